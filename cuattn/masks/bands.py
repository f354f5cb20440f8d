"""Which column masks are no more than a diagonal band: everything visible, causality, a window."""

from collections.abc import Sequence

import numpy as np

from cuattn.masks.base import Reach
from cuattn.masks.intervals import Interval, band_intervals, first_left, normalise

__all__ = ["find_reach"]


def find_reach(hidden: Sequence[Interval], n_queries: int) -> Reach | None:
    """Return the band that the keys' hidden row intervals leave visible, or None where it is none.

    Parameters
    ----------
    hidden : sequence of (start, end)
        Pairs of NumPy arrays of shape (n_keys,): intervals that hold together.
    n_queries : int
        Rows.

    Returns
    -------
    tuple of (int or None) or None
        ``(left, right)``: row i sees key j if ``i - left <= j <= i + right``; either may be negative.  None also
        where nothing is visible, and for a single row that does not see all keys.

    Examples
    --------
    >>> from cuattn.masks.intervals import band_intervals
    >>> find_reach(band_intervals(6, 6, left=2, right=0), 6)
    (2, 0)

    Two documents are no band:

    >>> find_reach([(np.array([2, 2, 4, 4]), np.full(4, 4)), (np.zeros(4, int), np.array([0, 0, 2, 2]))], 4) is None
    True
    """
    hidden = [normalise(start, end, n_queries) for start, end in hidden]
    first, last = _visible(hidden, n_queries)
    seen = first < last
    if not seen.any() or any(((end > first) & (start < last) & (start < end)).any() for start, end in hidden):
        return None  # nothing visible, or something hidden amid it
    key = np.arange(first.size)
    right, left = (key - first)[seen & (first > 0)], (last - 1 - key)[seen & (last < n_queries)]
    reach = (int(left[0]) if left.size else None, int(right[0]) if right.size else None)
    return reach if _is_band(first, last, reach, n_queries) else None


def _visible(hidden: Sequence[Interval], n_queries: int) -> Interval:
    """Return each key's first visible row and the one behind its last; nothing is visible if they are not in order."""
    mirrored = [(n_queries - end, n_queries - start) for start, end in hidden]
    return first_left(hidden), n_queries - first_left(mirrored)


def _is_band(first: np.ndarray, last: np.ndarray, reach: Reach, n_queries: int) -> bool:
    """Whether a band leaves visible just the rows from `first` on before `last`, key by key."""
    hidden = band_intervals(n_queries, first.size, *reach)
    first_of_band, last_of_band = _visible(hidden, n_queries) if hidden else (0, n_queries)
    same = (first == first_of_band) & (last == last_of_band)
    return bool(np.where(first < last, same, first_of_band >= last_of_band).all())
