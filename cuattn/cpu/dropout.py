"""The keep decisions of :mod:`cuattn.rng`, for parts of a problem that stands anywhere in a whole."""

import math

import numpy as np
from numpy import ndarray

from cuattn import rng
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Place, Problem


class Dropout:
    """Which elements stay, by head and range of rows and keys; ranges start at multiples of 16."""

    def __init__(self, problem: Problem, place: Place, state: rng.RNGState) -> None:
        self._problem, self._place, self._state = problem, place, state
        self._rows, self._keys = (
            first + rng.BLOCK * np.arange(cdiv(length, rng.BLOCK)) if blocks is None else blocks
            for first, length, blocks in (
                (place.row, problem.n_queries, place.row_blocks),
                (place.key, problem.n_keys, place.key_blocks),
            )
        )

    def kept(self, batch: tuple[int, ...], head: int, rows: slice, keys: slice) -> ndarray:
        """Return which elements of a head stay, bool (rows, keys)."""
        flat = np.arange(math.prod(self._problem.batch)).reshape(self._problem.batch)[batch]
        b = (self._place.batch + int(flat)) * self._place.heads + self._place.head + head
        of_rows = self._rows[rows.start // rng.BLOCK : cdiv(rows.stop, rng.BLOCK)]
        of_keys = self._keys[keys.start // rng.BLOCK : cdiv(keys.stop, rng.BLOCK)]
        kept = rng.keep_blocks(self._state, self._problem.dropout, b, of_rows, of_keys)
        return kept[: rows.stop - rows.start, : keys.stop - keys.start]
