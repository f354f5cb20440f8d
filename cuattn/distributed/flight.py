"""Messages under way while a rank computes: on a GPU on a stream of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from cuattn.distributed.comm import Comm, Messages
from cuattn.masks.device import load_cupy

_streams = threading.local()
_FIRST = -5  # the priority that goes before all others; of a GPU that has fewer it is its first


def start(comm: Comm, sends: Messages, recvs: Messages) -> Callable[[], None]:
    """Send and receive; return what lets the caller's current stream wait for it.  On the host nothing is left to do.

    Messages to itself and empty ones are skipped.  The arrays must live until then: messages are ordered behind what
    the current stream did before.
    """
    sends, recvs = ([(peer, x) for peer, x in each if peer != comm.rank and x.size] for each in (sends, recvs))
    device = next((x.device for _, x in (*sends, *recvs) if not isinstance(x, np.ndarray)), None)
    if device is None:
        if sends or recvs:
            comm.exchange(sends, recvs)
        return lambda: None
    cuda = load_cupy("array").cuda
    current, side = cuda.get_current_stream(), _side(cuda, device.id)
    side.wait_event(current.record())
    # What is computed next fills the GPU: messages that are kernels begin before it, as their stream goes first.
    current.wait_event(side.record())
    comm.exchange(sends, recvs, stream=side)
    arrived, held = side.record(), (sends, recvs)

    def wait() -> None:
        nonlocal held
        current.wait_event(arrived)
        held = None

    return wait


def _side(cuda: Any, device: int) -> Any:
    """Return this thread's stream for messages of a GPU, the current one."""
    known = vars(_streams).setdefault("by_device", {})
    if device not in known:
        known[device] = cuda.Stream(non_blocking=True, priority=_FIRST)
    return known[device]
