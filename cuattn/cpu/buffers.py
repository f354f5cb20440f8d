"""Memory of a thread: aligned, allocated once, cut into named arrays."""

import math

import numpy as np
from numpy import ndarray

_LINE = 64  # bytes of a cache line and of the widest vector register: unaligned, a matrix product loses 10 %
_SKEW = 17 * _LINE  # between arrays: equal places of two arrays must not share a set of the first-level cache
_HUGE_PAGE = 1 << 21  # bytes; a block that does not start one gets small pages at both ends
_SMALL = 1 << 17  # elements in all, of which cutting a block would take longer than it saves


class Buffers:
    """Scratch arrays of one thread, by name, cut from one block, which is allocated when it is first needed.

    Parameters
    ----------
    dtype : numpy.dtype
        Of all arrays.
    sizes : dict of str to int
        The most elements that are asked for by each name.

    Attributes
    ----------
    nbytes : int
        How much memory the arrays take.
    """

    def __init__(self, dtype: np.dtype, sizes: dict[str, int]) -> None:
        self._dtype, self._sizes = dtype, sizes
        self._arrays: dict[str, ndarray] = {}
        self._small = sum(sizes.values()) <= _SMALL
        size = sum(size * dtype.itemsize + _LINE + _SKEW for size in sizes.values())
        self._boundary = _HUGE_PAGE if size >= 2 * _HUGE_PAGE else _LINE
        self.nbytes = size + self._boundary

    def get(self, name: str, *shape: int) -> ndarray:
        """Return an uninitialised C-contiguous array; what one of the same name held is lost."""
        if self._small:
            return np.empty(shape, self._dtype)
        if not self._arrays:
            self._cut()
        return self._arrays[name][: math.prod(shape)].reshape(shape)

    def _cut(self) -> None:
        block = np.empty(self.nbytes, np.uint8)
        block, start = block[-block.ctypes.data % self._boundary :], 0
        for name, size in self._sizes.items():
            stop = start + size * self._dtype.itemsize
            self._arrays[name] = block[start:stop].view(self._dtype)
            start = stop + -stop % _LINE + _SKEW
