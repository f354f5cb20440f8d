"""Textbook attention and its gradients with every N x N matrix written out: what results are compared with.

One function computes the exact answer, or the one that a chain of array operations in a low precision gives, which
rounds every intermediate result.  The difference of the two is the measure of what error is allowed.
"""

import sys
from typing import Any, NamedTuple

import numpy as np

EXTENDED = bool(np.finfo(np.longdouble).eps < np.finfo(np.float64).eps)
"""Whether there is anything more precise than float64 here to judge float64 by."""


class Solution(NamedTuple):
    """What `solve` returns: the results of the API, and the matrices on the way to them.

    Attributes
    ----------
    o, l, m, dq, dk, dv, dbias : array
        Under the names of the API; the gradients are None without `do`, dbias without a bias.
    s, p, dp, ds : array, (..., Hq, Nq, Nk)
        Masked scores, their softmax, and the gradients of the dropped-out p and of s after bias.
    slope : array or float
        Derivative of the soft cap and of the score function.
    """

    o: Any
    l: Any
    m: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    s: Any
    p: Any
    dp: Any
    ds: Any
    slope: Any


def solve(
    q,
    k,
    v,
    do=None,
    *,
    visible=None,
    keep=None,
    keep_scale=1.0,
    bias=None,
    scale=None,
    softcap=None,
    score=None,
    dlse=None,
    delta_from_o=False,
    low=None,
    operand=None,
    softmax=None,
):
    """Compute attention and, with `do`, its gradients by the formulas of the paper.

    Parameters
    ----------
    q, k, v, do : array, (..., Hq, Nq, d), (..., Hkv, Nk, d), (..., Hkv, Nk, dv), (..., Hq, Nq, dv)
        NumPy or CuPy; leading axes broadcast and heads are grouped as in :func:`cuattn.attention`.
    visible, keep : bool array, optional
        What the mask lets through and what dropout keeps, broadcast to (..., Hq, Nq, Nk).
    keep_scale : float, default 1
        Factor of what is kept.
    bias, scale, softcap : optional
        As in :func:`cuattn.attention`.
    score : callable, optional
        Of scores, which it replaces by others; it returns these and their derivatives.
    dlse : array, (..., Hq, Nq), optional
        Gradient with respect to m + log(l).
    delta_from_o : bool, default False
        Take D from do and o, as algorithm 4 does in O(N) memory, instead of from dp and p.
    low : dtype, optional
        Round every step to it, with sums in float32 (float64 for float64); None is exact: float64, and long double for
        NumPy arrays in float64.
    operand : callable, optional
        Rounds both factors of every product, where products take fewer digits than sums do (TF32).
    softmax : callable, optional
        Another softmax along the last axis, SciPy's for a test.

    Returns
    -------
    Solution
        A key that no row may see, and a row that sees no key, take no part in it.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithms 0, 3 and 4.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.eye(2, dtype=np.float32)
    >>> solve(x, x, x, visible=np.tri(2, dtype=bool)).o.round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    xp, work, rounded = arithmetic(q, low)

    def factor(x):
        return x if operand is None else operand(x)

    scale = work.type(q.shape[-1] ** -0.5 if scale is None else scale)
    seen, dead, empty = visibility(xp, q, k, v, visible, bias)
    with np.errstate(all="ignore"):
        q_rows, key_heads, value_heads = (factor(repeat_heads(x, q).astype(work)) for x in (q, k, v))
        key_heads, value_heads = (xp.where(dead, 0, x) for x in (key_heads, value_heads))
        q_rows = xp.where(empty, 0, q_rows)
        s = rounded(scale * rounded(q_rows @ key_heads.swapaxes(-1, -2)))
        slope = work.type(1)
        if softcap is not None:
            tanh = rounded(xp.tanh(s / work.type(softcap)))
            s, slope = rounded(work.type(softcap) * tanh), 1 - tanh**2
        if score is not None:
            s, by_cap = score(s)
            s, slope = rounded(s.astype(work)), xp.where(seen, slope * by_cap.astype(work), 0)
        if bias is not None:
            s = rounded(s + bias.astype(work))
        s = xp.where(seen, s, -np.inf)
        m, l, p, none = exponentials(xp, s)
        p = softmax(s, axis=-1).astype(work) if softmax and s.shape[-1] else p / l[..., None]
        p = rounded(xp.where(none, 0, p))
        z = 1 if keep is None else keep * work.type(keep_scale)
        dropped = factor(rounded(p * z))
        o = rounded(dropped @ value_heads)
        if do is None:
            return Solution(o, l, m, None, None, None, None, s, p, None, None, slope)
        do = factor(xp.where(empty, 0, do.astype(work)))
        dp = rounded(rounded(do @ value_heads.swapaxes(-1, -2)) * z)
        delta = rounded((do * o if delta_from_o else p * dp).sum(-1))
        if dlse is not None:
            delta = delta - dlse.astype(work)
        ds = rounded(p * (dp - delta[..., None]))
        dbias = None if bias is None else rounded(sum_to(ds, bias.shape))
        ds_raw = factor(rounded(xp.where(ds == 0, 0, ds * slope)))
        dq = rounded(sum_to(scale * (ds_raw @ key_heads), q.shape))
        dk = rounded(sum_heads(scale * (ds_raw.swapaxes(-1, -2) @ q_rows), k.shape))
        dv = rounded(sum_heads(dropped.swapaxes(-1, -2) @ do, v.shape))
    return Solution(o, l, m, dq, dk, dv, dbias, s, p, dp, ds, slope)


def arithmetic(q, low):
    """Return q's array library, the dtype to compute in, and what rounds to `low`; None is exact, as for `solve`."""
    xp = np if isinstance(q, np.ndarray) else sys.modules["cupy"]
    most_exact = np.longdouble if xp is np and q.dtype == np.float64 else np.float64
    work = np.dtype(most_exact) if low is None else np.result_type(low, np.float32)

    def rounded(x):
        return x if low is None or low == work else x.astype(low).astype(work)

    return xp, work, rounded


