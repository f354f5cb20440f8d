"""Block-sparse FlashAttention: Algorithm 5 (forward), and Algorithm 4 with zero blocks skipped (backward)."""

import numpy as np

from cuattn.errors import ShapeError
from cuattn.io_model import block_sizes
from cuattn.reference.flash import backward_tile, forward_tile, place_backward, save_state
from cuattn.reference.hbm import HBM
from cuattn.reference.results import Backward, Forward
from cuattn.reference.steps import Options, block, place

__all__ = ["block_sparse_backward", "block_sparse_forward"]


def block_sparse_forward(q, k, v, blocks, M, *, scale=None, mask=None, dropout_p=0.0, rng=None, b=0, dtype=np.float64):
    """Run Algorithm 5: FlashAttention's forward over the nonzero blocks of a mask.

    Parameters
    ----------
    q, k, v : array_like, (N, d)
        Queries, keys and values.
    blocks : array_like, (T_r, T_c), bool
        The block sparsity mask, for the blocks of :func:`cuattn.io_model.block_sizes`: rows of block i see keys of
        block j where it is true.
    M : int
        On-chip memory in elements, d <= M <= N d.
    scale, mask, dropout_p, rng, b, dtype : optional
        As in :func:`cuattn.reference.flash_forward`; `mask` applies inside the nonzero blocks.

    Returns
    -------
    forward : Forward
        O, l, m, the random state and the accesses: Theta(N d + s N^2 d^2 / M) for a share s of nonzero blocks.

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
    >>> block_sparse_forward(q, k, v, np.eye(4), 16).o
    array([[1., 0., 0., 0.],
           [0., 1., 0., 0.],
           [0., 0., 1., 0.],
           [0., 0., 0., 1.]])
    """
    hbm = HBM(dtype)
    n, d = place(hbm, Q=q, K=k, V=v)
    options = Options.resolve(hbm, n, d, scale, mask, dropout_p, rng, b)
    save_state(hbm, options)  # Alg. 5 l. 1
    sizes = _place_blocks(hbm, blocks, n, d, M)
    hbm.allocate("O", (n, d), 0, output=True)  # Alg. 5 l. 2
    hbm.allocate("l", n, 0)
    hbm.allocate("m", n, -np.inf)
    for j in range(sizes.t_c):  # Alg. 5 l. 5
        keys = block(j, sizes.b_c, n)  # Alg. 5 l. 3
        K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 5 l. 6
        for i in range(sizes.t_r):  # Alg. 5 l. 7
            if hbm.load("M", (i, j)):  # Alg. 5 l. 8
                forward_tile(hbm, options, block(i, sizes.b_r, n), keys, K_j, V_j)  # Alg. 5 l. 9-16
    return Forward(hbm.take("O"), hbm.take("l"), hbm.take("m"), options.state, hbm.counts)


def block_sparse_backward(do, q, k, v, fwd, blocks, M, *, scale=None, mask=None, dropout_p=0.0, b=0, dtype=np.float64):
    """Run Algorithm 4 over the nonzero blocks of a mask: the backward of Algorithm 5.

    Parameters
    ----------
    do, q, k, v : array_like, (N, d)
        Gradient of O, and the forward's inputs.
    fwd : Forward
        Result of :func:`block_sparse_forward`; its O, l, m and random state are used.
    blocks : array_like, (T_r, T_c), bool
        As in :func:`block_sparse_forward`.
    M : int
        As in :func:`block_sparse_forward`.
    scale, mask, dropout_p, b, dtype : optional
        As in :func:`block_sparse_forward`.

    Returns
    -------
    backward : Backward
        dQ, dK, dV and the accesses.

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`block_sparse_forward`.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = v = do = np.eye(4)
    >>> fwd = block_sparse_forward(q, k, v, np.eye(4), 16)
    >>> block_sparse_backward(do, q, k, v, fwd, np.eye(4), 16).dv.sum(axis=0)
    array([1., 1., 1., 1.])
    """
    hbm = HBM(dtype)
    n, d, options = place_backward(hbm, do, q, k, v, fwd, scale, mask, dropout_p, b)  # Alg. 4 l. 1
    sizes = _place_blocks(hbm, blocks, n, d, M)  # Alg. 4 l. 2
    for name in ("dQ", "dK", "dV"):
        hbm.allocate(name, (n, d), 0, output=True)  # Alg. 4 l. 5
    for j in range(sizes.t_c):  # Alg. 4 l. 6
        keys = block(j, sizes.b_c, n)
        K_j, V_j = hbm.load("K", keys), hbm.load("V", keys)  # Alg. 4 l. 7
        dK_j = hbm.on_chip("dK", np.zeros_like(K_j))  # Alg. 4 l. 8
        dV_j = hbm.on_chip("dV", np.zeros_like(V_j))
        for i in range(sizes.t_r):  # Alg. 4 l. 9
            if hbm.load("M", (i, j)):  # as Alg. 5 l. 8
                backward_tile(hbm, options, block(i, sizes.b_r, n), keys, K_j, V_j, dK_j, dV_j)  # Alg. 4 l. 10-22
        hbm.store("dK", keys, dK_j)  # Alg. 4 l. 24
        hbm.store("dV", keys, dV_j)
    return Backward(hbm.take("dQ"), hbm.take("dK"), hbm.take("dV"), hbm.counts)


def _place_blocks(hbm, blocks, n, d, M):
    sizes = block_sizes(n, d, M)
    if np.shape(blocks) != (sizes.t_r, sizes.t_c):
        raise ShapeError(f"blocks has shape {np.shape(blocks)}: expected (T_r, T_c) = {(sizes.t_r, sizes.t_c)}")
    hbm.place("M", blocks, np.bool_)
    return sizes
