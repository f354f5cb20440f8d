"""The rule that results are held to, row by row, and the forward-error bound behind its floor.

A result may err by twice what the textbook computation in the same low precision errs by, plus one rounding of the
result, plus one rounding (eps) of every sum's terms.  The last is what is left where the textbook is right by luck or
where a softmax is saturated: a score that is a sum of large products is known to eps times the sum of their absolute
values, S_ij, and no algorithm that computes it in that precision knows it better.  To first order, with p the softmax
and S'_i = sum_j p_ij S_ij, where A_ij = |do_i| . |v_j| with dropout's factor, and D_i = sum_j p_ij dp_ij:

    m      S at the maximum                       l      l (1 + S' + S at the maximum)
    p      E = p (1 + S + S')                     o      sum_j E z |v|
    dp     A                                      D      sum_j E A
    ds     E |dp - D| + p (A + dD)                dq     |scale| sum_j (dds + |ds|) |k|, dk likewise
                                                  dv     sum_i E z |do|

all times eps of the sums' precision; and, for 16-bit inputs, times eps of that: p |v| and p |do| (P is rounded before
it is multiplied), |do . o| in D (o was rounded), |ds| |k| and |ds| |q| (so was dS).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuattn.reference import textbook

__all__ = ["Floors", "Verdict", "eps", "floors", "judge"]

FACTOR = 2.0
NAMES = ("o", "l", "m", "dq", "dk", "dv", "dbias")


class Floors(NamedTuple):
    """How far one rounding of every sum's terms moves a result: times eps of the sums, and of 16-bit operands."""

    wide: Any
    short: Any = 0.0


class Verdict(NamedTuple):
    """The worst row of a result."""

    name: str
    share: float  # of what is allowed
    plain: float  # of what twice the textbook's error and one rounding allow
    error: float
    allowed: float


def eps(dtype: Any) -> float:
    """Return the spacing of a dtype at 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def floors(exact: textbook.Solution, q: Any, k: Any, v: Any, do: Any, xp: Any, problem: dict[str, Any]) -> dict:
    """Return the `Floors` of every result; `problem` holds the keyword arguments that `textbook.solve` took."""
    work, lead = np.float64, exact.p.shape[:-2]
    double = q.dtype == np.float64
    unit = eps(np.float64 if double else np.float32)
    grain = float(ml_dtypes.finfo(q.dtype).smallest_subnormal) / eps(q.dtype)  # of short numbers near 0
    columns, value_columns, rows, keys = (min(n, 2 * n**0.5) for n in (q.shape[-1], v.shape[-1], *exact.p.shape[-2:]))
    rows *= max(math.prod(lead), 1) ** 0.5  # of all heads that share a key
    q, k, v, do = (xp.abs(x.astype(work)) for x in (q, k, v, do))
    kh, vh = textbook._repeat(xp, k, lead), textbook._repeat(xp, v, lead)
    scale = abs(problem.get("scale") if problem.get("scale") is not None else q.shape[-1] ** -0.5)
    p, s = exact.p.astype(work), exact.s.astype(work)
    size, slope, bend = _scores(xp, exact, columns * scale * (q @ kh.swapaxes(-1, -2)), problem)
    size = xp.where(s > -np.inf, size, 0)
    mean = (p * size).sum(-1)
    top = _at_maximum(xp, exact, s, size, unit)
    z = 1.0 if problem.get("keep") is None else xp.where(problem["keep"], problem["keep_scale"], 0.0)
    rest = xp.where(s > -np.inf, unit**2, 0)
    moved = p * (1 + size + mean[..., None]) + rest
    short_p = xp.where(s > -np.inf, p + grain, 0)
    found = {
        "m": Floors(top),
        "l": Floors(exact.l.astype(work) * (keys + mean + top)),
        "o": Floors(((moved + keys * p) * z) @ vh, (short_p * z) @ vh),
    }
    if exact.dq is None:
        return found
    dp, ds = exact.dp.astype(work), xp.abs(exact.ds.astype(work))
    a = z * (do @ vh.swapaxes(-1, -2))
    short_delta = p * (do * (xp.abs(exact.o.astype(work)) + grain)).sum(-1)[..., None]
    dlse = problem.get("dlse")
    spread = dp - (p * dp).sum(-1, keepdims=True) + (0.0 if dlse is None else dlse.astype(work)[..., None])
    wide = moved * xp.abs(spread) + p * (value_columns * a + ((moved + keys * p) * a).sum(-1, keepdims=True))
    if dlse is not None:
        wide = wide + p * xp.abs(dlse.astype(work))[..., None]
    wide_raw, short_raw = wide * slope + ds * bend, (short_delta + ds + grain) * slope
    for_keys = (wide_raw + rows * ds * slope, short_raw)
    found["dq"] = Floors(
        *(textbook.sum_to(scale * (x @ kh), q.shape) for x in (wide_raw + keys * ds * slope, short_raw))
    )
    found["dk"] = Floors(*(textbook._sum_heads(scale * (x.swapaxes(-1, -2) @ q), k.shape) for x in for_keys))
    found["dv"] = Floors(
        *(textbook._sum_heads((x * z).swapaxes(-1, -2) @ do, v.shape) for x in (moved + rows * p, short_p))
    )
    if exact.dbias is not None:
        found["dbias"] = Floors(*(textbook.sum_to(x, exact.dbias.shape) for x in (wide + rows * ds, short_delta)))
    return found


def _scores(xp: Any, exact: textbook.Solution, raw: Any, problem: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return S, the slope of the soft cap, and how much that slope moves."""
    slope, bend, size = exact.slope, 0.0, raw
    if problem.get("softcap") is not None:
        slope = exact.slope.astype(np.float64)
        size = slope * raw + problem["softcap"] * xp.sqrt(xp.maximum(1 - slope, 0))
        bend = 2 * (1 + size / problem["softcap"])
    if problem.get("bias") is not None:
        bias = xp.abs(problem["bias"].astype(np.float64))
        size = xp.minimum(size + xp.where(bias < np.inf, bias, 0), 1e150)
    return size, slope, bend


