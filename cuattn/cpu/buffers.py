"""Memory of a thread: aligned, allocated once, cut into named arrays."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["Buffers", "bytes_of"]

_LINE = 64  # bytes of a cache line and of the widest vector register: unaligned, a matrix product loses 10 %
_SKEW = 17 * _LINE  # between arrays: equal places of two arrays must not share a set of the first-level cache
_HUGE_PAGE = 1 << 21  # bytes; a block that does not start one gets small pages at both ends

_SMALL = 1 << 14  # elements in all, of which cutting a block would take longer than it saves

Shapes = dict[str, tuple[int, ...]]


class Buffers:
    """Scratch arrays of one thread, one for each name, cut from one block."""

    def __init__(self, dtype: np.dtype, shapes: Shapes) -> None:
        self._dtype, self._arrays = dtype, {}
        if sum(map(math.prod, shapes.values())) <= _SMALL:
            return
        size = bytes_of(dtype, shapes)
        block, boundary = np.empty(size, np.uint8), _boundary(size)
        block, start = block[-block.ctypes.data % boundary :], 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape) * dtype.itemsize
            self._arrays[name] = block[start:stop].view(dtype)
            start = stop + -stop % _LINE + _SKEW

    def get(self, name: str, *shape: int) -> np.ndarray:
        """Return an uninitialised C-contiguous array; what one of the same name held is lost."""
        if not self._arrays:
            return np.empty(shape, self._dtype)
        return self._arrays[name][: math.prod(shape)].reshape(shape)


def _boundary(size: int) -> int:
    return _HUGE_PAGE if size >= 2 * _HUGE_PAGE else _LINE


def bytes_of(dtype: np.dtype, shapes: Shapes) -> int:
    """Return how much memory such buffers take."""
    size = sum(math.prod(shape) * dtype.itemsize + _LINE + _SKEW for shape in shapes.values())
    return size + _boundary(size)
