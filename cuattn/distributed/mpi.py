"""The comm of processes that an MPI launcher has started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from cuattn.distributed.comm import Deadline, DistributedError, Messages
from cuattn.distributed.host import Process

LAUNCHED = ("PMI_", "PMIX_", "OMPI_")
"""How variables of the environment begin that launchers of MPI set."""


def launched() -> int | None:
    """Return how many ranks a launcher of MPI says it has started; None without one."""
    if not any(name.startswith(LAUNCHED) for name in os.environ):
        return None
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def world() -> Any:
    """Return the communicator of all processes that were started."""
    size = launched()
    try:
        from mpi4py import MPI
    except Exception as error:  # a broken installation raises more than ImportError
        raise DistributedError(
            f"a launcher of MPI has started this process, and importing mpi4py failed ({type(error).__name__}: "
            f'{error}); pip install "cuattn[mpi]", and start with its mpiexec'
        ) from error
    if size and MPI.COMM_WORLD.size != size:
        raise DistributedError(
            f"the launcher has started {size} ranks, and mpi4py's MPI knows {MPI.COMM_WORLD.size}: start with the "
            f"mpiexec of {MPI.Get_library_version().splitlines()[0]}, or install mpi4py for the launcher's MPI"
        )
    return MPI.COMM_WORLD


class OfMpi(Process):
    """The comm of an mpi4py communicator, which is duplicated."""

    def __init__(self, group: Any, timeout: float) -> None:
        from mpi4py import MPI

        _abort_on_exceptions(MPI)
        self._mpi, self.timeout, self.rank, self.size = MPI, timeout, group.rank, group.size
        self._comm, request = group.Idup()
        Deadline(timeout).wait(request.Test, lambda: {self.rank: "waited for the others to connect"})
        local = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = local.rank, local.size
        local.Free()

    def _begin(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        messages = (*recvs, *sends)
        requests = [self._comm.Irecv([array, self._mpi.BYTE], peer) for peer, array in recvs]
        requests += [self._comm.Isend([array, self._mpi.BYTE], peer) for peer, array in sends]
        statuses = [self._mpi.Status() for _ in messages]

        def late() -> dict[int, str]:
            left = [peer for (peer, _), request in zip(messages, requests, strict=True) if not request.Test()]
            return dict.fromkeys(left, f"did not answer rank {self.rank}")

        def finish() -> None:
            Deadline(self.timeout).wait(lambda: self._mpi.Request.Testall(requests, statuses), late)
            for (_, array), status in zip(recvs, statuses, strict=False):  # MPI itself takes shorter ones
                if status.Get_count(self._mpi.BYTE) != array.nbytes:
                    found = status.Get_count(self._mpi.BYTE)
                    raise DistributedError(f"a message has {found} bytes; expected {array.nbytes}")

        return finish

    def abort(self) -> None:
        """End all processes of the job."""
        self._comm.Abort(1)

    def close(self) -> None:
        """Free the duplicate."""
        super().close()
        if self._comm is not None and not self._mpi.Is_finalized():
            self._comm.Free()
        self._comm = None


_hooked = False


def _abort_on_exceptions(mpi: Any) -> None:
    """End the job when an exception leaves a rank's program; its peers would wait for it."""
    global _hooked
    if _hooked:
        return
    _hooked, before = True, sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        before(kind, error, trace)
        sys.stderr.flush()
        time.sleep(0.3)  # which the launcher needs to pass it on
        if mpi.COMM_WORLD.size > 1:
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook
