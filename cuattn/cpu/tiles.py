"""Which tiles of the attention matrix to visit, and which of their elements are hidden.

Everything here is by row tile and key tile of one :class:`~cuattn.cpu.blocks.Blocks`.  Element masks are made
transposed, (keys, rows), as the scores are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.heads import Head, pick, place
from cuattn.masks import BlockMask, intervals
from cuattn.masks.intervals import FULL, PARTIAL, SKIP
from cuattn.problem import Operands, Problem

__all__ = ["VEIL_BYTES", "Chunk", "Tiles", "Veil", "tile_of"]

_STRIP = 16  # row tiles whose states are computed at once
VEIL_BYTES = 1 << 24  # of element masks, remembered for the same heads
_STRIPS = 64  # strips that are remembered, for the heads that share a mask


class Chunk(NamedTuple):
    """The visible ones among the key tiles of one chunk, for one row tile.

    The scores of the visible tiles are kept side by side; `slot` is a tile's place among them.
    """

    index: int  # of the chunk; its tiles start at index * blocks.chunk
    count: int  # visible tiles
    runs: tuple[tuple[int, int, int], ...]  # (first tile, first slot, tiles) of neighbours
    partial: tuple[tuple[int, int], ...]  # (tile, slot) of tiles whose elements must be tested
    padding: int  # keys at the end of the last tile that do not exist
    simple: bool  # nothing is hidden in it


class Veil:
    """What a partial tile hides, as bit patterns: selecting by them is several times as fast as by booleans.

    Being bitwise, it is a selection: what a hidden element holds, NaN or not, is gone.
    """

    def __init__(self, shown: np.ndarray, dtype: np.dtype) -> None:
        self._shown, self._dtype = shown, dtype  # 0 where hidden, else all ones
        self._infinite: np.ndarray | None = None
        self.nbytes = 2 * shown.nbytes

    def zero(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile, (..., keys, rows), to 0."""
        bits = tile.view(self._shown.dtype)
        np.bitwise_and(bits, self._shown, bits)

    def hide(self, tile: np.ndarray) -> None:
        """Set the hidden elements of a tile of scores to -inf."""
        bits = tile.view(self._shown.dtype)
        if self._infinite is None:
            infinity = np.array(-np.inf, self._dtype).view(bits.dtype)
            self._infinite = np.bitwise_and(np.invert(self._shown), infinity)
        np.bitwise_and(bits, self._shown, bits)
        np.bitwise_or(bits, self._infinite, bits)


class _Source:
    """A part of the visibility rule; several parts combine by AND."""

    def instance(self, head: Head) -> tuple[int, ...]:
        """Return what tells the heads apart whose masks differ."""
        raise NotImplementedError

    def states(self, head: Head, start: int, stop: int) -> np.ndarray:
        """Return the states of a range of row tiles, int8 (stop - start, key tiles)."""
        raise NotImplementedError

    def hidden(self, head: Head, row_tile: int, key_tile: int) -> np.ndarray:
        """Return which elements of a tile are hidden, bool, (keys, rows) or broadcastable to it."""
        raise NotImplementedError

    def shown(self, head: Head, row_tile: int, key_tile: int, ramp: np.ndarray) -> np.ndarray:
        """Return the same as bits, 0 where hidden; (keys, rows) or (1, rows), with rows that do not exist.

        The bits are all zeros or all ones, of the dtype of `ramp`, see :func:`_ramp`, which has as many rows.
        """
        hidden = self.hidden(head, row_tile, key_tile)
        shown = np.empty((len(hidden), ramp.shape[1]), ramp.dtype)
        there = hidden.shape[1] if hidden.shape[1] > 1 else ramp.shape[1]
        np.subtract(hidden, 1, out=shown[:, :there], dtype=ramp.dtype, casting="unsafe")
        shown[:, there:] = ramp[-1, 0]
        return shown


