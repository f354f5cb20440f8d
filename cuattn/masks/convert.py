"""Between column intervals and other forms: dense masks, FlashMask's index tensors, the transposed problem."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn.errors import DtypeError, MaskError, shown
from cuattn.masks import checks
from cuattn.masks.device import namespace
from cuattn.masks.intervals import Interval, band_intervals, normalise


def from_dense(visible: Any) -> tuple[Any, Any, Any, Any]:
    """Return lts, lte, uts, ute of a boolean mask (..., n_queries, n_keys), True = attend; MaskError if there are none.

    O(n_queries * n_keys), a fixed number of array operations.
    """
    xp = namespace(visible)
    hidden = ~visible
    n_queries, n_keys = hidden.shape[-2:]
    if hidden.size == 0:
        empty = xp.zeros((*hidden.shape[:-2], n_keys), dtype=xp.int64)
        return empty, empty, empty, empty
    begins, ends = hidden.copy(), hidden.copy()  # first and last row of each run of hidden rows
    begins[..., 1:, :] &= visible[..., :-1, :]
    ends[..., :-1, :] &= visible[..., 1:, :]
    runs = begins.sum(axis=-2)
    _refuse_first(runs, "column")
    last = n_queries - 1
    start_1, start_2 = begins.argmax(axis=-2), last - begins[..., ::-1, :].argmax(axis=-2)
    end_1, end_2 = ends.argmax(axis=-2) + 1, n_queries - ends[..., ::-1, :].argmax(axis=-2)
    return assign(runs, (start_1, end_1), (start_2, end_2), n_queries)


def assign(runs: Any, first: tuple[Any, Any], second: tuple[Any, Any], n_queries: int) -> tuple[Any, Any, Any, Any]:
    """Choose which run of hidden rows is a key's lower and which its upper interval.

    The choice changes no meaning, but tiles are classified by the minimum and maximum over neighbouring keys, so
    that alike runs belong into the same vector: the one that begins at row 0 is the upper, the one that ends at
    the last row the lower; one in the middle goes by its side of the diagonal.  A key hidden from all rows gets
    both.

    Parameters
    ----------
    runs : int array, (..., n_keys)
        Number of runs, 0 to 2.
    first, second : (start, end)
        The first and the last run (the same where there is one; anything where there is none).
    n_queries : int
        Rows.

    Returns
    -------
    lts, lte, uts, ute : int arrays, (..., n_keys)
    """
    xp = namespace(runs)
    n_keys = runs.shape[-1]
    start, end = first
    diagonal = xp.arange(n_keys, dtype=xp.int64) * n_queries // max(n_keys, 1)
    is_two = runs == 2
    is_whole = (start == 0) & (end == n_queries)
    is_before = (start == 0) | ((end != n_queries) & (start + end <= 2 * diagonal))
    upper = is_two | ((runs == 1) & (is_before | is_whole))
    lower = is_two | ((runs == 1) & (~is_before | is_whole))
    return (
        xp.where(lower, second[0], n_queries),
        xp.where(lower, second[1], n_queries),
        xp.where(upper, start, 0),
        xp.where(upper, end, 0),
    )


def union(hidden: Sequence[Interval], n_queries: int) -> tuple[Any, Any, Any, Any] | None:
    """Return lts, lte, uts, ute that hide what several intervals do, or None where a key needs three.

    Parameters
    ----------
    hidden : sequence of (start, end)
        Pairs of NumPy arrays (..., n_keys) that broadcast against each other.
    n_queries : int
        Rows.
    """
    runs, first, second = _runs(hidden, n_queries)
    return None if runs.size and runs.max() > 2 else assign(runs, first, second, n_queries)


def _runs(hidden: Sequence[Interval], n_queries: int) -> tuple[np.ndarray, Interval, Interval]:
    """Return in how many runs intervals hide rows, and the first and last run; both are empty where there is none."""
    sides = np.broadcast_arrays(*(side for pair in hidden for side in normalise(*pair, n_queries)))
    starts, ends = np.stack(sides[::2]), np.stack(sides[1::2])
    order = np.argsort(starts, axis=0)
    starts, ends = np.take_along_axis(starts, order, axis=0), np.take_along_axis(ends, order, axis=0)
    reached = np.maximum.accumulate(ends, axis=0)  # the end of the run so far
    begins = starts < n_queries  # empty intervals begin at n_queries
    begins[1:] &= starts[1:] > reached[:-1]
    runs = begins.sum(axis=0)
    last = len(starts) - 1 - begins[::-1].argmax(axis=0)[None]
    end = np.take_along_axis(reached, np.maximum(last - 1, 0), axis=0)[0]
    first = starts[0], np.where(runs > 1, end, reached[-1])
    return runs, first, (np.take_along_axis(starts, last, axis=0)[0], reached[-1])


def from_startend(idx: Any, is_causal: bool, n_queries: int) -> list[Any]:
    """Return lts, lte, uts, ute of FlashMask's index tensor (..., n_keys, 1 | 2 | 4)."""
    if not isinstance(is_causal, bool | np.bool_):
        raise DtypeError(f"is_causal = {shown(is_causal)}: expected a bool")
    idx = checks.integers("idx", idx)
    allowed = (1, 2) if is_causal else (2, 4)
    if idx.ndim < 2 or idx.shape[-1] not in allowed:
        kind = "causal" if is_causal else "not causal"
        raise MaskError(f"idx has shape {idx.shape}: expected (..., n_keys, {allowed[0]} or {allowed[1]}), {kind}")
    xp = namespace(idx)
    if xp is np:
        checks.in_range("idx", idx, 0, n_queries)
    n_keys, columns = idx.shape[-2:]
    given = [idx[..., column] for column in range(columns)]
    if columns == 4:
        return given
    zero, last = xp.zeros(n_keys, dtype=xp.int32), xp.full(n_keys, n_queries, dtype=xp.int32)
    if not is_causal:
        return [given[0], last, zero, given[1]]
    _, upper_end = band_intervals(n_queries, n_keys, None, 0, n_keys - n_queries, xp)[0]
    return [given[0], last if columns == 1 else given[1], zero, upper_end]


