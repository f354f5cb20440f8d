"""The forward pass: online softmax over chunks of keys, one row tile at a time.

For each row the state is a reference, the true maximum of its scores so far, the sum of the exponentials and the
sum of the weighted values, the last two relative to the reference.  The reference follows the maximum only when
the two have drifted apart by more than ``WINDOW``: most chunks then rescale nothing, and the product that makes
the scores subtracts the reference for free.  What is decided for a row depends on the row's own scores alone, and
every sum over tiles runs in the order of the tiles, so a tile that contributes nothing may be skipped or visited:
the bits of the result are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from cuattn.cpu import threads
from cuattn.cpu.blocks import (
    LANES,
    Blocks,
    Shape,
    choose,
    is_plain,
    most_parts,
    small_columns,
    stack_shape,
    sum_columns,
    summed_keys,
)
from cuattn.cpu.bound import WINDOW
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import exponential, from_units, to_units
from cuattn.cpu.heads import Team, pick_team, team_groups
from cuattn.cpu.panel import Panel
from cuattn.cpu.scores import Rows, Scores
from cuattn.cpu.tiles import Chunk, Tiles
from cuattn.problem import Operands, Problem

__all__ = ["forward"]

_STEPS = 256  # chunks, as stacks see them, that a thread remembers

Call = Callable[[], object]


class Item(NamedTuple):
    """A stack of row tiles, of a head or of a team of heads, and what they see, pass by pass."""

    team: Team
    row_tile: int  # the first
    passes: list[list[Chunk]]


def forward(
    problem: Problem, operands: Operands, *, statistics: bool = True
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Compute attention and the statistics of its softmax.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : Operands
        Its arrays, on the host.
    statistics : bool
        Whether l and m are wanted.

    Returns
    -------
    o : ndarray, problem.o_shape, problem.out_dtype
        The output; 0 in empty rows.
    l, m : ndarray, problem.stat_shape, float32 | float64, or None
        Row sum of ``exp(s - m)`` and row maximum of the scores s, natural units; 0 and -inf in empty rows.

    Notes
    -----
    Bitwise reproducible, whatever the number of threads.  Extra memory is a few MB per thread.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 2, with the loops exchanged.
    """
    l = m = None
    if statistics:
        l = np.zeros(problem.stat_shape, problem.stat_dtype)
        m = np.full(problem.stat_shape, -np.inf, problem.stat_dtype)
    if problem.n_keys == 0 or 0 in problem.stat_shape:
        return np.zeros(problem.o_shape, problem.out_dtype), l, m
    o = np.empty(problem.o_shape, problem.out_dtype)  # in huge pages, where zeros would have to be small ones
    blocks = choose(problem, operands)
    tiles = Tiles(problem, operands, blocks)
    groups = team_groups(problem, operands, blocks.team)
    stacks = -(-blocks.row_tiles // blocks.stack)
    together = is_plain(problem)

    def prepare(group: int, index: int) -> Item:
        team, stack = divmod(index, stacks)
        team, row_tile = groups[group][team], stack * blocks.stack
        stop = min(row_tile + (1 if together else blocks.stack), blocks.row_tiles)
        return Item(team, row_tile, [tiles.chunks(team.heads[0], t) for t in range(row_tile, stop)])

    threads.run(
        threads.Dispatcher([len(group) * stacks for group in groups]),
        prepare,
        lambda: _Worker(problem, operands, blocks, tiles, (o, l, m)),
        threads.useful(problem, blocks),
    )
    return o, l, m


class _Step(NamedTuple):
    """The arrays that a chunk works on, and the calls that work on them, bound to them once.

    A bound call costs little, and touches next to nothing that threads share: both matter, since only one thread at a
    time runs Python.
    """

    s: np.ndarray  # (members, tiles, keys, rows): scores, then their exponentials
    make_scores: tuple[Call, ...]
    find_highest: Call
    add_up: tuple[Call, ...]
    weigh: tuple[Call, ...]
    take_whole: tuple[Call, ...]  # all steps, for a chunk in which nothing is hidden and no reference moves


class _Pass:
    """The row tiles of a stack that go through the keys together, and what is kept of them, relative to references."""

    def __init__(self, stack: _Stack, which: slice) -> None:
        self._stack = stack
        self._steps: dict[tuple, _Step] = {}
        self._all: tuple[Call, ...] = ()
        self.q = stack.q.augmented[which]
        self.o, self.sums, self.highest = stack.o[which], stack.sums[which], stack.highest[which]
        self.reference, self.seen = stack.reference[which], stack.seen[which]
        self.all_seen = False
        self.here = stack.here
        self.bounded = False  # whether chunks went by of which only a bound is known
        self.follow = partial(np.maximum, self.highest, self.here, out=self.highest)

    def look_back(self) -> None:
        """Find out which rows have seen a key in chunks that went by without a look at their scores."""
        if self.bounded:
            self.seen |= True if self._stack.together else np.add.reduce(self.sums[:, :, 0], axis=1) != 0
            self.all_seen, self.bounded = bool(self.seen.all()), False

    def step(self, chunk: Chunk) -> _Step:
        """Return what to do with a chunk; most chunks come again with every stack, so it is kept."""
        step = self._steps.get(chunk.runs)
        if step is None:
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            step = self._steps[chunk.runs] = self._bind(chunk)
        return step

    def take_all(self, chunks: list[Chunk]) -> tuple[Call, ...]:
        """Return all steps of all chunks, which are whole, and the same at every call."""
        if not self._all:
            self._all = tuple(call for chunk in chunks for call in self.step(chunk).take_whole)
        return self._all

    def _bind(self, chunk: Chunk) -> _Step:
        problem, blocks, buffers, panel, shape = self._stack.common
        members, width, rows = self.o.shape
        keys = blocks.keys
        s = buffers.get("s", members, chunk.count, keys, rows)
        # Where tiles may be skipped no product sums over two of them.
        summed = summed_keys(problem.head_dim_v, chunk.count * keys if self._stack.together else keys)
        parts = chunk.count * keys // summed
        # Elsewhere the first chunk is every stack's first, and o begins with it.
        first = self._stack.together and chunk.index == 0
        chunk_sum = self.o if first else buffers.get("chunk_sum", members, width, rows)
        weighed = chunk_sum[:, None] if parts == 1 else buffers.get("weighed", members, parts, width, rows)
        make_scores, make_products, add_up, weigh = [], [], [], []
        for tile, slot, count in chunk.runs:
            k, v = panel.run(shape.heads, tile, count)
            part = s[:, slot : slot + count]
            make_scores.append(partial(np.matmul, k, self.q, part))
            make_products.append(partial(np.matmul, k[..., :-1], self.q[..., :-1, :], part))
            if self._stack.counts_tiles:
                add_up.append(partial(np.matmul, self._stack.ones, part, self.sums[:, tile : tile + count]))
            which = slice(slot * keys // summed, (slot + count) * keys // summed)
            v = v.reshape(len(v), which.stop - which.start, summed, width).swapaxes(2, 3)
            part = part.reshape(members, -1, summed, rows)
            for columns in small_columns(width, summed * rows):
                weigh.append(partial(np.matmul, v[:, :, columns], part, weighed[:, which, columns]))
        if parts > 1:
            weigh.append(partial(np.add.reduce, weighed, 1, None, chunk_sum))
        if not first:
            weigh.append(partial(np.add, self.o, chunk_sum, self.o))
        wide = s.reshape(members, -1, LANES * rows)  # longer rows are faster to reduce
        find_highest = partial(np.maximum.reduce, wide, 1, None, self.here)
        search = (find_highest, self.follow) if self._stack.statistics else ()
        take_whole = (*make_products, *search, partial(exponential, s, s), *add_up, *weigh)
        return _Step(s, tuple(make_scores), find_highest, tuple(add_up), tuple(weigh), take_whole)


class _Stack:
    """What a thread keeps for a stack of row tiles on its way through the keys; all relative to the references."""

    def __init__(
        self, problem: Problem, blocks: Blocks, panel: Panel, buffers: Buffers, shape: Shape, *, statistics: bool
    ) -> None:
        self.common = problem, blocks, buffers, panel, shape
        self.shape, self.together, self.statistics = shape, is_plain(problem), statistics
        members, rows = shape.heads * shape.tiles, shape.rows
        self.counts_tiles = statistics or not self.together  # else the sums beside o are enough
        self.ones = np.ones((1, blocks.keys), problem.stat_dtype)
        self.all_ones = np.ones((1, blocks.key_tiles), problem.stat_dtype)
        self.q = Rows(buffers, shape, problem.head_dim, plain=False)
        width = problem.head_dim_v + sum_columns(problem)
        self.o = buffers.new(members, width, rows)
        self.sums = buffers.new(members, blocks.key_tiles, 1, rows)  # of exponentials, by tile
        self.highest = buffers.new(members, LANES * rows)  # of each row the highest scores, among every LANES keys
        self.here = buffers.new(members if self.together else shape.heads, LANES * rows)  # in a chunk
        passing, parts = len(self.here), most_parts(problem, blocks)
        buffers.get("s", passing, blocks.chunk, blocks.keys, rows)  # once for all chunks
        buffers.get("chunk_sum", passing, width, rows)
        if parts > 1:
            buffers.get("weighed", passing, parts, width, rows)
        self.reference = buffers.new(members, rows)
        self.seen = np.empty((members, rows), bool)  # rows that have seen a key
        if self.together:
            self.passes = [_Pass(self, slice(None))]
        else:  # a row tile of all heads at a time
            self.passes = [_Pass(self, slice(tile, None, shape.tiles)) for tile in range(shape.tiles)]

    def start(self) -> None:
        self.reference.fill(0)
        if self.statistics:
            self.highest.fill(-np.inf)
        if not self.together:  # else there is no tile without a sum, and o begins with the first chunk's
            self.sums.fill(0)
            self.o.fill(0)
        self.seen.fill(False)
        for each in self.passes:
            each.all_seen = each.bounded = False


class _Worker:
    """Computes stacks of row tiles, in one thread."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks, tiles: Tiles, results: tuple) -> None:
        self._problem, self._blocks, self._results = problem, blocks, results
        self._statistics = results[1] is not None
        self._buffers = Buffers(problem.stat_dtype)
        self._panel = Panel(problem, operands, blocks, tiles, self._buffers, counts=sum_columns(problem))
        self._scores = Scores(problem, operands, blocks, tiles, self._buffers)
        self._dropout = Dropout(problem, operands, blocks) if problem.dropout else None
        self._bare = self._scores.bare and not problem.dropout
        # Whether nothing is hidden and one panel holds all keys.
        self._uniform = is_plain(problem) and not problem.n_keys % blocks.keys and blocks.panel >= blocks.key_tiles
        self._stacks: dict[Shape, _Stack] = {}

    def __call__(self, item: Item) -> None:
        stack = self._stack_at(item)
        start = item.row_tile * self._blocks.rows
        rows = slice(start, min(start + stack.shape.tiles * stack.shape.rows, self._problem.n_queries))
        if not any(item.passes):
            pick_team(self._results[0], item.team)[:, rows] = 0
            return
        stack.start()
        self._scores.load(item.team, rows, stack.q)
        for n, (chunks, state) in enumerate(zip(item.passes, stack.passes, strict=True)):
            self._scores.begin(item.team, item.row_tile + n, state.q)
            if self._take_all(state, item.team, chunks):
                continue
            for chunk in chunks:
                self._advance(state, item.team, item.row_tile + n, chunk)
        self._finish(stack, item.team, rows)

    def _take_all(self, state: _Pass, team: Team, chunks: list[Chunk]) -> bool:
        """Take a pass through all keys as one list of calls, where no chunk needs a look; return whether."""
        if not self._uniform:
            return False
        self._panel.seek(team, 0)
        if not self._bounded():
            return False
        state.bounded = True
        for call in state.take_all(chunks):
            call()
        return True

    def _bounded(self) -> bool:
        """Whether no reference would move, whatever the scores with the panel's keys are."""
        return self._scores.farthest == 0 and self._scores.span(self._panel.reach) <= WINDOW

    def _advance(self, state: _Pass, team: Team, row_tile: int, chunk: Chunk) -> None:
        """Take a pass through a chunk of keys."""
        scores, panel = self._scores, self._panel
        panel.seek(team, chunk.runs[0][0])
        step = state.step(chunk)
        bounded = self._bounded()
        state.bounded |= bounded
        if bounded and self._bare and chunk.simple:
            for call in step.take_whole:
                call()
            return
        for call in step.make_scores:
            call()
        if bounded:
            scores.complete(step.s, chunk, hide=self._statistics)
            if self._statistics:
                step.find_highest()
                state.follow()
        else:
            scores.complete(step.s, chunk)
            step.find_highest()
            if not (np.maximum.reduce(state.here, None) <= WINDOW and state.all_seen):
                self._move(state, step.s)
            if self._statistics:
                state.follow()
        scores.exponentiate(step.s, panel.reach)
        for call in step.add_up:
            call()
        if self._dropout is not None:
            self._dropout.zero(step.s, self._dropout.dropped(chunk, team.heads[0], row_tile))
        for call in step.weigh:
            call()

    def _stack_at(self, item: Item) -> _Stack:
        shape = stack_shape(self._problem, self._blocks, len(item.team.heads), item.row_tile)
        if shape not in self._stacks:
            common = self._problem, self._blocks, self._panel, self._buffers
            self._stacks[shape] = _Stack(*common, shape, statistics=self._statistics)
        return self._stacks[shape]

    def _move(self, state: _Pass, s: np.ndarray) -> None:
        """Move the references of the rows whose highest score has left the window."""
        state.look_back()
        here = state.here.reshape(len(s), LANES, -1)
        highest = np.maximum.reduce(here, axis=1)
        if np.maximum.reduce(highest, None) <= WINDOW and np.minimum.reduce(highest, None) >= -WINDOW:
            state.seen.fill(True)
            state.all_seen = True
            return
        away = ~(highest <= WINDOW) | (~state.seen & (highest < -WINDOW) & (highest > -np.inf))
        shift = np.where(away, highest, 0)
        shrink = np.where(state.seen, exponential(-shift), 0)  # what is yet unseen has nothing to shrink
        state.seen |= highest != -np.inf
        state.all_seen = bool(state.seen.all())
        if not away.any():
            return
        np.subtract(s, shift[:, None, None], out=s)
        state.reference += shift
        self._scores.subtract(state.reference)
        state.sums *= shrink[:, None, None]
        state.o *= shrink[:, None]
        # What was the highest score is the reference now; those of earlier chunks do not count any more.
        np.copyto(state.highest.reshape(here.shape), -np.inf, where=away[:, None])
        np.copyto(here, 0, where=away[:, None])

    def _finish(self, stack: _Stack, team: Team, rows: slice) -> None:
        for each in stack.passes:
            each.look_back()
        o = pick_team(self._results[0], team)[:, rows]
        heads, tiles, height = stack.shape
        width = self._problem.head_dim_v
        total = np.matmul(stack.all_ones, stack.sums[:, :, 0])[:, 0] if stack.counts_tiles else None
        if stack.together:  # by the sums that had its own roundings
            below = np.add.reduce(stack.o[:, width:], axis=1)
        else:
            kept = 1.0 if self._dropout is None else 1 / self._problem.dropout_scale
            below = total * total.dtype.type(kept)
        unseen = None if all(each.all_seen for each in stack.passes) else ~stack.seen
        if unseen is not None:
            below[unseen] = 1
        weighed = stack.o[:, :width]
        np.divide(weighed, below[:, None], out=weighed)
        by_tile = weighed.reshape(heads, tiles, width, height).swapaxes(2, 3)
        whole, rest = divmod(o.shape[1], height)
        o[:, : whole * height].reshape(heads, whole, *by_tile.shape[2:])[...] = by_tile[:, :whole]
        if rest:
            o[:, whole * height :] = by_tile[:, whole, :rest]
        if self._statistics:
            self._write_statistics(stack, team, rows, total, unseen)

    def _write_statistics(
        self, stack: _Stack, team: Team, rows: slice, total: np.ndarray, unseen: np.ndarray | None
    ) -> None:
        l, m = (pick_team(result, team)[:, rows] for result in self._results[1:])
        heads, tiles, height = stack.shape
        highest = np.maximum.reduce(stack.highest.reshape(len(stack.o), LANES, height), axis=1)

        def of_rows(x: np.ndarray) -> np.ndarray:
            """Return x, (members, rows), as (heads, count)."""
            return x.reshape(heads, tiles * height)[:, : l.shape[1]]

        reference = of_rows(stack.reference)
        m[:] = from_units(of_rows(highest) + reference)
        # l is relative to m as it is returned, after its rounding: what the backward makes of both is then exact.
        np.multiply(of_rows(total), exponential((reference - to_units(m)).astype(l.dtype)), out=l)
        if unseen is not None:
            l[of_rows(unseen)] = 0
