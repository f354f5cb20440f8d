"""The parts of the visibility rule: whether tiles are visible, and which of their elements are hidden.

Element masks are made transposed, (keys, rows), as the scores are.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.heads import Head, pick, place
from cuattn.masks import BlockMask, intervals
from cuattn.masks.intervals import FULL, PARTIAL, SKIP
from cuattn.problem import Problem

__all__ = ["Source", "bit_lines", "sources", "tile_of"]


def sources(problem: Problem, mask: object, blocks: Blocks) -> list[Source]:
    """Return the parts of the rule of a problem."""
    if problem.mask == "column":
        pairs = [*mask._intervals(), *_band_intervals(problem)]
        table = intervals.tile_table(pairs, problem.n_queries, blocks.rows, blocks.keys)
        return [_Intervals(pairs, table, blocks, problem)]
    parts: list[Source] = []
    if problem.mask == "block":
        parts.append(_Blocks(mask, problem, blocks))
    elif problem.mask == "dense":
        parts.append(_Dense(mask, problem, blocks))
    pairs = _band_intervals(problem)
    if pairs:
        table = intervals.tile_table(pairs, problem.n_queries, blocks.rows, blocks.keys)
        parts.append(_Intervals(pairs, table, blocks, problem))
    return parts


def _band_intervals(problem: Problem) -> list:
    band = problem.band
    if band is None:
        return []
    return intervals.band_intervals(problem.n_queries, problem.n_keys, band.left, band.right, band.offset)


class Source:
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

    def patterns(self, head: Head, row_tiles: np.ndarray, key_tiles: np.ndarray) -> list | None:
        """Return of each tile what is the same only where the same is hidden; None if that takes long to tell."""
        return None

    def shown(self, head: Head, row_tile: int, key_tile: int, ramp: np.ndarray) -> np.ndarray:
        """Return the same as bits, 0 where hidden; (keys, rows) or (1, rows), with rows that do not exist.

        The bits are all zeros or all ones, of the dtype of `ramp`, see :func:`bit_lines`, which has as many rows.
        """
        hidden = self.hidden(head, row_tile, key_tile)
        shown = np.empty((len(hidden), ramp.shape[1]), ramp.dtype)
        there = hidden.shape[1] if hidden.shape[1] > 1 else ramp.shape[1]
        np.subtract(hidden, 1, out=shown[:, :there], dtype=ramp.dtype, casting="unsafe")
        shown[:, there:] = ramp[-1, 0]
        return shown


class _Intervals(Source):
    """Hidden row intervals per key: a ColumnMask, a band, or both together."""

    def __init__(self, pairs: list, table: np.ndarray, blocks: Blocks, problem: Problem) -> None:
        rank = len(problem.batch) + 1
        sides = np.broadcast_arrays(*(side for pair in pairs for side in pair))
        bounds = np.zeros((*sides[0].shape[:-1], len(sides), blocks.key_tiles * blocks.keys), np.int32)
        for n, side in enumerate(sides):
            bounds[..., n, : problem.n_keys] = side
        bounds = bounds.reshape(*bounds.shape[:-1], blocks.key_tiles, blocks.keys)
        self._bounds, self._table = _align(bounds, rank + 3), _align(table, rank + 3)
        self._blocks, self._n_queries, self._n_keys = blocks, problem.n_queries, problem.n_keys

    def instance(self, head):
        return place(self._table, head.query)

    def states(self, head, start, stop):
        return intervals.tile_states(pick(self._table, head.query), start, stop)

    def _relative(self, head: Head, row_tile: int, key_tile: int) -> np.ndarray:
        """Return the starts and ends, in turn, of what a tile's keys hide, relative to its first row."""
        return pick(self._bounds, head.query)[:, key_tile] - row_tile * self._blocks.rows

    def patterns(self, head, row_tiles, key_tiles):
        bounds = pick(self._bounds, head.query).swapaxes(0, 1)[key_tiles]
        bounds -= (row_tiles * self._blocks.rows).astype(np.int32)[:, None, None]
        np.maximum(bounds, 0, out=bounds)
        return [tile.tobytes() for tile in np.minimum(bounds, self._blocks.rows, out=bounds)]

    def shown(self, head, row_tile, key_tile, ramp):
        bounds = self._relative(head, row_tile, key_tile)[:, : self._n_keys - key_tile * self._blocks.keys]
        touched = pick(self._table, head.query)[key_tile].tolist()
        result = None
        for (_, _, low, high), start, end in zip(touched, bounds[::2], bounds[1::2], strict=True):
            if low <= row_tile < high:
                outside = _outside(start, end, ramp)
                result = outside if result is None else np.bitwise_and(result, outside, out=result)
        return ramp[-1:] if result is None else result

    def hidden(self, head, row_tile, key_tile):
        rows = min(self._blocks.rows, self._n_queries - row_tile * self._blocks.rows)
        return ~self.shown(head, row_tile, key_tile, bit_lines(rows, np.dtype(bool)))


@lru_cache(maxsize=16)
def bit_lines(rows: int, dtype: np.dtype) -> np.ndarray:
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


class _Blocks(Source):
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


class _Dense(Source):
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


def tile_of(matrix: np.ndarray, blocks: Blocks, row_tile: int, first: int, count: int = 1) -> np.ndarray:
    """Return the part of a (rows | 1, keys | 1) matrix that lies in a run of `count` tiles."""
    rows = slice(row_tile * blocks.rows, (row_tile + 1) * blocks.rows) if matrix.shape[0] > 1 else slice(None)
    keys = slice(first * blocks.keys, (first + count) * blocks.keys) if matrix.shape[1] > 1 else slice(None)
    return matrix[rows, keys]
