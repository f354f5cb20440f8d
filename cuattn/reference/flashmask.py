"""FlashMask: Algorithms 1 (forward) and 2 (backward) of its paper, FlashAttention-2 with column-wise masks.

Row i may not see key j when LTS[j] <= i < LTE[j] or UTS[j] <= i < UTE[j].  The minimum and maximum of each vector
over a block of keys, eight numbers, tell which tiles are skipped and which need no element test (eq. 4).
"""

from typing import NamedTuple

import numpy as np

from cuattn.errors import ShapeError
from cuattn.io_model import Tiles, block_sizes
from cuattn.reference.hbm import HBM, Counts
from cuattn.reference.steps import Backward, block, place, reciprocal, rescaling

__all__ = ["FlashMaskForward", "flashmask_backward", "flashmask_forward"]

_LOWER, _UPPER = slice(0, 2), slice(2, 4)  # columns of the mask in HBM: LTS and LTE, UTS and UTE


class FlashMaskForward(NamedTuple):
    """O (N, d), the logsumexp L (N,), -inf in an empty row, what was done with each tile, and the accesses."""

    o: np.ndarray
    lse: np.ndarray
    tiles: Tiles
    counts: Counts


def flashmask_forward(q, k, v, mask, M, *, scale=None, dtype=np.float64):
    """Run FlashMask's Algorithm 1.

    Parameters
    ----------
    q, k, v : array_like, (N, d)
        Queries, keys and values.
    mask : ColumnMask or sequence of 4 array_like of int, (N,)
        The vectors LTS, LTE, UTS, UTE (an object has them as lts, lte, uts, ute); start >= end masks nothing.
    M : int
        On-chip memory in elements, d <= M <= N d.  The paper leaves the block sizes open; these are
        FlashAttention's, :func:`cuattn.io_model.block_sizes`.
    scale : float, optional
        Factor of the scores in eq. 1; d**-0.5 by default.
    dtype : dtype, default float64
        Type of the arithmetic.

    Returns
    -------
    forward : FlashMaskForward
        O, the logsumexp L, what was done with each tile, and the accesses.

    Raises
    ------
    ArgumentError
        When M is outside its range.
    ShapeError
        When an array's shape is not as stated.

    Examples
    --------
    Causal attention hides from every key the rows before its own:

    >>> import numpy as np
    >>> q = k = v = np.eye(4)
    >>> none = np.zeros(4, int)
    >>> fwd = flashmask_forward(q, k, v, (none, none, none, np.arange(4)), 16)
    >>> fwd.tiles.visited.astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    hbm = HBM(dtype)
    n, d = place(hbm, Q=q, K=k, V=v)
    scale = d**-0.5 if scale is None else scale
    sizes = block_sizes(n, d, M)  # Alg. 1 l. 2-4
    tiles = Tiles(*(np.zeros((sizes.t_r, sizes.t_c), bool) for _ in Tiles._fields))
    _place_mask(hbm, mask, n, sizes)  # Alg. 1 l. 5
    hbm.allocate("O", (n, d), output=True)
    hbm.allocate("L", n)
    for i in range(sizes.t_r):  # Alg. 1 l. 6
        rows = block(i, sizes.b_r, n)
        Q_i = hbm.load("Q", rows)  # Alg. 1 l. 7
        O_i = hbm.on_chip("O", np.zeros_like(Q_i))  # Alg. 1 l. 8
        l_i = hbm.on_chip("l", np.zeros(len(Q_i), hbm.dtype))
        m_i = hbm.on_chip("m", np.full(len(Q_i), -np.inf, hbm.dtype))
        for j in range(sizes.t_c):  # Alg. 1 l. 9
            if _is_masked(rows, hbm.load("common", j)):  # Alg. 1 l. 10-15
                continue
            keys = block(j, sizes.b_c, n)
            K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 1 l. 16
            S_ij = hbm.on_chip("S", scale * (Q_i @ K_j.T))  # Alg. 1 l. 17
            lower, upper = _is_partial(rows, hbm.load("any", j))  # Alg. 1 l. 18, 22
            if lower:
                S_ij = _hide(S_ij, rows, hbm.load("mask", (keys, _LOWER)))  # Alg. 1 l. 19-20
            if upper:
                S_ij = _hide(S_ij, rows, hbm.load("mask", (keys, _UPPER)))  # Alg. 1 l. 23-24
            m_new = np.maximum(m_i, S_ij.max(axis=1))  # Alg. 1 l. 26
            P_ij = np.exp(S_ij - np.where(m_new == -np.inf, 0, m_new)[:, None])
            old = rescaling(m_i, m_new)
            l_i, m_i = old * l_i + P_ij.sum(axis=1), m_new  # Alg. 1 l. 27
            O_i = old[:, None] * O_i + P_ij @ V_j  # Alg. 1 l. 28
            tiles.visited[i, j], tiles.lower[i, j], tiles.upper[i, j] = True, lower, upper
        hbm.store("O", rows, reciprocal(l_i)[:, None] * O_i)  # Alg. 1 l. 30, 32
        hbm.store("L", rows, m_i + np.log(l_i, out=np.zeros_like(l_i), where=l_i != 0))  # Alg. 1 l. 31, 33
    return FlashMaskForward(hbm.take("O"), hbm.take("L"), tiles, hbm.counts)


def flashmask_backward(do, q, k, v, fwd, mask, M, *, scale=None, dtype=np.float64):
    """Run FlashMask's Algorithm 2.

    Parameters
    ----------
    do, q, k, v : array_like, (N, d)
        Gradient of O, and the forward's inputs.
    fwd : FlashMaskForward
        Result of :func:`flashmask_forward`; its O and L are used.
    mask : ColumnMask or sequence of 4 array_like of int, (N,)
        As in :func:`flashmask_forward`.
    M : int
        As in :func:`flashmask_forward`.
    scale, dtype : optional
        As in :func:`flashmask_forward`.

    Returns
    -------
    backward : Backward
        dQ, dK, dV and the accesses.

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`flashmask_forward`.

    Notes
    -----
    The loads are the published algorithm's.  Line 20 loads O_i, which D_i has replaced, and dQ_i, which line 32
    loads again; a kernel leaves both out.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = do = np.eye(4)
    >>> none = np.zeros(4, int)
    >>> causal = none, none, none, np.arange(4)
    >>> fwd = flashmask_forward(q, k, v, causal, 16)
    >>> flashmask_backward(do, q, k, v, fwd, causal, 16).dv.sum(axis=0).round(6)
    array([1., 1., 1., 1.])
    """
    hbm = HBM(dtype)
    n, d = place(hbm, Q=q, K=k, V=v, dO=do, O=fwd.o)
    hbm.place("L", fwd.lse)
    scale = d**-0.5 if scale is None else scale
    sizes = block_sizes(n, d, M)  # Alg. 2 l. 2-3
    hbm.allocate("dQ", (n, d), 0, output=True)  # Alg. 2 l. 4
    hbm.allocate("dK", (n, d), output=True)
    hbm.allocate("dV", (n, d), output=True)
    hbm.allocate("D", n)
    for i in range(sizes.t_r):  # Alg. 2 l. 5
        rows = block(i, sizes.b_r, n)
        hbm.store("D", rows, (hbm.load("dO", rows) * hbm.load("O", rows)).sum(axis=1))
    hbm.end_kernel()
    _place_mask(hbm, mask, n, sizes)  # Alg. 2 l. 6-7
    for j in range(sizes.t_c):  # Alg. 2 l. 8
        keys = block(j, sizes.b_c, n)
        K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 2 l. 9
        dK_j = hbm.on_chip("dK", np.zeros_like(K_j))  # Alg. 2 l. 10
        dV_j = hbm.on_chip("dV", np.zeros_like(V_j))
        vectors = hbm.load("mask", keys)  # Alg. 2 l. 11-12
        common, any_ = hbm.load("common", j), hbm.load("any", j)  # resident (appendix A.1)
        for i in range(sizes.t_r):  # Alg. 2 l. 13
            rows = block(i, sizes.b_r, n)
            if not _is_masked(rows, common):  # Alg. 2 l. 14-19
                _backward_tile(hbm, scale, rows, K_j, V_j, vectors, any_, dK_j, dV_j)
        hbm.store("dK", keys, dK_j)  # Alg. 2 l. 36
        hbm.store("dV", keys, dV_j)
    return Backward(hbm.take("dQ"), hbm.take("dK"), hbm.take("dV"), hbm.counts)


def _backward_tile(hbm, scale, rows, K_j, V_j, vectors, any_, dK_j, dV_j):
    Q_i, _, dO_i, _ = (hbm.load(name, rows) for name in ("Q", "O", "dO", "dQ"))  # Alg. 2 l. 20
    L_i, D_i = hbm.load("L", rows), hbm.load("D", rows)
    S_ij = hbm.on_chip("S", scale * (Q_i @ K_j.T))  # Alg. 2 l. 21
    lower, upper = _is_partial(rows, any_)
    if lower:
        S_ij = _hide(S_ij, rows, vectors[:, _LOWER])  # Alg. 2 l. 22-24
    if upper:
        S_ij = _hide(S_ij, rows, vectors[:, _UPPER])  # Alg. 2 l. 25-27
    P_ij = np.exp(S_ij - np.where(L_i == -np.inf, 0, L_i)[:, None])  # Alg. 2 l. 28
    dV_j += P_ij.T @ dO_i  # Alg. 2 l. 29
    dP_ij = hbm.on_chip("dP", dO_i @ V_j.T)  # Alg. 2 l. 30
    dS_ij = P_ij * (dP_ij - D_i[:, None])  # Alg. 2 l. 31
    dQ_i = hbm.load("dQ", rows) + scale * (dS_ij @ K_j)  # Alg. 2 l. 32
    hbm.store("dQ", rows, dQ_i)  # Alg. 2 l. 33
    dK_j += scale * (dS_ij.T @ Q_i)  # Alg. 2 l. 34


def _place_mask(hbm, mask, n, sizes):
    """Put the vectors into HBM, compute their bounds per block of keys and write them there.

    Per block, "common" holds the intervals that all its keys have in common, max LTS, min LTE, max UTS, min UTE, and
    "any" those that hold every key's: min LTS, max LTE, min UTS, max UTE.
    """
    if hasattr(mask, "lts"):
        mask = (mask.lts, mask.lte, mask.uts, mask.ute)
    for name, vector in zip(("LTS", "LTE", "UTS", "UTE"), mask, strict=True):
        if np.shape(vector) != (n,):
            raise ShapeError(f"mask: {name} has shape {np.shape(vector)}, expected (N,) = {(n,)}")
    hbm.place("mask", np.transpose(mask), np.int32)
    hbm.allocate("common", (sizes.t_c, 4), dtype=np.int32)
    hbm.allocate("any", (sizes.t_c, 4), dtype=np.int32)
    for j in range(sizes.t_c):
        vectors = hbm.load("mask", block(j, sizes.b_c, n))
        least, most, starts = vectors.min(axis=0), vectors.max(axis=0), [True, False, True, False]
        hbm.store("common", j, np.where(starts, most, least))
        hbm.store("any", j, np.where(starts, least, most))
    hbm.end_kernel()


def _is_masked(rows, common):
    """Tell whether one interval hides all of the tile, by what all its keys have in common.

    The papers' i x B_r is the end of a block; the last one may be shorter, and ends at N.
    """
    lts, lte, uts, ute = common
    return (rows.start >= lts and rows.stop <= lte) or (rows.start >= uts and rows.stop <= ute)


def _is_partial(rows, any_):
    """Tell for each interval whether it may hide an element of the tile."""
    lts, lte, uts, ute = any_
    return rows.stop > lts and rows.start < lte, rows.stop > uts and rows.start < ute


def _hide(S, rows, interval):
    """Set S to -inf where start <= row < end."""
    row, (start, end) = np.arange(rows.start, rows.stop)[:, None], interval.T
    return np.where((start <= row) & (row < end), -np.inf, S)
