"""What the backward makes of the forward's results before it meets a key."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cuattn.cpu.exponent import WINDOW, exponential

__all__ = ["RowWeights"]


class RowWeights:
    """What the backward needs to know of rows, from the forward's results, (..., rows) each.

    Attributes
    ----------
    empty : bool ndarray
        Rows that see nothing.
    reference : ndarray
        What scores are relative to.
    weight : ndarray
        1 over what makes exponentials of probabilities; it multiplies do, and so everything that probabilities meet.
    delta : ndarray
        The weighted D of algorithm 4, line 19, less dlse.
    """

    def __init__(self, rows: Mapping[str, np.ndarray]) -> None:
        do, o, l, m = (rows[name] for name in ("do", "o", "l", "m"))
        self.empty = l == 0
        self.reference = np.where(self.empty | (np.abs(m) <= WINDOW), 0, m)
        relative_to = np.where(self.empty, 0, m - self.reference)
        self.weight = np.where(self.empty, 0, 1 / (l * exponential(relative_to)))
        self.delta = np.add.reduce(np.multiply(do, o, dtype=l.dtype), axis=-1)
        if "dlse" in rows:
            self.delta -= rows["dlse"]
        self.delta *= self.weight
        self.delta[self.empty] = 0

    def weigh(self, do: np.ndarray, dropout_scale: float, out: np.ndarray) -> None:
        """Write the weighted do, (..., rows, width); rows that see nothing become 0, whatever they hold."""
        factors = self.weight * self.weight.dtype.type(dropout_scale)
        np.multiply(do, factors[..., None], out=out, dtype=out.dtype, casting="unsafe")
        if self.empty.any():
            out[self.empty] = 0
