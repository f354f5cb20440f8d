"""Textbook attention and its gradients, in high precision (the oracle) or rounded at every step (the textbook).

Everything N x N is made here on purpose: this module trades memory for being obviously right.  ``dtype=None``
computes in float64 (long double for float64 inputs) and rounds nothing; with a dtype, every intermediate result
is rounded to it, as a chain of array operations in that dtype would.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from scipy.special import softmax

from tests.tolerances import eps

LOW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class Scores(NamedTuple):
    """Steps of a textbook forward that the backward uses again."""

    q: np.ndarray  # (..., H, Nq, d), high precision, heads repeated
    k: np.ndarray  # (..., H, Nk, d)
    v: np.ndarray  # (..., H, Nk, dv)
    s: np.ndarray  # (..., H, Nq, Nk) masked scores
    tanh: np.ndarray | None  # tanh(s / softcap) before bias and mask
    p: np.ndarray  # softmax(s), 0 in empty rows


def work_dtype(dtype: np.dtype) -> np.dtype:
    """Precision that the oracle computes in."""
    return np.dtype(np.longdouble) if dtype == np.float64 else np.dtype(np.float64)


def visible_band(n_queries: int, n_keys: int, left: int | None, right: int | None, offset: int) -> np.ndarray:
    """Boolean (Nq, Nk): i + offset - left <= j <= i + offset + right, None = open."""
    i = np.arange(n_queries)[:, None] + offset
    j = np.arange(n_keys)[None, :]
    seen = np.ones((n_queries, n_keys), bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def _steps(q, k, v, *, visible, bias, scale, softcap, dtype, scale_on="s") -> Scores:
    """Compute masked scores and probabilities; `dtype` rounds every step."""
    low = dtype if dtype is not None else None
    work = work_dtype(q.dtype) if low is None else (np.dtype(np.float32) if low in LOW else np.dtype(low))

    def rounded(x):
        return x if low is None else x.astype(low).astype(work)

    heads = np.broadcast_shapes(q.shape[:-2], _lead_after_repeat(q, k), _lead_after_repeat(q, v))
    k, v = (_repeat(x, q) for x in (k, v))
    if visible is not None:  # a key that no query of its head may see takes no part at all
        shape = (*heads, q.shape[-2], k.shape[-2])
        dead = ~np.broadcast_to(visible, shape).any(-2)[..., None]
        k = np.where(dead, k.dtype.type(0), np.broadcast_to(k, (*heads, *k.shape[-2:])))
        v = np.where(dead, v.dtype.type(0), np.broadcast_to(v, (*heads, *v.shape[-2:])))
    q, k, v = (x.astype(work) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    factor = work.type(scale)
    sq, sk = (rounded(x * factor) if scale_on == side else x for side, x in (("q", q), ("k", k)))
    s = rounded(sq @ np.swapaxes(sk, -1, -2))
    if scale_on == "s":
        s = rounded(s * factor)
    tanh = None
    if softcap is not None:
        tanh = rounded(np.tanh(s / work.type(softcap)))
        s = rounded(work.type(softcap) * tanh)
    if bias is not None:
        s = rounded(s + bias.astype(work))
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    empty = np.all(s == -np.inf, axis=-1, keepdims=True) if s.shape[-1] else np.ones((*s.shape[:-1], 1), bool)
    p = np.where(empty, 0, softmax(np.where(empty, 0, s), axis=-1)) if s.shape[-1] else s
    return Scores(q, k, v, s, tanh, rounded(p.astype(work)))


def _lead_after_repeat(q, x):
    lead = list(x.shape[:-2])
    if lead and lead[-1] > 1 and q.ndim > 2 and q.shape[-3] > lead[-1]:
        lead[-1] = q.shape[-3]
    return tuple(lead)


def _repeat(x, q):
    """Repeat grouped key/value heads so that query head h reads head h // group."""
    if x.ndim > 2 and q.ndim > 2 and x.shape[-3] > 1 and q.shape[-3] > x.shape[-3]:
        return np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3)
    return x


