"""What ranks do that a launcher of MPI has started: `python -m tests.distributed.program WHAT`."""

import os
import signal
import sys
import time

import numpy as np

import cuattn
from cuattn import distributed, masks
from cuattn.distributed import DistributedError, Layout, connect
from tests.distributed.layouts import run
from tests.strategies import Case


def numbers(*shape):
    """Return random numbers, the same on all ranks."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def calls(comm):
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
            own, made = run(comm, case, layout, Layout.contiguous(n, comm.size), algorithm)
            for one, other in zip((*own[:3], *made[:3]), (*fwd[:3], *grads[:3]), strict=True):
                np.testing.assert_allclose(one, other, atol=2e-5)


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
    """A rank that does not come in time is an error on the others, and the comm is broken."""
    if comm.rank == 1:
        time.sleep(60)
    begin = time.monotonic()
    for _ in range(2):
        try:
            comm.barrier()
        except DistributedError:
            continue
        raise AssertionError("no error")
    assert time.monotonic() - begin < 3
    comm.abort()


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
    with connect(timeout=1.0 if sys.argv[1] == "late" else 30.0) as comm:
        globals()[sys.argv[1]](comm)
        print(f"rank {comm.rank} of {comm.size} done", flush=True)
