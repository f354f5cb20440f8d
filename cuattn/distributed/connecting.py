"""The way to a comm, whatever has started the ranks."""

from __future__ import annotations

import sys
from typing import Any

from cuattn import interop
from cuattn.distributed import mpi, threads
from cuattn.distributed.comm import TIMEOUT, Alone, Comm
from cuattn.distributed.host import OfNccl, Process
from cuattn.errors import DtypeError
from cuattn.masks.device import load_cupy


def connect(group: Any = None, /, *, device: int | None = None, timeout: float = TIMEOUT) -> Comm:
    """Return the comm of this rank; every rank calls this.

    Parameters
    ----------
    group : object, optional
        An mpi4py communicator, a `cupy.cuda.nccl.NcclCommunicator`, a process group of PyTorch, or any object that is a
        :class:`Comm`.  By default the ranks that :func:`spawn` or a launcher of MPI has started, else this one alone.
    device : int, optional
        The GPU of this rank, which becomes the current one; by default, of processes on a machine with GPUs whose
        program has imported CuPy, each takes the next.
    timeout : float, optional
        Seconds after which a rank that does not answer is an error.

    Returns
    -------
    Comm
        Also a context manager; its ``close()`` frees what it has made, and never `group`.

    Raises
    ------
    DistributedError
        Under a launcher of MPI without mpi4py, or with another MPI than the launcher's.

    See Also
    --------
    spawn : Makes ranks of threads.

    Examples
    --------
    >>> with connect() as comm:
    ...     comm.rank, comm.size
    (0, 1)
    """
    if device is not None:
        load_cupy("device").cuda.Device(device).use()
    if group is None and (found := threads.current()) is not None:
        found.timeout = timeout
        return found
    if group is None:
        if mpi.launched() is None:
            return Alone()
        group = mpi.world()
    root = type(group).__module__.partition(".")[0]
    if root == "mpi4py":
        if group.size == 1:
            return Alone()
        made: Process = mpi.OfMpi(group, timeout)
        threads.hold_cores(made.local_size)
        made.share_memory()
        made.use_devices(_device(made.local_rank) if device is None else device)
        return made
    if type(group).__name__ == "NcclCommunicator":
        return OfNccl(group, timeout)
    if root == "torch":
        from cuattn.distributed.process_group import OfProcessGroup

        return OfProcessGroup(group, timeout)
    if isinstance(group, Comm):
        return group
    raise DtypeError(
        f"group is {interop.type_name(group)}; expected an mpi4py communicator, an NcclCommunicator, a ProcessGroup or "
        "an object with rank, size, exchange, allgather, barrier and abort"
    )


def _device(rank: int) -> int | None:
    """Return the GPU of a process, the rank-th on its machine; None where the program is not about GPUs."""
    cupy = sys.modules.get("cupy")
    return rank % cupy.cuda.runtime.getDeviceCount() if cupy is not None and cupy.is_available() else None
