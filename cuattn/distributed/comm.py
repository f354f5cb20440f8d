"""What ranks need of each other, and the error that all of them raise."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from cuattn.errors import CuattnError

LOG = logging.getLogger("cuattn.distributed")
TIMEOUT = 300.0
"""Seconds that a rank waits for others, by default."""

Self = TypeVar("Self", bound="Closing")

Messages = Sequence[tuple[int, Any]]
"""Pairs (peer, array)."""


class DistributedError(CuattnError, RuntimeError):
    """Ranks disagree, or one of them failed, or did not answer in time.

    Attributes
    ----------
    ranks : dict of int to str
        What is known of each rank that has a part in it.

    See Also
    --------
    Comm : `check` and `timeout` of those that `connect` makes.

    Examples
    --------
    >>> from cuattn.distributed import DistributedError
    >>> print(DistributedError("scale differs", {0: "0.5", 1: "1.5"}))
    scale differs
      rank 0: 0.5
      rank 1: 1.5
    """

    def __init__(self, message: str, ranks: Mapping[int, str] | None = None) -> None:
        self.ranks: dict[int, str] = dict(ranks or {})
        told = "".join(f"\n  rank {rank}: {text}" for rank, text in sorted(self.ranks.items()))
        super().__init__(message + told)

    def __reduce__(self) -> tuple[Any, ...]:
        return _error, (str(self), self.ranks)


def _error(text: str, ranks: dict[int, str]) -> DistributedError:
    error = DistributedError(text)
    error.ranks = ranks
    return error


@runtime_checkable
class Comm(Protocol):
    """Ranks that work together: what :func:`cuattn.distributed.connect` returns, or any object that has this.

    Attributes
    ----------
    rank, size : int
        Which of how many this one is.

    See Also
    --------
    connect : Makes one of processes.
    spawn : Makes them of threads.

    Notes
    -----
    More is asked if it has it: `local_size`, how many ranks share this machine, by default all; `sm_margin`, how many
    multiprocessors kernels leave to messages that could not begin beside them, by default none; `by_copies`, whether
    messages of GPUs are none that wait for multiprocessors; and ``begin(sends, recvs, *, stream)``, which does of an
    exchange what waits for no other host and returns a function that does the rest, or None.

    Examples
    --------
    >>> from cuattn.distributed import Comm, connect
    >>> with connect() as comm:
    ...     isinstance(comm, Comm), comm.rank, comm.size
    (True, 0, 1)
    """

    rank: int
    size: int

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Send and receive contiguous arrays, in one group: ``[(peer, array), ...]``.

        Messages between the same two ranks match in order and in size.  It returns when host arrays have arrived, and
        those sent may be changed; with arrays on a GPU when the work is enqueued on `stream`, by default the current.
        """

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""

    def barrier(self) -> None:
        """Return when all ranks have called this."""

    def abort(self) -> None:
        """Let all ranks that wait, or will, fail."""


class Closing:
    """A context manager that closes itself."""

    def close(self) -> None:
        """Free what this has made: by default nothing."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Alone(Closing):
    """The comm of a single rank."""

    rank, size = 0, 1

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Copy messages to itself."""
        for (_, source), (_, target) in zip(sends, recvs, strict=True):
            target[...] = source

    def allgather(self, obj: Any) -> list[Any]:
        """Return the object."""
        return [obj]

    def barrier(self) -> None:
        """Return at once."""

    def abort(self) -> None:
        """Do nothing: nobody waits."""


# Seconds that a wait does not sleep, but lets others have its core: the shortest sleep takes a third as long, 0 s, too.
AWAKE = 2e-4
_let_others = getattr(os, "sched_yield", lambda: time.sleep(0))


class Deadline:
    """A time by which something has to happen; waiting for it sleeps at most a millisecond at a time."""

    def __init__(self, seconds: float, awake: float | None = None) -> None:
        self._seconds, self._begin, self._pause = seconds, time.monotonic(), 0.0
        self._awake = AWAKE if awake is None else awake

    def wait(self, happened: Callable[[], Any], what: Callable[[], Mapping[int, str]]) -> None:
        """Poll until something happened; at the deadline raise what is known of ranks."""
        while not happened():
            waited = time.monotonic() - self._begin
            if waited > self._seconds:
                raise DistributedError(f"no answer within {self._seconds:g} s", what())
            if waited < self._awake:
                _let_others()
                continue
            self._pause = min(self._pause + 2e-5, 1e-3)
            time.sleep(self._pause)
