"""Messages under way while a rank computes: on a GPU on a stream of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cuattn.distributed.comm import Comm, Messages
from cuattn.masks.device import load_cupy

_here = threading.local()
_FIRST = -5  # the priority that goes before all others; of a GPU that has fewer it is its first


def start(comm: Comm, sends: Messages, recvs: Messages) -> Callable[[], None]:
    """Send and receive; return what lets the caller's current stream wait for it.  On the host nothing is left to do.

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
        current.wait_event(event)
        free.append(event)

    return wait


def _nothing() -> None:
    """Wait for nothing."""


def _side(cuda: Any, device: int) -> tuple[Any, list[Any]]:
    """Return this thread's stream for messages of a GPU, the current one, and events that nobody waits for."""
    known: dict[Any, tuple[Any, list[Any]]] = vars(_here)
    if device not in known:
        known[device] = cuda.Stream(non_blocking=True, priority=_FIRST), []
    return known[device]
