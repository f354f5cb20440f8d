"""What ranks do that a launcher of MPI has started: `python -m tests.distributed.program WHAT`."""

import gc
import os
import signal
import sys
import threading
import time
import weakref

import numpy as np

import cuattn
from cuattn import distributed, masks
from cuattn.distributed import DistributedError, Layout, connect
from cuattn.distributed.gpu import Copies, load_nccl
from tests.distributed.layouts import run
from tests.strategies import Case


def numbers(*shape):
    """Return random numbers, the same on all ranks."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def calls(comm, put=np.asarray, get=np.asarray):
    """Compute a problem in each way; the results are those of one device, with the same bits in l's dropout."""
    n = 112
    q, k, v, do = numbers(4, 2, n, 16)
    mask = masks.causal_document([30, 50, 32])
    options = {"mask": mask, "dropout_p": 0.25, "rng": 3}
    fwd = cuattn.forward(q, k, v, **options)
    grads = cuattn.backward(do, q, k, v, fwd, mask=mask, dropout_p=0.25)
    case = Case(q, k, v, do, None, options)
    for algorithm in (None, "ring", "gather", "combine"):
        for layout in (Layout.zigzag(n, comm.size), Layout.balanced(mask, comm.size, unit=16)):
            own, made = run(comm, case, layout, Layout.contiguous(n, comm.size), algorithm, put, get)
            for one, other in zip((*own[:3], *made[:3]), (*fwd[:3], *grads[:3]), strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5)


def objects(comm):
    """Short objects travel in one message, long ones in two, and none is mixed up with another rank's."""
    for size in (0, 900, 1016, 1100, 100_000):
        sizes = [size // (rank + 1) for rank in range(comm.size)]
        assert comm.allgather(b"x" * sizes[comm.rank]) == [b"x" * n for n in sizes]
    assert comm.allgather(None) == [None] * comm.size


def calls_on_gpus(comm):
    """Compute the same on a GPU for each rank, by the way of messages that the comm has chosen."""
    import cupy

    assert getattr(comm, "_takes_gpus", False) or isinstance(comm._gpus, Copies), "messages go through host memory"
    calls(comm, cupy.asarray, cupy.asnumpy)
    if comm._gpus is not None:  # a process group's messages are PyTorch's
        _ends(comm)


def calls_over_nccl(comm):
    """The same by NCCL."""
    import cupy

    nccl = load_nccl()
    key = comm.allgather(nccl.get_unique_id() if comm.rank == 0 else None)[0]
    with distributed.connect(nccl.NcclCommunicator(comm.size, key, comm.rank)) as over:
        calls(over, cupy.asarray, cupy.asnumpy)
        _ends(over)
        comm.barrier()  # a communicator that ends while its peer aborts ends the peer


def _ends(comm):
    """What does not arrive in time is an error."""
    import cupy

    comm._gpus._timeout = 0.5
    if comm.rank == 0:
        if isinstance(comm._gpus, Copies):  # hosts have met, and then the GPU of the other is late
            comm._gpus._tell = lambda sends, recvs: lambda: None
            comm.exchange([(1, cupy.zeros(1 << 20))], [])
        else:
            comm.exchange([], [(1, cupy.zeros(1 << 20))])  # which nobody sends
        end = time.monotonic() + 20
        while time.monotonic() < end:
            try:
                comm.check()
            except DistributedError as error:
                assert "did not finish within 0.5 s" in str(error), error
                break
            time.sleep(0.01)
        else:
            raise AssertionError("no error")


def disagree(comm):
    """Every rank learns what every other has said."""
    x = numbers(2, 32, 8)
    for options, name, values in (
        ({"scale": comm.rank + 1.0}, "scale", [f"{rank + 1.0}" for rank in range(comm.size)]),
        ({"is_causal": comm.rank == 0}, "is_causal", ["True"] + ["False"] * (comm.size - 1)),
    ):
        try:
            distributed.attention(x, x, x, comm=comm, **options)
        except DistributedError as error:
            assert str(error).startswith(name) and list(error.ranks.values()) == values, error
        else:
            raise AssertionError("no error")
    assert distributed.attention(x, x, x, comm=comm).shape == x.shape  # the comm is as good as before


def late(comm):
    """A rank that does not come in time is an error on the others, which names it, and the comm is broken."""
    if comm.rank == 1:
        time.sleep(60)
    begin = time.monotonic()
    for _ in range(2):
        try:
            comm.barrier()
        except DistributedError as error:
            assert error.ranks == {1: f"did not answer rank {comm.rank}"}, error
            continue
        raise AssertionError("no error")
    assert time.monotonic() - begin < 3
    comm.abort()


def late_message(comm):
    """What a message was to be put into lives on: it may still arrive."""
    if comm.rank == 1:
        time.sleep(60)
    target = np.zeros(4).view(type("Kept", (np.ndarray,), {}))
    kept = weakref.ref(target)
    try:
        comm.exchange([], [(1, target)])
    except DistributedError as error:
        assert error.ranks == {1: f"did not answer rank {comm.rank}"}, error
    del target
    gc.collect()
    assert kept() is not None
    comm.abort()


def short(comm):
    """A message that is shorter than what it is put into is an error, too."""
    x = np.zeros(4 + 4 * comm.rank)
    try:
        comm.exchange(*(([], [(0, x)]) if comm.rank else ([(1, x)], [])))
    except DistributedError as error:
        assert comm.rank == 1 and "a message has 32 bytes; expected 64" in str(error), error
    else:
        assert comm.rank == 0


def interrupted(comm):
    """An interrupted rank has a comm that is broken: what it has sent half would be taken for something else."""
    if comm.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        for kind in (KeyboardInterrupt, DistributedError):
            try:
                comm.exchange([], [(1, np.zeros(4))])
            except kind:
                continue
            raise AssertionError("no error")
        comm.abort()
    time.sleep(60)


def connecting():
    """A rank that does not connect in time is an error on the others."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        time.sleep(60)
    begin = time.monotonic()
    try:
        connect(timeout=0.5)
    except DistributedError:
        assert time.monotonic() - begin < 3
        raise
    raise AssertionError("no error")


def late_of_torch(comm):
    """As for MPI; where nobody ends the job the late rank, which gloo has shut out, gets an error, too."""
    if comm.rank == 1:
        time.sleep(3)
    for _ in range(2):
        begin = time.monotonic()
        try:
            distributed.attention(*numbers(3, 2, 16, 8), comm=comm)
        except DistributedError as error:
            assert list(error.ranks) == [1], error
        else:
            raise AssertionError("no error")
        assert time.monotonic() - begin < 2
    time.sleep(4 - 4 * comm.rank)  # until the other has found out


def dies_of_torch(comm):
    """A rank that dies is an error on the others."""
    if comm.rank == 1:
        os._exit(3)
    for _ in range(2):
        try:
            comm.barrier()
        except DistributedError as error:
            assert list(error.ranks) == [1], error
        else:
            raise AssertionError("no error")


def killed(comm):
    """A rank dies while others wait for it."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def raises(comm):
    """An exception leaves the program of a rank."""
    if comm.rank == 1:
        raise ValueError("what a program has got wrong")
    comm.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "connecting":
        connecting()
    if sys.argv[1].endswith(("_on_gpus", "_over_nccl")):
        import cupy  # noqa: F401  so that ranks take GPUs
    with connect(timeout=1.0 if sys.argv[1].startswith("late") else 30.0) as comm:
        globals()[sys.argv[1]](comm)
        print(f"rank {comm.rank} of {comm.size} done", flush=True)
