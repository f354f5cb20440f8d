"""What row tiles see: the tiles to visit, and what hides elements of them.

Elements are (keys, rows), as scores are.  A key that does not exist, at the end of the last key tile, is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.masks.intervals import FULL, PARTIAL, bit_lines
from cuattn.problem import Problem

__all__ = ["MASK_BYTES", "Part", "TileMask", "Visibility"]

_STRIP = 16  # row tiles whose states are computed at once
MASK_BYTES = 1 << 23  # of element masks, remembered for the same heads
_PATTERNS = 1 << 10  # partial tiles in a strip; where there are more they are likely to differ
_REMEMBERED = 1 << 12  # strips


class TileMask:
    """What hides elements of a partial tile, as bit patterns: selecting by them is faster than by booleans.

    Being bitwise, it is a selection: what a hidden element holds, NaN or not, is gone.

    Parameters
    ----------
    shown : ndarray, (keys, rows), unsigned
        Of each element all bits, or none where it is hidden.
    """

    def __init__(self, shown: np.ndarray) -> None:
        self._shown = shown

    def zero(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile, (..., keys, rows), to 0."""
        bits = tile.view(self._shown.dtype)
        np.bitwise_and(bits, self._shown, bits)

    def fill(self, tile: np.ndarray, value: float) -> None:
        """Set the hidden elements of a tile to a number."""
        self.zero(tile)
        bits = tile.view(self._shown.dtype)
        np.bitwise_or(bits, ~self._shown & np.array(value, tile.dtype).view(self._shown.dtype), bits)


class Run(NamedTuple):
    """Neighbouring key tiles."""

    first: int
    slots: slice  # theirs, among those of the part
    keys: slice  # that exist


class Part(NamedTuple):
    """The key tiles of a step that a row tile sees; they are taken at once, side by side."""

    index: int  # of the step
    count: int
    runs: tuple[Run, ...]
    masks: tuple[tuple[int, Callable[[], TileMask]], ...]  # what hides elements, by slot


class Visibility:
    """The visibility of a whole problem, by tile."""

    def __init__(self, problem: Problem, masks: Sequence[Any], blocks: Blocks) -> None:
        self._problem, self._masks, self._blocks = problem, masks, blocks
        self._strips: dict[Hashable, list[tuple[Part, ...]]] = {}
        self._tile_masks: dict[Hashable, Callable[[], TileMask]] = {}
        self._dtype = np.dtype(f"u{problem.stat_dtype.itemsize}")

    @property
    def mask_bytes(self) -> int:
        """How much memory the element masks take at most that are remembered."""
        return len(self._tile_masks) * self._blocks.rows * self._blocks.keys * self._dtype.itemsize

    def parts(self, head: tuple[int, ...], row_tile: int) -> tuple[Part, ...]:
        """Return what a row tile of a head, an index into (*batch, heads), sees."""
        instances = tuple([mask.instance(head) for mask in self._masks])
        strip, row = divmod(row_tile, _STRIP) if self._masks else (0, 0)
        found = self._strips.get((strip, instances))
        if found is None:
            if len(self._strips) >= _REMEMBERED:
                self._strips.clear()
            found = self._strips[strip, instances] = self._strip(instances, strip * _STRIP)
        return found[row]

    def _strip(self, instances: tuple, start: int) -> list[tuple[Part, ...]]:
        """Return what the row tiles of a strip see."""
        blocks = self._blocks
        stop = min(start + _STRIP, blocks.row_tiles) if self._masks else start + 1
        states = np.full((stop - start, blocks.key_tiles), FULL, np.int8)
        for mask, instance in zip(self._masks, instances, strict=True):
            np.minimum(states, mask.states(instance, blocks.rows, blocks.keys, start, stop), out=states)
        if self._problem.n_keys % blocks.keys:
            np.minimum(states[:, -1], PARTIAL, out=states[:, -1])
        hidden = self._hidden(instances, states, start)
        steps: list[dict[int, list[int]]] = [{} for _ in states]
        for row, tile in zip(*(index.tolist() for index in np.nonzero(states)), strict=True):
            steps[row].setdefault(tile // blocks.step, []).append(tile)
        return [
            tuple([self._part(index, tiles, of_row) for index, tiles in by_step.items()])
            for by_step, of_row in zip(steps, hidden, strict=True)
        ]

    def _hidden(self, instances: tuple, states: np.ndarray, start: int) -> list[dict[int, Callable[[], TileMask]]]:
        """Return, by row tile of a strip, what hides elements of its partial tiles; some along a diagonal are alike."""
        blocks = self._blocks
        found: list[dict[int, Callable[[], TileMask]]] = [{} for _ in states]
        rows, tiles = np.nonzero(states == PARTIAL)
        patterns: list = [None]
        if 0 < len(rows) <= _PATTERNS:
            patterns = [
                mask.patterns(instance, blocks.rows, blocks.keys, rows + start, tiles)
                for mask, instance in zip(self._masks, instances, strict=True)
            ]
        if None in patterns:
            patterns = [((rows + start) * blocks.key_tiles + tiles).tolist()]
        for row, tile, *pattern in zip(rows.tolist(), tiles.tolist(), *patterns, strict=True):
            key = (*pattern, instances, tile == blocks.key_tiles - 1)
            make = self._tile_masks.get(key)
            if make is None:
                make = partial(self._tile_mask, instances, row + start, tile)
                if not self.is_full:
                    make = self._tile_masks[key] = cache(make)
            found[row][tile] = make
        return found

    @property
    def is_full(self) -> bool:
        """Whether no more element masks are remembered: each is made anew when it is needed."""
        return self.mask_bytes >= MASK_BYTES

    def _tile_mask(self, instances: tuple, row_tile: int, tile: int) -> TileMask:
        blocks = self._blocks
        ramp = bit_lines(blocks.rows, self._dtype)
        there = min(blocks.keys, self._problem.n_keys - tile * blocks.keys)
        full = np.zeros((blocks.keys, blocks.rows), ramp.dtype)
        full[:there] = ramp[-1]
        for mask, instance in zip(self._masks, instances, strict=True):
            full[:there] &= mask.shown(instance, blocks.rows, blocks.keys, row_tile, tile, ramp)[:there]
        return TileMask(full)

    def _part(self, index: int, tiles: list[int], hidden: dict[int, Callable[[], TileMask]]) -> Part:
        """Return the part of a step with these tiles."""
        runs, size = [], self._blocks.keys
        for _, run in groupby(enumerate(tiles), lambda pair: pair[1] - pair[0]):
            (slot, first), *_, (last_slot, last) = list(run) * 2
            keys = slice(first * size, min((last + 1) * size, self._problem.n_keys))
            runs.append(Run(first, slice(slot, last_slot + 1), keys))
        masks = [(slot, hidden[tile]) for slot, tile in enumerate(tiles) if tile in hidden]
        return Part(index, len(tiles), tuple(runs), tuple(masks))
