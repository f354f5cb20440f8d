"""Two forwards that Algorithm 1 is compared with: its loops swapped, and Rabe and Staats' chunks.

Both have queries outside.  The lecture's swap keeps O, l and m of a block of queries on the chip and corrects them
there.  Rabe and Staats summarise each pair of chunks by a temporary output with its statistics and combine the
summaries of a chunk of queries at the end (appendix B.5 of the FlashAttention paper): T_c outputs instead of one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cuattn.reference.flash import update
from cuattn.reference.steps import Counts, Forward, empty_rows, softmax_tile, start


def swapped_forward(q: ArrayLike, k: ArrayLike, v: ArrayLike, M: int, *, dtype: DTypeLike = np.float64) -> Forward:
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
    Forward
        O, l, m and the accesses, about 8 N^2 d^2 / M instead of Algorithm 1's 12 N^2 d^2 / M.

    Raises
    ------
    ArgumentError
        When M is outside its range.
    ShapeError
        When q, k and v are not of one shape (N, d).

    See Also
    --------
    flash_forward : With keys outside, as published.

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
    hbm, n, d, rows, keys = start(M, dtype, square=True, Q=q, K=k, V=v)  # Alg. 1 l. 1
    hbm.allocate((n, d), "O", output=True)
    hbm.allocate(n, "l", "m")
    for here in rows:  # Alg. 1 l. 7, outside
        Q_i = hbm.load(here, "Q")  # Alg. 1 l. 8
        O_i, l_i, m_i = empty_rows(hbm, Q_i)  # Alg. 1 l. 2, on the chip
        for columns in keys:  # Alg. 1 l. 5, inside
            K_j, V_j = hbm.load(columns, "K", "V")  # Alg. 1 l. 6
            S_ij = hbm.on_chip("S", Q_i @ K_j.T)  # Alg. 1 l. 9
            O_i, l_i, m_i = update(S_ij, V_j, O_i, l_i, m_i)  # Alg. 1 l. 10-13, on the chip
        hbm.store(here, O=O_i, l=l_i, m=m_i)
    return Forward(*hbm.take("O", "l", "m"), None, hbm.counts)


class RabeStaatsForward(NamedTuple):
    """O (N, d) and the accesses.

    See Also
    --------
    rabe_staats_forward : Returns one.

    Examples
    --------
    >>> x = np.ones((8, 2))
    >>> rabe_staats_forward(x, x, x, 16).o[0].round(3)
    array([1., 1.])
    """

    o: np.ndarray
    counts: Counts


def rabe_staats_forward(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, M: int, *, dtype: DTypeLike = np.float64
) -> RabeStaatsForward:
    """Run the chunked forward, with chunks of the size that Algorithm 1 would take.

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
    RabeStaatsForward
        O and the accesses: each chunk of at most d queries reads all of K and V, so at least 2 N^2 whatever M is.

    Raises
    ------
    ArgumentError
        When M is outside its range.
    ShapeError
        When q, k and v are not of one shape (N, d).

    See Also
    --------
    flash_forward : One running result in place of one per chunk.

    References
    ----------
    M. N. Rabe, C. Staats, "Self-attention does not need O(n^2) memory", 2021.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.eye(4)
    >>> rabe_staats_forward(q, k, v, 16).counts
    Counts(reads=240, writes=112, extra=24, sram=27)
    """
    hbm, n, d, rows, keys = start(M, dtype, Q=q, K=k, V=v)
    hbm.allocate((n, d), "O", output=True)
    # One output and one l and m per chunk of keys; the next chunk of queries uses the same memory.
    chunk = len(keys), rows[0].stop
    hbm.allocate((*chunk, d), "O_j")
    hbm.allocate(chunk, "l_j", "m_j")
    for here in rows:
        used = slice(0, here.stop - here.start)
        Q_i = hbm.load(here, "Q")
        for j, columns in enumerate(keys):
            K_j, V_j = hbm.load(columns, "K", "V")
            m_ij, P_ij, l_ij = softmax_tile(hbm.on_chip("S", Q_i @ K_j.T))
            hbm.store((j, used), O_j=P_ij @ V_j, l_j=l_ij, m_j=m_ij)
        m_i = hbm.load(np.s_[:, used], "m_j")
        O_i = l_i = 0
        for j, share in enumerate(np.exp(m_i - m_i.max(axis=0))):
            O_ij, l_ij = hbm.load((j, used), "O_j", "l_j")
            O_i = hbm.on_chip("O", O_i + share[:, None] * O_ij)
            l_i = hbm.on_chip("l", l_i + share * l_ij)
        hbm.store(here, O=O_i / l_i[:, None])
    return RabeStaatsForward(*hbm.take("O"), hbm.counts)
