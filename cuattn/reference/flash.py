"""FlashAttention with the loops of the paper: Algorithms 1, 2 and 5 (forward) and 4 (backward).

K and V are the outer loop; O and its statistics l and m live in HBM and are corrected by every block of keys.
Algorithm 1 is Algorithm 2 without tau, mask and dropout; block-sparse attention, Algorithm 5 and its backward, is the
same with one `if`.
"""

import numpy as np

from cuattn.errors import ShapeError
from cuattn.io_model import block_sizes
from cuattn.reference.hbm import HBM
from cuattn.reference.steps import Backward, Forward, Options, block, fresh_state, place, reciprocal, update
from cuattn.rng import recorded

__all__ = ["flash_backward", "flash_forward"]


def flash_forward(
    q, k, v, M, *, blocks=None, scale=None, mask=None, dropout_p=0.0, rng=None, b=0, dtype=np.float64
):  # fmt: skip
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
        tau; d**-0.5 by default.
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
    forward : Forward
        O, l, m, the random state (None without dropout) and the accesses: Theta(N^2 d^2 / M), or
        Theta(N d + s N^2 d^2 / M) for a share s of nonzero blocks.

    Raises
    ------
    ArgumentError
        When M or `dropout_p` is outside its range, or dropout has no `rng`.
    ShapeError
        When an array's shape is not as stated.

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
    hbm = HBM(dtype)
    n, d = place(hbm, Q=q, K=k, V=v)
    options = Options.resolve(hbm, n, d, scale, mask, dropout_p, b, lambda: fresh_state(rng))
    if options.state is not None:  # Alg. 2, 5 l. 1
        hbm.allocate("R", 2, dtype=np.uint64)
        hbm.store("R", slice(0, 2), options.state)
    b_r, b_c, t_r, t_c = _place_blocks(hbm, blocks, n, d, M)  # Alg. 1 l. 1; Alg. 2 l. 2
    hbm.allocate("O", (n, d), 0, output=True)  # Alg. 1, 5 l. 2; Alg. 2 l. 3
    hbm.allocate("l", n, 0)
    hbm.allocate("m", n, -np.inf)
    for j in range(t_c):  # Alg. 1, 5 l. 5; Alg. 2 l. 6
        keys = block(j, b_c, n)  # Alg. 1, 5 l. 3; Alg. 2 l. 4
        K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 1, 5 l. 6; Alg. 2 l. 7
        for i in range(t_r):  # Alg. 1, 5 l. 7; Alg. 2 l. 8
            if blocks is None or hbm.load("M", (i, j)):  # Alg. 5 l. 8
                _forward_tile(hbm, options, block(i, b_r, n), keys, K_j, V_j)
    return Forward(hbm.take("O"), hbm.take("l"), hbm.take("m"), options.state, hbm.counts)


def _forward_tile(hbm, options, rows, keys, K_j, V_j):
    """Add block j of keys to the output of block i of rows."""
    Q_i, O_i = hbm.load("Q", rows), hbm.load("O", rows)  # Alg. 1 l. 8; Alg. 2, 5 l. 9
    l_i, m_i = hbm.load("l", rows), hbm.load("m", rows)
    S_ij = hbm.on_chip("S", options.scale * (Q_i @ K_j.T))  # Alg. 1 l. 9; Alg. 2, 5 l. 10
    S_ij = options.masked(hbm, S_ij, rows, keys)  # Alg. 2, 5 l. 11
    Z_ij = options.dropout(hbm.dtype, rows, keys)
    O_i, l_i, m_i = update(S_ij, V_j, O_i, l_i, m_i, Z_ij)  # Alg. 1 l. 10-12; Alg. 2, 5 l. 12-15
    hbm.store("O", rows, O_i)
    hbm.store("l", rows, l_i)  # Alg. 1 l. 13; Alg. 2, 5 l. 16
    hbm.store("m", rows, m_i)


