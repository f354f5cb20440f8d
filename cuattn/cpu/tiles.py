"""Which tiles of the attention matrix to visit, and which of their elements are hidden.

Everything here is by row tile and key tile of one :class:`~cuattn.cpu.blocks.Blocks`.  Element masks are made
transposed, (keys, rows), as the scores are.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.heads import Head, pick
from cuattn.cpu.sources import bit_lines, sources, tile_of
from cuattn.cpu.views import Group, Veil, View, groups
from cuattn.masks.intervals import PARTIAL
from cuattn.problem import Operands, Problem

__all__ = ["PARTS", "VEIL_BYTES", "Tiles"]

_STRIP = 16  # row tiles whose states are computed at once
VEIL_BYTES = 1 << 24  # of element masks, remembered for the same heads
_PATTERNS = 1 << 10  # partial tiles in a strip; where there are more they are likely to differ
_STRIPS = 64  # strips that are remembered, for the heads that share a mask
PARTS = 1 << 12  # parts of groups that are, some 2 MB


class Tiles:
    """The visibility of a whole problem, by tile."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks) -> None:
        self._problem, self._bias, self._blocks = problem, operands.bias, blocks
        self._sources = sources(problem, operands.mask, blocks)
        self._everything = View(((0, blocks.key_tiles),), {}, blocks, problem.n_keys)
        self._instances: dict[int, tuple] = {}  # of heads: what tells their masks apart
        self._strips: dict[tuple, list[View]] = {}
        self._groups: dict[tuple, list[Group]] = {}
        self._parts = 0  # of these
        self._veils: dict[tuple, Veil] = {}
        self._veils_left = VEIL_BYTES // (2 * blocks.rows * blocks.keys * problem.stat_dtype.itemsize)

    def view(self, head: Head, row_tile: int) -> View:
        """Return what a row tile sees."""
        if not self._sources:
            return self._everything
        strip, row = divmod(row_tile, _STRIP)
        key = (strip, *self._instance(head))
        views = self._strips.get(key)
        if views is None:
            if len(self._strips) >= _STRIPS:
                self._strips.clear()
            start, stop = strip * _STRIP, min((strip + 1) * _STRIP, self._blocks.row_tiles)
            states = self._sources[0].states(head, start, stop)
            for source in self._sources[1:]:
                states = np.minimum(states, source.states(head, start, stop))
            views = self._strips[key] = self._views(head, states, start)
        return views[row]

    def groups(self, head: Head, row_tile: int, stop: int, most: int) -> list[Group]:
        """Return what some row tiles see, grouped by up to `most` that see the same tiles."""
        key = (row_tile, *self._instance(head)) if self._sources else (stop - row_tile,)
        found = self._groups.get(key)
        if found is None:
            views = [self.view(head, t) for t in range(row_tile, stop)]
            found = groups(views, most, self._blocks)
            parts = sum(len(group.parts) for group in found)
            if self._parts + parts > PARTS:
                self._groups.clear()
                self._parts = 0
            self._groups[key] = found
            self._parts += parts
        return found

    def _views(self, head: Head, states: np.ndarray, start: int) -> list[View]:
        """Return what the row tiles of a strip see, given the states of their tiles."""
        runs: list[list[tuple[int, int]]] = [[] for _ in states]
        edges = np.zeros((len(states), states.shape[1] + 2), bool)
        edges[:, 1:-1] = states
        row_tiles, ends = np.nonzero(edges[:, 1:] != edges[:, :-1])  # of a run the first tile, and the one after it
        for row, first, last in zip(row_tiles[::2].tolist(), ends[::2].tolist(), ends[1::2].tolist(), strict=True):
            runs[row].append((first, last - first))
        common = self._blocks, self._problem.n_keys
        return [
            View(tuple(of_row), partial, *common)
            for of_row, partial in zip(runs, self._partial(head, states, start), strict=True)
        ]

    def _instance(self, head: Head) -> tuple:
        instance = self._instances.get(head.index)
        if instance is None:
            instance = self._instances[head.index] = tuple(source.instance(head) for source in self._sources)
        return instance

    def veil(self, head: Head, row_tile: int, key_tile: int, rows: int, known: Veil | None) -> Veil:
        """Return what a partial tile of `rows` rows hides; keys that do not exist, too, but no rows that do not.

        `known` is what its row tile's view has of it, which is right if all rows exist.
        """
        if known is not None and rows == self._blocks.rows:
            return known
        key = (row_tile, key_tile, *self._instance(head))
        return self._veils.get(key) or self._make_veil(key, head, row_tile, key_tile, rows)

    def _make_veil(self, key: tuple, head: Head, row_tile: int, key_tile: int, rows: int) -> Veil:
        veil = Veil(partial(self._shown, head, row_tile, key_tile, rows), self._problem.stat_dtype)
        if self._veils_left:
            self._veils[key] = veil
            self._veils_left -= 1
        return veil

    def _partial(self, head: Head, states: np.ndarray, start: int) -> list[dict[int, Veil | None]]:
        """Return, for each row tile of a strip, its partial tiles, with their veils as far as they are easy to find.

        Along a diagonal one tile looks like another, so few are made.
        """
        found: list[dict[int, Veil | None]] = [{} for _ in states]
        row_tiles, key_tiles = np.nonzero(states == PARTIAL)
        patterns = [None]
        if 0 < len(row_tiles) <= _PATTERNS:
            patterns = [source.patterns(head, row_tiles + start, key_tiles) for source in self._sources]
        if None in patterns:
            patterns = []
        for row, tile, *key in zip(row_tiles.tolist(), key_tiles.tolist(), *patterns, strict=True):
            veil = None
            if key:
                veil = self._veils.get(tuple(key))
                if veil is None and self._veils_left:
                    veil = self._make_veil(tuple(key), head, row + start, tile, self._blocks.rows)
            found[row][tile] = veil
        return found

    def _shown(self, head: Head, row_tile: int, key_tile: int, rows: int) -> np.ndarray:
        """Return the bits of a veil, (blocks.keys, rows)."""
        ramp = bit_lines(rows, np.dtype(f"u{self._problem.stat_dtype.itemsize}"))
        shown = self._sources[0].shown(head, row_tile, key_tile, ramp)
        for source in self._sources[1:]:
            shown = shown & source.shown(head, row_tile, key_tile, ramp)
        keys = min(self._blocks.keys, self._problem.n_keys - key_tile * self._blocks.keys)
        if shown.shape[0] == self._blocks.keys:
            return shown
        full = np.zeros((self._blocks.keys, rows), shown.dtype)
        full[:keys] = shown
        return full

    def hidden(self, head: Head, row_tile: int, key_tile: int) -> np.ndarray:
        """Return the hidden elements of a partial tile, bool, (keys, rows) or broadcastable; without padding."""
        result = self._sources[0].hidden(head, row_tile, key_tile)
        for source in self._sources[1:]:
            result = result | source.hidden(head, row_tile, key_tile)
        return result

    def dead_keys(self, head: Head) -> np.ndarray:
        """Return which keys no row of a head sees, bool (n_keys,); visits every visible tile.

        A bias of -inf hides.
        """
        size = self._blocks
        seen = np.zeros(self._problem.n_keys, bool)
        bias = None if self._bias is None else pick(self._bias, head.query)
        for row_tile in range(size.row_tiles):
            view = self.view(head, row_tile)
            for tile in (first + n for first, count in view.runs for n in range(count)):
                keys = slice(tile * size.keys, (tile + 1) * size.keys)
                hidden = self.hidden(head, row_tile, tile) if tile in view.partial else np.zeros((1, 1), bool)
                if bias is not None:
                    hidden = hidden | np.equal(tile_of(bias, size, row_tile, tile).T, -np.inf)
                seen[keys] |= ~hidden.all(axis=1)
        return ~seen
