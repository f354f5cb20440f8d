"""What row tiles see, in the forms in which passes take it.

A row tile that may need a look at its scores goes through its tiles by chunks, which have fixed places.  Where no look
is needed, neighbouring row tiles that see the same tiles form a group, and go through them together, in equal parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks

__all__ = ["Chunk", "Group", "Part", "Veil", "View", "groups"]


class Veil:
    """What a partial tile hides, as bit patterns: selecting by them is several times as fast as by booleans.

    Being bitwise, it is a selection: what a hidden element holds, NaN or not, is gone.  The patterns are made when they
    are needed first, by the thread that needs them; should two need them at once, both make the same.
    """

    def __init__(self, make: Callable[[], np.ndarray], dtype: np.dtype) -> None:
        self._make, self._dtype = make, dtype
        self._shown: np.ndarray | None = None  # 0 where hidden, else all ones; of some keys, as all others hide nothing
        self._infinite: np.ndarray | None = None
        self._ceiling: np.ndarray | None = None  # of these two only one is kept

    def _some(self, tile: np.ndarray) -> np.ndarray:
        """Return the keys of a tile, (..., keys, rows), that hide something; see to it that the patterns are there."""
        if self._shown is None:
            shown = self._make()
            touched = np.flatnonzero(~np.bitwise_and.reduce(shown, axis=1))
            self._keys = slice(touched[0], touched[-1] + 1) if len(touched) else slice(0, 0)
            self._shown = shown[self._keys]
        return tile[..., self._keys, :]

    def zero(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile, (..., keys, rows), to 0."""
        bits = self._some(tile).view(self._shown.dtype)
        np.bitwise_and(bits, self._shown, bits)

    def hide(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile of scores to -inf."""
        bits = self._some(tile).view(self._shown.dtype)
        infinite = self._infinite
        if infinite is None:
            infinity = np.array(-np.inf, self._dtype).view(bits.dtype)
            infinite = np.bitwise_and(np.invert(self._shown), infinity)
            self._infinite, self._ceiling = infinite, None
        np.bitwise_and(bits, self._shown, bits)
        np.bitwise_or(bits, infinite, bits)

    def lower(self, tile: np.ndarray, lowest: float) -> None:
        """Set the hidden elements of a tile of scores, all of which are numbers above `lowest`, to that."""
        some, ceiling = self._some(tile), self._ceiling
        if ceiling is None:
            ceiling = np.where(self._shown, np.array(np.inf, self._dtype), np.array(lowest, self._dtype))
            self._infinite, self._ceiling = None, ceiling
        np.minimum(some, ceiling, out=some)


class Chunk(NamedTuple):
    """The visible ones among the key tiles of one chunk, for one row tile.

    The scores of the visible tiles are kept side by side; `slot` is a tile's place among them.
    """

    index: int  # of the chunk; its tiles start at index * blocks.chunk
    count: int  # visible tiles
    runs: tuple[tuple[int, int, int], ...]  # (first tile, first slot, tiles) of neighbours
    partial: tuple[tuple[int, int], ...]  # (tile, slot) of tiles whose elements must be tested
    veils: tuple[Veil | None, ...]  # of the partial tiles, if all rows exist, where they are known
    padding: int  # keys at the end of the last tile that do not exist
    simple: bool  # nothing is hidden in it


class View:
    """What a row tile sees.

    Attributes
    ----------
    runs : tuple of (first tile, tiles)
        Neighbouring visible tiles.
    partial : dict of Veil or None, by tile
        The tiles whose elements must be tested, and what hides them if all rows exist, where that is known.
    """

    def __init__(
        self, runs: tuple[tuple[int, int], ...], partial: dict[int, Veil | None], blocks: Blocks, n_keys: int
    ) -> None:
        self.runs, self.partial = runs, partial
        self._blocks, self._n_keys = blocks, n_keys

    @property
    def stop(self) -> int:
        """The tile after the last visible one."""
        tile, count = self.runs[-1]
        return tile + count

    @property
    def padding(self) -> int:
        """How many keys at the end of the last visible tile do not exist."""
        return max(0, self.stop * self._blocks.keys - self._n_keys)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The chunks that hold visible tiles."""
        found: list[int] = []
        for tile, count in self.runs:
            first, last = tile // self._blocks.chunk, (tile + count - 1) // self._blocks.chunk
            found.extend(range(first + (found[-1:] == [first]), last + 1))
        return tuple(found)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The visible tiles by chunk."""
        size = self._blocks.chunk
        by_chunk: dict[int, list[tuple[int, int, int]]] = {}
        for tile, left in self.runs:
            while left:
                count = min(left, size - tile % size)
                runs = by_chunk.setdefault(tile // size, [])
                slot = runs[-1][1] + runs[-1][2] if runs else 0
                runs.append((tile, slot, count))
                tile, left = tile + count, left - count
        return [self._chunk(index, tuple(runs)) for index, runs in by_chunk.items()]

    def _chunk(self, index: int, runs: tuple[tuple[int, int, int], ...]) -> Chunk:
        tile, slot, count = runs[-1]
        padding = self.padding if tile + count == self.stop else 0
        partial = self.partial_of(runs)
        veils = tuple([self.partial[tile] for tile, _ in partial])
        return Chunk(index, slot + count, runs, partial, veils, padding, not partial and not padding)

    def partial_of(self, runs: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Return (tile, slot) of the partial ones among some tiles."""
        if not self.partial:
            return ()
        return tuple(
            [(tile + n, slot + n) for tile, slot, count in runs for n in range(count) if tile + n in self.partial]
        )


class Part(NamedTuple):
    """Some of the tiles that a group sees; they are taken at once, and `slot` is a tile's place among them."""

    count: int
    runs: tuple[tuple[int, int, int], ...]  # (first tile, first slot, tiles) of neighbours, in a panel, too
    veils: tuple[tuple[int, int, int, Veil | None], ...]  # (row tile in the group, tile, slot, what hides it)
    padding: int  # keys at the end of the last tile that do not exist


class Group(NamedTuple):
    """Neighbouring row tiles that see the same tiles."""

    start: int  # the first, in its stack
    views: list[View]
    parts: list[Part]


def groups(views: list[View], most: int, blocks: Blocks) -> list[Group]:
    """Group the row tiles of a stack, given what each sees, up to `most` together."""
    result = []
    start = 0
    while start < len(views):
        stop = start + 1
        while stop < min(len(views), start + most) and views[stop].runs == views[start].runs:
            stop += 1
        result.append(Group(start, views[start:stop], _parts(views[start:stop], blocks)))
        start = stop
    return result


def _parts(views: list[View], blocks: Blocks) -> list[Part]:
    """Split what a group sees into as few parts as there is room for, of about equal sizes."""
    runs = list(views[0].runs[::-1])
    tiles = sum(count for _, count in runs)
    number = -(-tiles // (blocks.slots // len(views)))
    parts = []
    for index in range(number):
        taken: list[tuple[int, int, int]] = []
        slot, room = 0, (tiles + index) // number
        while slot < room:
            tile, left = runs.pop()
            count = min(left, room - slot, blocks.panel - tile % blocks.panel)
            taken.append((tile, slot, count))
            slot += count
            if count < left:
                runs.append((tile + count, left - count))
        veils = [
            (row, tile, slot, view.partial[tile])
            for row, view in enumerate(views)
            for tile, slot in view.partial_of(tuple(taken))
        ]
        parts.append(Part(slot, tuple(taken), tuple(veils), 0 if runs else views[0].padding))
    return parts
