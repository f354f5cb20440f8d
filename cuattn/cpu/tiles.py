"""What row tiles see: the tiles to visit, and what hides elements of them.

Elements are (keys, rows), as scores are.  A key that does not exist, at the end of the last key tile, is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.io_model.sizes import cdiv
from cuattn.masks.intervals import PARTIAL, bit_lines
from cuattn.problem import Problem

__all__ = ["MASK_BYTES", "Part", "RowGroup", "TileMask", "Visibility"]

_STRIP = 16  # row tiles whose states are computed at once
MASK_BYTES = 1 << 23  # of element masks, remembered for the same heads
_PATTERNS = 1 << 10  # partial tiles in a strip; where there are more they are likely to differ
_REMEMBERED = 1 << 12  # strips, and parts of groups of row tiles: some 2 MB each


class TileMask:
    """What hides elements of a partial tile, as bit patterns: selecting by them is faster than by booleans.

    Being bitwise, it is a selection: what a hidden element holds, NaN or not, is gone.

    Parameters
    ----------
    shown : ndarray, (keys, rows), unsigned
        Of each element all bits, or none where it is hidden.
    dtype : numpy.dtype
        Of the tiles, of as many bits.
    """

    def __init__(self, shown: np.ndarray, dtype: np.dtype) -> None:
        touched = np.flatnonzero(~np.bitwise_and.reduce(shown, axis=1))  # all other keys hide nothing
        self._keys = slice(touched[0], touched[-1] + 1) if len(touched) else slice(0, 0)
        self._shown, self._dtype = shown[self._keys], dtype
        self._filling: tuple[float, np.ndarray] = (math.nan, shown)

    def zero(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile, (..., keys, rows), to 0."""
        bits = tile[..., self._keys, :].view(self._shown.dtype)
        np.bitwise_and(bits, self._shown, bits)

    def fill(self, tile: np.ndarray, value: float) -> None:
        """Set the hidden elements of a tile to a number."""
        filled, filling = self._filling
        if filled != value:
            filling = np.bitwise_and(~self._shown, np.array(value, self._dtype).view(self._shown.dtype))
            self._filling = value, filling
        bits = tile[..., self._keys, :].view(self._shown.dtype)
        np.bitwise_and(bits, self._shown, bits)
        np.bitwise_or(bits, filling, bits)


class LazyTileMask:
    """A tile mask that is made by the thread that needs it; should two need it at once, both make the same."""

    def __init__(self, make: Callable[[], TileMask], *, keep: bool) -> None:
        self._make, self._keep = make, keep
        self._made: TileMask | None = None

    def __call__(self) -> TileMask:
        """Return the mask, of which only those that are kept are remembered."""
        made = self._made or self._make()
        if self._keep:
            self._made = made
        return made


class Part(NamedTuple):
    """Some of the key tiles that a group of row tiles sees; they are taken at once, side by side."""

    index: int  # of the step that they lie in, if parts are kept to steps
    count: int
    runs: tuple[tuple[int, int, int], ...]  # (first tile, its slot among those of the part, tiles) of neighbours
    masks: tuple[tuple[int, int, LazyTileMask], ...]  # (row tile in the group, slot, what hides elements)


class RowGroup(NamedTuple):
    """Neighbouring row tiles that see the same tiles."""

    start: int  # the first, in its stack
    count: int
    packed: tuple[Part, ...]  # as few as there is room for, of about equal sizes
    steps: tuple[Part, ...]  # by steps of the key tiles: what is visible does not move their bounds


class _View(NamedTuple):
    """What a row tile sees."""

    runs: tuple[tuple[int, int], ...]  # (first tile, tiles) of neighbours
    partial: dict[int, LazyTileMask]  # by tile


