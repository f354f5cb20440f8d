"""The one acceptance rule of the tests: design rule, error <= 2 x textbook error + one rounding.

Nothing else in the test suite holds a numeric tolerance.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

FACTOR = 2.0  # the textbook's own error may be exceeded by this factor


def eps(dtype) -> float:
    """Spacing of `dtype` at 1."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).eps)


def max_error(actual, exact) -> float:
    """Largest absolute difference; equal infinities and NaNs in the same place differ by 0."""
    actual, exact = np.asarray(actual).astype(np.longdouble), np.asarray(exact).astype(np.longdouble)
    if actual.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        difference = np.abs(actual - exact)
    same = (actual == exact) | (np.isnan(actual) & np.isnan(exact))
    difference = np.where(same, 0, difference)
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def textbook_error(textbook, exact) -> float:
    """Error of the textbook; of several evaluations (a list), the largest."""
    return max(max_error(each, exact) for each in (textbook if isinstance(textbook, list) else [textbook]))


def bound(exact, textbook, dtype, magnitude=None) -> float:
    """The largest error that the rule allows: FACTOR x the textbook's error + one rounding of the largest value.

    With a `magnitude` (sums of absolute values), one rounding of the largest sum's terms is added, in the precision
    of the sums: float32, or float64 for float64.
    """
    allowed = FACTOR * textbook_error(textbook, exact) + eps(dtype) * _largest(exact)
    if magnitude is not None:
        allowed += eps(np.float64 if np.dtype(dtype) == np.float64 else np.float32) * _largest(magnitude)
    return allowed


def _largest(x) -> float:
    finite = np.abs(np.asarray(x).astype(np.longdouble))
    finite = finite[np.isfinite(finite)]
    return float(finite.max()) if finite.size else 0.0


def assert_close(actual, exact, textbook, *, dtype=None, magnitude=None, name="result") -> None:
    """Assert that `actual` is as close to `exact` as the rule asks of something computed in `dtype`.

    `exact` is the oracle's value, `textbook` the same computation rounded to the input's precision at each step (a
    list: in several equivalent orders), and `dtype` the precision of the one rounding (default: actual's own).
    `magnitude` is for problems so small that the textbook may be right by luck: see the oracle's functions.
    """
    actual = np.asarray(actual)
    assert actual.shape == np.shape(exact), f"{name} has shape {actual.shape}; the oracle {np.shape(exact)}"
    error, allowed = max_error(actual, exact), bound(exact, textbook, dtype or actual.dtype, magnitude)
    known = textbook_error(textbook, exact)
    assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g} (textbook {known:.3g})"
