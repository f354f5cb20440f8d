"""What row tiles see: the tiles to visit, and what hides elements of them.

Elements are (keys, rows), as scores are.  A key that does not exist, at the end of the last key tile, is hidden.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu.blocks import Blocks
from cuattn.masks.intervals import FULL, PARTIAL, bit_lines
from cuattn.problem import Problem

_STRIP = 16  # row tiles whose states are computed at once
MASK_BYTES = 1 << 23  # of element masks, remembered for the same heads
_PATTERNS = 1 << 10  # partial tiles in a strip; where there are more they are likely to differ
_REMEMBERED = 1 << 12  # strips


Shown = Callable[[], tuple[slice, ndarray]]
"""Returns what a tile shows, as bits (keys, rows), and of which keys these are; all others hide nothing."""


class Run(NamedTuple):
    """Neighbouring key tiles."""

    first: int
    slots: slice  # theirs, among those of the part
    keys: slice  # that exist


class Part(NamedTuple):
    """The key tiles of a step that a row tile sees; they are taken at once, side by side."""

    index: int  # of the step
    count: int
    runs: list[Run]
    masks: list[tuple[int, Shown]]  # of partial tiles, by slot


class Visibility:
    """The visibility of a whole problem, by tile."""

    def __init__(self, problem: Problem, masks: Sequence[Any], blocks: Blocks) -> None:
        self._problem, self._masks, self._blocks = problem, masks, blocks
        self._strips: dict[Hashable, list[tuple[Part, ...]]] = {}
        self._tile_masks: dict[Hashable, Shown] = {}
        self._dtype = np.dtype(f"u{problem.stat_dtype.itemsize}")
        self._most = MASK_BYTES // (blocks.rows * blocks.keys * self._dtype.itemsize)  # masks that are remembered

    def parts(self, head: tuple[int, ...], row_tile: int) -> tuple[Part, ...]:
        """Return what a row tile of a head, an index into (*batch, heads), sees."""
        instances = tuple([mask.instance(head) for mask in self._masks])
        strip, row = divmod(row_tile if self._masks else 0, _STRIP)
        key = (instances, strip)
        if key not in self._strips:
            if len(self._strips) >= _REMEMBERED:
                self._strips.clear()
            self._strips[key] = self._strip(instances, strip * _STRIP)
        return self._strips[key][row]

    def _strip(self, instances: tuple, start: int) -> list[tuple[Part, ...]]:
        """Return what the row tiles of a strip see."""
        blocks = self._blocks
        stop = min(start + _STRIP, blocks.row_tiles)
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
            tuple(
                [
                    self._part(
                        index, tiles, [(n, hidden[row, tile]) for n, tile in enumerate(tiles) if (row, tile) in hidden]
                    )
                    for index, tiles in by_step.items()
                ]
            )
            for row, by_step in enumerate(steps)
        ]

    def _hidden(self, instances: tuple, states: ndarray, start: int) -> dict[tuple[int, int], Shown]:
        """Return what partial tiles of a strip show, by row and key tile; along a diagonal one looks like another."""
        blocks, found = self._blocks, {}
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
                n_keys = self._problem.n_keys
                make = partial(_tile_mask, self._masks, blocks, n_keys, self._dtype, instances, row + start, tile)
                if len(self._tile_masks) < self._most:
                    make = self._tile_masks[key] = cache(make)
            found[row, tile] = make
        return found

    def _part(self, index: int, tiles: list[int], masks: list[tuple[int, Shown]]) -> Part:
        """Return the part of a step with these tiles."""
        runs, size = [], self._blocks.keys
        for _, run in groupby(enumerate(tiles), lambda pair: pair[1] - pair[0]):
            pairs = list(run)
            (slot, first), (last_slot, last) = pairs[0], pairs[-1]
            keys = slice(first * size, min((last + 1) * size, self._problem.n_keys))
            runs.append(Run(first, slice(slot, last_slot + 1), keys))
        return Part(index, len(tiles), runs, masks)


def _tile_mask(
    masks: Sequence[Any], blocks: Blocks, n_keys: int, dtype: np.dtype, instances: tuple, row_tile: int, tile: int
) -> tuple[slice, ndarray]:
    """Return what a tile shows; no method, so that what remembers it does not hold itself."""
    ramp = bit_lines(blocks.rows, dtype)
    there = min(blocks.keys, n_keys - tile * blocks.keys)
    full = np.zeros((blocks.keys, blocks.rows), ramp.dtype)
    full[:there] = ramp[-1]
    for mask, instance in zip(masks, instances, strict=True):
        full[:there] &= mask.shown(instance, blocks.rows, blocks.keys, row_tile, tile, ramp)[:there]
    touched = np.flatnonzero(~np.bitwise_and.reduce(full, 1))
    keys = slice(touched[0], touched[-1] + 1) if len(touched) else slice(0)
    return keys, full[keys]
