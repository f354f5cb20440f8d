"""Short messages between processes of one machine, through memory that they share: hosts answer each other at once."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cuattn.distributed.comm import Deadline, DistributedError, Messages

LONGEST = 1 << 14  # bytes of a message
_SLOTS = 16  # messages from one rank to another that are not taken yet
_HEAD = 3  # words in front of a message: its number, its bytes, and a check of both and of what it says
_WORD = 8
_BLOCK = 1 << 20
_ENDED = -1  # in the place of a process's number
_SLOT = _HEAD * _WORD + LONGEST


class Mailbox:
    """Rings of slots, one for each pair of ranks; a message is there once its number and its check are.

    Parameters
    ----------
    rank, size : int
    timeout : float
        Seconds that another rank may take to answer.
    memory : mmap
        Of all ranks, zeros at first.

    Attributes
    ----------
    awake : float or None
        Seconds that a wait does not sleep; None is what other waits have.
    """

    awake: float | None = None

    def __init__(self, rank: int, size: int, timeout: float, memory: mmap.mmap) -> None:
        self._rank, self._timeout = rank, timeout
        words = np.frombuffer(memory, np.int64, size * (1 + size))
        self._ranks = words[:size]  # their processes, or what says that they have ended
        self._taken = words[size:].reshape(size, size)  # by sender and receiver
        self._slots = np.frombuffer(memory, np.uint8, offset=words.nbytes).reshape(size, size, _SLOTS, _SLOT)
        self._sent, self._awaited = [0] * size, [0] * size
        self._ranks[rank] = os.getpid()

    @staticmethod
    def bytes_of(size: int) -> int:
        """Return how much memory so many ranks share."""
        return size * (1 + size) * _WORD + size * size * _SLOTS * _SLOT

    def begin(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Send arrays of bytes; return what waits for those that others send."""
        for peer, array in sends:
            self._send(peer, array)
        expected = []
        for peer, array in recvs:
            self._awaited[peer] += 1
            expected.append((peer, self._awaited[peer], array))

        def finish() -> None:
            for each in expected:
                self._receive(*each)

        return finish

    def _send(self, peer: int, array: np.ndarray) -> None:
        self._sent[peer] += 1
        number, taken = self._sent[peer], self._taken[self._rank]
        self._wait(lambda: int(taken[peer]) + _SLOTS >= number, peer)
        slot = self._slots[self._rank, peer, number % _SLOTS]
        slot[_HEAD * _WORD :][: array.nbytes] = array
        slot[: _HEAD * _WORD].view(np.uint64)[1:] = array.nbytes, _check(number, array)
        slot[:_WORD].view(np.uint64)[0] = number

    def _receive(self, peer: int, number: int, array: np.ndarray) -> None:
        slot = self._slots[peer, self._rank, number % _SLOTS]
        head = slot[: _HEAD * _WORD].view(np.uint64)

        def came() -> bool:
            if int(head[0]) != number or int(head[1]) > LONGEST:
                return False
            return _check(number, slot[_HEAD * _WORD :][: int(head[1])]) == int(head[2])

        self._wait(came, peer)
        if int(head[1]) != array.nbytes:
            raise DistributedError(f"a message has {int(head[1])} bytes; expected {array.nbytes}")
        array[:] = slot[_HEAD * _WORD :][: array.nbytes]
        self._taken[peer, self._rank] = number

    def _wait(self, happened: Callable[[], bool], peer: int) -> None:
        """Wait until something happened; fail as soon as the other rank has ended without it."""
        ended = False

        def over() -> bool:
            nonlocal ended
            ended = self._has_ended(peer)  # asked first: what a rank did before it ended counts
            return happened() or ended

        if happened():
            return
        Deadline(self._timeout, self.awake).wait(over, lambda: {peer: f"did not answer rank {self._rank}"})
        if ended and not happened():
            raise DistributedError("a rank failed", {peer: f"ended before it answered rank {self._rank}"})

    def _has_ended(self, peer: int) -> bool:
        process = int(self._ranks[peer])
        if process <= 0:
            return process == _ENDED
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # of another user, and there
            pass
        return False

    def end(self) -> None:
        """Let others know that this rank will answer no more."""
        self._ranks[self._rank] = _ENDED


def _check(number: int, content: np.ndarray) -> int:
    return zlib.crc32(content.data, number & 0xFFFFFFFF) | (content.nbytes << 32)


def shared(rank: int, size: int, timeout: float, allgather: Callable[[Any], list[Any]]) -> Mailbox | None:
    """Return the mailbox of ranks that are all on this machine, or None where they cannot share memory; all call this.

    The file is gone once all have opened it.
    """
    if os.name != "posix":  # elsewhere nobody is asked whether a process is there
        return None
    place, memory = _place(), None
    path = allgather(str(place / f"cuattn-{uuid.uuid4().hex}"))[0]
    for maker in (True, False):
        if maker == (rank == 0):
            with contextlib.suppress(OSError, ValueError):
                memory = _mapped(path, Mailbox.bytes_of(size) if maker else 0)
        everyone = allgather(memory is not None)
    if rank == 0:
        Path(path).unlink(missing_ok=True)
    return Mailbox(rank, size, timeout, memory) if memory is not None and all(everyone) else None


def _place() -> Path:
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _mapped(path: str, size: int) -> mmap.mmap:
    """Map a file; make it, of this size, if that is not 0."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if size else 0)
    file = os.open(path, flags, 0o600)
    try:
        written = 0
        while written < size:  # which fails where memory is short, as a page that is touched later would not
            written += os.write(file, bytes(min(_BLOCK, size - written)))
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)
