"""Interval arithmetic: what an operation makes of operands that lie between bounds, for all tiles at once.

Bounds are float64 arrays that broadcast (booleans: False and True as bounds).  Integers are exact below 2**53; a bound
beyond that leaves the interval open.  Numbers of the accumulator's type are rounded when they are computed, so that
their bounds are widened by more than any backend's rounding (:func:`widened`): the intervals hold for float32 and
float64, on every device.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

EXACT = 2.0**53  # integers below are numbers of float64
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_RELATIVE, _ABSOLUTE = 2.0**-20, 1e-37


class Interval(NamedTuple):
    """Bounds of a value, per tile.

    Attributes
    ----------
    lo, hi : float64 or bool array
        The least and the greatest value.
    nan : bool
        Whether the value may be NaN in some tile.
    """

    lo: Any
    hi: Any
    nan: bool = False


Rule = Callable[..., Interval]
OPEN = Interval(np.float64(-np.inf), np.float64(np.inf))
EITHER = Interval(np.False_, np.True_)


def point(value: Any) -> Interval:
    """Return the interval of a number, or of an array of numbers that are one per tile."""
    bound = np.asarray(value)
    bound = bound if bound.dtype == bool else bound.astype(np.float64)
    nan = bool(np.isnan(bound).any()) if bound.dtype != bool else False
    return OPEN._replace(nan=True) if nan else Interval(bound, bound)


def _infinite(*operands: Interval) -> bool:
    return any(bool(np.isinf(bound).any()) for x in operands for bound in (x.lo, x.hi))


def _hull(candidates: list[Any], nan: bool) -> Interval:
    """Return the interval around some values; where one is no number, everything."""
    lo, hi = candidates[0], candidates[0]
    for value in candidates[1:]:  # minimum and maximum hand on NaN
        lo, hi = np.minimum(lo, value), np.maximum(hi, value)
    return Interval(np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi), nan)


def widened(x: Interval) -> Interval:
    """Return an interval that also holds what rounding makes of the value."""
    below, above = (np.minimum(np.abs(bound), _FLOAT32_MAX) * _RELATIVE + _ABSOLUTE for bound in x[:2])
    lo, hi = x.lo - below, x.hi + above
    lo, hi = np.where(x.lo >= 0, np.maximum(lo, 0), lo), np.where(x.hi <= 0, np.minimum(hi, 0), hi)  # signs are exact
    lo = np.where(lo > _FLOAT32_MAX, _FLOAT32_MAX, np.where(lo < -_FLOAT32_MAX, -np.inf, lo))
    hi = np.where(hi > _FLOAT32_MAX, np.inf, np.where(hi < -_FLOAT32_MAX, -_FLOAT32_MAX, hi))
    return x._replace(lo=lo, hi=hi)


def whole(x: Interval) -> Interval:
    """Return the interval of an integer, left open where float64 does not hold it."""
    beyond = (x.lo <= -EXACT) | (x.hi >= EXACT)  # the next integer is rounded to that, too
    if not np.any(beyond):
        return x
    return Interval(np.where(beyond, -np.inf, x.lo), np.where(beyond, np.inf, x.hi))


def corners(ufunc: Callable) -> Rule:
    """Return the rule of an operation whose extremes lie at bounds of its two operands."""

    def rule(x: Interval, y: Interval) -> Interval:
        if x is y and ufunc is np.multiply:  # the same value twice
            return square(x)
        nan = x.nan or y.nan or (_infinite(x) and _infinite(y)) or (ufunc is np.multiply and _infinite(x, y))
        return _hull([ufunc(a, b) for a in x[:2] for b in y[:2]], nan)

    return rule


def add(x: Interval, y: Interval) -> Interval:
    """Bound a sum."""
    lo, hi = x.lo + y.lo, x.hi + y.hi
    infinite = _infinite(x) and _infinite(y)
    if infinite:
        lo, hi = np.where(np.isnan(lo), -np.inf, lo), np.where(np.isnan(hi), np.inf, hi)
    return Interval(lo, hi, x.nan or y.nan or infinite)


def negative(x: Interval) -> Interval:
    """Bound the negative."""
    return Interval(-x.hi, -x.lo, x.nan)


def subtract(x: Interval, y: Interval) -> Interval:
    """Bound a difference."""
    return add(x, negative(y))


def _quotient(ufunc: Callable, x: Interval, y: Interval, most: Any, nan: bool = False) -> Interval:
    """Bound a quotient, which has `most` as its size where the divisor may be 0."""
    through = (y.lo <= 0) & (y.hi >= 0)
    found = _hull([ufunc(a, np.where(through, 1, b)) for a in x[:2] for b in y[:2]], False)
    nan = nan and (x.nan or y.nan or bool(np.any(through)) or (_infinite(x) and _infinite(y)))
    return Interval(np.where(through, -most, found.lo), np.where(through, most, found.hi), nan)


def true_divide(x: Interval, y: Interval) -> Interval:
    """Bound a quotient."""
    return _quotient(np.true_divide, x, y, np.inf, nan=True)


def floor_divide(x: Interval, y: Interval) -> Interval:
    """Bound a floored quotient of integers, which is 0 for the divisor 0."""
    return _quotient(np.floor_divide, x, y, np.maximum(np.abs(x.lo), np.abs(x.hi)) + 1)


def remainder(x: Interval, y: Interval) -> Interval:
    """Bound a remainder of integers, of the divisor's sign, 0 for the divisor 0; in one period it moves with x."""
    divisor = np.where((y.lo > 0) & (y.lo == y.hi), y.lo, np.nan)
    first, last = np.floor(x.lo / divisor), np.floor(x.hi / divisor)
    near = (first == last) & np.isfinite(first)
    lo = np.where(near, x.lo - first * divisor, np.minimum(y.lo + 1, 0))
    return Interval(lo, np.where(near, x.hi - last * divisor, np.maximum(y.hi - 1, 0)))