class Visibility:
    """The visibility of a whole problem, by tile."""

    def __init__(self, problem: Problem, masks: Sequence[Any], blocks: Blocks) -> None:
        self._problem, self._masks, self._blocks = problem, masks, blocks
        self._strips: dict[Hashable, list[_View]] = {}
        self._groups: dict[Hashable, tuple[RowGroup, ...]] = {}
        self._tile_masks: dict[Hashable, LazyTileMask] = {}
        self._mask_bytes = blocks.rows * blocks.keys * problem.stat_dtype.itemsize

    @property
    def mask_bytes(self) -> int:
        """How much memory the element masks take at most that are remembered."""
        return len(self._tile_masks) * self._mask_bytes

    @property
    def is_full(self) -> bool:
        """Whether no more element masks are remembered."""
        return self.mask_bytes + self._mask_bytes > MASK_BYTES

    def groups(self, head: tuple[int, ...], start: int, stop: int) -> tuple[RowGroup, ...]:
        """Return what some row tiles of a head see, grouped by those that see the same."""
        instances = tuple([mask.instance(head) for mask in self._masks])
        key = (start if self._masks else stop - start, instances)
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) >= _REMEMBERED:
                self._groups.clear()
            views = [self._view(instances, t) for t in range(start, stop)]
            found = self._groups[key] = tuple(self._group(views))
        return found

    def _view(self, instances: tuple, row_tile: int) -> _View:
        blocks = self._blocks
        strip, row = divmod(row_tile, _STRIP)
        if not self._masks:
            strip, row = 0, 0
        views = self._strips.get((strip, instances))
        if views is None:
            if len(self._strips) >= _REMEMBERED:
                self._strips.clear()
            start, stop = strip * _STRIP, min((strip + 1) * _STRIP, blocks.row_tiles)
            states = np.full((stop - start if self._masks else 1, blocks.key_tiles), PARTIAL + 1, np.int8)
            for mask, instance in zip(self._masks, instances, strict=True):
                np.minimum(states, mask.states(instance, blocks.rows, blocks.keys, start, stop), out=states)
            if self._problem.n_keys % blocks.keys:
                np.minimum(states[:, -1], PARTIAL, out=states[:, -1])
            views = self._strips[strip, instances] = self._views(instances, states, start)
        return views[row]

    def _views(self, instances: tuple, states: np.ndarray, start: int) -> list[_View]:
        """Return what the row tiles of a strip see, given the states of their tiles."""
        runs: list[list[tuple[int, int]]] = [[] for _ in states]
        edges = np.zeros((len(states), states.shape[1] + 2), bool)
        edges[:, 1:-1] = states
        rows, ends = np.nonzero(edges[:, 1:] != edges[:, :-1])  # of a run the first tile, and the one after it
        for row, first, last in zip(rows[::2].tolist(), ends[::2].tolist(), ends[1::2].tolist(), strict=True):
            runs[row].append((first, last - first))
        partial = self._partial(instances, states, start)
        return [_View(tuple(of_row), of_tiles) for of_row, of_tiles in zip(runs, partial, strict=True)]

    def _partial(self, instances: tuple, states: np.ndarray, start: int) -> list[dict[int, LazyTileMask]]:
        """Return, for each row tile of a strip, its partial tiles; along a diagonal one looks like another."""
        blocks = self._blocks
        found: list[dict[int, LazyTileMask]] = [{} for _ in states]
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
            known = self._tile_masks.get(key)
            if known is None:
                make = partial(self._tile_mask, instances, row + start, tile)
                known = LazyTileMask(make, keep=not self.is_full)
                if not self.is_full:
                    self._tile_masks[key] = known
            found[row][tile] = known
        return found

    def _tile_mask(self, instances: tuple, row_tile: int, tile: int) -> TileMask:
        blocks = self._blocks
        ramp = bit_lines(blocks.rows, np.dtype(f"u{self._problem.stat_dtype.itemsize}"))
        there = min(blocks.keys, self._problem.n_keys - tile * blocks.keys)
        full = np.zeros((blocks.keys, blocks.rows), ramp.dtype)
        full[:there] = ramp[-1]
        for mask, instance in zip(self._masks, instances, strict=True):
            full[:there] &= mask.shown(instance, blocks.rows, blocks.keys, row_tile, tile, ramp)[:there]
        return TileMask(full, self._problem.stat_dtype)

    def _group(self, views: list[_View]) -> list[RowGroup]:
        result, start, blocks = [], 0, self._blocks
        while start < len(views):
            stop = start + 1
            while stop < min(len(views), start + blocks.abreast) and views[stop].runs == views[start].runs:
                stop += 1
            together = views[start:stop]
            steps = _cut(views[start].runs, blocks.step)
            tiles = sum(count for _, count in views[start].runs)
            most = max(1, blocks.room // (blocks.heads * len(together)))
            packed = _pack(views[start].runs, tiles, cdiv(tiles, most))
            result.append(RowGroup(start, stop - start, *(tuple(_parts(cut, together)) for cut in (packed, steps))))
            start = stop
        return result


Cut = tuple[int, list[tuple[int, int, int]]]


def _cut(runs: tuple[tuple[int, int], ...], step: int) -> list[Cut]:
    """Cut runs of tiles at the multiples of `step`."""
    by_step: dict[int, list[tuple[int, int, int]]] = {}
    for tile, left in runs:
        while left:
            count = min(left, step - tile % step)
            cut = by_step.setdefault(tile // step, [])
            cut.append((tile, cut[-1][1] + cut[-1][2] if cut else 0, count))
            tile, left = tile + count, left - count
    return list(by_step.items())


def _pack(runs: tuple[tuple[int, int], ...], tiles: int, number: int) -> list[Cut]:
    """Split runs of tiles into parts of about equal sizes."""
    left = list(runs[::-1])
    packed = []
    for index in range(number):
        taken: list[tuple[int, int, int]] = []
        slot, room = 0, (tiles + index) // number
        while slot < room:
            tile, rest = left.pop()
            count = min(rest, room - slot)
            taken.append((tile, slot, count))
            slot += count
            if count < rest:
                left.append((tile + count, rest - count))
        packed.append((index, taken))
    return packed


def _parts(cuts: list[Cut], views: list[_View]) -> list[Part]:
    return [
        Part(
            index,
            runs[-1][1] + runs[-1][2],
            tuple(runs),
            tuple(
                (row, slot + n, view.partial[tile + n])
                for row, view in enumerate(views)
                if view.partial
                for tile, slot, count in runs
                for n in range(count)
                if tile + n in view.partial
            ),
        )
        for index, runs in cuts
    ]
