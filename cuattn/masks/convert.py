"""Between column intervals and other forms: dense masks, bands, FlashMask's index tensors, the transposed problem."""

import math
from itertools import combinations, product
from typing import Any

import numpy as np

from cuattn.errors import MaskError
from cuattn.masks.device import namespace
from cuattn.masks.intervals import normalise
from cuattn.masks.runs import rows_of_band

Pair = tuple[Any, Any]


def from_dense(visible: Any) -> Any:
    """Return lts, lte, uts, ute of a boolean mask (..., n_queries, n_keys), True = attend; MaskError if there are none.

    O(n_queries * n_keys), a fixed number of array operations.
    """
    xp = namespace(visible)
    n_queries, n_keys = visible.shape[-2:]
    if visible.size == 0:
        return xp.zeros((4, *visible.shape[:-2], n_keys), dtype=xp.int32)
    edges = xp.diff((~visible).astype(xp.int8), prepend=0, append=0, axis=-2)
    begins, ends = edges > 0, edges < 0  # of runs of hidden rows: the first, and the one behind the last
    count = begins.sum(axis=-2)
    _refuse_first(count, "column")
    first = begins.argmax(axis=-2), ends.argmax(axis=-2)
    last = n_queries - begins[..., ::-1, :].argmax(axis=-2), n_queries - ends[..., ::-1, :].argmax(axis=-2)
    return assign(count, first, last, n_queries)


def assign(count: Any, first: Pair, last: Pair, n_queries: int) -> tuple[Any, Any, Any, Any]:
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
    starts, ends = (side.astype(np.int64) for side in normalise(bounds, n_queries))
    ordered = (starts << 32) + ends
    for i, j in combinations(range(len(ordered)), 2):  # quicker than a sort of few
        ordered[i], ordered[j] = np.minimum(ordered[i], ordered[j]), np.maximum(ordered[i], ordered[j])
    starts, ends = ordered >> 32, ordered & (2**32 - 1)
    for k in range(1, len(ends)):
        np.maximum(ends[k], ends[k - 1], out=ends[k])  # the end of the run so far
    begins = starts < n_queries  # empty intervals begin at n_queries
    begins[1:] &= starts[1:] > ends[:-1]
    count = begins.sum(axis=0)
    last = np.where(begins, starts, 0).max(axis=0)
    first_end = np.where(starts < last, ends, 0).max(axis=0)
    return count, (starts[0], np.where(count > 1, first_end, ends[-1])), (last, ends[-1])


def union(bounds: np.ndarray, n_queries: int) -> tuple[Any, Any, Any, Any] | None:
    """Return lts, lte, uts, ute that hide what intervals (see `runs`) do, or None where a key needs three."""
    found = runs(bounds, n_queries)
    return None if (found[0] > 2).any() else assign(*found, n_queries)


def find_reach(bounds: np.ndarray, n_queries: int) -> tuple[int | None, int | None] | None:
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


def transpose(bounds: np.ndarray, n_queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the vectors, (..., n_queries), of the transposed mask; MaskError where a row hides more than two runs.

    O(n_queries + n_keys) for each mask.  Going from key j - 1 to key j, a run of hidden keys begins in
    the rows that j hides and j - 1 does not, and ends in those of the reverse: at most six row intervals each.  Where
    no row has more than two, these intervals hold at most 2 n_queries rows together, which are listed.
    """
    leading, n_keys = bounds.shape[1:-1], bounds.shape[-1]
    count, first, last = runs(bounds.reshape(4, math.prod(leading), n_keys), n_queries)
    disjoint = np.where([count > 0] * 2 + [count > 1] * 2, [*first, *last], n_queries)
    padded = np.pad(disjoint, ((0, 0), (0, 0), (1, 1)), constant_values=n_queries)  # beyond the keys nothing is hidden
    before, after = padded[..., :-1], padded[..., 1:]
    shape = (*leading, n_queries)
    count, first_start, last_start = _changes(after, before, shape)
    _, first_end, last_end = _changes(before, after, shape)
    return assign(count, (first_start, first_end), (last_start, last_end), n_keys)


def _changes(rows_of: np.ndarray, without: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return of each row how many keys have it in `rows_of` but not in `without`, and the first and last of them.

    Both are disjoint intervals start_1, end_1, start_2, end_2, (4, masks, keys); results are of `shape`, whose
    last axis is the rows.
    """
    masks, n_queries = rows_of.shape[1], shape[-1]
    gaps = ((0, without[0]), (without[1], without[2]), (without[3], n_queries))
    found = []
    for (start, stop), (gap_start, gap_stop) in product((rows_of[:2], rows_of[2:]), gaps):
        start, stop = np.maximum(start, gap_start), np.minimum(stop, gap_stop)
        mask, key = np.nonzero(start < stop)
        place = mask * n_queries
        found.append((start[mask, key] + place, stop[mask, key] + place, key))
    start, stop, key = map(np.concatenate, zip(*found, strict=True))
    room = masks * n_queries + 1
    count = (np.bincount(start, minlength=room) - np.bincount(stop, minlength=room)).cumsum()[:-1]
    _refuse_first(count.reshape(shape), "row")
    length = stop - start
    row, key = np.repeat(stop - length.cumsum(), length) + np.arange(length.sum()), np.repeat(key, length)
    one, total = np.zeros_like(count), np.bincount(row, key, minlength=len(count)).astype(np.int64)
    one[row] = key  # of two keys of a row any
    other = np.where(count > 1, total - one, one)
    return [keys.reshape(shape) for keys in (count, np.minimum(one, other), np.maximum(one, other))]


def _refuse_first(count: Any, line: str) -> None:
    """Raise MaskError naming the first line, a row or a column, that hides more than two runs."""
    for *matrix, index in namespace(count).argwhere(count > 2)[:1].tolist():
        found = int(count[(*matrix, index)])
        raise MaskError(f"mask{matrix or ''}: {line} {index} hides {found} separate intervals, expected at most two")
