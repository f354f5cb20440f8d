"""Diagonal bands, causality and windows, as masks, and what they leave of a part of a matrix."""

import numpy as np

from cuattn.masks.base import Mask
from cuattn.masks.column import ColumnMask
from cuattn.masks.interval_mask import IntervalMask
from cuattn.masks.intervals import OPEN, Interval, band_intervals
from cuattn.masks.runs import Runs, indices, kept_before, length_of

__all__ = ["BandMask", "band_of_runs"]


class BandMask(IntervalMask):
    """A band as a mask: row i sees key j if ``i + offset - left <= j <= i + offset + right``.  For backends.

    Parameters
    ----------
    n_queries, n_keys : int
        Shape of the matrix.
    left, right : int or None
        Reach of a row before and behind its diagonal; None leaves that side open.
    offset : int, optional
        Column of row 0's diagonal.
    """

    __slots__ = _parameter_names = ("n_queries", "n_keys", "left", "right", "offset")
    kind = "band"
    leading = ()

    def __init__(self, n_queries: int, n_keys: int, left: int | None, right: int | None, offset: int = 0) -> None:
        self._settle(None, n_queries=n_queries, n_keys=n_keys, left=left, right=right, offset=offset)

    def __repr__(self) -> str:
        band = f"left={self.left}, right={self.right}, offset={self.offset}"
        return f"<BandMask {self.n_queries} queries x {self.n_keys} keys, {band}>"

    def _intervals(self) -> list[Interval]:
        pairs = band_intervals(self.n_queries, self.n_keys, self.left, self.right, self.offset)
        nothing = np.zeros(self.n_keys, np.int64)
        return pairs or [(nothing, nothing)]

    def _restrict(self, rows: Runs, keys: Runs) -> Mask:
        if len(rows) == len(keys) == 1:
            offset = self.offset + rows[0][0] - keys[0][0]
            return BandMask(length_of(rows), length_of(keys), self.left, self.right, offset)
        return band_of_runs(rows, keys, self.left, self.right, self.offset)


def band_of_runs(rows: Runs, keys: Runs, left: int | None, right: int | None, offset: int = 0) -> ColumnMask:
    """Return what a band leaves of a part of a matrix, in the part's own indices: for shards made of several pieces.

    Parameters
    ----------
    rows, keys : tuple of (start, stop)
        Runs of the whole matrix that the part takes, in ascending order.
    left, right, offset
        The band over the whole matrix, as in `BandMask`.

    Returns
    -------
    ColumnMask

    Examples
    --------
    The first and the last two of eight rows, causally:

    >>> band_of_runs(((0, 2), (6, 8)), ((0, 4),), None, 0).dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 1],
           [1, 1, 1, 1]])
    """
    n = length_of(rows)
    key = indices(keys) - offset
    first = 0 if right is None else kept_before(key - min(right, OPEN), rows)
    last = n if left is None else kept_before(key + (min(left, OPEN) + 1), rows)
    return ColumnMask._of([last, n, 0, np.broadcast_to(first, key.shape)], n)
