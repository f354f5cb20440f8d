"""Dropout of a chunk of probabilities."""

from __future__ import annotations

import numpy as np

from cuattn import rng
from cuattn.cpu.blocks import Blocks
from cuattn.cpu.heads import Head
from cuattn.cpu.views import Chunk, Part
from cuattn.problem import Operands, Problem

__all__ = ["Dropout"]


class Dropout:
    """The keep decisions of :mod:`cuattn.rng`, by chunk."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks) -> None:
        self._problem, self._state, self._blocks = problem, operands.rng, blocks
        self._first_batch_head = problem.origin.batch * (problem.origin.heads or problem.heads) + problem.origin.head

    def dropped(self, chunk: Chunk | Part, head: Head, row_tile: int) -> list[tuple[slice, np.ndarray]]:
        """Return the dropped elements of a chunk: the slots of each run, and which of them, (keys, rows)."""
        problem, origin, size = self._problem, self._problem.origin, self._blocks
        batch, local = divmod(head.index, problem.heads)
        b = self._first_batch_head + batch * (origin.heads or problem.heads) + local
        row = row_tile * size.rows
        rows = min(size.rows, problem.n_queries - row)
        result = []
        for tile, slot, count in chunk.runs:
            key = tile * size.keys
            keys = min(count * size.keys, problem.n_keys - key)
            kept = rng.keep(
                self._state,
                problem.dropout,
                b,
                (origin.row + row, origin.row + row + rows),
                (origin.key + key, origin.key + key + keys),
            )
            result.append((slice(slot, slot + count), ~kept.T))
        return result

    @staticmethod
    def zero(array: np.ndarray, dropped: list[tuple[slice, np.ndarray]]) -> None:
        """Set the dropped elements of an array, (1, chunk.count, keys, rows), to 0."""
        for slots, which in dropped:
            keys, rows = which.shape
            np.copyto(array[0, slots].reshape(-1, array.shape[-1])[:keys, :rows], 0, where=which)
