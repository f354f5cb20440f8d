"""Functions of the distance between two points: what they are on the host, along scores, and in kernels.

With ``w = weight |x - y|^2 / bandwidth^2`` each is a function k(w) that falls from 1 at w = 0.  Where it is evaluated
it takes ``z = base w``, whose factor makes its exponentials ones of base 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import BASE_2

_LOG2_E = math.log2(math.e)


class KernelFunction(NamedTuple):
    """One function of the distance.

    Attributes
    ----------
    number : int
        Its place in ``pairwise::Function`` (kernels/pairwise/functions.cuh).
    weight, base : float
        The factors above.
    evaluate : callable
        ``evaluate(-z, slopes, bounded)`` returns k and, if `slopes`, -dk/dw, on the host, in place of -z.  If it is
        `bounded`, no power of 2 is out of range.
    score : callable or None
        log k of the score s = -w, as :mod:`cuattn.tracing` takes it; None where it is s.
    sharp : bool
        Whether k has a slope at distance 0.
    """

    number: int
    weight: float
    base: float
    evaluate: Callable[[ndarray, bool, bool], tuple[ndarray, ndarray | None]]
    score: Callable[..., Any] | None = None
    sharp: bool = False


def power_of_2(x: ndarray, bounded: bool) -> ndarray:
    """Replace numbers, at most 0, by powers of 2, of which those that are no normal numbers become 0; return the array.

    `bounded` ones are known to be no such.
    """
    lowest = least(x.dtype)
    if not bounded:
        x.clip(lowest, np.inf, out=x)  # what is less is slow
    if BASE_2:
        np.exp2(x, x)
    else:
        np.exp(np.multiply(x, 1 / _LOG2_E, x), x)
    return x if bounded else np.subtract(x, x.dtype.type(2.0**lowest), x)


@lru_cache
def least(dtype: np.dtype) -> int:
    """Return an exponent of 2 with which a number is normal, and quick to compute."""
    return np.finfo(dtype).minexp + 2


def _gaussian(s: ndarray, slopes: bool, bounded: bool) -> tuple[ndarray, ndarray | None]:
    k = power_of_2(s, bounded)
    return k, k


def _cauchy(s: ndarray, slopes: bool, bounded: bool) -> tuple[ndarray, ndarray | None]:
    k = np.reciprocal(np.subtract(1, s, s), s)
    return k, k * k if slopes else None


def _of_distance(values: Callable, derivative: Callable) -> Callable:
    """Return what evaluates a function of the distance t = sqrt(w), given exp(-t)."""

    def evaluate(s: ndarray, slopes: bool, bounded: bool) -> tuple[ndarray, ndarray | None]:
        t = np.sqrt(np.abs(s, s), s)
        e = power_of_2(-t, bounded)
        t *= s.dtype.type(1 / _LOG2_E)
        slope = derivative(t, e) if slopes else None
        return values(t, e), slope

    return evaluate


def _laplacian_slope(t: ndarray, e: ndarray) -> ndarray:
    return np.divide(e, 2 * t, out=np.zeros_like(t), where=t > 0)


def _root(s: Any) -> Any:
    return np.sqrt(np.where(s < 0, -s, 0.0))


FUNCTIONS = {
    "gaussian": KernelFunction(0, 0.5, _LOG2_E, _gaussian),
    "laplacian": KernelFunction(
        1,
        1.0,
        _LOG2_E**2,
        _of_distance(lambda t, e: e, _laplacian_slope),
        lambda s, b, h, i, j: -_root(s),
        sharp=True,
    ),
    "cauchy": KernelFunction(2, 1.0, 1.0, _cauchy, lambda s, b, h, i, j: -np.log1p(np.maximum(-s, 0.0))),
    "matern32": KernelFunction(
        3,
        3.0,
        _LOG2_E**2,
        _of_distance(lambda t, e: (1 + t) * e, lambda t, e: e / 2),
        lambda s, b, h, i, j: np.log1p(_root(s)) - _root(s),
    ),
    "matern52": KernelFunction(
        4,
        5.0,
        _LOG2_E**2,
        _of_distance(lambda t, e: (1 + t * (1 + t / 3)) * e, lambda t, e: (1 + t) * e / 6),
        lambda s, b, h, i, j: np.log1p(_root(s) + np.maximum(-s, 0.0) / 3) - _root(s),
    ),
}
