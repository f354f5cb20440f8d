"""Textbook attention with every N x N matrix written out: what the self-check compares with.

One function computes the exact answer (in float64, or long double for float64 inputs) and the textbook answer in
the inputs' own precision, which rounds every intermediate result to it (16-bit numbers are summed in float32).  The
difference of the two is what a user would get from a chain of array operations, and the measure of what is allowed.
"""

import ml_dtypes
import numpy as np

__all__ = ["EXTENDED", "allowed", "solve", "worst"]

EXTENDED = bool(np.finfo(np.longdouble).eps < np.finfo(np.float64).eps)
"""Whether there is anything more precise than float64 here to judge float64 by."""


def solve(q, k, v, do, *, visible, keep, keep_scale, bias, scale, softcap, exact):
    """Return o, lse, dq, dk, dv and dbias by the formulas of the paper.

    Parameters
    ----------
    q, k, v, do : numpy.ndarray, (heads, n, d), (kv_heads, n, d), (kv_heads, n, d), (heads, n, d)
        The problem; query head h reads key and value head ``h // (heads // kv_heads)``.
    visible, keep : numpy.ndarray of bool, broadcast to (heads, n, n)
        What the mask lets through, and what dropout keeps.
    keep_scale : float
        Factor of what is kept.
    bias : numpy.ndarray or None
        Added to the scores.
    scale, softcap : float, float or None
        Of the scores.
    exact : bool
        Whether to compute in higher precision and round nothing.

    Returns
    -------
    dict of str to numpy.ndarray
        The results under the names of the API, in the precision of their sums also where they were rounded.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithms 0 and 3.
    """
    low = q.dtype
    work = (np.float64, np.longdouble) if low == np.float64 else (np.float32, np.float64)
    work = work[exact]

    def rounded(x):
        return x if exact else x.astype(low).astype(work)

    group = len(q) // len(k)
    q, do = q.astype(work), do.astype(work)
    k, v = (np.repeat(x.astype(work), group, axis=0) for x in (k, v))
    with np.errstate(invalid="ignore", divide="ignore"):
        s = rounded(scale * rounded(q @ k.mT))
        slope = 1.0
        if softcap is not None:
            tanh = rounded(np.tanh(s / softcap))
            s, slope = rounded(softcap * tanh), 1 - tanh**2
        s = np.where(visible, s if bias is None else rounded(s + bias.astype(work)), -np.inf)
        m = s.max(axis=-1, keepdims=True)
        p = np.where(visible, np.exp(s - m), 0)
        l = p.sum(axis=-1, keepdims=True)
        lse = np.where(l > 0, m + np.log(l), -np.inf)[..., 0]
        p = rounded(np.where(l > 0, p / l, 0))
    z = np.where(keep, keep_scale, 0.0).astype(work)
    o = rounded(rounded(p * z) @ v)
    dv = rounded(p * z).mT @ do
    dp = rounded(rounded(do @ v.mT) * z)
    ds = rounded(p * (dp - rounded((p * dp).sum(axis=-1, keepdims=True))))
    dbias = None if bias is None else rounded(_sum_to(ds, bias.shape))
    ds = rounded(ds * slope)
    dq = rounded(scale * (ds @ k))
    dk, dv = (rounded(x.reshape(-1, group, *x.shape[1:]).sum(axis=1)) for x in (scale * (ds.mT @ q), dv))
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias}


def _sum_to(x, shape):
    """Sum over the axes along which `shape` broadcasts to x's."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)


def _distance(x, exact):
    """Return the largest absolute difference; infinity when one side is not a number."""
    with np.errstate(invalid="ignore"):
        difference = np.where(x == exact, 0, np.abs(x - exact))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def allowed(exact, textbook, dtype):
    """Return the largest error that is accepted: twice the textbook's, plus one rounding of the largest value."""
    finite = exact[np.isfinite(exact)]
    return 2 * _distance(textbook, exact) + float(ml_dtypes.finfo(dtype).eps) * float(np.abs(finite).max(initial=0))


def worst(results, exact, textbook):
    """Return which of several results is the furthest beyond, or the least below, what is accepted.

    Parameters
    ----------
    results : dict of str to numpy.ndarray
        What was computed, under the names of :func:`solve`.
    exact, textbook : dict of str to numpy.ndarray
        The two answers of :func:`solve`.

    Returns
    -------
    name : str
    error, limit : float
        Its largest error, and the largest one accepted.
    """
    rows = []
    for name, value in results.items():
        limit = allowed(exact[name], textbook[name], value.dtype)
        error = _distance(value.astype(exact[name].dtype), exact[name])
        rows.append((error / limit if limit else np.inf if error else 0.0, name, error, limit))
    return max(rows)[1:]
