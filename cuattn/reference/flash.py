"""FlashAttention with the loops of the paper: Algorithms 1, 2 and 5 (forward) and 4 (backward).

K and V are the outer loop; O and its statistics l and m live in HBM and are corrected by every block of keys.
Algorithm 1 is Algorithm 2 without tau, mask and dropout; block-sparse attention, Algorithm 5 and its backward, is the
same with one `if`.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cuattn import rng as random
from cuattn.errors import ArgumentError
from cuattn.reference.steps import (
    Backward,
    Forward,
    add_gradients,
    backward_blocks,
    exp_minus,
    reciprocal,
    softmax_tile,
    start,
)


def flash_forward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    M: int,
    *,
    blocks: ArrayLike | None = None,
    scale: float | None = None,
    mask: Any = None,
    dropout_p: float = 0.0,
    rng: Any = None,
    b: int = 0,
    dtype: DTypeLike = np.float64,
) -> Forward:
    """Run Algorithm 2, FlashAttention's forward; with `blocks` Algorithm 5; with scale=1 alone Algorithm 1.

    Parameters
    ----------
    q, k, v : array_like, (N, d)
        Queries, keys and values.
    M : int
        On-chip memory in elements, d <= M <= N d.
    blocks : array_like, (T_r, T_c), bool, optional
        The block sparsity mask, for the blocks of :func:`cuattn.io_model.block_sizes`: rows of block i see keys of
        block j where it is true.  `mask` applies inside the nonzero blocks.
    scale : float, optional
        The papers' tau; d**-0.5 by default.
    mask : callable or array_like of bool, (N, N), optional
        What may be seen: a function of row and key indices (i, j), evaluated on the chip, or an array in HBM whose
        tiles are loaded and counted.
    dropout_p : float, default 0
        Dropout probability (its threshold is :func:`cuattn.rng.threshold`).
    rng : int | RNGState | numpy.random.Generator, optional
        The random state; needed with dropout.
    b : int, default 0
        Which matrix of a batch this is, for dropout.
    dtype : dtype, default float64
        Type of the arithmetic.

    Returns
    -------
    Forward
        O, l, m, the random state (None without dropout) and the accesses: Theta(N^2 d^2 / M), or
        Theta(N d + s N^2 d^2 / M) for a share s of nonzero blocks.

    Raises
    ------
    ArgumentError
        When M or `dropout_p` is outside its range, or dropout has no `rng`.
    ShapeError
        When an array's shape is not as stated.

    See Also
    --------
    swapped_forward : With queries outside.
    cuattn.forward : For speed.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = np.eye(4)
    >>> flash_forward(q, k, v, 16, mask=lambda i, j: j <= i).l.round(3)
    array([1.   , 1.607, 2.213, 2.82 ])
    >>> flash_forward(q, k, v, 16, blocks=np.eye(4)).o
    array([[1., 0., 0., 0.],
           [0., 1., 0., 0.],
           [0., 0., 1., 0.],
           [0., 0., 0., 1.]])
    """
    hbm, n, d, rows, keys = problem = start(M, dtype, Q=q, K=k, V=v)  # Alg. 1 l. 1, 3; Alg. 2 l. 2, 4
    options = Options(problem, blocks, scale, mask, dropout_p, b)
    options.draw_state(rng)  # Alg. 2, 5 l. 1
    hbm.allocate((n, d), "O", fill=0, output=True)  # Alg. 1, 5 l. 2; Alg. 2 l. 3
    hbm.allocate(n, "l", fill=0)
    hbm.allocate(n, "m", fill=-np.inf)
    for j, columns in enumerate(keys):  # Alg. 1, 5 l. 5; Alg. 2 l. 6
        K_j, V_j = hbm.load(columns, "K", "V")  # Alg. 1, 5 l. 6; Alg. 2 l. 7
        for i, here in enumerate(rows):  # Alg. 1, 5 l. 7; Alg. 2 l. 8
            if blocks is None or hbm.load((i, j), "blocks"):  # Alg. 5 l. 8
                Q_i, O_i, l_i, m_i = hbm.load(here, "Q", "O", "l", "m")  # Alg. 1 l. 8; Alg. 2, 5 l. 9
                S_ij, Z_ij = options.scores(Q_i, K_j, here, columns)  # Alg. 1 l. 9; Alg. 2, 5 l. 10-11
                O_i, l_i, m_i = update(S_ij, V_j, O_i, l_i, m_i, Z_ij)  # Alg. 1 l. 10-12; Alg. 2, 5 l. 12-15
                hbm.store(here, O=O_i, l=l_i, m=m_i)  # Alg. 1 l. 12-13; Alg. 2, 5 l. 15-16
    return Forward(*hbm.take("O", "l", "m"), options.state, hbm.counts)


def flash_backward(
    do: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    fwd: Forward,
    M: int,
    *,
    blocks: ArrayLike | None = None,
    scale: float | None = None,
    mask: Any = None,
    dropout_p: float = 0.0,
    b: int = 0,
    dtype: DTypeLike = np.float64,
) -> Backward:
    """Run Algorithm 4, FlashAttention's backward, which computes S and P again from l and m.

    Parameters
    ----------
    do, q, k, v : array_like, (N, d)
        Gradient of O, and the forward's inputs.
    fwd : Forward
        Result of the forward; its O, l, m and random state are used.
    M : int
        As in :func:`flash_forward`.
    blocks, scale, mask, dropout_p, b, dtype : optional
        As in :func:`flash_forward`; with `blocks`, zero blocks are skipped.

    Returns
    -------
    Backward
        The gradients dQ, dK, dV and the accesses: Theta(N^2 d^2 / M), or Theta(N d + s N^2 d^2 / M) with `blocks`.

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`flash_forward`.

    See Also
    --------
    flash_forward : Gives what it takes.
    cuattn.backward : For speed.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = do = np.eye(4)
    >>> fwd = flash_forward(q, k, v, 16, dropout_p=0.5, rng=1)
    >>> flash_backward(do, q, k, v, fwd, 16, dropout_p=0.5).counts.total
    466
    """
    hbm, n, d, rows, keys = problem = start(M, dtype, Q=q, K=k, V=v, dO=do, O=fwd.o)  # Alg. 4 l. 2-3
    hbm.place("l", fwd.l, shape=(n,))
    hbm.place("m", fwd.m, shape=(n,))
    options = Options(problem, blocks, scale, mask, dropout_p, b)
    options.load_state(fwd.rng_state)  # Alg. 4 l. 1
    hbm.allocate((n, d), "dQ", "dK", "dV", fill=0, output=True)  # Alg. 4 l. 5
    for j, columns, *tiles in backward_blocks(hbm, keys):  # Alg. 4 l. 6-8, 24
        for i, here in enumerate(rows):  # Alg. 4 l. 9
            if blocks is None or hbm.load((i, j), "blocks"):  # as Alg. 5 l. 8
                Q_i, O_i, dO_i, dQ_i, l_i, m_i = hbm.load(here, "Q", "O", "dO", "dQ", "l", "m")  # Alg. 4 l. 10
                S_ij, Z_ij = options.scores(Q_i, tiles[0], here, columns)  # Alg. 4 l. 11-12, 14
                P_ij = reciprocal(l_i)[:, None] * exp_minus(S_ij, m_i)  # Alg. 4 l. 13
                D_i = (dO_i * O_i).sum(axis=1)  # Alg. 4 l. 19
                dQ_i = add_gradients(hbm, options.scale, P_ij, D_i, dO_i, Q_i, dQ_i, *tiles, Z_ij)  # Alg. 4 l. 15-22
                hbm.store(here, dQ=dQ_i)  # Alg. 4 l. 21
    return Backward(*hbm.take("dQ", "dK", "dV"), hbm.counts)


class Options:
    """What Algorithms 2, 4 and 5 add to attention: tau, MASK, dropout and, placed in HBM, the block mask.

    `mask` is None, a function of row and key indices that is evaluated on the chip, or an array in HBM.  `threshold` is
    0 without dropout, whose `state` is drawn, or loaded from where a forward left it.
    """

    def __init__(self, problem, blocks, scale, mask, dropout_p, b):
        self.hbm, n, d, rows, keys = problem
        self.mask, self.b, self.state = mask, b, None
        self.scale = d**-0.5 if scale is None else scale
        self.threshold = random.threshold(dropout_p)
        if mask is not None and not callable(mask):
            self.hbm.place("mask", mask, np.bool_, (n, n))
        if blocks is not None:
            self.hbm.place("blocks", blocks, np.bool_, (len(rows), len(keys)))

    def draw_state(self, rng):
        """With dropout, take the random state from a call's `rng`, and save it to HBM."""
        if self.threshold:
            if rng is None:
                raise ArgumentError("rng is None: with dropout, expected a seed or a state")
            self.state = random.resolve(rng)
            self.hbm.allocate(2, "R", fill=self.state, dtype=np.uint64)

    def load_state(self, saved):
        """With dropout, load the random state that a forward saved."""
        if self.threshold:
            self.hbm.place("R", random.recorded(saved), np.uint64)
            self.state = random.RNGState(*self.hbm.load(..., "R").tolist())

    def scores(self, Q_i, K_j, rows, keys):
        """Return MASK(tau Q_i K_j^T), -inf where row i may not see key j, and Z, what dropout multiplies P by."""
        S = self.hbm.on_chip("S", self.scale * (Q_i @ K_j.T))
        if self.mask is not None:
            seen = self.mask(*np.ogrid[rows, keys]) if callable(self.mask) else self.hbm.load((rows, keys), "mask")
            S = np.where(seen, S, -np.inf)
        if not self.threshold:
            return S, 1
        kept = random.keep(self.state, self.threshold, self.b, (rows.start, rows.stop), (keys.start, keys.stop))
        return S, kept * S.dtype.type(random.LEVELS / (random.LEVELS - self.threshold))


def update(S_ij, V_j, O_i, l_i, m_i, Z_ij=1):
    """Return O_i, l_i and m_i after a tile of scores; Z_ij is dropout's factor."""
    m_ij, P_ij, l_ij = softmax_tile(S_ij)  # Alg. 1 l. 10; Alg. 2, 5 l. 12
    m_new = np.maximum(m_i, m_ij)  # Alg. 1 l. 11; Alg. 2, 5 l. 13
    old, new = exp_minus(m_i, m_new), exp_minus(m_ij, m_new)
    l_new = old * l_i + new * l_ij
    P_dropped = P_ij * Z_ij  # Alg. 2, 5 l. 14
    O_i = (l_i * old)[:, None] * O_i + new[:, None] * (P_dropped @ V_j)  # Alg. 1 l. 12; Alg. 2, 5 l. 15
    return reciprocal(l_new)[:, None] * O_i, l_new, m_new