class _Intervals(_Source):
    """Hidden row intervals per key: a ColumnMask, a band, or both together."""

    def __init__(self, pairs: list, table: np.ndarray, blocks: Blocks, problem: Problem) -> None:
        leading = len(problem.batch) + 1
        self._pairs = [tuple(_align(np.asarray(bound, np.int32), leading + 1) for bound in pair) for pair in pairs]
        self._table = _align(table, leading + 3)
        self._blocks, self._n_queries = blocks, problem.n_queries

    def instance(self, head):
        return place(self._table, head.query)

    def states(self, head, start, stop):
        return intervals.tile_states(pick(self._table, head.query), start, stop)

    def shown(self, head, row_tile, key_tile, ramp):
        first = row_tile * self._blocks.rows
        keys = slice(key_tile * self._blocks.keys, (key_tile + 1) * self._blocks.keys)
        touched = pick(self._table, head.query)[key_tile]
        result = None
        for (start, end), (_, _, low, high) in zip(self._pairs, touched.tolist(), strict=True):
            if low <= row_tile < high:
                outside = _outside(pick(start, head.query)[keys] - first, pick(end, head.query)[keys] - first, ramp)
                result = outside if result is None else np.bitwise_and(result, outside, out=result)
        return ramp[-1:] if result is None else result

    def hidden(self, head, row_tile, key_tile):
        rows = min(self._blocks.rows, self._n_queries - row_tile * self._blocks.rows)
        return ~self.shown(head, row_tile, key_tile, _ramp(rows, np.dtype(bool)))


@lru_cache(maxsize=16)
def _ramp(rows: int, dtype: np.dtype) -> np.ndarray:
    """Return (rows + 1, rows), whose line t has all bits set before row t; a tile's veil is made of such lines."""
    ramp = np.tri(rows + 1, rows, -1, bool)
    return ramp if dtype.kind == "b" else np.negative(ramp.astype(dtype))


def _outside(start: np.ndarray, end: np.ndarray, ramp: np.ndarray) -> np.ndarray:
    """Return, as bits, row < start or row >= end for each key and row; a side that no key needs is not looked up."""
    rows = len(ramp) - 1
    if end.min() >= rows:
        return ramp.take(start, 0, mode="clip")
    after = ramp.take(end, 0, mode="clip")
    np.invert(after, out=after)
    if start.max() > 0:
        after |= ramp.take(start, 0, mode="clip")
    return after


class _Blocks(_Source):
    """A BlockMask."""

    def __init__(self, mask: BlockMask, problem: Problem, blocks: Blocks) -> None:
        self._mask, self._blocks = mask, blocks
        self._array = _align(mask.blocks, len(problem.batch) + 3)
        states = mask.tile_states(blocks.rows, blocks.keys, problem.n_queries, problem.n_keys)
        self._states = _align(states, len(problem.batch) + 3)
        self._shape = problem.n_queries, problem.n_keys

    def instance(self, head):
        return place(self._states, head.query)

    def states(self, head, start, stop):
        return pick(self._states, head.query)[start:stop]

    def hidden(self, head, row_tile, key_tile):
        rows = _span(row_tile, self._blocks.rows, self._shape[0]) // self._mask.block_m
        keys = _span(key_tile, self._blocks.keys, self._shape[1]) // self._mask.block_n
        return ~pick(self._array, head.query)[rows, keys[:, None]]


class _Dense(_Source):
    """A boolean array, True = attend."""

    def __init__(self, mask: np.ndarray, problem: Problem, blocks: Blocks) -> None:
        self._mask, self._blocks = mask, blocks
        self._shape = problem.n_queries, problem.n_keys

    def instance(self, head):
        return place(self._mask, head.query)

    def states(self, head, start, stop):
        rows, keys = self._blocks.rows, self._blocks.keys
        mask = pick(self._mask, head.query)
        edges = np.arange(0, self._shape[1], keys)
        states = np.empty((stop - start, self._blocks.key_tiles), np.int8)
        for t in range(start, stop):
            stripe = mask if len(mask) == 1 else mask[t * rows : (t + 1) * rows]
            some = np.broadcast_to(np.logical_or.reduce(stripe, axis=0), self._shape[1:])
            every = np.broadcast_to(np.logical_and.reduce(stripe, axis=0), self._shape[1:])
            states[t - start] = np.where(np.logical_and.reduceat(every, edges), FULL, PARTIAL)
            states[t - start][~np.logical_or.reduceat(some, edges)] = SKIP
        return states

    def hidden(self, head, row_tile, key_tile):
        return ~tile_of(pick(self._mask, head.query), self._blocks, row_tile, key_tile).T


