"""The exponential that the CPU backend uses, and the unit that its scores are in.

Softmax may use any base: scores that are multiplied by ``log2(e)`` beforehand (folded into q, at no cost) need
``exp2`` instead of ``exp``.  NumPy's ``exp2`` takes half the time of ``exp`` where it is vectorised (AVX-512), and
several times as long where it is not; so the base is chosen once, by what this NumPy and processor offer.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["UNIT", "exponential", "from_units", "lowest", "to_units"]


def _exp2_is_vectorised() -> bool:
    try:
        from numpy.lib.introspect import opt_func_info

        targets = opt_func_info(func_name="^exp2$", signature="float(32|64)").get("exp2", {})
    except (ImportError, AttributeError):  # older NumPy: stay with exp, which is vectorised nearly everywhere
        return False
    return bool(targets) and all(not target["current"].startswith("baseline") for target in targets.values())


_BASE_2 = _exp2_is_vectorised()

_EXACT_UNIT = 1 / np.log(np.longdouble(2)) if _BASE_2 else np.longdouble(1)

UNIT = float(_EXACT_UNIT)
"""What natural scores are multiplied by; ``exponential(UNIT * x) == exp(x)``."""

exponential: np.ufunc = np.exp2 if _BASE_2 else np.exp
"""``exp2`` or ``exp``."""


def lowest(dtype: np.dtype) -> float:
    """Return a score whose exponential is next to nothing and still a normal number.

    Below it vectorised exponentials leave their fast path: a subnormal result may take a hundred times as long.
    """
    return math.ceil(math.log(np.finfo(dtype).tiny) * UNIT) + 1.0


def to_units(natural: np.ndarray) -> np.ndarray:
    """Return natural scores in units of UNIT, in a precision beyond their own."""
    if natural.dtype == np.float32:
        return natural.astype(np.float64) * UNIT
    return natural * _EXACT_UNIT


def from_units(scores: np.ndarray) -> np.ndarray:
    """Return scores in units of UNIT as natural ones, in their own precision, rounded once."""
    high = scores.astype(np.float64) / UNIT if scores.dtype == np.float32 else scores / _EXACT_UNIT
    return high.astype(scores.dtype)
