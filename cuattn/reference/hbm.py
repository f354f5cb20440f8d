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
    >>> Q_1 = hbm.load(slice(0, 4), "Q")
    >>> hbm.allocate((6, 2), "O")
    >>> hbm.store(slice(0, 4), O=3 * Q_1)
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

    def allocate(self, shape, *names, fill=None, dtype=None, output=False):
        """Reserve arrays; with `fill`, write their initial value.  An `output` is not extra memory."""
        for name in names:
            array = self._arrays[name] = np.empty(shape, dtype or self.dtype)
            self._extra += 0 if output else array.size
            if fill is not None:
                self.store(..., **{name: fill})

    def load(self, index, *names):
        """Read a tile of each array from HBM into its on-chip buffer and return them (copies); of one, itself."""
        tiles = [self.on_chip(name, np.array(self._arrays[name][index])) for name in names]
        self._reads += sum(tile.size for tile in tiles)
        return tiles if len(tiles) > 1 else tiles[0]

    def store(self, index, **tiles):
        """Write tiles from the chip to their place in the arrays of these names in HBM."""
        for name, tile in tiles.items():
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

    def take(self, *names):
        """Return arrays to the caller, who gets them in HBM; not an access."""
        return [self._arrays.pop(name) for name in names]

    @property
    def counts(self) -> Counts:
        """The accesses so far."""
        return Counts(self._reads, self._writes, self._extra, max(self._sram, sum(self._buffers.values())))
