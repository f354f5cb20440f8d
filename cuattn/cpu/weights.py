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
    empty : bool ndarray or None
        Rows that see nothing; None if there are none.
    reference : ndarray or None
        What scores are relative to; None for 0 throughout.
    weight : ndarray
        What makes probabilities of exponentials; it multiplies do, and so everything that probabilities meet.
    delta : ndarray
        The weighted D of algorithm 4, line 19, less dlse.
    """

    def __init__(self, rows: Mapping[str, np.ndarray]) -> None:
        do, o, l, m = (rows[name] for name in ("do", "o", "l", "m"))
        self.empty = self.reference = None
        below = l
        if not np.abs(m).max() <= WINDOW:  # as where a row is empty
            empty, reference = l == 0, np.where(np.abs(m) > WINDOW, m, 0)
            reference[empty] = 0
            m, below = np.where(empty, 0, m - reference), np.where(empty, 1, l)
            self.empty = empty if empty.any() else None
            self.reference = reference if reference.any() else None
        self.weight = 1 / (below * exponential(m))
        self.delta = np.add.reduce(np.multiply(do, o, dtype=l.dtype), axis=-1)
        if "dlse" in rows:
            self.delta -= rows["dlse"]
        self.delta *= self.weight
        if self.empty is not None:
            self.weight[self.empty] = self.delta[self.empty] = 0

    def weigh(self, do: np.ndarray, dropout_scale: float, out: np.ndarray) -> None:
        """Write the weighted do, (..., rows, width); rows that see nothing become 0, whatever they hold."""
        factors = self.weight * self.weight.dtype.type(dropout_scale)
        np.multiply(do, factors[..., None], out=out, dtype=out.dtype, casting="unsafe")
        if self.empty is not None:
            out[self.empty] = 0
