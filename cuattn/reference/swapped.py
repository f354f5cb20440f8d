"""The lecture's improvement of Algorithm 1: queries are the outer loop, so O, l and m never leave the chip."""

import numpy as np

from cuattn.io_model import block_sizes
from cuattn.reference.hbm import HBM
from cuattn.reference.results import Forward
from cuattn.reference.steps import block, place, reciprocal, rescaling, softmax_tile

__all__ = ["swapped_forward"]


def swapped_forward(q, k, v, M, *, dtype=np.float64):
    """Run Algorithm 1 with its loops swapped and B_r = B_c = ceil(M / 4d).

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
    forward : Forward
        O, l, m and the accesses, about 8 N^2 d^2 / M instead of Algorithm 1's 12 N^2 d^2 / M.

    Raises
    ------
    ArgumentError
        When M is outside its range.
    ShapeError
        When q, k and v are not of one shape (N, d).

    Notes
    -----
    S_ij has (M / 4d)^2 elements: with B_r no longer held below d, it outgrows the chip for M above about 16 d^2.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.eye(4)
    >>> swapped_forward(q, k, v, 16).counts
    Counts(reads=144, writes=24, extra=8, sram=19)
    """
    hbm = HBM(dtype)
    n, d = place(hbm, Q=q, K=k, V=v)
    b_r, b_c, t_r, t_c = block_sizes(n, d, M, square=True)  # Alg. 1 l. 1
    hbm.allocate("O", (n, d), output=True)
    hbm.allocate("l", n)
    hbm.allocate("m", n)
    for i in range(t_r):  # Alg. 1 l. 7, outside
        rows = block(i, b_r, n)
        Q_i = hbm.load("Q", rows)  # Alg. 1 l. 8
        O_i = hbm.on_chip("O", np.zeros_like(Q_i))  # Alg. 1 l. 2, on the chip
        l_i = hbm.on_chip("l", np.zeros(len(Q_i), hbm.dtype))
        m_i = hbm.on_chip("m", np.full(len(Q_i), -np.inf, hbm.dtype))
        for j in range(t_c):  # Alg. 1 l. 5, inside
            keys = block(j, b_c, n)
            K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 1 l. 6
            S_ij = hbm.on_chip("S", Q_i @ K_j.T)  # Alg. 1 l. 9
            m_ij, P_ij, l_ij = softmax_tile(S_ij)  # Alg. 1 l. 10
            m_new = np.maximum(m_i, m_ij)  # Alg. 1 l. 11
            old, new = rescaling(m_i, m_new), rescaling(m_ij, m_new)
            l_new = old * l_i + new * l_ij
            O_i = (l_i * old)[:, None] * O_i + new[:, None] * (P_ij @ V_j)  # Alg. 1 l. 12, on the chip
            O_i = reciprocal(l_new)[:, None] * O_i
            l_i, m_i = l_new, m_new  # Alg. 1 l. 13, on the chip
        hbm.store("O", rows, O_i)
        hbm.store("l", rows, l_i)
        hbm.store("m", rows, m_i)
    return Forward(hbm.take("O"), hbm.take("l"), hbm.take("m"), None, hbm.counts)
