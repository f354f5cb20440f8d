"""The memory of the papers' machine: arrays in HBM that an algorithm reaches only through counted accesses."""

from typing import NamedTuple

import numpy as np

__all__ = ["HBM", "Counts"]


class Counts(NamedTuple):
    """What an algorithm moved and held, in elements.

    Attributes
    ----------
    reads, writes : int
        Elements moved from and to HBM; filling an array with an initial value counts as writing it.
    extra : int
        Elements of HBM allocated beyond the inputs and the outputs.
    sram : int
        On-chip buffers: the largest tile of each array, summed; the largest such sum over the kernels.
    """

    reads: int
    writes: int
    extra: int
    sram: int

    @property
    def total(self) -> int:
        """Reads and writes together: the papers' "HBM accesses"."""
        return self.reads + self.writes


class HBM:
    """Named arrays, handed out as tiles; every access is counted.

    The arrays are private: an algorithm can neither read an element without :meth:`load` nor change one without
    :meth:`store`, so its counts cannot be wrong by omission.

    Parameters
    ----------
    dtype : dtype, default float64
        Type of the arrays, and so of the arithmetic.

    Examples
    --------
    >>> hbm = HBM()
    >>> hbm.place("Q", np.ones((6, 2)))
    >>> Q_1 = hbm.load("Q", slice(0, 4))
    >>> hbm.allocate("O", (6, 2))
    >>> hbm.store("O", slice(0, 4), 3 * Q_1)
    >>> hbm.counts
    Counts(reads=8, writes=8, extra=12, sram=8)
    """

    def __init__(self, dtype=np.float64):
        self.dtype = np.dtype(dtype)
        self._arrays = {}
        self._buffers = {}
        self._reads = self._writes = self._extra = self._sram = 0

    def place(self, name, array, dtype=None):
        """Put a copy of a caller's array into HBM, where it is when the algorithm starts; not an access."""
        self._arrays[name] = np.array(array, dtype or self.dtype)

    def allocate(self, name, shape, fill=None, *, dtype=None, output=False):
        """Reserve an array; with `fill`, write its initial value.  An `output` is not extra memory."""
        array = self._arrays[name] = np.empty(shape, dtype or self.dtype)
        if not output:
            self._extra += array.size
        if fill is not None:
            array[...] = fill
            self._writes += array.size

    def load(self, name, index=...):
        """Read a tile from HBM into the array's on-chip buffer and return it (a copy)."""
        tile = np.array(self._arrays[name][index])
        self._reads += tile.size
        return self.on_chip(name, tile)

    def store(self, name, index, tile):
        """Write a tile from the chip to its place in HBM."""
        place = self._arrays[name][index]
        place[...] = tile
        self._writes += place.size

    def on_chip(self, name, array):
        """Note that an array computed on the chip occupies the buffer `name`, and return it."""
        self._buffers[name] = max(self._buffers.get(name, 0), array.size)
        return array

    def end_kernel(self):
        """Free the on-chip buffers, as between two kernels."""
        self._sram = max(self._sram, sum(self._buffers.values()))
        self._buffers.clear()

    def take(self, name):
        """Return an array to the caller, who gets it in HBM; not an access."""
        return self._arrays.pop(name)

    @property
    def counts(self) -> Counts:
        """The accesses so far."""
        return Counts(self._reads, self._writes, self._extra, max(self._sram, sum(self._buffers.values())))
