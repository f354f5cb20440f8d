"""The state of some row tiles on their way through the keys, and the calls that take them through a chunk.

Calls are bound to their arrays once, as far as possible: a bound call costs little, and touches next to nothing that
threads share.  Both matter, since only one thread at a time runs Python.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from cuattn.cpu.blocks import (
    ABREAST,
    LANES,
    Blocks,
    Shape,
    is_plain,
    most_parts,
    small_columns,
    sum_columns,
    summed_keys,
)
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.exponent import exponential
from cuattn.cpu.panel import Panel
from cuattn.cpu.scores import Rows
from cuattn.cpu.steps import Call, Steps
from cuattn.cpu.views import Chunk, View
from cuattn.problem import Problem

__all__ = ["Pass", "Stack"]

_BLOCK = 16  # tiles whose sums are added up first, in a sum over all of them


class Step(NamedTuple):
    """The arrays that a chunk works on, and the calls that work on them."""

    s: np.ndarray  # (members, tiles, keys, rows): scores, then their exponentials
    make_scores: tuple[Call, ...]  # relative to references
    make_products: tuple[Call, ...]  # where all references are 0
    find_highest: Call
    add_up: tuple[Call, ...]
    begin: tuple[Call, ...]  # the output, with the first chunk
    weigh: tuple[Call, ...]  # add to it


class Pass:
    """The row tiles of a stack that go through the keys together, and what is kept of them, relative to references."""

    def __init__(self, stack: Stack, which: slice) -> None:
        self._stack = stack
        self.step: Steps[Step] = Steps(self._bind)  # what to do with a chunk
        self.q = stack.q.augmented[which]
        self.o, self.sums, self.highest = stack.o[which], stack.sums[which], stack.highest[which]
        self.reference, self.seen = stack.reference[which], stack.seen[which]
        self.here = stack.here[: len(self.o)]
        self.follow = partial(np.maximum, self.highest, self.here, out=self.highest)
        self.start()

    def start(self) -> None:
        """Forget what has been seen."""
        self.all_seen = False
        self.bounded = False  # whether chunks went by of which only a bound is known
        self.fresh = True  # whether there is no output yet

    def look_back(self) -> None:
        """Find out which rows have seen a key in chunks that went by without a look at their scores."""
        if self.bounded:
            self.seen |= self._summed() != 0
            self.all_seen, self.bounded = bool(self.seen.all()), False

    def _summed(self) -> np.ndarray | float:
        """Return what is 0 in the rows that have seen nothing."""
        raise NotImplementedError

    def _bind(self, chunk: Chunk) -> Step:
        raise NotImplementedError

    def _find_highest(self, s: np.ndarray) -> Call:
        wide = s.reshape(len(s), -1, LANES * s.shape[3])  # longer rows are faster to reduce
        return partial(np.maximum.reduce, wide, 1, None, self.here)


class PlainPass(Pass):
    """All row tiles of a stack, of one head, which all see all keys."""

    def __init__(self, stack: Stack, which: slice) -> None:
        super().__init__(stack, which)
        self._all: tuple[Call, ...] = ()

    def _summed(self):
        return 1.0

    def take_all(self, chunks: list[Chunk]) -> tuple[Call, ...]:
        """Return all steps of all chunks, which are whole, and the same at every call."""
        if not self._all:
            for chunk, step in zip(chunks, map(self.step, chunks), strict=True):
                search = (step.find_highest, self.follow) if self._stack.statistics else ()
                exponentiate = partial(exponential, step.s, step.s)
                weigh = step.weigh if chunk.index else step.begin
                self._all += (*step.make_products, *search, exponentiate, *step.add_up, *weigh)
        return self._all

    def _bind(self, chunk):
        stack, buffers, keys = self._stack, self._stack.buffers, self._stack.blocks.keys
        members, width, rows = self.o.shape
        s = buffers.get("s", members, chunk.count, keys, rows)
        summed = summed_keys(stack.width, chunk.count * keys)
        parts = chunk.count * keys // summed
        # The first chunk is every stack's first, and o begins with it.
        chunk_sum = self.o if chunk.index == 0 else buffers.get("chunk_sum", members, width, rows)
        weighed = chunk_sum[:, None] if parts == 1 else buffers.get("weighed", members, parts, width, rows)
        ((tile, _, count),) = chunk.runs
        k, v = stack.panel.run(stack.shape.heads, tile, count)
        v = v.reshape(len(v), parts, summed, width).swapaxes(2, 3)
        p = s.reshape(members, parts, summed, rows)
        columns = small_columns(width, summed * rows)
        weigh = [partial(np.matmul, v[:, :, some], p, weighed[:, :, some]) for some in columns]
        if parts > 1:
            weigh.append(partial(np.add.reduce, weighed, 1, None, chunk_sum))
        add_up = ()
        if stack.counts_tiles:
            add_up = (partial(np.matmul, stack.ones, s, self.sums[:, tile : tile + count]),)
        return Step(
            s,
            (partial(np.matmul, k, self.q, s),),
            (partial(np.matmul, k[..., :-1], self.q[..., :-1, :], s),),
            self._find_highest(s),
            add_up,
            tuple(weigh),
            (*weigh, partial(np.add, self.o, chunk_sum, self.o)),
        )


class _Room(NamedTuple):
    """What chunks with one number of visible tiles share."""

    s: np.ndarray
    p: np.ndarray  # the same, as many parts as products with values are made of it
    find_highest: Call
    begin: Call
    add: Call


class MaskedPass(Pass):
    """A row tile of all heads of a team; tiles may be skipped.

    Where scores need a look; else see :mod:`cuattn.cpu.sweep`, which gives the same bits.
    """

    def __init__(self, stack: Stack, which: slice) -> None:
        super().__init__(stack, which)
        blocks, buffers = stack.blocks, stack.buffers
        members, width, rows = self.o.shape
        summed = summed_keys(stack.width, blocks.keys)
        self._parts = blocks.keys // summed  # of a tile
        self._s = buffers.get("s", members, blocks.chunk, blocks.keys, rows)
        self._weighed = buffers.get("weighed", members, 1 + blocks.chunk * self._parts, width, rows)  # o comes first
        self._k, v = stack.panel.run(stack.shape.heads, 0, blocks.panel)
        self._k_alone, self._q_alone = self._k[..., :-1], self.q[..., :-1, :]
        v = v.reshape(len(v), blocks.panel * self._parts, summed, width).swapaxes(2, 3)  # a view, upright or not
        self._columns = [(v[:, :, some], self._weighed[:, 1:, some]) for some in small_columns(width, summed * rows)]
        self._rooms: dict[int, _Room] = {}
        self._fetch = partial(np.copyto, self._weighed[:, 0], self.o)

    def _summed(self):
        return self._stack.add_tiles(self.sums)

    def _room(self, count: int) -> _Room:
        room = self._rooms.get(count)
        if room is None:
            members, _, keys, rows = self._s.shape
            s = self._stack.buffers.get("s", members, count, keys, rows)
            p = s.reshape(members, count * self._parts, -1, rows)
            weighed = self._weighed[:, : 1 + count * self._parts]
            begin = partial(np.add.reduce, weighed[:, 1:], 1, None, self.o)
            add = partial(np.add.reduce, weighed, 1, None, self.o)
            room = self._rooms[count] = _Room(s, p, self._find_highest(s), begin, add)
        return room

    def _bind(self, chunk):
        s, p, find_highest, begin, add = self._room(chunk.count)
        parts, panel = self._parts, self._stack.blocks.panel
        make_scores, make_products, add_up, weigh = [], [], [], []
        for tile, slot, count in chunk.runs:
            place, here = tile % panel, slice(slot, slot + count)
            there = slice(place, place + count)
            make_scores.append(partial(np.matmul, self._k[:, there], self.q, s[:, here]))
            make_products.append(partial(np.matmul, self._k_alone[:, there], self._q_alone, s[:, here]))
            if self._stack.counts_tiles:
                add_up.append(partial(np.matmul, self._stack.ones, s[:, here], self.sums[:, tile : tile + count]))
            here, there = slice(slot * parts, (slot + count) * parts), slice(place * parts, (place + count) * parts)
            for v, weighed in self._columns:
                weigh.append(partial(np.matmul, v[:, there], p[:, here], weighed[:, here]))
        calls = tuple(make_scores), tuple(make_products), find_highest, tuple(add_up)
        return Step(s, *calls, (*weigh, begin), (self._fetch, *weigh, add))


class Stack:
    """What a thread keeps for a stack of row tiles on its way through the keys; all relative to the references."""

    def __init__(
        self, problem: Problem, blocks: Blocks, panel: Panel, buffers: Buffers, shape: Shape, *, statistics: bool
    ) -> None:
        self.blocks, self.panel, self.buffers, self.shape = blocks, panel, buffers, shape
        self.together, self.statistics = is_plain(problem), statistics
        self.width = problem.head_dim_v  # of o, which ends with what sums up the probabilities
        members, rows = shape.heads * shape.tiles, shape.rows
        self.counts_tiles = statistics or not sum_columns(problem)  # else the sums beside o are enough
        self.ones = np.ones((1, blocks.keys), problem.stat_dtype)
        self.all_ones = np.ones((1, blocks.key_tiles), problem.stat_dtype)
        self.q = Rows(buffers, shape, problem.head_dim, plain=False)
        self.o = buffers.new(members, problem.head_dim_v + sum_columns(problem), rows)
        tiles = -(-blocks.key_tiles // _BLOCK) * _BLOCK if self.counts_tiles else 0
        self.sums = buffers.new(members, tiles, 1, rows)  # of exponentials, by tile
        self._touched = slice(0, tiles)  # those that may be other than 0
        self.highest = buffers.new(members, LANES * rows)  # of each row the highest scores, among every LANES keys
        abreast = shape.tiles if self.together else ABREAST
        self.here = buffers.new(shape.heads * abreast, LANES * rows)  # in a chunk
        passing, parts = members if self.together else shape.heads, most_parts(problem, blocks)
        buffers.get("s", passing, blocks.chunk if self.together else blocks.slots, blocks.keys, rows)  # once for all
        if self.together:
            buffers.get("chunk_sum", passing, *self.o.shape[1:])
        buffers.get("weighed", passing, parts, *self.o.shape[1:])
        self.reference = buffers.new(members, rows)
        self.seen = np.empty((members, rows), bool)  # rows that have seen a key
        if self.together:
            self.passes: list[Pass] = [PlainPass(self, slice(None))]
        else:  # a row tile of all heads at a time
            self.passes = [MaskedPass(self, slice(tile, None, shape.tiles)) for tile in range(shape.tiles)]

    def start(self, views: list[View]) -> None:
        """Turn to other rows, of which this is what they see."""
        self.reference.fill(0)
        if self.statistics:
            self.highest.fill(-np.inf)
        if self.counts_tiles and not self.together:  # together there is no tile without a sum
            some = [view for view in views if view.runs]
            first = min(view.runs[0][0] for view in some)
            stop = max(view.stop for view in some)
            self._touched = slice(first // _BLOCK * _BLOCK, -(-stop // _BLOCK) * _BLOCK)
            self.sums[:, self._touched].fill(0)
        self.seen.fill(False)
        for each in self.passes:
            each.start()

    def add_tiles(self, sums: np.ndarray) -> np.ndarray:
        """Add up sums by tile, (members, tiles, 1, rows), in an order in which it does not matter where they start."""
        touched = sums[:, self._touched, 0]
        blocks = touched.reshape(len(touched), -1, _BLOCK, touched.shape[2])
        return np.add.reduce(np.add.reduce(blocks, axis=2), axis=1)

    def finish(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the sums of the exponentials of all rows, as far as they were wanted, and of those beside o."""
        for each in self.passes:
            if each.fresh:
                each.o.fill(0)
        beside = np.add.reduce(self.o[:, self.width :], axis=1) if self.o.shape[1] > self.width else None
        if not self.together:
            total = self.add_tiles(self.sums)
            self.seen |= total != 0
            return total, beside
        self.passes[0].look_back()
        if not self.counts_tiles:
            return None, beside
        tiles = self.all_ones.shape[1]
        return np.matmul(self.all_ones, self.sums[:, :tiles, 0])[:, 0], beside
