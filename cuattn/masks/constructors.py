"""The masks of the FlashMask paper that follow from a length and a few numbers.

Every function returns a :class:`ColumnMask` of host vectors, in O(N) time and memory: for each key the rows that are
hidden below the diagonal (the *lower* interval, from some row on) and above it (the *upper* one, before some row).
i is the query row, j the key column, and the formulas say what is visible.  Masks of packed sequences are in
`cuattn.masks.packed`; use all of them from `cuattn.masks`.

References
----------
G. Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention", sections 2.1 and A.5.2.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from cuattn.errors import DtypeError, MaskError, shown
from cuattn.masks import checks
from cuattn.masks.column import ColumnMask
from cuattn.masks.runs import Runs, indices, length_of, rows_of_band


def band_of_runs(rows: Runs, keys: Runs, left: int | None, right: int | None, offset: int = 0) -> ColumnMask:
    """Return what a band leaves of a part of a matrix, in the part's own indices: for shards made of several pieces.

    Parameters
    ----------
    rows, keys : tuple of (start, stop)
        Runs of the whole matrix that the part takes, in ascending order.
    left, right : int or None
        Row i of the whole sees its key j if ``i + offset - left <= j <= i + offset + right``; None leaves a side open.
    offset : int, optional
        Column of row 0's diagonal.

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
    key = indices(keys) - offset
    first, last = rows_of_band(key, left, right, rows)
    return ColumnMask._of(length_of(rows), last, ute=np.broadcast_to(first, key.shape))


def band(n_queries: int, n_keys: int, left: int | None, right: int | None, offset: int = 0) -> ColumnMask:
    """Return a band of a whole matrix, see `band_of_runs`."""
    return band_of_runs(((0, n_queries),), ((0, n_keys),), left, right, offset)


kept_band = lru_cache(maxsize=8)(band)
"""The same for backends, which ask for it in every call: what is remembered keeps its tables."""


def full(n_queries: int, n_keys: int | None = None) -> ColumnMask:
    """Let every row see every key.

    Parameters
    ----------
    n_queries : int
        Rows.
    n_keys : int, optional
        Keys; by default as many as rows.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n_keys,).

    See Also
    --------
    causal : The lower triangle.

    Examples
    --------
    >>> full(2, 3).dense().astype(int)
    array([[1, 1, 1],
           [1, 1, 1]])
    """
    return band(*_shape(n_queries, n_keys), None, None)


def causal(n_queries: int, n_keys: int | None = None, align: str = "bottom_right") -> ColumnMask:
    """Let each row see the keys up to the diagonal: j <= i + (n_keys - n_queries), or j <= i for "top_left".

    Parameters
    ----------
    n_queries : int
        Rows.
    n_keys : int, optional
        Keys; by default as many as rows.
    align : {"bottom_right", "top_left"}, optional
        The corner of the scores that the diagonal ends in, or starts from.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n_keys,).

    See Also
    --------
    sliding_window : Causal, and no further back.
    full : Everything.

    Examples
    --------
    >>> causal(2, 3).dense().astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    n_queries, n_keys = _shape(n_queries, n_keys)
    if not isinstance(align, str) or align not in ("bottom_right", "top_left"):
        raise MaskError(f"align = {shown(align)}: expected 'bottom_right' or 'top_left'")
    return band(n_queries, n_keys, None, 0, n_keys - n_queries if align == "bottom_right" else 0)


def sliding_window(n: int, window: int) -> ColumnMask:
    """Let each row see the last `window` keys, its own included: 0 <= i - j < window.

    Parameters
    ----------
    n : int
        Rows and keys.
    window : int
        Keys that a row sees, >= 0.  ``sliding_window(n, w)`` is the argument ``window=(w - 1, 0)`` of
        :func:`cuattn.attention`, which counts the keys on either side.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n,).

    See Also
    --------
    global_sliding_window : A window to both sides, with tokens that see and are seen by all.

    Examples
    --------
    >>> sliding_window(4, 2).dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]])
    """
    n = checks.integer("n", n)
    return band(n, n, checks.integer("window", window, maximum=np.inf) - 1, 0)


def global_sliding_window(n: int, window: int, n_global: int) -> ColumnMask:
    """Let each row see the keys at most `window` away; the first `n_global` tokens see and are seen by all.

    Visible when abs(i - j) <= window, or i < n_global, or j < n_global.

    Parameters
    ----------
    n : int
        Rows and keys.
    window : int
        Distance that a row sees to either side, >= 0: ``window=(w, w)`` of :func:`cuattn.attention`.
    n_global : int
        Number of global tokens, >= 0; more than `n` mean all.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n,).

    See Also
    --------
    sliding_window : Without global tokens, causal.

    Examples
    --------
    >>> global_sliding_window(5, 1, 1).dense().astype(int)
    array([[1, 1, 1, 1, 1],
           [1, 1, 1, 0, 0],
           [1, 1, 1, 1, 0],
           [1, 0, 1, 1, 1],
           [1, 0, 0, 1, 1]])
    """
    n = checks.integer("n", n)
    window = min(checks.integer("window", window, maximum=np.inf), n)
    n_global = min(checks.integer("n_global", n_global, maximum=np.inf), n)
    j = np.arange(n)
    lower_start = np.where(j < n_global, n, np.clip(j + window + 1, n_global, n))
    return ColumnMask._of(n, lower_start, n, n_global, np.maximum(j - window, n_global))


def prefix_lm_causal(n: int, prefix: int) -> ColumnMask:
    """Let each row see the prefix and the keys up to its own: j <= i or j < prefix.

    Parameters
    ----------
    n : int
        Rows and keys.
    prefix : int
        Length of the prefix, 0 <= prefix <= n.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n,).

    See Also
    --------
    prefix_lm_document : Several of them in one sequence.

    Examples
    --------
    >>> prefix_lm_causal(4, 2).dense().astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    n = checks.integer("n", n)
    prefix = checks.integer("prefix", prefix, maximum=n)
    j = np.arange(n)
    return ColumnMask._of(n, ute=np.where(j < prefix, 0, j))


