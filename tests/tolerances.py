"""The one acceptance rule: error <= 2 x the textbook's error in the same precision + one rounding.

Nothing else in the test suite holds a numeric tolerance.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["Verdict", "assert_close", "assert_same", "bound", "eps", "judge", "max_error", "roundings"]

FACTOR = 2.0  # the textbook's own error may be exceeded by this factor


class Verdict(NamedTuple):
    """The worst row of a result: its error, what the rule allows, and their ratio."""

    share: float
    error: float
    allowed: float
    plain: float  # the largest ratio without a floor


def eps(dtype, smallest=False) -> float:
    """Spacing of `dtype` at 1, or its smallest positive number."""
    found = ml_dtypes.finfo(np.dtype(dtype))
    return float(found.smallest_subnormal if smallest else found.eps)


def roundings(terms: int) -> float:
    """Return how many roundings of a sum's precision a sum is known to: 2 sqrt(n), as if they were random, n at most.

    Equal terms that are added up one by one round one way as long as the sum keeps its exponent: BLAS's sums of n equal
    numbers are up to n / 8 off, which the textbook's are not where its weights happen to be short.
    """
    return min(terms, 2 * terms**0.5)


def max_error(actual, exact) -> float:
    """Largest absolute difference; equal infinities and NaNs in the same place differ by 0."""
    actual, exact = np.asarray(actual).astype(np.longdouble), np.asarray(exact).astype(np.longdouble)
    return float(_distance(np, actual, exact).max(initial=0))


def assert_same(results, others) -> None:
    """Assert that results are equal, number by number, and None where the others are."""
    for one, other in zip(results, others, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)


def bound(exact, textbook, dtype, magnitude=0.0) -> float:
    """The largest error that the rule allows: FACTOR x the textbook's error + one rounding of the largest value.

    A `magnitude`, the size of a sum's terms, adds one rounding of it in the sums' precision.
    """
    finite = np.abs(np.asarray(exact).astype(np.longdouble))
    rounding = eps(dtype) * float(finite[np.isfinite(finite)].max(initial=0))
    return FACTOR * max_error(textbook, exact) + rounding + eps(_sums(dtype)) * magnitude


def assert_close(actual, exact, textbook, *, dtype=None, magnitude=0.0, floor=None, name="result") -> None:
    """Assert that `actual` is as close to `exact` as the rule asks of something computed in `dtype`.

    `exact` is the oracle's value, `textbook` the same computation rounded to the input's precision at each step, and
    `dtype` the precision of the one rounding (default: actual's own).  With a `floor`, from the oracle, every row is
    held to the rule by itself.
    """
    actual, dtype = np.asarray(actual), dtype or actual.dtype
    assert actual.shape == np.shape(exact), f"{name} has shape {actual.shape}; the oracle {np.shape(exact)}"
    known = max_error(textbook, exact)
    if floor is None:
        error, allowed = max_error(actual, exact), bound(exact, textbook, dtype, magnitude)
    else:
        _, error, allowed, _ = judge(name, actual, exact, textbook, floor, np.dtype(dtype))
    assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g} (textbook {known:.3g})"


def judge(name: str, actual: Any, exact: Any, textbook: Any, floor: Any, dtype: np.dtype) -> Verdict:
    """Hold every row of a result to the rule: NumPy or CuPy arrays.

    A row is so small that the textbook may be right by luck; what is allowed has a floor, see `oracle.floors`.  l and m
    of 16-bit inputs are numbers of float32 and held to what is possible there.  `dtype` is the inputs'.
    """
    if not actual.size:
        return Verdict(0.0, 0.0, 0.0, 0.0)
    xp = np if isinstance(actual, np.ndarray) else sys.modules["cupy"]
    sums = eps(_sums(dtype))
    statistic = name in ("l", "m")
    strays = 0.0 if statistic else _distance(xp, textbook.astype(exact.dtype), exact)
    rounded = max(dtype, actual.dtype, key=eps)
    unit, smallest = (sums, 0.0) if statistic else (eps(rounded), eps(rounded, smallest=True))
    rounding = unit * xp.where(xp.isfinite(exact), xp.abs(exact), 0) + smallest
    least = sums * floor.wide + (eps(dtype) if eps(dtype) > sums else 0.0) * floor.short
    most = (1 - 2 * eps(actual.dtype)) * float(ml_dtypes.finfo(actual.dtype).max)
    wide = actual.astype(exact.dtype)
    overflows = xp.isinf(wide) & (xp.abs(exact) > most) & ((wide > 0) == (exact > 0))  # no such number in that dtype
    error = xp.where(overflows, 0, _distance(xp, wide, exact))
    parts = [xp.broadcast_to(xp.asarray(x), actual.shape) for x in (error, strays, rounding, least)]
    error, strays, rounding, least = parts if statistic else [x.max(-1) for x in parts]
    plain = FACTOR * xp.where(xp.isfinite(strays), strays, 0) + rounding
    share = _ratio(xp, error, plain + least)
    worst = int(share.argmax())
    at_worst = [float(x.reshape(-1)[worst]) for x in (share, error, plain + least)]
    return Verdict(*at_worst, float(_ratio(xp, error, plain).max()))


def _sums(dtype):
    return np.float64 if np.dtype(dtype) == np.float64 else np.float32


def _ratio(xp, error, allowed):
    with np.errstate(all="ignore"):
        share = xp.where(error == 0, 0, error / allowed)
    return xp.where(xp.isnan(share), np.inf, share)


def _distance(xp, x, exact):
    with np.errstate(all="ignore"):
        difference = xp.abs(x - exact)
        if np.isfinite(difference).all():
            return difference
        difference = xp.where((x == exact) | (xp.isnan(x) & xp.isnan(exact)), 0, difference)
    return xp.where(xp.isnan(difference), np.inf, difference)
