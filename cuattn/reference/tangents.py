"""FlashAttention along tangents, with the loops of the paper: Algorithms 2 and 4 with their derivatives.

A tile of scores S has a tangent, T = tau (tQ K^T + Q tK^T).  Beside O, l and m there are tO, the tangent of O, and mu,
that of the logsumexp: the mean of T under the softmax.  Twice the arrays share the chip, so blocks are those of M / 2.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cuattn.reference.flash import Options
from cuattn.reference.steps import Counts, exp_minus, reciprocal, softmax_tile, start
from cuattn.rng import RNGState


class Jvp(NamedTuple):
    """O (N, d), l and m (N,), the random state, the tangents of O and of the logsumexp, and the accesses.

    See Also
    --------
    flash_jvp : Returns one.

    Examples
    --------
    >>> x = np.ones((8, 2))
    >>> flash_jvp(x, x, x, 0 * x, 0 * x, x, 16).to[0].round(3)
    array([1., 1.])
    """

    o: np.ndarray
    l: np.ndarray
    m: np.ndarray
    rng_state: RNGState | None
    to: np.ndarray
    tlse: np.ndarray
    counts: Counts


class BackwardJvp(NamedTuple):
    """The gradients dQ, dK, dV (N, d), their tangents, and the accesses.

    See Also
    --------
    flash_backward_jvp : Returns one.

    Examples
    --------
    >>> x = np.ones((8, 2))
    >>> jvp = flash_jvp(x, x, x, 0 * x, 0 * x, x, 16)
    >>> flash_backward_jvp(x, x, x, x, jvp, x, 0 * x, 0 * x, x, 16).tdv[0].round(3)
    array([1., 1.])
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    tdq: np.ndarray
    tdk: np.ndarray
    tdv: np.ndarray
    counts: Counts


def flash_jvp(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    tq: ArrayLike,
    tk: ArrayLike,
    tv: ArrayLike,
    M: int,
    *,
    blocks: ArrayLike | None = None,
    scale: float | None = None,
    mask: Any = None,
    dropout_p: float = 0.0,
    rng: Any = None,
    b: int = 0,
    dtype: DTypeLike = np.float64,
) -> Jvp:
    """Run Algorithm 2 or, with `blocks`, 5, with its derivative along tangents.

    Parameters
    ----------
    q, k, v, tq, tk, tv : array_like, (N, d)
        Queries, keys and values, and their tangents.
    M : int
        On-chip memory in elements; the blocks are those of half of it.
    blocks, scale, mask, dropout_p, rng, b, dtype : optional
        As in :func:`flash_forward`.

    Returns
    -------
    Jvp
        O, l, m, the random state, the tangents of O and of the logsumexp, and the accesses: Theta(N^2 d^2 / M).

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`flash_forward`.

    See Also
    --------
    flash_forward : Without tangents.
    cuattn.jvp : For speed.

    Examples
    --------
    >>> import numpy as np
    >>> x, zero = np.eye(4), np.zeros((4, 4))
    >>> flash_jvp(x, x, x, zero, zero, np.ones((4, 4)), 16).to.round(6)[0]
    array([1., 1., 1., 1.])
    """
    hbm, n, d, rows, keys = problem = start(M, dtype, tangents=True, Q=q, K=k, V=v, tQ=tq, tK=tk, tV=tv)
    options = Options(problem, blocks, scale, mask, dropout_p, b)
    options.draw_state(rng)
    hbm.allocate((n, d), "O", "tO", fill=0, output=True)
    hbm.allocate(n, "l", "mu", fill=0)
    hbm.allocate(n, "m", fill=-np.inf)
    for j, columns in enumerate(keys):
        K_j, V_j, tK_j, tV_j = hbm.load(columns, "K", "V", "tK", "tV")
        for i, here in enumerate(rows):
            if blocks is None or hbm.load((i, j), "blocks"):
                Q_i, tQ_i, *sums = hbm.load(here, "Q", "tQ", "O", "tO", "l", "m", "mu")
                S_ij, Z_ij = options.scores(Q_i, K_j, here, columns)
                T_ij = hbm.on_chip("T", options.scale * (tQ_i @ K_j.T + Q_i @ tK_j.T))
                O_i, tO_i, l_i, m_i, mu_i = update(S_ij, T_ij, V_j, tV_j, *sums, Z_ij)
                hbm.store(here, O=O_i, tO=tO_i, l=l_i, m=m_i, mu=mu_i)
    o, l, m, to, mu = hbm.take("O", "l", "m", "tO", "mu")
    return Jvp(o, l, m, options.state, to, mu, hbm.counts)


def update(S_ij, T_ij, V_j, tV_j, O_i, tO_i, l_i, m_i, mu_i, Z_ij=1):
    """Return O_i, tO_i, l_i, m_i and mu_i after a tile of scores and their tangents; Z_ij is dropout's factor.

    What was summed up relative to the old mean of tangents moves with the mean, and so nothing large cancels.
    """
    m_ij, P_ij, l_ij = softmax_tile(S_ij)
    m_new = np.maximum(m_i, m_ij)
    old, new = l_i * exp_minus(m_i, m_new), exp_minus(m_ij, m_new)
    l_new = old + new * l_ij
    inverse = reciprocal(l_new)
    mu_new = inverse * (old * mu_i + new * (P_ij * T_ij).sum(axis=1))
    P_dropped = new[:, None] * (P_ij * Z_ij)
    tP_dropped = P_dropped * (T_ij - mu_new[:, None])
    tO_i = old[:, None] * (tO_i + (mu_i - mu_new)[:, None] * O_i) + tP_dropped @ V_j + P_dropped @ tV_j
    O_i = old[:, None] * O_i + P_dropped @ V_j
    return inverse[:, None] * O_i, inverse[:, None] * tO_i, l_new, m_new, mu_new


