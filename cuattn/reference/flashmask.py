"""FlashMask: Algorithms 1 (forward) and 2 (backward) of its paper, FlashAttention-2 with column-wise masks.

Row i may not see key j when LTS[j] <= i < LTE[j] or UTS[j] <= i < UTE[j].  The minimum and maximum of each vector
over a block of keys, eight numbers, tell which tiles are skipped and which need no element test (eq. 4).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cuattn.io_model import Tiles
from cuattn.reference.steps import (
    Backward,
    Counts,
    add_gradients,
    backward_blocks,
    empty_rows,
    exp_minus,
    reciprocal,
    start,
)

_VECTORS = "LTS", "LTE", "UTS", "UTE"


class FlashMaskForward(NamedTuple):
    """O (N, d), the logsumexp L (N,), -inf in an empty row, what was done with each tile, and the accesses.

    See Also
    --------
    flashmask_forward : Returns one.

    Examples
    --------
    >>> from cuattn import masks
    >>> x = np.ones((8, 2))
    >>> flashmask_forward(x, x, x, masks.causal(8), 16).o.shape
    (8, 2)
    """

    o: np.ndarray
    lse: np.ndarray
    tiles: Tiles
    counts: Counts


def flashmask_forward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: Any,
    M: int,
    *,
    scale: float | None = None,
    dtype: DTypeLike = np.float64,
) -> FlashMaskForward:
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
    FlashMaskForward
        O, the logsumexp L, what was done with each tile, and the accesses.

    Raises
    ------
    ArgumentError
        When M is outside its range.
    ShapeError
        When an array's shape is not as stated.

    See Also
    --------
    cuattn.io_model.flashmask_forward : Predicts its counts.
    cuattn.forward : For speed.

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
    hbm, n, d, rows, keys = start(M, dtype, Q=q, K=k, V=v)  # Alg. 1 l. 2-4
    scale = d**-0.5 if scale is None else scale
    tiles = Tiles(*np.zeros((3, len(rows), len(keys)), bool))
    _place_mask(hbm, mask, n, keys)  # Alg. 1 l. 5
    hbm.allocate((n, d), "O", output=True)
    hbm.allocate(n, "L")
    for i, here in enumerate(rows):  # Alg. 1 l. 6
        Q_i = hbm.load(here, "Q")  # Alg. 1 l. 7
        O_i, l_i, m_i = empty_rows(hbm, Q_i)  # Alg. 1 l. 8
        for j, columns in enumerate(keys):  # Alg. 1 l. 9
            if _is_masked(here, hbm.load(j, "common")):  # Alg. 1 l. 10-15
                continue
            K_j, V_j = hbm.load(columns, "K", "V")  # Alg. 1 l. 16
            S_ij = hbm.on_chip("S", scale * (Q_i @ K_j.T))  # Alg. 1 l. 17
            lower, upper = _is_partial(here, hbm.load(j, "any"))  # Alg. 1 l. 18, 22
            if lower:
                S_ij = _hide(S_ij, here, *hbm.load(columns, "LTS", "LTE"))  # Alg. 1 l. 19-20
            if upper:
                S_ij = _hide(S_ij, here, *hbm.load(columns, "UTS", "UTE"))  # Alg. 1 l. 23-24
            m_new = np.maximum(m_i, S_ij.max(axis=1))  # Alg. 1 l. 26
            P_ij, old = exp_minus(S_ij, m_new), exp_minus(m_i, m_new)
            l_i, m_i = old * l_i + P_ij.sum(axis=1), m_new  # Alg. 1 l. 27
            O_i = old[:, None] * O_i + P_ij @ V_j  # Alg. 1 l. 28
            tiles.visited[i, j], tiles.lower[i, j], tiles.upper[i, j] = True, lower, upper
        L_i = m_i + np.log(l_i, out=np.zeros_like(l_i), where=l_i != 0)  # Alg. 1 l. 31
        hbm.store(here, O=reciprocal(l_i)[:, None] * O_i, L=L_i)  # Alg. 1 l. 30, 32, 33
    return FlashMaskForward(*hbm.take("O", "L"), tiles, hbm.counts)


def flashmask_backward(
    do: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    fwd: FlashMaskForward,
    mask: Any,
    M: int,
    *,
    scale: float | None = None,
    dtype: DTypeLike = np.float64,
) -> Backward:
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
    Backward
        The gradients dQ, dK, dV and the accesses.

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`flashmask_forward`.

    See Also
    --------
    flashmask_forward : Gives what it takes.
    cuattn.backward : For speed.

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
    hbm, n, d, rows, keys = start(M, dtype, Q=q, K=k, V=v, dO=do, O=fwd.o)  # Alg. 2 l. 2-3
    hbm.place("L", fwd.lse, shape=(n,))
    scale = d**-0.5 if scale is None else scale
    hbm.allocate((n, d), "dQ", fill=0, output=True)  # Alg. 2 l. 4
    hbm.allocate((n, d), "dK", "dV", output=True)
    hbm.allocate(n, "D")
    for here in rows:  # Alg. 2 l. 5
        hbm.store(here, D=np.multiply(*hbm.load(here, "dO", "O")).sum(axis=1))
    hbm.end_kernel()
    _place_mask(hbm, mask, n, keys)  # Alg. 2 l. 6-7
    for j, columns, K_j, *tiles in backward_blocks(hbm, keys):  # Alg. 2 l. 8-10, 36
        lts, lte, uts, ute = hbm.load(columns, *_VECTORS)  # Alg. 2 l. 11-12
        common, any_ = hbm.load(j, "common", "any")  # resident (appendix A.1)
        for here in rows:  # Alg. 2 l. 13
            if _is_masked(here, common):  # Alg. 2 l. 14-19
                continue
            Q_i, _, dO_i, _, L_i, D_i = hbm.load(here, "Q", "O", "dO", "dQ", "L", "D")  # Alg. 2 l. 20
            S_ij = hbm.on_chip("S", scale * (Q_i @ K_j.T))  # Alg. 2 l. 21
            lower, upper = _is_partial(here, any_)
            S_ij = _hide(S_ij, here, lts, lte) if lower else S_ij  # Alg. 2 l. 22-24
            S_ij = _hide(S_ij, here, uts, ute) if upper else S_ij  # Alg. 2 l. 25-27
            P_ij, dQ_i = exp_minus(S_ij, L_i), hbm.load(here, "dQ")  # Alg. 2 l. 28, 32
            dQ_i = add_gradients(hbm, scale, P_ij, D_i, dO_i, Q_i, dQ_i, K_j, *tiles)  # Alg. 2 l. 29-34
            hbm.store(here, dQ=dQ_i)  # Alg. 2 l. 33
    return Backward(*hbm.take("dQ", "dK", "dV"), hbm.counts)


def _place_mask(hbm, mask, n, keys):
    """Put the vectors into HBM, compute their bounds per block of keys and write them there.

    Of each of the two intervals, "common" holds the rows that all keys of the block have in common, (max LTS, min LTE)
    and (max UTS, min UTE), and "any" those of any key, (min LTS, max LTE) and (min UTS, max UTE).
    """
    if hasattr(mask, "lts"):
        mask = (mask.lts, mask.lte, mask.uts, mask.ute)
    for name, vector in zip(_VECTORS, mask, strict=True):
        hbm.place(name, vector, np.int32, (n,))
    hbm.allocate((len(keys), 2, 2), "common", "any", dtype=np.int32)
    for j, columns in enumerate(keys):
        lts, lte, uts, ute = hbm.load(columns, *_VECTORS)
        common = [(lts.max(), lte.min()), (uts.max(), ute.min())]
        hbm.store(j, common=common, any=[(lts.min(), lte.max()), (uts.min(), ute.max())])
    hbm.end_kernel()


def _is_masked(rows, common):
    """Tell whether one interval hides all of the tile, by what all its keys have in common.

    The papers' i x B_r is the end of a block; the last one may be shorter, and ends at N.
    """
    return any(rows.start >= first and rows.stop <= end for first, end in common)


def _is_partial(rows, any_):
    """Tell for each interval whether it may hide an element of the tile."""
    return [rows.stop > first and rows.start < end for first, end in any_]


def _hide(S, rows, first, end):
    """Set S to -inf where first <= row < end."""
    row = np.c_[rows]
    return np.where((first <= row) & (row < end), -np.inf, S)
