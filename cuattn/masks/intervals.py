"""Arithmetic on the row intervals that key columns hide, and on their tiles.

A mask hides from key j the rows of a few half-open intervals ``start[j] <= i < end[j]``: two of a `ColumnMask`,
one for each closed side of a band (causal, window).  The functions here take the intervals as pairs
``(start, end)`` of integer arrays of shape (..., n_keys), NumPy or CuPy, of any content: a bound outside
[0, n_queries] is clamped and ``start >= end`` is an empty interval, so vectors that nobody has checked cannot
name a row that does not exist.

Tiles are `block_m` rows by `block_n` keys; `Tr` and `Tc` count the row and the key tiles.  Over the keys of one
key tile an interval gives two ranges of row tiles, from the minimum and maximum of its bounds (the FlashMask
paper's equation 4): a *skip* range, in which it hides everything, and a *partial* range, outside of which it hides
nothing.  Four integers per key tile and interval answer every question about the Tr x Tc tiles, which are
therefore never stored.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn.io_model.sizes import cdiv
from cuattn.masks.device import namespace

FULL, PARTIAL, SKIP = 2, 1, 0
"""Tile states: everything visible, elements must be tested, nothing visible."""

Interval = tuple[Any, Any]

OPEN = 2**33  # beyond any row index: a window at least this wide is open


def normalise(start: Any, end: Any, n_queries: int) -> Interval:
    """Clamp an interval to the rows that exist and give every empty one the same, neutral bounds.

    Parameters
    ----------
    start, end : array, (..., n_keys), int32 or int64
        Bounds of any value.
    n_queries : int
        Rows.

    Returns
    -------
    start, end : array, (..., n_keys)
        Bounds in [0, n_queries]; ``(n_queries, 0)`` where the interval is empty, which is neutral in a minimum
        of starts and in a maximum of ends.

    Examples
    --------
    >>> import numpy as np
    >>> [bound.tolist() for bound in normalise(np.array([-3, 5, 2]), np.array([9, 4, 4]), n_queries=8)]
    [[0, 8, 2], [8, 0, 4]]
    """
    xp = namespace(start)
    start, end = xp.clip(start, 0, n_queries), xp.clip(end, 0, n_queries)
    empty = start >= end
    return xp.where(empty, n_queries, start), xp.where(empty, 0, end)


def band_intervals(
    n_queries: int, n_keys: int, left: int | None, right: int | None, offset: int = 0, xp: Any = np
) -> list[Interval]:
    """Return the intervals that a band hides: key j is seen by row i if i + offset - left <= j <= i + offset + right.

    Parameters
    ----------
    n_queries, n_keys : int
        Shape of the problem.
    left, right : int or None
        Reach of a row before and behind its diagonal, >= 0; None leaves that side open.
    offset : int, optional
        Column of row 0's diagonal: 0, or n_keys - n_queries for the alignment at the bottom right.
    xp : module, optional
        NumPy (the default) or CuPy.

    Returns
    -------
    list of (start, end)
        One pair of int64 arrays of shape (n_keys,) for each closed side.

    Examples
    --------
    Causal, four rows and keys: key j is hidden from the rows before j.

    >>> [(start.tolist(), end.tolist()) for start, end in band_intervals(4, 4, None, 0)]
    [([0, 0, 0, 0], [0, 1, 2, 3])]
    """
    diagonal = xp.arange(n_keys, dtype=xp.int64) - offset  # the row whose diagonal is key j
    intervals = []
    if right is not None:
        end = xp.clip(diagonal - min(right, OPEN), 0, n_queries)
        intervals.append((xp.zeros_like(end), end))
    if left is not None:
        start = xp.clip(diagonal + (min(left, OPEN) + 1), 0, n_queries)
        intervals.append((start, xp.full_like(start, n_queries)))
    return intervals


def covered(intervals: Sequence[Interval], n_queries: int) -> Any:
    """Return which keys the intervals together hide from every row (with no rows: all keys).

    Parameters
    ----------
    intervals : sequence of (start, end)
        Pairs of arrays of shape (..., n_keys) that broadcast against each other.
    n_queries : int
        Rows.

    Returns
    -------
    bool array, (..., n_keys)

    Examples
    --------
    >>> import numpy as np
    >>> lower, upper = (np.array([3, 4]), np.array([8, 8])), (np.array([0, 0]), np.array([3, 3]))
    >>> covered([lower, upper], 8).tolist()
    [True, False]
    """
    return first_left(intervals) >= n_queries


def first_left(intervals: Sequence[Interval]) -> Any:
    """Return, per key, the first row that the intervals together do not hide, however far it lies.

    Parameters
    ----------
    intervals : sequence of (start, end)
        Pairs of arrays of shape (..., n_keys) that broadcast against each other.

    Returns
    -------
    int array, (..., n_keys)

    Examples
    --------
    >>> import numpy as np
    >>> first_left([(np.array([3, 4]), np.array([8, 8])), (np.array([0, 0]), np.array([3, 3]))]).tolist()
    [8, 3]
    """
    xp = namespace(intervals[0][0])
    row = xp.zeros((), dtype=xp.int64)  # every row before this one is hidden
    for _ in intervals:
        for start, end in intervals:
            row = xp.where((start <= row) & (end > row), end, row)
    return row


def tile_bounds(start: Any, end: Any, n_queries: int, block_m: int, block_n: int) -> Any:
    """Return, per key tile, the row tiles in which one interval hides everything and those where it may hide some.

    Row tile t is skipped if ``a <= t < b``, else partial if ``p <= t < q``, else untouched by this interval.

    Parameters
    ----------
    start, end : array, (..., n_keys), int32 or int64
        The interval, of any content.
    n_queries : int
        Rows.
    block_m, block_n : int
        Rows and keys of a tile, >= 1.

    Returns
    -------
    int32 array, (..., Tc, 4)
        ``a, b, p, q``, indices of row tiles in [0, Tr]; a range is empty if its first is not below its second.

    Examples
    --------
    Causal over 8 rows and keys in tiles of 2 x 4: keys 4 to 7 are skipped by row tiles 0 and 1.

    >>> tile_bounds(*band_intervals(8, 8, None, 0)[0], n_queries=8, block_m=2, block_n=4).tolist()
    [[4, 0, 0, 2], [0, 2, 0, 4]]
    """
    xp = namespace(start)
    if start.size == 0:  # CuPy has no minimum of nothing, whatever the axis
        return xp.zeros((*start.shape[:-1], cdiv(start.shape[-1], block_n), 4), dtype=xp.int32)
    row_tiles = cdiv(n_queries, block_m)
    start, end = normalise(start, end, n_queries)
    start, end = _by_key_tile(start, block_n), _by_key_tile(end, block_n)
    first_end = end.min(axis=-1)
    skip_from = cdiv(start.max(axis=-1), block_m)
    skip_to = xp.where(first_end == n_queries, row_tiles, first_end // block_m)  # a ragged last tile ends with the rows
    partial_from = start.min(axis=-1) // block_m
    partial_to = cdiv(end.max(axis=-1), block_m)
    return xp.stack([skip_from, skip_to, partial_from, partial_to], axis=-1).astype(xp.int32)


def tile_table(intervals: Sequence[Interval], n_queries: int, block_m: int, block_n: int) -> Any:
    """Return the `tile_bounds` of several intervals that hold together.

    A key that the intervals together hide from every row counts as hidden by each of them, so that it spoils the
    skip range of none.

    Parameters
    ----------
    intervals : sequence of (start, end)
        K >= 1 pairs of arrays of shape (..., n_keys) that broadcast against each other.
    n_queries, block_m, block_n : int
        As in `tile_bounds`.

    Returns
    -------
    int32 array, (..., Tc, K, 4)
    """
    xp = namespace(intervals[0][0])
    dead = covered(intervals, n_queries)
    bounds = [
        tile_bounds(xp.where(dead, 0, start), xp.where(dead, n_queries, end), n_queries, block_m, block_n)
        for start, end in intervals
    ]
    return xp.stack(bounds, axis=-2)


def tile_states(table: Any, row_start: int, row_stop: int) -> Any:
    """Return the states of the tiles in a range of row tiles: skipped if any interval skips, else partial if any does.

    Parameters
    ----------
    table : int32 array, (..., Tc, K, 4)
        From `tile_table`.
    row_start, row_stop : int
        Range of row tiles.

    Returns
    -------
    int8 array, (..., row_stop - row_start, Tc)
        `SKIP` (0), `PARTIAL` (1) or `FULL` (2).  Sound for any vectors; PARTIAL may stand for a tile that is in
        truth full or empty.

    Examples
    --------
    >>> table = tile_table(band_intervals(8, 8, None, 0), n_queries=8, block_m=2, block_n=4)
    >>> tile_states(table, 0, 4).tolist()
    [[1, 0], [1, 0], [2, 1], [2, 1]]
    """
    xp = namespace(table)
    row = xp.arange(row_start, row_stop, dtype=xp.int32)[:, None]
    shape = (*table.shape[:-3], row_stop - row_start, table.shape[-3])
    states = xp.full(shape, FULL, dtype=xp.int8)
    for column, state in ((2, PARTIAL), (0, SKIP)):  # skipping has the last word
        for k in range(table.shape[-2]):
            first, last = table[..., None, :, k, column], table[..., None, :, k, column + 1]
            states[(row >= first) & (row < last)] = state
    return states


def skipped_tiles(table: Any) -> Any:
    """Return how many row tiles each key tile skips, from the table of two intervals, in O(Tc).

    Parameters
    ----------
    table : int32 array, (..., Tc, 2, 4)
        From `tile_table`.

    Returns
    -------
    int array, (..., Tc)
    """
    xp = namespace(table)
    first, last = table[..., 0], table[..., 1]
    lengths = xp.maximum(last - first, 0).sum(axis=-1)
    both = xp.minimum(last[..., 0], last[..., 1]) - xp.maximum(first[..., 0], first[..., 1])
    return lengths - xp.maximum(both, 0)


@lru_cache(maxsize=16)
def bit_lines(rows: int, dtype: np.dtype) -> np.ndarray:
    """Return (rows + 1, rows), whose line t has all bits set before row t; the bits of tiles are made of such lines."""
    ramp = np.tri(rows + 1, rows, -1, bool)
    return ramp if dtype.kind == "b" else np.negative(ramp.astype(dtype))


def _by_key_tile(vector: Any, block_n: int) -> Any:
    """Reshape (..., n_keys) to (..., Tc, block_n); the last key fills a ragged last tile."""
    xp = namespace(vector)
    n_keys = vector.shape[-1]
    block_n = min(block_n, n_keys)
    key_tiles = cdiv(n_keys, block_n)
    if key_tiles * block_n != n_keys:
        vector = xp.take(vector, xp.minimum(xp.arange(key_tiles * block_n), n_keys - 1), axis=-1)
    return vector.reshape(*vector.shape[:-1], key_tiles, block_n)