def flash_backward_jvp(
    do: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    jvp: Jvp,
    tdo: ArrayLike,
    tq: ArrayLike,
    tk: ArrayLike,
    tv: ArrayLike,
    M: int,
    *,
    blocks: ArrayLike | None = None,
    scale: float | None = None,
    mask: Any = None,
    dropout_p: float = 0.0,
    b: int = 0,
    dtype: DTypeLike = np.float64,
) -> BackwardJvp:
    """Run Algorithm 4 with its derivative along tangents: every product of it becomes two more.

    Parameters
    ----------
    do, q, k, v : array_like, (N, d)
        Gradient of O, and the forward's inputs.
    jvp : Jvp
        Result of :func:`flash_jvp` along the same tangents.
    tdo, tq, tk, tv : array_like, (N, d)
        Tangents of do, q, k and v.
    M : int
        As in :func:`flash_jvp`.
    blocks, scale, mask, dropout_p, b, dtype : optional
        As in :func:`flash_forward`.

    Returns
    -------
    BackwardJvp
        The gradients dQ, dK, dV, their tangents, and the accesses: Theta(N^2 d^2 / M).

    Raises
    ------
    ArgumentError, ShapeError
        As in :func:`flash_forward`.

    See Also
    --------
    flash_jvp : Gives what it takes.
    cuattn.backward_jvp : For speed.

    Examples
    --------
    >>> import numpy as np
    >>> x, zero = np.eye(4), np.zeros((4, 4))
    >>> jvp = flash_jvp(x, x, x, zero, zero, x, 16)
    >>> flash_backward_jvp(x, x, x, x, jvp, x, zero, zero, x, 16).tdv.sum(1).round(6)
    array([1., 1., 1., 1.])
    """
    arrays = {"Q": q, "K": k, "V": v, "dO": do, "O": jvp.o, "tQ": tq, "tK": tk, "tV": tv, "tdO": tdo, "tO": jvp.to}
    hbm, n, d, rows, keys = problem = start(M, dtype, tangents=True, **arrays)
    for name, array in (("l", jvp.l), ("m", jvp.m), ("mu", jvp.tlse)):
        hbm.place(name, array, shape=(n,))
    options = Options(problem, blocks, scale, mask, dropout_p, b)
    options.load_state(jvp.rng_state)
    gradients = "dQ", "dK", "dV", "tdQ", "tdK", "tdV"
    hbm.allocate((n, d), *gradients, fill=0, output=True)
    tau = options.scale
    for j, columns in enumerate(keys):
        K_j, V_j, tK_j, tV_j = hbm.load(columns, "K", "V", "tK", "tV")
        dK_j, dV_j, tdK_j, tdV_j = (hbm.on_chip(name, np.zeros_like(K_j)) for name in ("dK", "dV", "tdK", "tdV"))
        for i, here in enumerate(rows):
            if not (blocks is None or hbm.load((i, j), "blocks")):
                continue
            Q_i, O_i, dO_i, dQ_i, tQ_i, tO_i, tdO_i, tdQ_i, l_i, m_i, mu_i = hbm.load(
                here, "Q", "O", "dO", "dQ", "tQ", "tO", "tdO", "tdQ", "l", "m", "mu"
            )
            S_ij, Z_ij = options.scores(Q_i, K_j, here, columns)
            T_ij = hbm.on_chip("T", tau * (tQ_i @ K_j.T + Q_i @ tK_j.T) - mu_i[:, None])
            P_ij = reciprocal(l_i)[:, None] * exp_minus(S_ij, m_i)
            D_i, tD_i = ((dO_i * O_i).sum(axis=1), (tdO_i * O_i + dO_i * tO_i).sum(axis=1))
            dP_ij = hbm.on_chip("dP", (dO_i @ V_j.T) * Z_ij)
            tdP_ij = hbm.on_chip("tdP", (tdO_i @ V_j.T + dO_i @ tV_j.T) * Z_ij)
            dS_ij = P_ij * (dP_ij - D_i[:, None])
            tdS_ij = T_ij * dS_ij + P_ij * (tdP_ij - tD_i[:, None])
            dV_j += (P_ij * Z_ij).T @ dO_i
            tdV_j += (P_ij * T_ij * Z_ij).T @ dO_i + (P_ij * Z_ij).T @ tdO_i
            dK_j += tau * (dS_ij.T @ Q_i)
            tdK_j += tau * (tdS_ij.T @ Q_i + dS_ij.T @ tQ_i)
            dQ_i += tau * (dS_ij @ K_j)
            tdQ_i += tau * (tdS_ij @ K_j + dS_ij @ tK_j)
            hbm.store(here, dQ=dQ_i, tdQ=tdQ_i)
        hbm.store(columns, dK=dK_j, dV=dV_j, tdK=tdK_j, tdV=tdV_j)
    return BackwardJvp(*hbm.take(*gradients), hbm.counts)
