"""What the algorithms share: results, placing inputs, blocks, the online softmax and the products of a backward."""

from typing import NamedTuple

import numpy as np

from cuattn.errors import ShapeError
from cuattn.io_model import block_sizes
from cuattn.reference.hbm import HBM, Counts
from cuattn.rng import RNGState


class Forward(NamedTuple):
    """O (N, d), the row sums l and row maxima m (N,), the random state (None without dropout), and the accesses.

    An empty row, one without any visible key, has O = 0, l = 0 and m = -inf.
    """

    o: np.ndarray
    l: np.ndarray
    m: np.ndarray
    rng_state: RNGState | None
    counts: Counts


class Backward(NamedTuple):
    """The gradients dQ, dK, dV (N, d), and the accesses."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    counts: Counts


def start(M, dtype, *, square=False, **arrays):
    """Put Q, K, V, ... (N, d), all of one shape, into HBM.

    Returns
    -------
    hbm : HBM
    n, d : int
    rows, keys : list of slice
        The blocks of B_r rows and of B_c keys, :func:`cuattn.io_model.block_sizes`; the last may be shorter.
    """
    hbm = HBM(dtype)
    (first, shape), *others = ((name, np.shape(array)) for name, array in arrays.items())
    if len(shape) != 2 or 0 in shape:
        raise ShapeError(f"{first} has shape {shape}: expected (N, d) with N, d >= 1")
    for name, other in others:
        if other != shape:
            raise ShapeError(f"{name} has shape {other}: expected {shape}, the shape of {first}")
    for name, array in arrays.items():
        hbm.place(name, array)
    n, d = shape
    sizes = block_sizes(n, d, M, square)
    return hbm, n, d, blocks(n, sizes.b_r), blocks(n, sizes.b_c)


def blocks(n, size):
    """Return the blocks of `size` that n elements are divided into; the last may be shorter."""
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def exp_minus(x, m):
    """Return e^(x - m) of numbers or rows; with m = -inf, where nothing was visible, all of x is too, and gives 0."""
    m = np.where(m == -np.inf, 0, m)
    return np.exp(x - (m if x.ndim == 1 else m[:, None]))


def softmax_tile(S):
    """Return m~ = rowmax(S), P~ = exp(S - m~) and l~ = rowsum(P~) of a tile.

    In a row that is masked throughout, m~ = -inf and P~ = 0 (the papers leave that row undefined).
    """
    m = S.max(axis=1)
    P = exp_minus(S, m)
    return m, P, P.sum(axis=1)


def reciprocal(l):
    """Return 1 / l, 0 where l = 0: an empty row's output is 0."""
    return np.divide(1, l, out=np.zeros_like(l), where=l != 0)


def empty_rows(hbm, Q_i):
    """Return O_i, l_i and m_i of a block of queries on the chip, before any key."""
    n = len(Q_i)
    O_i, l_i = np.zeros_like(Q_i), np.zeros(n, hbm.dtype)
    return hbm.on_chip("O", O_i), hbm.on_chip("l", l_i), hbm.on_chip("m", np.full(n, -np.inf, hbm.dtype))


def empty_gradients(hbm, K_j):
    """Return dK_j and dV_j of a block of keys on the chip, before any query."""
    return [hbm.on_chip(name, np.zeros_like(K_j)) for name in ("dK", "dV")]


def add_gradients(hbm, scale, P_ij, D_i, dO_i, Q_i, dQ_i, K_j, V_j, dK_j, dV_j, Z_ij=1):
    """Return dQ_i after a tile, and add to dK_j and dV_j in place; Z_ij is dropout's factor."""
    dV_j += (P_ij * Z_ij).T @ dO_i  # Alg. 4 l. 15-16; FlashMask Alg. 2 l. 29
    dP_ij = hbm.on_chip("dP", dO_i @ V_j.T) * Z_ij  # Alg. 4 l. 17-18; FlashMask Alg. 2 l. 30
    dS_ij = P_ij * (dP_ij - D_i[:, None])  # Alg. 4 l. 20; FlashMask Alg. 2 l. 31
    dK_j += scale * (dS_ij.T @ Q_i)  # Alg. 4 l. 22; FlashMask Alg. 2 l. 34
    return dQ_i + scale * (dS_ij @ K_j)  # Alg. 4 l. 21; FlashMask Alg. 2 l. 32
