"""Exponentials: base 2 where NumPy vectorises that, which takes half the time of base e.

A product of queries and keys is a natural score.  Exponentials are relative to a reference per row: 0, as long as the
row's highest score is within WINDOW of it, else a score near the highest.  Which it is follows from the row's own
scores alone, so its bits depend neither on tiles nor on neighbours.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["BASE_2", "WINDOW", "exponential", "exponentiate", "longest", "lowest", "relative"]

# Exponentials are within 2^-32 .. 2^32 of each row's reference.  float32 has 2^-126 .. 2^128: a row of 2^24 keys sums
# to 2^56, and its output stays below the largest number with values up to 2^71; values down to 2^-70 keep all bits.
WINDOW = 22.0


def _exp2_is_vectorised() -> bool:
    try:
        from numpy.lib.introspect import opt_func_info

        targets = opt_func_info(func_name="^exp2$", signature="float(32|64)").get("exp2", {})
    except (ImportError, AttributeError):  # older NumPy: stay with exp, which is vectorised nearly everywhere
        return False
    return bool(targets) and all(not target["current"].startswith("baseline") for target in targets.values())


BASE_2 = _exp2_is_vectorised()
_LOG2_E = float(1 / np.log(np.longdouble(2)))


def exponential(s: np.ndarray) -> np.ndarray:
    """Return exp of an array, with the bits of :func:`exponentiate`."""
    return exponentiate(np.array(s, ndmin=1)).reshape(np.shape(s))


def exponentiate(s: np.ndarray) -> np.ndarray:
    """Replace numbers by their exponentials, and return the array."""
    if not BASE_2:
        return np.exp(s, s)
    np.multiply(s, _LOG2_E, s)
    return np.exp2(s, s)


def lowest(dtype: np.dtype) -> float:
    """Return a number whose exponential is next to nothing and still a normal number; smaller results are slow."""
    return math.ceil(math.log(np.finfo(dtype).tiny)) + 1.0


def relative(s: np.ndarray) -> np.ndarray:
    """Replace scores of any size, relative to their references, by exponentials; 0 for the lowest and for -inf."""
    floor = lowest(s.dtype)
    np.maximum(s, floor, out=s)  # what is less may be subnormal, or is -inf: both are slow
    exponentiate(s)
    # Takes nothing from a weight that counts: it is less than half a unit in the last place of 2^-100.
    return np.subtract(s, exponential(np.full(16, floor, s.dtype))[0], out=s)


def longest(squares: np.ndarray, terms: int) -> float:
    """Return the length of the longest of some vectors, given their sums of `terms` squares; or a little more.

    What rounding may have taken from the sums, and underflow from the squares, is made up for.
    """
    return math.sqrt(1.001 * float(np.maximum.reduce(squares, None)) + terms * float(np.finfo(squares.dtype).tiny))
