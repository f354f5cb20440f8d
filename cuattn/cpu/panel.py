"""A thread's own copy of keys and values: in the precision of the sums, aligned, safe to multiply with.

The copy is what makes the products fast and simple.  Rows start cache lines; keys end with a column of ones, so
that one product subtracts a number of each row's own from all its scores; the last tile is padded with zeros; and
where a key is invisible to all rows, so that nothing may depend on what it holds, it becomes zero (0 * NaN in the
product of probabilities and values would be NaN).
"""

from __future__ import annotations

import math

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.heads import Head, pick, place
from cuattn.cpu.tiles import Tiles
from cuattn.problem import Operands, Problem

__all__ = ["Panel"]


class Panel:
    """Keys and values of a range of key tiles, loaded as the tiles are asked for.

    Attributes
    ----------
    keys : ndarray, (tiles, blocks.keys, head_dim + 1)
        Keys and a one.
    values : ndarray, (tiles, blocks.keys, head_dim_v or, with `ones`, head_dim_v + 1)
        Values and, with `ones`, a one.
    reach : float
        The most by which a product with a key here can exceed the largest element of the other factor.
    """

    def __init__(
        self, problem: Problem, operands: Operands, blocks: Blocks, tiles: Tiles, buffers: Buffers, *, ones: bool
    ) -> None:
        self._operands, self._blocks, self._tiles = operands, blocks, tiles
        self._n_keys = problem.n_keys
        self._length = blocks.panel * blocks.keys
        self._head: Head | None = None
        self._first = 0
        self._loaded: tuple | None = None
        self._poisoned = False
        self.reach = 0.0
        self.keys = buffers.new(blocks.panel, blocks.keys, problem.head_dim + 1)
        self.values = buffers.new(blocks.panel, blocks.keys, problem.head_dim_v + ones)

    def seek(self, head: Head, tile: int) -> int:
        """Make the keys and values of a tile and of its whole chunk present; return the first tile that is here."""
        first = tile - tile % self._blocks.panel
        if head is not self._head or first != self._first:
            wanted = (place(self._operands.k, head.kv), place(self._operands.v, head.kv), first)
            if wanted != self._loaded or self._poisoned:  # which keys are dead is a matter of the query head
                self._load(head, first)
                self._loaded = wanted
            self._head, self._first = head, first
        return first

    def _load(self, head: Head, first: int) -> None:
        start = first * self._blocks.keys
        stop = min(start + self._length, self._n_keys)
        for source, panel in ((self._operands.k, self.keys), (self._operands.v, self.values)):
            flat, width = self._flat(panel), source.shape[-1]
            flat[: stop - start, :width] = pick(source, head.kv)[start:stop]
            flat[: stop - start, width:] = 1
            flat[stop - start :] = 0
        keys, values = self._flat(self.keys)[:, :-1], self.values.reshape(-1)
        self.reach = math.sqrt(np.maximum.reduce(np.einsum("ij,ij->i", keys, keys)) * keys.shape[1])
        # Not finite where something is NaN, infinite or huge; of those, the last is only slow.
        self._poisoned = not math.isfinite(self.reach + np.dot(values, values))
        if self._poisoned:
            dead = np.flatnonzero(self._tiles.dead_keys(head)[start:stop])
            for panel in (self.keys, self.values):
                self._flat(panel)[dead] = 0

    def _flat(self, panel: np.ndarray) -> np.ndarray:
        return panel.reshape(self._length, panel.shape[-1])