def flash_backward(do, q, k, v, fwd, M, *, blocks=None, scale=None, mask=None, dropout_p=0.0, b=0, dtype=np.float64):
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
    backward : Backward
        dQ, dK, dV and the accesses: Theta(N^2 d^2 / M), or Theta(N d + s N^2 d^2 / M) with `blocks`.

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`flash_forward`.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = do = np.eye(4)
    >>> fwd = flash_forward(q, k, v, 16, dropout_p=0.5, rng=1)
    >>> flash_backward(do, q, k, v, fwd, 16, dropout_p=0.5).counts.total
    466
    """
    hbm = HBM(dtype)
    n, d = place(hbm, Q=q, K=k, V=v, dO=do, O=fwd.o)
    hbm.place("l", fwd.l)
    hbm.place("m", fwd.m)
    options = Options.resolve(hbm, n, d, scale, mask, dropout_p, b, lambda: recorded(fwd.rng_state))
    if options.state is not None:  # Alg. 4 l. 1
        hbm.place("R", options.state, np.uint64)
        seed, offset = hbm.load("R").tolist()
        options = options._replace(state=options.state._replace(seed=seed, offset=offset))
    b_r, b_c, t_r, t_c = _place_blocks(hbm, blocks, n, d, M)  # Alg. 4 l. 2
    for name in ("dQ", "dK", "dV"):
        hbm.allocate(name, (n, d), 0, output=True)  # Alg. 4 l. 5
    for j in range(t_c):  # Alg. 4 l. 6
        keys = block(j, b_c, n)  # Alg. 4 l. 3
        K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 4 l. 7
        dK_j = hbm.on_chip("dK", np.zeros_like(K_j))  # Alg. 4 l. 8
        dV_j = hbm.on_chip("dV", np.zeros_like(V_j))
        for i in range(t_r):  # Alg. 4 l. 9
            if blocks is None or hbm.load("M", (i, j)):  # as Alg. 5 l. 8
                _backward_tile(hbm, options, block(i, b_r, n), keys, K_j, V_j, dK_j, dV_j)
        hbm.store("dK", keys, dK_j)  # Alg. 4 l. 24
        hbm.store("dV", keys, dV_j)
    return Backward(hbm.take("dQ"), hbm.take("dK"), hbm.take("dV"), hbm.counts)


def _backward_tile(hbm, options, rows, keys, K_j, V_j, dK_j, dV_j):
    """Add the gradients of tile (i, j): to dQ_i in HBM, and to dK_j and dV_j on the chip, in place."""
    Q_i, O_i, dO_i, dQ_i = (hbm.load(name, rows) for name in ("Q", "O", "dO", "dQ"))  # Alg. 4 l. 10
    l_i, m_i = hbm.load("l", rows), hbm.load("m", rows)
    S_ij = hbm.on_chip("S", options.scale * (Q_i @ K_j.T))  # Alg. 4 l. 11
    S_ij = options.masked(hbm, S_ij, rows, keys)  # Alg. 4 l. 12
    P_ij = reciprocal(l_i)[:, None] * np.exp(S_ij - np.where(m_i == -np.inf, 0, m_i)[:, None])  # Alg. 4 l. 13
    Z_ij = options.dropout(hbm.dtype, rows, keys)  # Alg. 4 l. 14
    P_dropped = P_ij * Z_ij  # Alg. 4 l. 15
    dV_j += P_dropped.T @ dO_i  # Alg. 4 l. 16
    dP_dropped = hbm.on_chip("dP", dO_i @ V_j.T)  # Alg. 4 l. 17
    dP_ij = dP_dropped * Z_ij  # Alg. 4 l. 18
    D_i = (dO_i * O_i).sum(axis=1)  # Alg. 4 l. 19
    dS_ij = P_ij * (dP_ij - D_i[:, None])  # Alg. 4 l. 20
    hbm.store("dQ", rows, dQ_i + options.scale * (dS_ij @ K_j))  # Alg. 4 l. 21
    dK_j += options.scale * (dS_ij.T @ Q_i)  # Alg. 4 l. 22


def _place_blocks(hbm, blocks, n, d, M):
    """Return the block sizes; a block sparsity mask is put into HBM."""
    sizes = block_sizes(n, d, M)
    if blocks is not None:
        if np.shape(blocks) != (sizes.t_r, sizes.t_c):
            raise ShapeError(f"blocks has shape {np.shape(blocks)}: expected (T_r, T_c) = {(sizes.t_r, sizes.t_c)}")
        hbm.place("M", blocks, np.bool_)
    return sizes
