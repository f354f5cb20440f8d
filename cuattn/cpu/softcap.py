"""The soft cap of scores, cap * tanh(s / cap), and what derivatives become on their way through it."""

import numpy as np
from numpy import ndarray

from cuattn.cpu.buffers import Buffers


class Softcap:
    """The soft cap as one thread has it, of the scores that it capped last; NaN is hidden, if derivatives there are 0.

    Parameters
    ----------
    cap : float
    buffers : Buffers
        With room for "tanh" and, if tangents go through the cap, "slope".
    """

    def __init__(self, cap: float, buffers: Buffers) -> None:
        self._cap, self._buffers = cap, buffers

    def __call__(self, s: ndarray) -> None:
        """Cap scores, which were divided by the cap."""
        self._tanh, self._bend = np.tanh(s, self._buffers.get("tanh", *s.shape)), None
        np.multiply(self._tanh, self._cap, s)

    def move(self, t: ndarray) -> None:
        """Turn tangents of the products that go into the cap into those of scores."""
        self._slope, self._bend = self._slope_in(self._buffers.get("slope", *t.shape)), self._tanh
        t *= self._slope
        self._bend *= t  # becomes the tangent of the slope
        self._bend *= -2

    def _slope_in(self, slope: ndarray) -> ndarray:
        """Return the derivative of scores by the products that went into the cap, in an array, which may be tanh."""
        np.multiply(self._tanh, self._tanh, slope)
        np.subtract(1, slope, slope)
        slope *= self._cap
        return slope

    def differentiate(self, ds: ndarray, tds: ndarray | None = None, *, careful: bool) -> None:
        """Turn derivatives by scores, and their tangents, into those by the products; once for each capping."""
        slope, bend = self._slope_in(self._tanh) if self._bend is None else self._slope, self._bend
        if careful:
            for factor in (slope,) if bend is None else (slope, bend):
                factor[np.isnan(factor)] = 0  # where ds is 0, as what is hidden, or NaN
        if tds is not None:
            tds *= slope
            if bend is not None:
                tds += np.multiply(bend, ds, bend)
        ds *= slope
