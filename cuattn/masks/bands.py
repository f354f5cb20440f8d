"""Diagonal bands: which rows see a key, and which column masks are no more than a band."""

from typing import Any

import numpy as np

from cuattn.masks import convert
from cuattn.masks.base import Reach
from cuattn.masks.runs import Runs, kept_before, length_of

__all__ = ["find_reach", "rows_of_band"]

_OPEN = 2**33  # beyond any row index: a window at least this wide is open


def rows_of_band(key: Any, left: int | None, right: int | None, rows: Runs) -> tuple[Any, Any]:
    """Return the rows that see keys through a band, counted among those of a part.

    Parameters
    ----------
    key : int array
        Keys, less the column of row 0's diagonal.
    left, right : int or None
        Reach of a row before and behind its diagonal; None leaves that side open.
    rows : tuple of (start, stop)
        Runs of rows that the part takes, in ascending order.

    Returns
    -------
    first, last : int array or int
        The first row, and the row behind the last.

    Examples
    --------
    Causal, four rows and keys: key j is seen from row j on.

    >>> rows_of_band(np.arange(4), None, 0, ((0, 4),))
    (array([0, 1, 2, 3]), 4)
    """
    first = 0 if right is None else kept_before(key - min(right, _OPEN), rows)
    return first, length_of(rows) if left is None else kept_before(key + (min(left, _OPEN) + 1), rows)


def find_reach(bounds: np.ndarray, n_queries: int) -> Reach | None:
    """Return the band that the keys' hidden row intervals leave visible, or None where it is none.

    Parameters
    ----------
    bounds : int array, (4, n_keys)
        Starts and ends of two intervals that hold together.
    n_queries : int
        Rows.

    Returns
    -------
    tuple of (int or None) or None
        ``(left, right)``: row i sees key j if ``i - left <= j <= i + right``; either may be negative.  None also
        where nothing is visible, and for a single row that does not see all keys.

    Examples
    --------
    A window of three keys:

    >>> key = np.arange(6)
    >>> find_reach(np.stack([np.minimum(key + 3, 6), 0 * key + 6, 0 * key, key]), 6)
    (2, 0)

    Two documents are no band:

    >>> find_reach(np.array([[2, 2, 4, 4], [4, 4, 4, 4], [0, 0, 0, 0], [0, 0, 2, 2]]), 4) is None
    True
    """
    last, lower_end, upper_start, first = convert.assign(*convert.runs(bounds, n_queries), n_queries)
    seen = first < last
    if not seen.any() or upper_start.any() or lower_end.min() < n_queries:
        return None  # nothing visible, or something hidden amid it
    key = np.arange(first.size)
    left, right = (last - 1 - key)[seen & (last < n_queries)], (key - first)[seen & (first > 0)]
    reach = int(left[0]) if left.size else None, int(right[0]) if right.size else None
    band = rows_of_band(key, *reach, ((0, n_queries),))
    same = np.where(seen, (first == band[0]) & (last == band[1]), band[0] >= band[1])
    return reach if same.all() else None
