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
from cuattn.cpu.bound import longest
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.heads import Head, Team, pick, place
from cuattn.cpu.tiles import Tiles
from cuattn.problem import Operands, Problem

__all__ = ["Panel"]


class Panel:
    """Keys and values of a range of key tiles, for a team of heads, loaded as the tiles are asked for.

    Attributes
    ----------
    keys : ndarray, (heads, tiles, blocks.keys, head_dim + 1)
        Keys and a one.  Heads that read the same keys and values have one copy.
    values : ndarray, (heads, tiles, blocks.keys, head_dim_v + counts)
        Values and, with `counts`, a one among zeros; its place goes round from key to key.
    reach : float
        The length of the longest key, or a little more.
    """

    def __init__(
        self, problem: Problem, operands: Operands, blocks: Blocks, tiles: Tiles, buffers: Buffers, *, counts: int
    ) -> None:
        self._operands, self._blocks, self._tiles = operands, blocks, tiles
        self._n_keys = problem.n_keys
        self._team: Team | None = None
        self._first = 0
        self._loaded: tuple | None = None
        self._poisoned = False
        self.reach = 0.0
        copies = 1 if problem.group > 1 else blocks.team
        self.keys = buffers.new(copies, blocks.panel, blocks.keys, problem.head_dim + 1)
        self.values = buffers.new(copies, blocks.panel, blocks.keys, problem.head_dim_v + counts)

    def seek(self, team: Team, tile: int) -> None:
        """Make the keys and values of a tile, and of its whole chunk, present at tile % blocks.panel."""
        first = tile - tile % self._blocks.panel
        if team is not self._team or first != self._first:
            heads = team.heads[:1] if team.alike else team.heads
            where = [(place(self._operands.k, head.kv), place(self._operands.v, head.kv)) for head in heads]
            if self._poisoned or self._loaded != (where, first):  # which keys are dead is a matter of the query head
                self._load(heads, first)
                self._loaded = where, first
            self._team, self._first = team, first

    def run(self, heads: int, tile: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the keys and values of some neighbouring tiles are for a team of `heads`, once they are here."""
        place = tile % self._blocks.panel
        where = slice(0, min(heads, len(self.keys))), slice(place, place + count)
        return self.keys[where], self.values[where]

    def _load(self, heads: tuple[Head, ...], first: int) -> None:
        start = first * self._blocks.keys
        stop = min(start + self._blocks.panel * self._blocks.keys, self._n_keys)
        self.reach = total = 0.0
        for n, head in enumerate(heads):
            keys, values = self._copy(n, head, start, stop)
            self.reach = np.maximum(self.reach, longest(np.einsum("ij,ij->i", keys, keys), keys.shape[1]))
            total += np.dot(values, values)
        # Not finite where something is NaN, infinite or huge; of those, the last is only slow.
        self._poisoned = not math.isfinite(self.reach + total)
        if self._poisoned:
            for n, head in enumerate(heads):
                dead = np.flatnonzero(self._tiles.dead_keys(head)[start:stop])
                for panel in (self.keys, self.values):
                    _flat(panel[n])[dead] = 0

    def _copy(self, n: int, head: Head, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy the keys and values of a head; return them without ones, the values as one vector."""
        for source, panel in ((self._operands.k, self.keys), (self._operands.v, self.values)):
            flat, width = _flat(panel[n]), source.shape[-1]
            flat[: stop - start, :width] = pick(source, head.kv)[start:stop]
            flat[: stop - start, width:] = 0
            counts = panel.shape[-1] - width
            for turn in range(counts):
                flat[turn : stop - start : counts, width + turn] = 1
            flat[stop - start :] = 0
        return _flat(self.keys[n])[:, :-1], self.values[n].reshape(self.values[n].size)


def _flat(panel: np.ndarray) -> np.ndarray:
    tiles, keys, width = panel.shape
    return panel.reshape(tiles * keys, width)