def fmod(x: Interval, y: Interval) -> Interval:
    """Bound a remainder of the dividend's sign."""
    size = np.maximum(np.abs(y.lo), np.abs(y.hi))
    return Interval(np.where(x.lo < 0, -size, 0), np.where(x.hi > 0, size, 0), True)


def increasing(function: Callable, low: float = -np.inf, high: float = np.inf) -> Rule:
    """Return the rule of a function that rises on [low, high] and is NaN elsewhere."""

    def rule(x: Interval) -> Interval:
        nan = x.nan or bool(np.any(x.lo < low)) or bool(np.any(x.hi > high))
        lo, hi = function(np.clip(x.lo, low, high)), function(np.clip(x.hi, low, high))
        return Interval(lo, hi, nan)

    return rule


def decreasing(function: Callable, low: float, high: float) -> Rule:
    """Return the rule of a function that falls on [low, high] and is NaN elsewhere."""
    rising = increasing(function, low, high)

    def rule(x: Interval) -> Interval:
        found = rising(x)
        return Interval(found.hi, found.lo, found.nan)

    return rule


def even(function: Callable) -> Rule:
    """Return the rule of a function of the absolute value that rises with it."""

    def rule(x: Interval) -> Interval:
        a, b = np.abs(x.lo), np.abs(x.hi)
        least = np.where((x.lo <= 0) & (x.hi >= 0), 0.0, np.minimum(a, b))
        return Interval(function(least), function(np.maximum(a, b)), x.nan)

    return rule


absolute, square, multiply = even(np.positive), even(np.square), corners(np.multiply)


def hypot(x: Interval, y: Interval) -> Interval:
    """Bound the length of a vector."""
    return corners(np.hypot)(absolute(x), absolute(y))


def approximated(function: Callable, low: float = -np.inf) -> Rule:
    """Return the rule of a function that rises from `low` on, which kernels of 16-bit problems approximate."""
    rising = increasing(function, low)

    def rule(x: Interval) -> Interval:
        lo, hi, nan = rising(x)
        return Interval(lo - 1e-6, hi + 1e-6, nan)

    return rule


def exp(x: Interval) -> Interval:
    """Bound an exponential, which kernels of 16-bit problems approximate."""
    return Interval(np.exp(x.lo) * (1 - 1e-5), np.exp(x.hi) * (1 + 1e-5), x.nan)


def within(low: float, high: float) -> Rule:
    """Return the rule of a function that is bounded, and NaN perhaps."""

    def rule(*operands: Interval) -> Interval:
        return Interval(np.float64(low), np.float64(high), True)

    return rule


def minimum(x: Interval, y: Interval) -> Interval:
    """Bound a minimum."""
    return Interval(np.minimum(x.lo, y.lo), np.minimum(x.hi, y.hi), x.nan or y.nan)


def maximum(x: Interval, y: Interval) -> Interval:
    """Bound a maximum."""
    return Interval(np.maximum(x.lo, y.lo), np.maximum(x.hi, y.hi), x.nan or y.nan)


def select(c: Interval, x: Interval, y: Interval) -> Interval:
    """Bound a choice: by both where the condition is open."""
    lo, hi = np.minimum(x.lo, y.lo), np.maximum(x.hi, y.hi)
    return Interval(
        np.where(c.lo, x.lo, np.where(c.hi, lo, y.lo)), np.where(c.lo, x.hi, np.where(c.hi, hi, y.hi)), x.nan or y.nan
    )