def visibility(xp, q, k, v, visible, bias):
    """Return what may be seen, (..., Hq, Nq, Nk), and which keys no row sees and which rows see no key, (..., 1)."""
    lead = np.broadcast_shapes(*(repeat_heads(x, q).shape[:-2] for x in (q, k, v)))
    seen = xp.ones((), bool) if visible is None else visible
    if bias is not None:
        seen = seen & (bias != -np.inf)
    seen = xp.broadcast_to(seen, (*lead, q.shape[-2], k.shape[-2]))
    return seen, *(~seen.any(axis)[..., None] for axis in (-2, -1))


def exponentials(xp, s):
    """Return m, l, exp(s - m), and which rows, (..., 1), have no finite score."""
    m = s.max(-1) if s.shape[-1] else xp.full(s.shape[:-1], -np.inf, s.dtype)
    none = (m == -np.inf)[..., None]
    p = xp.where(none, 0, xp.exp(s - m[..., None]))
    return m, p.sum(-1), p, none


def sum_to(x, shape):
    """Sum over the axes along which `shape` broadcasts to ``x.shape``.

    Examples
    --------
    >>> import numpy as np
    >>> sum_to(np.ones((2, 3, 4)), (3, 1))
    array([[8.],
           [8.],
           [8.]])
    """
    aligned = (1,) * (x.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(aligned) if size != x.shape[axis])
    return (x.sum(axis=axes, keepdims=True) if axes else x).reshape(shape)


def repeat_heads(x, q):
    """Repeat grouped heads, so that query head h of q reads head h // group."""
    if min(x.ndim, q.ndim) > 2 and 1 < x.shape[-3] < q.shape[-3]:
        x = x.repeat(q.shape[-3] // x.shape[-3], axis=-3)
    return x


def sum_heads(x, shape):
    """Sum the gradients of repeated heads, then over broadcast axes."""
    if len(shape) > 2 and 1 < shape[-3] < x.shape[-3]:
        x = x.reshape(*x.shape[:-3], shape[-3], x.shape[-3] // shape[-3], *x.shape[-2:]).sum(-3)
    return sum_to(x, shape)
