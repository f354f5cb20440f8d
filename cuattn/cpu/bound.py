"""How large scores may become before exponentials need a maximum to be relative to.

Cauchy and Schwarz bound a score by the lengths of its query and its key.  Where that bound is below :data:`WINDOW`,
softmax needs no maximum: the exponentials are relative to 0, as those of the online softmax would be.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["WINDOW", "longest"]

# In units of exponent.UNIT, so exponentials are within 2^-32 .. 2^32 (with base e, where it is used, 2^-47 .. 2^47).
# float32 has 2^-126 .. 2^128: a row of 2^24 keys sums to 2^56 (2^71), and its output stays below the largest number
# with values up to 2^71 (2^56).  A row's largest exponential is 2^-32 (2^-47) at least, so values down to 2^-70
# (2^-55) keep all their bits in the products.  Standard normal q and k of up to 256 dimensions have shorter scores.
WINDOW = 32.0


def longest(squares: np.ndarray, terms: int) -> float:
    """Return the length of the longest of some vectors, given their sums of `terms` squares; or a little more.

    What rounding may have taken from the sums, and underflow from the squares, is made up for.
    """
    return math.sqrt(1.001 * float(np.maximum.reduce(squares, None)) + terms * float(np.finfo(squares.dtype).tiny))
