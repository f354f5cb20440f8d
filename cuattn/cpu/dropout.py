"""The keep decisions of :mod:`cuattn.rng`, for parts of a problem that stands anywhere in a whole."""

from __future__ import annotations

import numpy as np

from cuattn import rng
from cuattn.problem import Problem

__all__ = ["Dropout"]

_BLOCK = 16  # rows or keys of the generator's blocks; parts are made of whole ones


class Dropout:
    """Which elements stay, by head and range of rows and keys; ranges start at multiples of 16."""

    def __init__(self, problem: Problem, place, state: rng.RNGState) -> None:
        self._problem, self._place, self._state = problem, place, state
        self._rows, self._keys = (
            first + _BLOCK * np.arange((length + _BLOCK - 1) // _BLOCK) if blocks is None else blocks
            for first, length, blocks in (
                (place.row, problem.n_queries, place.row_blocks),
                (place.key, problem.n_keys, place.key_blocks),
            )
        )

    def kept(self, batch: tuple[int, ...], head: int, rows: slice, keys: slice) -> np.ndarray:
        """Return which elements of a head stay, bool (rows, keys)."""
        place = self._place
        flat = int(np.ravel_multi_index(batch, self._problem.batch)) if batch else 0
        b = (place.batch + flat) * place.heads + place.head + head
        blocks = (
            of[part.start // _BLOCK : -(-part.stop // _BLOCK)] for of, part in ((self._rows, rows), (self._keys, keys))
        )
        kept = rng.keep_blocks(self._state, self._problem.dropout, b, *blocks)
        return kept[: rows.stop - rows.start, : keys.stop - keys.start]