def to_startend(vectors: Any) -> Any:
    """Return FlashMask's index tensor (batch, heads, n_keys, 4) of stacked vectors (4, ..., n_keys)."""
    xp = namespace(vectors)
    leading, n_keys = vectors.shape[1:-1], vectors.shape[-1]
    if len(leading) > 2:
        raise MaskError(f"leading axes {leading}: expected at most (batch, heads)")
    return xp.stack(list(vectors), axis=-1).reshape(*(1,) * (2 - len(leading)), *leading, n_keys, 4)


def transpose(
    lts: np.ndarray, lte: np.ndarray, uts: np.ndarray, ute: np.ndarray, n_queries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the vectors, (..., n_queries), of the transposed mask; MaskError where a row hides more than two runs.

    O(n_queries + n_keys) for each mask.  Going from key j - 1 to key j, a run of hidden keys begins in the rows
    that j hides and j - 1 does not, and ends in those of the reverse: at most six row intervals each.  Difference
    arrays over the rows add up, for all of them at once, how many runs begin, the sum of the keys where they
    begin, and the sum of the squares; a sum and a sum of squares determine two keys.
    """
    leading, n_keys = lts.shape[:-1], lts.shape[-1]
    count = int(np.prod(leading))
    vectors = [vector.reshape(count, n_keys).astype(np.int64) for vector in (lts, lte, uts, ute)]
    runs, first, second = _runs([(vectors[0], vectors[1]), (vectors[2], vectors[3])], n_queries)
    nothing = np.full_like(runs, n_queries)
    start_1, end_1 = (np.where(runs > 0, bound, nothing) for bound in first)
    start_2, end_2 = (np.where(runs > 1, bound, nothing) for bound in second)
    rows = np.full((count, 1), n_queries)
    before = [np.concatenate([rows, bound], axis=1) for bound in (start_1, end_1, start_2, end_2)]
    after = [np.concatenate([bound, rows], axis=1) for bound in (start_1, end_1, start_2, end_2)]
    runs, start_sum, start_squares = _scan(after, before, n_queries)
    _, end_sum, end_squares = _scan(before, after, n_queries)
    shape = (*leading, n_queries)
    runs = runs.reshape(shape)
    _refuse_first(runs, "row")
    starts = [keys.reshape(shape) for keys in _two_keys(runs, start_sum.reshape(shape), start_squares.reshape(shape))]
    ends = [keys.reshape(shape) for keys in _two_keys(runs, end_sum.reshape(shape), end_squares.reshape(shape))]
    return assign(runs, (starts[0], ends[0]), (starts[1], ends[1]), n_keys)


def _scan(rows_of: list[np.ndarray], without: list[np.ndarray], n_queries: int) -> list[np.ndarray]:
    """Sum 1, j and j * j over the keys j whose rows `rows_of`, less those of `without`, contain a row.

    Both are disjoint intervals start_1, end_1, start_2, end_2 of shape (masks, keys); the sums are (masks,
    n_queries).  They wrap modulo 2**64 on the way, and cannot at the end where there are at most two keys.
    """
    masks, keys = rows_of[0].shape
    gaps = [(np.zeros_like(without[0]), without[0]), (without[1], without[2]), (without[3], np.int64(n_queries))]
    place = np.arange(masks)[:, None] * (n_queries + 1)
    key = np.broadcast_to(np.arange(keys), (masks, keys))
    sums = [np.zeros(masks * (n_queries + 1), dtype=np.int64) for _ in range(3)]
    for start, end in ((rows_of[0], rows_of[1]), (rows_of[2], rows_of[3])):
        for gap_start, gap_end in gaps:
            first, last = np.maximum(start, gap_start), np.minimum(end, gap_end)
            some = first < last
            j = key[some]
            for rows, sign in (((place + first)[some], 1), ((place + last)[some], -1)):
                for total, term in zip(sums, (1, j, j * j), strict=True):
                    np.add.at(total, rows, sign * term)
    return [total.reshape(masks, n_queries + 1).cumsum(axis=1)[:, :n_queries] for total in sums]


def _two_keys(runs: np.ndarray, total: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a <= b from a + b and a * a + b * b; where one key was summed, that key twice."""
    twice = runs == 2
    gap = np.where(twice, 2 * squares - total * total, 0)  # (b - a) ** 2
    gap = np.rint(np.sqrt(gap.astype(np.float64))).astype(np.int64)  # exact: a perfect square below 2**62
    return np.where(twice, (total - gap) // 2, total), np.where(twice, (total + gap) // 2, total)


def _refuse_first(runs: Any, line: str) -> None:
    """Raise MaskError naming the first line, a row or a column, that hides more than two runs."""
    if runs.size == 0 or int(runs.max()) <= 2:
        return
    *matrix, index = (int(axis) for axis in np.unravel_index(int((runs > 2).argmax()), runs.shape))
    mask = f"mask{matrix}" if matrix else "mask"
    found = int(runs[(*matrix, index)])
    raise MaskError(f"{mask}: {line} {index} hides {found} separate intervals, expected at most two")
