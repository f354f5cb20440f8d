"""The oracle: textbook attention and its gradients in high precision, and the bound on what rounding does to them.

The formulas are :func:`cuattn.reference.textbook.solve`'s, here with SciPy's softmax.  ``dtype=None`` computes in
float64 (long double for float64 inputs) and rounds nothing; with a dtype, every intermediate result is rounded to it,
as a chain of array operations in that dtype would.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from cuattn.reference import textbook
from cuattn.reference.textbook import Solution, sum_heads, sum_to
from tests.tolerances import eps

__all__ = ["Floor", "backward", "floors", "forward", "solve", "visible_band"]


class Floor(NamedTuple):
    """How far roundings move a result: in multiples of eps of the sums, and of eps of 16-bit inputs."""

    wide: Any
    short: Any = 0.0


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


def solve(*arrays: Any, dtype: Any = None, **options: Any) -> Solution:
    """Return all that the textbook computes from q, k, v and, for gradients, do; on a GPU with CuPy's softmax."""
    library = special if isinstance(arrays[0], np.ndarray) else sys.modules["cupyx"].scipy.special
    return textbook.solve(*arrays, **options, low=dtype, softmax=library.softmax)


def forward(q, k, v, *, dtype=None, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return textbook o (..., Nq, dv), l and m (..., Nq); `visible` and `keep` are dense booleans."""
    return solve(q, k, v, dtype=dtype, **options)[:3]


def backward(do, q, k, v, *, dtype=None, **options) -> tuple[np.ndarray, ...]:
    """Return textbook dq, dk, dv, dbias, each of its operand's shape (dbias None without a bias)."""
    return solve(q, k, v, do, dtype=dtype, **options)[3:7]


def floors(exact: Solution, q, k, v, do=None, *, scale=None, softcap=None, bias=None, keep=None, keep_scale=1.0,
           dlse=None, visible=None) -> dict[str, Floor]:  # fmt: skip
    """Bound, to first order, what the roundings of any algorithm in the sums' precision do to each result.

    A score that is a sum of large products is known to eps times the sum of their absolute values, S_ij, and nothing
    computed in that precision knows it better; so a saturated softmax cannot be held to the textbook's luck.  With p
    the softmax, S'_i = sum_j p_ij S_ij, z dropout's factor, A_ij = z |do_i| . |v_j| and D_i = sum_j p_ij dp_ij, one
    rounding of every sum's terms moves

        m   by S at the maximum                     l   by l (1 + S' + S at the maximum)
        p   by E = p (1 + S + S'), the 1 for l      o   by sum_j E z |v|
        D   by sum_j E A                            ds  by E |dp - D| + p (A + that of D)
        dv  by sum_i E z |do|                       dq  by |scale| sum_j (that of ds + |ds|) |k|, dk likewise

    A sum of n terms counts 2 sqrt(n) times (n at most), as if roundings were random, and twice that in scores and in l,
    whose terms may be alike and round one way.  Weights p below eps**3 count as 0.  For 16-bit inputs, their eps times
    this is added: p |v| and p |do| (P is rounded before it is multiplied), |do . o| in D (o was rounded), |ds| |k| and
    |ds| |q| (so was dS).  Their capped scores may be cap - 2 cap / (1 + e^2x), the difference of terms of up to 2 cap.

    Parameters
    ----------
    exact : Solution
        Of `solve` for the arguments that follow.

    Returns
    -------
    dict of str to Floor
        By the names of the results.
    """
    given = {"scale": scale, "softcap": softcap, "bias": bias, "keep": keep, "keep_scale": keep_scale}
    bound = _Bound(exact, q, k, v, given)
    return bound.forward() if do is None else {**bound.forward(), **bound.backward(do, bias, dlse)}


class _Bound:
    """What the floors are made of; S is `size`, E is `moved`."""

    def __init__(self, exact: Solution, q, k, v, given: dict[str, Any]) -> None:
        self.exact = exact
        self.xp = xp = np if isinstance(q, np.ndarray) else sys.modules["cupy"]
        self.shapes, lead, low = (q.shape, k.shape, v.shape), exact.p.shape[:-2], q.dtype
        unit = eps(np.float64 if low == np.float64 else np.float32)
        self.grain = eps(low, smallest=True) / eps(low)  # 16-bit numbers near 0 are this coarse
        terms = (q.shape[-1], v.shape[-1], *exact.p.shape[-2:])
        width, self.width_v, self.rows, self.keys = (min(n, 2 * n**0.5) for n in terms)
        self.rows *= max(math.prod(lead), 1) ** 0.5  # of all heads that may share a key
        self.q, k, v = (xp.abs(x.astype(np.float64)) for x in (q, k, v))
        self.k, self.v = (textbook.repeat_heads(xp, x, lead) for x in (k, v))
        self.scale = abs(q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"])
        raw = 2 * width * self.scale * (self.q @ self.k.swapaxes(-1, -2))
        size, self.slope, self.bend = _scores(xp, exact, raw, given["softcap"], given["bias"], eps(low) > unit)
        seen = exact.s > -np.inf
        size = xp.where(seen, size, 0)
        self.p = exact.p.astype(np.float64)
        self.mean = (self.p * size).sum(-1)
        self.top = _at_maximum(xp, exact, size, unit)
        self.z = 1.0 if given["keep"] is None else xp.where(given["keep"], given["keep_scale"], 0.0)
        self.moved = self.p * (self.keys + size + self.mean[..., None]) + xp.where(seen, unit**2, 0)
        self.short_p = xp.where(seen, self.p + self.grain, 0) * self.z

    def forward(self) -> dict[str, Floor]:
        l = self.exact.l.astype(np.float64)
        return {
            "o": Floor(((self.moved + self.keys * self.p) * self.z) @ self.v, self.short_p @ self.v),
            "l": Floor(l * (2 * self.keys + self.mean + self.top)),
            "m": Floor(self.top),
        }

    def backward(self, do, bias, dlse) -> dict[str, Floor]:
        xp, exact, p = self.xp, self.exact, self.p
        do, ds, o = (xp.abs(x.astype(np.float64)) for x in (do, exact.ds, exact.o))
        a = self.z * (do @ self.v.swapaxes(-1, -2))
        gap = exact.dp.astype(np.float64) - (exact.p * exact.dp).sum(-1, keepdims=True).astype(np.float64)
        wide = p * (self.width_v * a + ((self.moved + self.keys * p) * a).sum(-1, keepdims=True))
        if dlse is not None:
            gap = gap + dlse[..., None]
            wide = wide + p * xp.abs(dlse[..., None])
        wide = wide + self.moved * xp.abs(gap)
        short_delta = p * (do * (o + self.grain)).sum(-1)[..., None]
        short = (short_delta + ds + self.grain) * self.slope
        for_rows, for_keys = (wide * self.slope + ds * (self.bend + n * self.slope) for n in (self.keys, self.rows))
        q_shape, k_shape, v_shape = self.shapes
        found = {
            "dq": [sum_to(self.scale * (x @ self.k), q_shape) for x in (for_rows, short)],
            "dk": [sum_heads(self.scale * (x.swapaxes(-1, -2) @ self.q), k_shape) for x in (for_keys, short)],
            "dv": [
                sum_heads(x.swapaxes(-1, -2) @ do, v_shape)
                for x in ((self.moved + self.rows * p) * self.z, self.short_p)
            ],
        }
        if bias is not None:
            found["dbias"] = [sum_to(x, bias.shape) for x in (wide + self.rows * ds, short_delta)]
        return {name: Floor(*parts) for name, parts in found.items()}


def _scores(xp, exact, raw, softcap, bias, short):
    """Return S, the slope of the soft cap, and by how much that slope moves."""
    size, slope, bend = raw, 1.0, 0.0
    if softcap is not None:
        slope = exact.slope.astype(np.float64)
        capped = softcap * xp.sqrt(xp.maximum(1 - slope, 0))
        size = slope * raw + (2 * softcap if short else capped)
        bend = 2 * (1 + (slope * raw + capped) / softcap)
    if bias is not None:
        bias = xp.abs(bias.astype(np.float64))
        size = xp.minimum(size + xp.where(bias < np.inf, bias, 0), 1e150)
    return size, slope, bend


def _at_maximum(xp, exact, size, unit):
    """Return the largest S among the scores of a row that may be its maximum."""
    if not size.shape[-1]:
        return xp.zeros(size.shape[:-1])
    s, m = exact.s.astype(np.float64), exact.m.astype(np.float64)[..., None]
    reach = xp.where(s + unit * size >= m, size, 0).max(-1, keepdims=True)
    return xp.where(s + unit * (size + reach) >= m, size, 0).max(-1)