def compare(surely: Callable, never: Callable) -> Rule:
    """Return the rule of a comparison from what decides it; NaN compares as False."""

    def rule(x: Interval, y: Interval) -> Interval:
        hi = ~never(x, y)
        return Interval(np.zeros_like(hi) if x.nan or y.nan else surely(x, y), hi)

    return rule


less = compare(lambda x, y: x.hi < y.lo, lambda x, y: x.lo >= y.hi)
less_equal = compare(lambda x, y: x.hi <= y.lo, lambda x, y: x.lo > y.hi)
equal = compare(lambda x, y: (x.lo == y.hi) & (x.hi == y.lo), lambda x, y: (x.hi < y.lo) | (x.lo > y.hi))


def logical_not(x: Interval) -> Interval:
    """Bound a negation."""
    return Interval(~x.hi, ~x.lo)


def logical_and(x: Interval, y: Interval) -> Interval:
    """Bound a conjunction."""
    return Interval(x.lo & y.lo, x.hi & y.hi)


def logical_or(x: Interval, y: Interval) -> Interval:
    """Bound a disjunction."""
    return Interval(x.lo | y.lo, x.hi | y.hi)


def logical_xor(x: Interval, y: Interval) -> Interval:
    """Bound an exclusive disjunction."""
    known = (x.lo == x.hi) & (y.lo == y.hi)
    return Interval(known & (x.lo ^ y.lo), ~known | (x.lo ^ y.lo))


def to_float(x: Interval) -> Interval:
    """Return a boolean's or an integer's bounds as a number's."""
    return Interval(np.asarray(x.lo, np.float64), np.asarray(x.hi, np.float64), x.nan)


def to_integer(x: Interval) -> Interval:
    """Bound what is left of a number as an integer of int32; NaN becomes 0."""
    lo, hi = (np.clip(np.trunc(np.asarray(bound, np.float64)), -(2.0**31), 2.0**31 - 1) for bound in x[:2])
    return Interval(np.minimum(lo, 0), np.maximum(hi, 0)) if x.nan else Interval(lo, hi)


def _bits(x: Interval) -> Any:
    """Return a bound 2**k - 1 of integers that are not negative."""
    safe = np.where((x.lo >= 0) & np.isfinite(x.hi), x.hi, 0)
    return np.ldexp(1.0, np.frexp(safe)[1]) - 1


def bitwise_and(x: Interval, y: Interval) -> Interval:
    """Bound the common bits: those of an operand that is not negative bound them."""
    most_x = np.where(x.lo >= 0, x.hi, np.inf)
    most_y = np.where(y.lo >= 0, y.hi, np.inf)
    most = np.minimum(most_x, most_y)
    return Interval(np.where(np.isinf(most) & (x.lo < 0) & (y.lo < 0), -np.inf, 0.0), most)


def bitwise_or(x: Interval, y: Interval) -> Interval:
    """Bound the joint bits, or the differing ones."""
    known = (x.lo >= 0) & (y.lo >= 0) & np.isfinite(x.hi) & np.isfinite(y.hi)
    return Interval(np.where(known, 0.0, -np.inf), np.where(known, np.maximum(_bits(x), _bits(y)), np.inf))


def invert(x: Interval) -> Interval:
    """Bound the inverted bits of an integer, -x - 1."""
    return Interval(-x.hi - 1, -x.lo - 1)


def _shift(move: Callable) -> Rule:
    """Return the rule of a shift; by fewer than 0 or more than 63 bits it leaves 0, or -1."""

    def rule(x: Interval, y: Interval) -> Interval:
        found = _hull([move(a, np.exp2(np.clip(b, 0, 64))) for a in x[:2] for b in y[:2]], False)
        odd = (y.lo < 0) | (y.hi > 63)
        lo, hi = np.minimum(found.lo, -1), np.maximum(found.hi, 0)
        return Interval(np.where(odd, lo, found.lo), np.where(odd, hi, found.hi))

    return rule


left_shift, right_shift = _shift(np.multiply), _shift(np.floor_divide)


def isnan(x: Interval) -> Interval:
    """Bound the question for NaN."""
    return Interval(np.False_, np.bool_(x.nan))


def anything(*operands: Interval) -> Interval:
    """Bound a number of which nothing is known."""
    return OPEN._replace(nan=True)


def either(*operands: Interval) -> Interval:
    """Bound a boolean of which nothing is known."""
    return EITHER
