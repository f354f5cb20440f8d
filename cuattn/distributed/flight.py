"""What is under way at a time: on a GPU messages, on a stream of their own, and parts of a call, on others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cuattn.distributed.comm import Comm, Messages
from cuattn.masks.device import load_cupy

_here = threading.local()
LANES = 4
_FIRST = -5  # the priority that goes before all others; of a GPU that has fewer it is its first


def start(comm: Comm, sends: Messages, recvs: Messages) -> Callable[[], None]:
    """Send and receive; return what lets the then current stream wait for it.  On the host nothing is left to do.

    There are messages, none of them empty or to itself.  The arrays must live until then: messages are ordered behind
    what the current stream did before.
    """
    array = (sends or recvs)[0][1]
    if isinstance(array, np.ndarray):
        comm.exchange(sends, recvs)
        return _nothing
    cuda = load_cupy("array").cuda
    current, (side, free) = cuda.get_current_stream(), _side(cuda, array.device.id)
    event = free.pop() if free else cuda.Event(disable_timing=True)  # a wait is for what it has recorded by then
    event.record(current)
    side.wait_event(event)
    if not getattr(comm, "by_copies", False):
        # What is computed next fills the GPU: messages that are kernels begin before it, as their stream goes first.
        event.record(side)
        current.wait_event(event)
    begin = getattr(comm, "begin", comm.exchange)
    finish = begin(sends, recvs, stream=side)
    if finish is None:
        event.record(side)

    def wait() -> None:
        if finish is not None:
            finish()
            event.record(side)
        cuda.get_current_stream().wait_event(event)
        free.append(event)

    return wait


def _nothing() -> None:
    """Wait for nothing."""


class Lanes:
    """Streams beside the caller's, of its thread: each goes on from where that was when it was first asked for.

    Parameters
    ----------
    caller : cupy.cuda.Stream
        The current one.
    """

    __slots__ = ("_ahead", "_caller")

    def __init__(self, caller: Any) -> None:
        self._caller, self._ahead = caller, set()  # lanes that the caller's stream does not wait for yet

    def go(self, lane: int | None) -> Any:
        """Make a lane's stream current, or the caller's, which waits for all lanes; return it."""
        streams, event = _lanes(load_cupy("array").cuda)
        if lane is None:
            for other in self._ahead:
                event.record(streams[other])
                self._caller.wait_event(event)
            self._ahead.clear()
        elif lane not in self._ahead:
            event.record(self._caller)
            streams[lane].wait_event(event)
            self._ahead.add(lane)
        stream = self._caller if lane is None else streams[lane]
        stream.use()
        return stream

    def end(self) -> None:
        """Return to the caller's stream; what lanes do in later calls, with the memory of this one, comes after it."""
        self.go(None)
        streams, event = _lanes(load_cupy("array").cuda)
        event.record(self._caller)
        for stream in streams:
            stream.wait_event(event)


def _lanes(cuda: Any) -> tuple[list[Any], Any]:
    """Return this thread's lanes of the current GPU, and an event."""
    known: dict[Any, Any] = vars(_here)
    key = "lanes", cuda.runtime.getDevice()
    if key not in known:
        known[key] = [cuda.Stream(non_blocking=True) for _ in range(LANES)], cuda.Event(disable_timing=True)
    return known[key]


def _side(cuda: Any, device: int) -> tuple[Any, list[Any]]:
    """Return this thread's stream for messages of a GPU, the current one, and events that nobody waits for."""
    known: dict[Any, tuple[Any, list[Any]]] = vars(_here)
    if device not in known:
        known[device] = cuda.Stream(non_blocking=True, priority=_FIRST), []
    return known[device]
