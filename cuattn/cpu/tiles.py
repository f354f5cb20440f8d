"""What row tiles see: the tiles to visit, and what hides elements of them.

Elements are (keys, rows), as scores are.  A key that does not exist, at the end of the last key tile, is hidden.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import visible_bits
from cuattn.cpu.blocks import Blocks
from cuattn.masks.intervals import FULL, PARTIAL
from cuattn.problem import Problem

_STRIP = 16  # row tiles whose states are computed at once
MASK_BYTES = 1 << 23  # of element masks, remembered for tiles that look alike, or for heads under the same mask
_TOGETHER = 16  # tiles side by side whose element masks are made at once
_PATTERNS = 1 << 10  # partial tiles in a strip; where there are more they are likely to differ
_REMEMBERED = 1 << 12  # strips


Shown = Callable[[], tuple[slice, ndarray]]
"""Returns what tiles show, as bits ([tiles,] keys, rows), and of which keys these are; all others hide nothing."""


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
    masks: list[tuple[slice, Shown]]  # of partial tiles, by slots


class Visibility:
    """The visibility of a whole problem, by tile.

    Parameters
    ----------
    problem : Problem
    masks : sequence of Mask
    blocks : Blocks
    again : bool
        Whether heads under a mask that others have been asked for will follow.
    """

    def __init__(self, problem: Problem, masks: Sequence[Any], blocks: Blocks, *, again: bool) -> None:
        self._problem, self._masks, self._blocks = problem, masks, blocks
        self._strips: dict[Hashable, list[tuple[Part, ...]]] = {}
        self._tile_masks: dict[Hashable, Shown] = {}
        self._dtype, self._again = np.dtype(f"u{problem.stat_dtype.itemsize}"), again
        self._room = MASK_BYTES // (blocks.rows * blocks.keys * self._dtype.itemsize)  # for tiles to remember

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
        stop = min(start + (_STRIP if self._masks else 1), blocks.row_tiles)
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
            tuple([self._part(index, tiles, hidden[row]) for index, tiles in by_step.items()])
            for row, by_step in enumerate(steps)
        ]

    def _hidden(self, instances: tuple, states: ndarray, start: int) -> list[dict[int, tuple[int, Shown]]]:
        """Return, by row and key tile of a strip, how many partial tiles begin there and what they show.

        Along a diagonal one tile looks like another; tiles of which that is not known are taken side by side.
        """
        blocks, found = self._blocks, [{} for _ in states]
        rows, tiles = np.nonzero(states == PARTIAL)
        patterns: list[Any] = [None]
        if len(rows) <= _PATTERNS:
            patterns = [
                mask.patterns(instance, blocks.rows, blocks.keys, rows + start, tiles)
                for mask, instance in zip(self._masks, instances, strict=True)
            ]
        first, again = np.arange(len(rows)), True
        if None in patterns or 2 * len({*zip(*patterns, strict=True)}) > len(rows):
            places = rows * blocks.key_tiles + tiles
            first = np.flatnonzero((np.diff(places, prepend=-2) != 1) | (tiles % blocks.step % _TOGETHER == 0))
            patterns, again = [(places[first] + start * blocks.key_tiles).tolist()], self._again
        elements = _Elements(self._problem, self._masks, blocks, self._dtype, instances)
        counts = np.diff(first, append=len(rows))
        where = (index.tolist() for index in (rows[first], tiles[first], counts))
        for row, tile, count, *pattern in zip(*where, *patterns, strict=True):
            key = (*pattern, instances, tile == blocks.key_tiles - 1)
            shown = self._tile_masks.get(key)
            if shown is None:
                shown = partial(elements.shown, row + start, tile, count)
                if again and count <= self._room:
                    self._room -= count
                    shown = self._tile_masks[key] = cache(shown)
            found[row][tile] = (count, shown)
        return found

    def _part(self, index: int, tiles: list[int], hidden: dict[int, tuple[int, Shown]]) -> Part:
        """Return the part of a step with these tiles."""
        runs, size = [], self._blocks.keys
        for _, run in groupby(enumerate(tiles), lambda pair: pair[1] - pair[0]):
            pairs = list(run)
            (slot, first), (last_slot, last) = pairs[0], pairs[-1]
            keys = slice(first * size, min((last + 1) * size, self._problem.n_keys))
            runs.append(Run(first, slice(slot, last_slot + 1), keys))
        begin = [(slot, *hidden[tile]) for slot, tile in enumerate(tiles) if tile in hidden]
        return Part(index, len(tiles), runs, [(slice(slot, slot + count), shown) for slot, count, shown in begin])


class _Elements(NamedTuple):
    """What makes element masks; no methods of `Visibility`, so that what remembers them does not hold itself."""

    problem: Problem
    masks: Sequence[Any]
    blocks: Blocks
    dtype: np.dtype  # of bits
    instances: tuple

    def shown(self, row_tile: int, tile: int, count: int) -> tuple[slice, ndarray]:
        """Return what neighbouring tiles show; of a single one the keys alone that some row does not see."""
        blocks, problem = self.blocks, self.problem
        row, key, size = row_tile * blocks.rows, tile * blocks.keys, count * blocks.keys
        rows, keys = slice(row, min(row + blocks.rows, problem.n_queries)), slice(key, min(key + size, problem.n_keys))
        hidden = [mask.hidden(instance, rows, keys) for mask, instance in zip(self.masks, self.instances, strict=True)]
        bits = visible_bits(hidden, (keys.stop - key, rows.stop - row), self.dtype)
        if bits.shape != (size, blocks.rows):  # keys that do not exist are hidden, rows that do not see the others
            there, bits = bits, np.zeros((size, blocks.rows), self.dtype)
            bits[: len(there)] = np.iinfo(self.dtype).max
            bits[: len(there), : there.shape[1]] = there
        touched = np.flatnonzero(~np.bitwise_and.reduce(bits, 1)) if count == 1 else range(size)
        hidden = slice(touched[0], touched[-1] + 1) if len(touched) else slice(0)
        return hidden, bits.reshape(count, blocks.keys, blocks.rows)[:, hidden]