def _at_maximum(xp: Any, exact: textbook.Solution, s: Any, size: Any, unit: float) -> Any:
    """Return the largest S among the scores of a row that may be its maximum."""
    if not s.shape[-1]:
        return xp.zeros(s.shape[:-1])
    m = exact.m.astype(np.float64)[..., None]
    rival = s + unit * size >= m
    reach = xp.where(rival, size, 0).max(-1, keepdims=True)
    return xp.where(s + unit * (size + reach) >= m, size, 0).max(-1)


def judge(name: str, actual: Any, exact: Any, rough: Any, floor: Floors, low: Any, xp: Any) -> Verdict:
    """Hold one result to the rule.

    Parameters
    ----------
    name : str
    actual, exact : array
    rough : array or None
        The textbook's in low precision; None where it rounds what the library does not.
    floor : Floors
    low : dtype
        Of the inputs.
    xp : module

    Returns
    -------
    Verdict
        NaN where `exact` is not NaN is infinitely wrong.
    """
    if not math.prod(actual.shape):
        return Verdict(name, 0.0, 0.0, 0.0, 0.0)
    actual, exact = actual.astype(exact.dtype), exact
    sums, rounding = eps(np.float64 if low == np.float64 else np.float32), eps(low)
    error = _distance(xp, actual, exact)
    strays = 0.0 if rough is None else _distance(xp, rough.astype(exact.dtype), exact)
    finite = xp.where(xp.isfinite(exact), xp.abs(exact), 0) + float(ml_dtypes.finfo(low).smallest_subnormal) / rounding
    short = eps(low) if low.itemsize == 2 else 0.0
    wide = xp.broadcast_to(xp.asarray(floor.wide), actual.shape)
    parts = [error, strays, rounding * finite, sums * wide + short * floor.short]
    if name not in ("l", "m"):
        parts = [xp.broadcast_to(xp.asarray(part), actual.shape).max(-1) for part in parts]
    error, strays, rounding, least = parts
    if rough is not None:
        strays = xp.where(xp.isfinite(strays), strays, 0)
    plain = FACTOR * strays + rounding
    allowed = plain + least
    with np.errstate(all="ignore"):
        shares = [xp.where(error == 0, 0, error / bound) for bound in (allowed, plain)]
    shares = [xp.where(xp.isnan(share), np.inf, share) for share in shares]
    worst = int(shares[0].argmax())
    return Verdict(name, *(float(x.max()) for x in shares), *(float(x.reshape(-1)[worst]) for x in (error, allowed)))


def _distance(xp: Any, x: Any, exact: Any) -> Any:
    with np.errstate(all="ignore"):
        difference = xp.where((x == exact) | xp.isnan(exact), 0, xp.abs(x - exact))
    return xp.where(xp.isnan(difference), np.inf, difference)