def qk_sparse(n: int, spans: Any) -> ColumnMask:
    """Let each row see the keys up to its own, except those of a span that has not ended yet.

    Visible when j <= i, unless j lies in a span and i < that span's end.

    Parameters
    ----------
    n : int
        Rows and keys.
    spans : sequence of (start, length)
        Spans of keys within [0, n); they may overlap and come in any order.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n,).

    See Also
    --------
    eviction : Keys that are seen until a row.

    Examples
    --------
    >>> qk_sparse(5, [(1, 3)]).dense().astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 0, 0, 0, 0],
           [1, 0, 0, 0, 0],
           [1, 0, 0, 0, 0],
           [1, 1, 1, 1, 1]])
    """
    n = checks.integer("n", n)
    start, length = checks.numbers("spans", spans, 2).T
    end = start + length
    for first in np.flatnonzero(end > n)[:1]:
        raise MaskError(f"spans[{first}] = ({start[first]}, {length[first]}): expected a span within [0, {n})")
    last_end = np.zeros(n + 1, dtype=np.int64)  # last end of the spans that begin at key j; key n: empty spans
    np.maximum.at(last_end, start, end)
    # Of the spans that begin by key j, the one that ends last covers j if any does; else it ends by j.
    return ColumnMask._of(n, ute=np.maximum(np.arange(n), np.maximum.accumulate(last_end)[:n]))


def eviction(evicted_at: Any) -> ColumnMask:
    """Let each row see the keys up to its own that have not been evicted: j <= i < evicted_at[j].

    Parameters
    ----------
    evicted_at : array_like of int, (..., n)
        The first row that no longer sees key j, in [0, n]; n means never evicted.

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (..., n).

    See Also
    --------
    random_eviction : Draws which keys go.

    Examples
    --------
    >>> eviction([4, 2, 4, 4]).dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 0, 1, 0],
           [1, 0, 1, 1]])
    """
    evicted_at = checks.integers("evicted_at", evicted_at, on_host=True)
    if evicted_at.ndim == 0:
        raise MaskError(f"evicted_at = {evicted_at}: expected at least one axis")
    n = checks.integer("evicted_at.shape[-1]", evicted_at.shape[-1])
    checks.in_range("evicted_at", evicted_at, n)
    return ColumnMask._of(n, evicted_at, ute=np.arange(n))


def random_eviction(n: int, start: int, rng: Any = None) -> ColumnMask:
    """Let each row see the keys up to its own, and from row `start` on evict one random key per row.

    At each row i >= start one key, uniformly random among the keys j < i that are still visible, is evicted: it is
    hidden from row i on.

    Parameters
    ----------
    n : int
        Rows and keys.
    start : int
        The first row at which a key is evicted, >= 0.
    rng : optional
        What `numpy.random.default_rng` takes: None, an int seed, a Generator, ...

    Returns
    -------
    ColumnMask
        The mask, with vectors of shape (n,).

    See Also
    --------
    eviction : Of keys that are told.

    Notes
    -----
    Once rows evict, each adds one candidate (the key before it) and takes one, so the candidates always fill the
    same number of slots.  A row picks a slot; its own key is the slot's next tenant, which the next row that picks
    this slot evicts.  One stable sort by slot finds, for every key, that row: exact, O(n log n), no loop.

    Examples
    --------
    >>> mask = random_eviction(6, 3, rng=0)
    >>> mask.dense().sum(axis=1)
    array([1, 2, 3, 3, 3, 3])
    """
    n = checks.integer("n", n)
    start = checks.integer("start", start, maximum=np.inf)
    try:
        rng = np.random.default_rng(rng)
    except (TypeError, ValueError) as error:
        kind = DtypeError if isinstance(error, TypeError) else MaskError
        raise kind(f"rng = {shown(rng)}: expected what numpy.random.default_rng takes") from None
    slots = min(max(start, 1), n)  # row 0 has no key before it
    slot_of = np.concatenate([np.arange(slots), rng.integers(0, max(slots, 1), size=n - slots)])
    tenants = np.argsort(slot_of, kind="stable")
    evicted_at = np.full(n, n)
    tenant, following = tenants[:-1], tenants[1:]
    succeeded = slot_of[tenant] == slot_of[following]
    evicted_at[tenant[succeeded]] = following[succeeded]
    return eviction(evicted_at)


def _shape(n_queries: int, n_keys: int | None) -> tuple[int, int]:
    n_queries = checks.integer("n_queries", n_queries)
    return n_queries, n_queries if n_keys is None else checks.integer("n_keys", n_keys)