def forward(
    q, k, v, *, visible=None, bias=None, scale=None, softcap=None, keep=None, keep_scale=1.0, dtype=None, scale_on="s"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return textbook o (..., Nq, dv), l and m (..., Nq); `visible` and `keep` are dense booleans."""
    with np.errstate(all="ignore"):
        step = _steps(q, k, v, visible=visible, bias=bias, scale=scale, softcap=softcap, dtype=dtype, scale_on=scale_on)
        m = step.s.max(-1, initial=-np.inf)
        shift = np.where(m == -np.inf, 0, m)
        l = np.exp(step.s - shift[..., None]).sum(-1)
        p = step.p if keep is None else np.where(keep, step.p * step.p.dtype.type(keep_scale), 0)
        if dtype is not None:
            p = p.astype(dtype).astype(p.dtype)
        o = p @ step.v
    return (o if dtype is None else o.astype(dtype)), l, m


def backward(
    do,
    q,
    k,
    v,
    *,
    visible=None,
    bias=None,
    scale=None,
    softcap=None,
    keep=None,
    keep_scale=1.0,
    dtype=None,
    scale_on="s",
    delta_on="p",
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return textbook dq, dk, dv, dbias, each of its operand's shape (dbias None without a bias).

    `delta_on`: D is rowsum(p * dp), or with "o" rowsum(do * o), which is equal but cannot cancel dP exactly.
    """
    low = dtype

    def rounded(x):
        return x if low is None else x.astype(low).astype(x.dtype)

    with np.errstate(all="ignore"):
        step = _steps(q, k, v, visible=visible, bias=bias, scale=scale, softcap=softcap, dtype=dtype, scale_on=scale_on)
        work = step.q.dtype
        scale = work.type(q.shape[-1] ** -0.5 if scale is None else scale)
        empty = (step.p == 0).all(-1, keepdims=True)  # an empty row's do and q take no part
        do = np.where(empty, 0, do.astype(work))
        sq = np.where(empty, 0, step.q)
        z = work.type(1) if keep is None else np.where(keep, work.type(keep_scale), work.type(0))
        pd = rounded(step.p * z)
        dv = np.swapaxes(pd, -1, -2) @ do
        dp = rounded(rounded(do @ np.swapaxes(step.v, -1, -2)) * z)
        terms = step.p * dp if delta_on == "p" else do * rounded(pd @ step.v)
        ds = rounded(step.p * (dp - rounded(terms.sum(-1, keepdims=True))))
        dbias = None if bias is None else sum_to(ds, bias.shape)
        if softcap is not None:
            ds = rounded(ds * (1 - step.tanh**2))
        dq = scale * (ds @ step.k)
        dk = scale * (np.swapaxes(ds, -1, -2) @ sq)
    grads = [sum_to(dq, q.shape), sum_heads(dk, k.shape), sum_heads(dv, v.shape), dbias]
    return tuple(g if g is None or low is None else g.astype(low) for g in grads)


ORDERS = 6  # evaluations of the textbook whose largest error counts as its error


def textbook_forward(q, k, v, *, dtype, **options) -> list[list[np.ndarray]]:
    """Evaluate the textbook in several equivalent orders; return o, l, m as lists with one entry per order.

    Its rounding error is a matter of luck on small problems: with one key and one feature it may be 0.  Summing over
    features and keys in other orders, and scaling q or k instead of s, gives the size of what is left to chance.
    """
    results = []
    for order in range(ORDERS):
        swap = _Order(order, q, k)
        results.append(
            forward(swap.features(q), swap.keys(swap.features(k)), swap.keys(v), dtype=dtype, **swap.options(options))
        )
    return [list(column) for column in zip(*results, strict=True)]


def textbook_backward(do, q, k, v, *, dtype, **options) -> list[list[np.ndarray] | None]:
    """Evaluate the textbook gradients as :func:`textbook_forward` does, D in both ways; dq, dk, dv, dbias as lists."""
    results = []
    for order in range(ORDERS):
        swap = _Order(order, q, k)
        dq, dk, dv, dbias = backward(
            do, swap.features(q), swap.keys(swap.features(k)), swap.keys(v), dtype=dtype, delta_on="po"[order % 2],
            **swap.options(options),
        )  # fmt: skip
        results.append((swap.features(dq, back=True), swap.keys(swap.features(dk, back=True), back=True),
                        swap.keys(dv, back=True), swap.scores(dbias, back=True)))  # fmt: skip
    return [None if column[0] is None else list(column) for column in zip(*results, strict=True)]


class _Order:
    """One order of summation: permutations of features and keys, and where the scale is applied."""

    def __init__(self, order, q, k):
        rng = np.random.default_rng(order)
        d, n = q.shape[-1], k.shape[-2]
        self.d = rng.permutation(d) if order else np.arange(d)
        self.n = rng.permutation(n) if order else np.arange(n)
        self.scale_on = "sqk"[order % 3]

    def features(self, x, back=False):
        return x[..., np.argsort(self.d) if back else self.d]

    def keys(self, x, back=False):
        return x[..., np.argsort(self.n) if back else self.n, :]

    def scores(self, x, back=False):
        if x is None or x.shape[-1] == 1 != self.n.size:
            return x
        return x[..., np.argsort(self.n) if back else self.n]

    def options(self, options):
        moved = {name: self.scores(options.get(name)) for name in ("visible", "bias", "keep")}
        return {**options, **moved, "scale_on": self.scale_on}


def magnitude_forward(q, k, v, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bound what one rounding in every sum can move o, l and m by, in units of eps: sums of absolute values.

    A score moves by the rounding of its products, and p by as much, relatively.
    """
    with np.errstate(all="ignore"):
        step, s = _magnitude_steps(q, k, v, options)
        m = s.max(-1, initial=0)
        _, l, _ = forward(q, k, v, **options)
        z = _kept(options, step)
        return ((step.p * z) @ np.abs(step.v)) * (1 + m[..., None]), l * (1 + m), m


def magnitude_backward(do, q, k, v, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Bound what one rounding in every sum can move the gradients by, in units of eps of the sums' precision.

    D is taken from an o that was rounded to the input's precision, so its rounding counts in that.
    """
    with np.errstate(all="ignore"):
        step, s = _magnitude_steps(q, k, v, options)
        empty = (step.p == 0).all(-1, keepdims=True)
        z = _kept(options, step)
        do = np.where(empty, 0, np.abs(do.astype(step.q.dtype)))
        p = step.p * (1 + s)
        dp = (do @ np.swapaxes(np.abs(step.v), -1, -2)) * z
        o_rounding = eps(q.dtype) / eps(np.float32) if q.dtype in LOW else 1
        ds = p * (dp + o_rounding * (p * dp).sum(-1, keepdims=True))
        scale = abs(q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"])
        dq = scale * (ds @ np.abs(step.k))
        dk = scale * (np.swapaxes(ds, -1, -2) @ np.where(empty, 0, np.abs(step.q)))
        dv = np.swapaxes(p * z, -1, -2) @ do
    dbias = None if options.get("bias") is None else sum_to(ds, options["bias"].shape)
    return sum_to(dq, q.shape), sum_heads(dk, k.shape), sum_heads(dv, v.shape), dbias


def _magnitude_steps(q, k, v, options):
    """Return the oracle's steps and, for each visible score, the sum of the absolute values that make it."""
    names = ("visible", "bias", "scale", "softcap")
    step = _steps(q, k, v, **{name: options.get(name) for name in names}, dtype=None)
    scale = abs(q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"])
    s = scale * (np.abs(step.q) @ np.swapaxes(np.abs(step.k), -1, -2))
    if options.get("bias") is not None:
        s = s + np.where(np.isfinite(options["bias"]), np.abs(options["bias"].astype(s.dtype)), 0)
    return step, np.where(step.s == -np.inf, 0, s)


def _kept(options, step):
    keep = options.get("keep")
    return 1 if keep is None else np.where(keep, step.p.dtype.type(options["keep_scale"]), 0)


def sum_heads(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum the gradient of repeated heads back to grouped heads, then over broadcast axes."""
    if len(shape) > 2 and 1 < shape[-3] < x.shape[-3]:
        x = x.reshape(*x.shape[:-3], shape[-3], x.shape[-3] // shape[-3], *x.shape[-2:]).sum(-3)
    return sum_to(x, shape)


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which `shape` was broadcast to ``x.shape``."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and x.shape[a] != 1)
    return x.sum(axis=axes, keepdims=True) if axes else x
