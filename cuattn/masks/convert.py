"""Between column intervals and other forms: dense masks, bands, FlashMask's index tensors, the transposed problem."""

import math
from itertools import combinations
from typing import Any

import numpy as np

from cuattn.errors import MaskError
from cuattn.masks.device import namespace
from cuattn.masks.runs import Reach, rows_of_band

Pair = tuple[Any, Any]
Vectors = tuple[Any, Any, Any, Any]


def from_dense(visible: Any) -> Any:
    """Return lts, lte, uts, ute of a boolean mask (..., n_queries, n_keys), True = attend; MaskError if there are none.

    O(n_queries * n_keys), a fixed number of array operations.
    """
    xp = namespace(visible)
    if visible.size == 0:  # CuPy has no running sum of nothing
        return xp.zeros((4, *visible.shape[:-2], visible.shape[-1]), dtype=xp.int32)
    changes = xp.diff(~visible, axis=-2, prepend=False, append=False).swapaxes(-1, -2)
    number = changes.sum(axis=-1)
    _refuse_first(number, "column")
    return _between(xp.nonzero(changes)[-1], number, visible.shape[-2])


def _between(changes: Any, number: Any, length: int) -> Vectors:
    """Return the vectors of lines, each of which begins and ceases to be hidden where its changes say.

    Parameters
    ----------
    changes : int array
        Of line after line, ascending.
    number : int array, (..., lines)
        Of changes of each line: 0, 2 or 4.
    length : int
        Of a line.
    """
    changes = namespace(changes).append(changes, [0, 0])  # for lines without any
    behind = number.cumsum().reshape(number.shape)
    before = behind - number
    first, last = ((changes[at], changes[at + 1]) for at in (before, behind - 2))
    return assign(number // 2, first, last, length)


def assign(count: Any, first: Pair, last: Pair, n_queries: int) -> Vectors:
    """Choose which run of hidden rows is a key's lower and which its upper interval.

    The choice changes no meaning, but tiles are classified by the minimum and maximum over neighbouring keys, so
    that alike runs belong into the same vector: the one that begins at row 0 is the upper, the one that ends at
    the last row the lower; one in the middle goes by its side of the diagonal.  A key hidden from all rows gets
    both.

    Parameters
    ----------
    count : int array, (..., n_keys)
        Number of runs, 0 to 2.
    first, last : (start, end)
        The first and the last run (the same where there is one; anything where there is none).
    n_queries : int
        Rows.

    Returns
    -------
    lts, lte, uts, ute : int arrays, (..., n_keys)
    """
    xp = namespace(count)
    n_keys = count.shape[-1]
    start, end = first
    diagonal = xp.arange(n_keys, dtype=xp.int64) * n_queries // max(n_keys, 1)
    is_before = (start == 0) | ((end != n_queries) & (start + end <= 2 * diagonal))
    upper = (count == 2) | ((count == 1) & is_before)
    lower = (count == 2) | ((count == 1) & (~is_before | (end - start == n_queries)))
    return (
        xp.where(lower, last[0], n_queries),
        xp.where(lower, last[1], n_queries),
        xp.where(upper, start, 0),
        xp.where(upper, end, 0),
    )


def runs(bounds: np.ndarray, n_queries: int) -> tuple[np.ndarray, Pair, Pair]:
    """Return in how many runs a key's intervals hide rows, and the first and the last run, as `assign` takes them.

    Parameters
    ----------
    bounds : int array, (2 K, ..., n_keys)
        Starts and ends in turn, of any content.
    n_queries : int
        Rows.
    """
    bounds = np.clip(bounds, 0, n_queries)
    empty = bounds[::2] >= bounds[1::2]
    # Starts and ends in order, each for itself: a run begins where all intervals so far have ended.
    starts, ends = (_ordered(np.where(empty, -1, bounds[side::2])) for side in (0, 1))
    begins = starts >= 0
    begins[1:] &= starts[1:] > ends[:-1]
    count = begins.sum(axis=0)
    first, last = np.where(begins, starts, n_queries).min(axis=0), np.where(begins, starts, -1).max(axis=0)
    first_end = np.where(ends < last, ends, -1).max(axis=0)
    return count, (first, np.where(count > 1, first_end, ends[-1])), (last, ends[-1])


def _ordered(sides: np.ndarray) -> np.ndarray:
    """Sort an array along its first axis, in place; where that is short this is much quicker than np.sort."""
    for i, j in combinations(range(len(sides)), 2):
        sides[i], sides[j] = np.minimum(sides[i], sides[j]), np.maximum(sides[i], sides[j])
    return sides


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

    >>> import numpy as np
    >>> key = np.arange(6)
    >>> find_reach(np.stack([np.minimum(key + 3, 6), 0 * key + 6, 0 * key, key]), 6)
    (2, 0)

    Two documents are no band:

    >>> find_reach(np.array([[2, 2, 4, 4], [4, 4, 4, 4], [0, 0, 0, 0], [0, 0, 2, 2]]), 4) is None
    True
    """
    last, lower_end, upper_start, first = assign(*runs(bounds, n_queries), n_queries)
    seen = first < last
    if not seen.any() or upper_start.any() or lower_end.min() < n_queries:
        return None  # nothing visible, or something hidden amid it
    key = np.arange(first.size)
    left, right = (last - 1 - key)[seen & (last < n_queries)], (key - first)[seen & (first > 0)]
    reach = int(left[0]) if left.size else None, int(right[0]) if right.size else None
    band = rows_of_band(key, *reach, ((0, n_queries),))
    same = np.where(seen, (first == band[0]) & (last == band[1]), band[0] >= band[1])
    return reach if same.all() else None


def transpose(bounds: np.ndarray, n_queries: int) -> Vectors:
    """Return the vectors, (..., n_queries), of the transposed mask; MaskError where a row hides more than two runs.

    O(n_queries + n_keys) for each mask, up to a sort.  Going along the keys, a row begins or ceases to be hidden where
    an odd number of the bounds of a key and of the one before, their runs being disjoint, lie at or above it: in at
    most four intervals of rows.  A row of two runs changes four times, and all changes are listed.
    """
    leading, n_keys = bounds.shape[1:-1], bounds.shape[-1]
    # Beyond the keys nothing is hidden.
    bounds = np.pad(bounds.reshape(4, math.prod(leading), n_keys), ((0, 0), (0, 0), (1, 1)))
    count, first, last = runs(bounds, n_queries)
    disjoint = np.where([count > 0] * 2 + [count > 1] * 2, [*first, *last], n_queries)
    changes = _ordered(np.concatenate([disjoint[..., :-1], disjoint[..., 1:]]))
    changes = changes + np.arange(len(count))[:, None] * n_queries  # rows of all masks
    some = changes[::2] < changes[1::2]
    start, stop, key = changes[::2][some], changes[1::2][some], np.nonzero(some)[-1]
    room = len(count) * n_queries + 1
    number = (np.bincount(start, minlength=room) - np.bincount(stop, minlength=room)).cumsum()[:-1]
    number = number.reshape(*leading, n_queries)
    _refuse_first(number, "row")
    length = stop - start
    row = np.repeat(stop - length.cumsum(), length) + np.arange(length.sum())
    listed = np.sort(row * (n_keys + 1) + np.repeat(key, length), kind="stable") % (n_keys + 1)  # of row after row
    return _between(listed, number, n_keys)


def _refuse_first(number: Any, line: str) -> None:
    """Raise MaskError naming the first line, a row or a column, of more than four changes: two hidden runs."""
    for *matrix, index in namespace(number).argwhere(number > 4)[:1].tolist():
        found = int(number[(*matrix, index)]) // 2
        raise MaskError(f"mask{matrix or ''}: {line} {index} hides {found} separate intervals, expected at most two")