def _span(tile: int, size: int, limit: int) -> np.ndarray:
    return np.arange(tile * size, min((tile + 1) * size, limit))


def _align(array: np.ndarray, rank: int) -> np.ndarray:
    return array[(None,) * (rank - array.ndim)]


class Tiles:
    """The visibility of a whole problem, by tile."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks) -> None:
        self._problem, self._bias, self._blocks = problem, operands.bias, blocks
        self._sources = _sources(problem, operands.mask, blocks)
        self._everything = _chunks(np.full(blocks.key_tiles, FULL, np.int8), blocks, problem.n_keys)
        self._strips: dict[tuple, list[list[Chunk]]] = {}
        self._veils: dict[tuple, Veil] = {}
        self._veil_bytes = 0

    def chunks(self, head: Head, row_tile: int) -> list[Chunk]:
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
                self._everything if (of_row == FULL).all() else _chunks(of_row, self._blocks, self._problem.n_keys)
                for of_row in states
            ]
        return rows[row]

    def _instance(self, head: Head) -> tuple:
        return tuple(source.instance(head) for source in self._sources)

    def veil(self, head: Head, row_tile: int, key_tile: int, rows: int) -> Veil:
        """Return what a partial tile of `rows` rows hides; keys that do not exist, too, but no rows that do not."""
        key = (row_tile, key_tile, *self._instance(head))
        veil = self._veils.get(key)
        if veil is None:
            veil = Veil(self._shown(head, row_tile, key_tile, rows), self._problem.stat_dtype)
            if self._veil_bytes + veil.nbytes <= VEIL_BYTES:  # for the other heads that share the mask
                self._veils[key] = veil
                self._veil_bytes += veil.nbytes
        return veil

    def _shown(self, head: Head, row_tile: int, key_tile: int, rows: int) -> np.ndarray:
        """Return the bits of a veil, (blocks.keys, rows)."""
        ramp = _ramp(rows, np.dtype(f"u{self._problem.stat_dtype.itemsize}"))
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


def tile_of(matrix: np.ndarray, blocks: Blocks, row_tile: int, first: int, count: int = 1) -> np.ndarray:
    """Return the part of a (rows | 1, keys | 1) matrix that lies in a run of `count` tiles."""
    rows = slice(row_tile * blocks.rows, (row_tile + 1) * blocks.rows) if matrix.shape[0] > 1 else slice(None)
    keys = slice(first * blocks.keys, (first + count) * blocks.keys) if matrix.shape[1] > 1 else slice(None)
    return matrix[rows, keys]


def _sources(problem: Problem, mask: object, blocks: Blocks) -> list[_Source]:
    band = problem.band
    if problem.mask == "column":
        sides = {} if band is None else {"left": band.left, "right": band.right, "offset": band.offset}
        pairs = [(mask.lts, mask.lte), (mask.uts, mask.ute), *_band_intervals(problem)]
        return [_Intervals(pairs, mask.tile_bounds(blocks.rows, blocks.keys, **sides), blocks, problem)]
    sources: list[_Source] = []
    if problem.mask == "block":
        sources.append(_Blocks(mask, problem, blocks))
    elif problem.mask == "dense":
        sources.append(_Dense(mask, problem, blocks))
    pairs = _band_intervals(problem)
    if pairs:
        table = intervals.tile_table(pairs, problem.n_queries, blocks.rows, blocks.keys)
        sources.append(_Intervals(pairs, table, blocks, problem))
    return sources


def _band_intervals(problem: Problem) -> list:
    band = problem.band
    if band is None:
        return []
    return intervals.band_intervals(problem.n_queries, problem.n_keys, band.left, band.right, band.offset)


def _chunks(states: np.ndarray, blocks: Blocks, n_keys: int) -> list[Chunk]:
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
        chunks.append(
            Chunk(index, stop - start, tuple(tuple(run) for run in runs), partial, padding, not partial and not padding)
        )
        start = stop
    return chunks
