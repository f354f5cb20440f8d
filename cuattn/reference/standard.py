"""Standard attention: Algorithm 0 of the FlashAttention paper (forward) and Algorithm 3 (backward).

S, P and their gradients go through HBM.  The paper gives no block sizes for these algorithms; a matrix product here
keeps B_c rows of one operand or of its result on the chip while B_r rows at a time of the others stream past, with
the blocks of Algorithm 1, so that every tile fits as it does there.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cuattn.reference.steps import Backward, Counts, blocks, softmax_tile, start


class StandardForward(NamedTuple):
    """O (N, d) and P (N, N), which the standard backward needs, and the accesses.

    See Also
    --------
    standard_forward : Returns one.

    Examples
    --------
    >>> x = np.ones((8, 2))
    >>> standard_forward(x, x, x, 16).p[0, 0]
    np.float64(0.125)
    """

    o: np.ndarray
    p: np.ndarray
    counts: Counts


def standard_forward(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, M: int, *, dtype: DTypeLike = np.float64
) -> StandardForward:
    """Run Algorithm 0: S = Q K^T, P = softmax(S), O = P V, each step a kernel of its own.

    Parameters
    ----------
    q, k, v : array_like, (N, d)
        Queries (already scaled), keys and values.
    M : int
        On-chip memory in elements, d <= M <= N d.
    dtype : dtype, default float64
        Type of the arithmetic.

    Returns
    -------
    StandardForward
        O, P and the accesses: Theta(N d + N^2) for M >= d^2.

    Raises
    ------
    ArgumentError
        When M is outside its range.
    ShapeError
        When q, k and v are not of one shape (N, d).

    See Also
    --------
    flash_forward : Without the matrix in slow memory.

    Notes
    -----
    A row of S must be on the chip to be normalised, N elements even where M is less.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.eye(4)
    >>> standard_forward(q, k, v, 16).counts
    Counts(reads=176, writes=48, extra=32, sram=16)
    """
    hbm, n, d, *tiles = start(M, dtype, Q=q, K=k, V=v)
    hbm.allocate((n, n), "S", "P")
    hbm.allocate((n, d), "O", output=True)
    _outer_product(hbm, "Q", "K", "S", *tiles)  # Alg. 0 l. 1: S = Q K^T
    for rows in blocks(n, max(1, M // n)):  # Alg. 0 l. 2: P = softmax(S)
        _, P_i, l_i = softmax_tile(hbm.load(rows, "S"))
        hbm.store(rows, P=P_i / l_i[:, None])
    hbm.end_kernel()
    _product(hbm, "P", "V", "O", *tiles)  # Alg. 0 l. 3: O = P V
    return StandardForward(*hbm.take("O", "P"), hbm.counts)


def standard_backward(
    do: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, p: ArrayLike, M: int, *, dtype: DTypeLike = np.float64
) -> Backward:
    """Run Algorithm 3: the gradients of Algorithm 0 from P in HBM.

    Parameters
    ----------
    do, q, k, v : array_like, (N, d)
        Gradient of O, and the forward's inputs.
    p : array_like, (N, N)
        P of :func:`standard_forward`.
    M : int
        As in :func:`standard_forward`.
    dtype : dtype, default float64
        As in :func:`standard_forward`.

    Returns
    -------
    Backward
        The gradients dQ, dK, dV and the accesses: Theta(N d + N^2) for M >= d^2.

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`standard_forward`.

    See Also
    --------
    flash_backward : Without the matrix in slow memory.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = do = np.eye(4)
    >>> p = standard_forward(q, k, v, 16).p
    >>> standard_backward(do, q, k, v, p, 16).dv.sum(1).round(6)
    array([1., 1., 1., 1.])
    """
    hbm, n, d, *tiles = start(M, dtype, Q=q, K=k, V=v, dO=do)
    hbm.place("P", p, shape=(n, n))
    hbm.allocate((n, n), "dP", "dS")
    hbm.allocate((n, d), "dQ", "dK", "dV", output=True)
    _product(hbm, "P", "dO", "dV", *tiles, transposed=True)  # Alg. 3 l. 1: dV = P^T dO
    _outer_product(hbm, "dO", "V", "dP", *tiles)  # Alg. 3 l. 2: dP = dO V^T
    for rows in blocks(n, max(1, M // (2 * n))):  # Alg. 3 l. 3: dS_ij = P_ij (dP_ij - sum_l P_il dP_il)
        P_i, dP_i = hbm.load(rows, "P", "dP")
        hbm.store(rows, dS=P_i * (dP_i - (P_i * dP_i).sum(axis=1, keepdims=True)))
    hbm.end_kernel()
    _product(hbm, "dS", "K", "dQ", *tiles)  # Alg. 3 l. 4: dQ = dS K
    _product(hbm, "dS", "Q", "dK", *tiles, transposed=True)  # Alg. 3 l. 5: dK = dS^T Q
    return Backward(*hbm.take("dQ", "dK", "dV"), hbm.counts)


def _outer_product(hbm, left, right, result, rows, keys):
    """Run a kernel that computes left @ right^T, (N, N), with a block of `right` on the chip."""
    for resident in keys:
        right_j = hbm.load(resident, right)
        for streamed in rows:
            tile = hbm.on_chip(result, hbm.load(streamed, left) @ right_j.T)
            hbm.store((streamed, resident), **{result: tile})
    hbm.end_kernel()


def _product(hbm, left, right, result, rows, keys, transposed=False):
    """Run a kernel that computes left @ right, or left^T @ right, with a block of the result on the chip."""
    for resident in keys:
        total = 0
        for streamed in rows:
            A = hbm.load((streamed, resident), left).T if transposed else hbm.load((resident, streamed), left)
            total = hbm.on_chip(result, total + A @ hbm.load(streamed, right))
        hbm.store(resident, **{result: total})
    hbm.end_kernel()
