"""Which tiles of the attention matrix to visit, and which of their elements are hidden.

Everything here is by row tile and key tile of one :class:`~cuattn.cpu.blocks.Blocks`.  Element masks are made
transposed, (keys, rows), as the scores are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.heads import Head, pick
from cuattn.cpu.sources import bit_lines, sources, tile_of
from cuattn.masks.intervals import FULL, PARTIAL
from cuattn.problem import Operands, Problem

__all__ = ["VEIL_BYTES", "Chunk", "Tiles", "Veil", "View"]

_STRIP = 16  # row tiles whose states are computed at once
VEIL_BYTES = 1 << 24  # of element masks, remembered for the same heads
_PATTERNS = 1 << 10  # partial tiles in a strip; where there are more they are likely to differ
_STRIPS = 64  # strips that are remembered, for the heads that share a mask


class Veil:
    """What a partial tile hides, as bit patterns: selecting by them is several times as fast as by booleans.

    Being bitwise, it is a selection: what a hidden element holds, NaN or not, is gone.
    """

    def __init__(self, shown: np.ndarray, dtype: np.dtype) -> None:
        touched = np.flatnonzero(~shown.all(axis=1))
        self._keys = slice(touched[0], touched[-1] + 1) if len(touched) else slice(0, 0)  # all others hide nothing
        self._shown, self._dtype = shown[self._keys], dtype  # 0 where hidden, else all ones
        self._infinite: np.ndarray | None = None
        self.nbytes = 2 * shown.nbytes

    def zero(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile, (..., keys, rows), to 0."""
        bits = tile[..., self._keys, :].view(self._shown.dtype)
        np.bitwise_and(bits, self._shown, bits)

    def hide(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile of scores to -inf."""
        bits = tile[..., self._keys, :].view(self._shown.dtype)
        if self._infinite is None:
            infinity = np.array(-np.inf, self._dtype).view(bits.dtype)
            self._infinite = np.bitwise_and(np.invert(self._shown), infinity)
        np.bitwise_and(bits, self._shown, bits)
        np.bitwise_or(bits, self._infinite, bits)


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

    @property
    def stop(self) -> int:
        """The tile after the last visible one."""
        tile, _, count = self.runs[-1]
        return tile + count


class View(NamedTuple):
    """What a row tile sees."""

    chunks: list[Chunk]
    indices: tuple[int, ...]  # of the chunks
    merged: list[Chunk]  # the same tiles in fewer chunks, whose indices mean nothing


class Tiles:
    """The visibility of a whole problem, by tile."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks) -> None:
        self._problem, self._bias, self._blocks = problem, operands.bias, blocks
        self._sources = sources(problem, operands.mask, blocks)
        everything = _chunks(np.full(blocks.key_tiles, FULL, np.int8), blocks, problem.n_keys, {})
        self._everything = View(everything, tuple(range(len(everything))), everything)
        self._strips: dict[tuple, list[View]] = {}
        self._veils: dict[tuple, Veil] = {}
        self._veil_bytes = 0

    def chunks(self, head: Head, row_tile: int) -> list[Chunk]:
        """Return what a row tile sees, by chunk."""
        return self.view(head, row_tile).chunks

    def view(self, head: Head, row_tile: int) -> View:
        """Return what a row tile sees."""
        if not self._sources:
            return self._everything
        strip, row = divmod(row_tile, _STRIP)
        key = (strip, *self._instance(head))
        rows = self._strips.get(key)
        if rows is None:
            if len(self._strips) >= _STRIPS:
                self._strips.clear()
            start, stop = strip * _STRIP, min((strip + 1) * _STRIP, self._blocks.row_tiles)
            states = self._sources[0].states(head, start, stop)
            for source in self._sources[1:]:
                states = np.minimum(states, source.states(head, start, stop))
            rows = self._strips[key] = [
                self._everything if (of_row == FULL).all() else self._view(of_row, veils)
                for of_row, veils in zip(states, self._strip_veils(head, states, start), strict=True)
            ]
        return rows[row]

    def _view(self, states: np.ndarray, veils: dict[int, Veil]) -> View:
        chunks = _chunks(states, self._blocks, self._problem.n_keys, veils)
        merged = _merge(chunks, self._blocks) if self._problem.direction == "forward" else chunks
        return View(chunks, tuple([chunk.index for chunk in chunks]), merged)

    def _instance(self, head: Head) -> tuple:
        return tuple(source.instance(head) for source in self._sources)

    def veil(self, head: Head, row_tile: int, key_tile: int, rows: int) -> Veil:
        """Return what a partial tile of `rows` rows hides; keys that do not exist, too, but no rows that do not."""
        key = (row_tile, key_tile, *self._instance(head))
        return self._veils.get(key) or self._make_veil(key, head, row_tile, key_tile, rows)

    def _make_veil(self, key: tuple, head: Head, row_tile: int, key_tile: int, rows: int) -> Veil:
        veil = Veil(self._shown(head, row_tile, key_tile, rows), self._problem.stat_dtype)
        if self._veil_bytes + veil.nbytes <= VEIL_BYTES:
            self._veils[key] = veil
            self._veil_bytes += veil.nbytes
        return veil

    def _strip_veils(self, head: Head, states: np.ndarray, start: int) -> list[dict[int, Veil]]:
        """Return, for each row tile of a strip, the veils of its partial tiles as far as they are easy to find.

        Along a diagonal one tile looks like another, so few are made.
        """
        found: list[dict[int, Veil]] = [{} for _ in states]
        row_tiles, key_tiles = np.nonzero(states == PARTIAL)
        if not 0 < len(row_tiles) <= _PATTERNS:
            return found
        size = 2 * self._blocks.rows * self._blocks.keys * self._problem.stat_dtype.itemsize
        patterns = [source.patterns(head, row_tiles + start, key_tiles) for source in self._sources]
        if None not in patterns:
            for row, tile, *key in zip(row_tiles.tolist(), key_tiles.tolist(), *patterns, strict=True):
                key = tuple(key)
                veil = self._veils.get(key)
                if veil is None and self._veil_bytes + size <= VEIL_BYTES:
                    veil = self._make_veil(key, head, row + start, tile, self._blocks.rows)
                if veil is not None:
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
            for chunk in self.chunks(head, row_tile):
                partial = {tile for tile, _ in chunk.partial}
                for tile in (first + n for first, _, count in chunk.runs for n in range(count)):
                    keys = slice(tile * size.keys, (tile + 1) * size.keys)
                    hidden = self.hidden(head, row_tile, tile) if tile in partial else np.zeros((1, 1), bool)
                    if bias is not None:
                        hidden = hidden | np.equal(tile_of(bias, size, row_tile, tile).T, -np.inf)
                    seen[keys] |= ~hidden.all(axis=1)
        return ~seen


def _chunks(states: np.ndarray, blocks: Blocks, n_keys: int, veils: dict[int, Veil]) -> list[Chunk]:
    """Group the visible tiles of a row tile by chunk."""
    chunks = []
    visible, codes = np.flatnonzero(states).tolist(), states.tolist()
    start = 0
    while start < len(visible):
        index = visible[start] // blocks.chunk
        stop = start + 1
        while stop < len(visible) and visible[stop] // blocks.chunk == index:
            stop += 1
        runs: list[list[int]] = []
        for slot, tile in enumerate(visible[start:stop]):
            if runs and runs[-1][0] + runs[-1][2] == tile:
                runs[-1][2] += 1
            else:
                runs.append([tile, slot, 1])
        partial = tuple((tile, slot) for slot, tile in enumerate(visible[start:stop]) if codes[tile] == PARTIAL)
        padding = max(0, (visible[stop - 1] + 1) * blocks.keys - n_keys)
        known = tuple([veils.get(tile) for tile, _ in partial])
        runs = tuple(map(tuple, runs))
        chunks.append(Chunk(index, stop - start, runs, partial, known, padding, not partial and not padding))
        start = stop
    return chunks


def _merge(chunks: list[Chunk], blocks: Blocks) -> list[Chunk]:
    """Take the tiles of several chunks together while they are not more than a whole chunk has."""
    merged: list[Chunk] = []
    for chunk in chunks:
        if not merged or merged[-1].count + chunk.count > blocks.chunk:
            merged.append(chunk)
            continue
        last = merged[-1]
        runs = list(last.runs)
        for tile, slot, count in chunk.runs:
            if last.stop == tile and tile % blocks.panel and len(runs) == len(last.runs):  # neighbours in the panel
                runs[-1] = (*runs[-1][:2], runs[-1][2] + count)
            else:
                runs.append((tile, slot + last.count, count))
        merged[-1] = Chunk(
            last.index,
            last.count + chunk.count,
            tuple(runs),
            last.partial + tuple((tile, slot + last.count) for tile, slot in chunk.partial),
            last.veils + chunk.veils,
            chunk.padding,
            last.simple and chunk.simple,
        )
    return merged
