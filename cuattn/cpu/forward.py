"""The forward pass: online softmax over chunks of keys, one row tile at a time.

For each row the state is a reference, the true maximum of its scores so far, the sum of the exponentials and the
sum of the weighted values, the last two relative to the reference.  The reference follows the maximum only when
the two have drifted apart by more than ``_WINDOW``: most chunks then rescale nothing, and the product that makes
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
from cuattn.cpu.blocks import Blocks, Shape, choose, stack_shape
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import exponential, from_units, to_units
from cuattn.cpu.heads import Team, pick_team, team_groups
from cuattn.cpu.panel import Panel
from cuattn.cpu.scores import Rows, Scores
from cuattn.cpu.tiles import Chunk, Tiles
from cuattn.problem import Operands, Problem

__all__ = ["forward"]

_WINDOW = 16.0  # exponentials stay below exp2(16): far from overflow; the smallest that count are far from underflow
Call = Callable[[], object]

_STEPS = 256  # chunks, as stacks see them, that a thread remembers


class Item(NamedTuple):
    """A stack of row tiles, of a head or of a team of heads, and what they see."""

    team: Team
    row_tile: int  # the first
    chunks: list[Chunk]


def forward(problem: Problem, operands: Operands) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute attention and the statistics of its softmax.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : Operands
        Its arrays, on the host.

    Returns
    -------
    o : ndarray, problem.o_shape, problem.out_dtype
        The output; 0 in empty rows.
    l, m : ndarray, problem.stat_shape, float32 | float64
        Row sum of ``exp(s - m)`` and row maximum of the scores s, natural units; 0 and -inf in empty rows.

    Notes
    -----
    Bitwise reproducible, whatever the number of threads.  Extra memory is a few MB per thread.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 2, with the loops exchanged.
    """
    o = np.zeros(problem.o_shape, problem.out_dtype)
    l = np.zeros(problem.stat_shape, problem.stat_dtype)
    m = np.full(problem.stat_shape, -np.inf, problem.stat_dtype)
    if l.size == 0 or problem.n_keys == 0:
        return o, l, m
    blocks = choose(problem, operands)
    tiles = Tiles(problem, operands, blocks)
    groups = team_groups(problem, operands, blocks.team)
    stacks = -(-blocks.row_tiles // blocks.stack)

    def prepare(group: int, index: int) -> Item:
        team, stack = divmod(index, stacks)
        team, row_tile = groups[group][team], stack * blocks.stack
        return Item(team, row_tile, tiles.chunks(team.heads[0], row_tile))

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

    s: np.ndarray  # (stack, tiles, keys, rows): scores, then their exponentials
    highest: np.ndarray  # (stack, 8 * rows): of each row 8 candidates for the highest score
    make_scores: tuple[Call, ...]
    find_highest: Call
    add_up: tuple[Call, ...]
    weigh: tuple[Call, ...]
    collect: Call


class _Stack:
    """What a thread keeps for a stack of row tiles on its way through the keys; all relative to the references."""

    def __init__(self, problem: Problem, blocks: Blocks, panel: Panel, buffers: Buffers, shape: Shape) -> None:
        self._problem, self._blocks, self._panel, self._buffers = problem, blocks, panel, buffers
        self.shape = shape
        stack, rows = shape.heads * shape.tiles, shape.rows
        self._steps: dict[tuple, _Step] = {}
        self._ones = np.ones((1, blocks.keys), problem.stat_dtype)
        self.q = Rows(buffers, shape, problem.head_dim, plain=False)
        self.o = buffers.new(stack, rows, problem.head_dim_v)
        self.o_chunk = buffers.new(stack, rows, problem.head_dim_v)
        self.add_chunk = partial(np.add, self.o, self.o_chunk, self.o)
        self.sums = buffers.new(stack, blocks.key_tiles, 1, rows)  # of exponentials, by tile
        self.highest = buffers.new(-(-blocks.key_tiles // blocks.chunk), stack, 8 * rows)  # score, by chunk
        self.reference = buffers.new(stack, rows)
        self.seen = np.empty((stack, rows), bool)  # rows that have seen a key
        self.all_seen = False

    def start(self) -> None:
        self.o.fill(0)
        self.sums.fill(0)
        self.highest.fill(-np.inf)
        self.reference.fill(0)
        self.seen.fill(False)
        self.all_seen = False

    def step(self, chunk: Chunk) -> _Step:
        """Return what to do with a chunk; most chunks come again with every stack, so it is kept."""
        step = self._steps.get(chunk.runs)
        if step is None:
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            step = self._steps[chunk.runs] = self._bind(chunk)
        return step

    def _bind(self, chunk: Chunk) -> _Step:
        stack, rows, keys = len(self.o), self.shape.rows, self._blocks.keys
        s = self._buffers.get("s", stack, chunk.count, keys, rows)
        weighed = self._buffers.get("weighed", stack, chunk.count, rows, self._problem.head_dim_v)
        make_scores, add_up, weigh = [], [], []
        for tile, slot, count in chunk.runs:
            k, v = self._panel.run(self.shape.heads, tile, count)
            here = slice(slot, slot + count)
            part = s[:, here]
            make_scores.append(partial(np.matmul, k, self.q.augmented, part))
            add_up.append(partial(np.matmul, self._ones, part, self.sums[:, tile : tile + count]))
            weigh.append(partial(np.matmul, part.swapaxes(2, 3), v, weighed[:, here]))
        highest = self.highest[chunk.index]
        wide = s.reshape(stack, -1, 8 * rows)  # longer rows are faster to reduce
        return _Step(
            s,
            highest,
            tuple(make_scores),
            partial(np.maximum.reduce, wide, 1, None, highest),
            tuple(add_up),
            tuple(weigh),
            partial(np.add.reduce, weighed, 1, None, self.o_chunk),
        )


class _Worker:
    """Computes stacks of row tiles, in one thread."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks, tiles: Tiles, results: tuple) -> None:
        self._problem, self._blocks, self._results = problem, blocks, results
        self._buffers = Buffers(problem.stat_dtype)
        self._panel = Panel(problem, operands, blocks, tiles, self._buffers, ones=False)
        self._scores = Scores(problem, operands, blocks, tiles, self._buffers)
        self._dropout = Dropout(problem, operands, blocks) if problem.dropout else None
        self._stacks: dict[Shape, _Stack] = {}

    def __call__(self, item: Item) -> None:
        if not item.chunks:
            return
        stack = self._stack_at(item)
        stack.start()
        scores, panel = self._scores, self._panel
        start = item.row_tile * self._blocks.rows
        rows = slice(start, min(start + stack.shape.tiles * stack.shape.rows, self._problem.n_queries))
        scores.begin(item.team, rows, stack.q)
        for chunk in item.chunks:
            panel.seek(item.team, chunk.runs[0][0])
            step = stack.step(chunk)
            for call in step.make_scores:
                call()
            scores.complete(step.s, chunk)
            step.find_highest()
            if not (np.maximum.reduce(step.highest, None) <= _WINDOW and stack.all_seen):
                self._move(stack, step)
            scores.exponentiate(step.s, panel.reach)
            for call in step.add_up:
                call()
            if self._dropout is not None:
                self._dropout.zero(step.s, self._dropout.dropped(chunk, item.team.heads[0], item.row_tile))
            for call in step.weigh:
                call()
            step.collect()
            stack.add_chunk()
        self._finish(stack, item.team, rows)

    def _stack_at(self, item: Item) -> _Stack:
        shape = stack_shape(self._problem, self._blocks, len(item.team.heads), item.row_tile)
        if shape not in self._stacks:
            self._stacks[shape] = _Stack(self._problem, self._blocks, self._panel, self._buffers, shape)
        return self._stacks[shape]

    def _move(self, stack: _Stack, step: _Step) -> None:
        """Move the references of the rows whose highest score has left the window."""
        here = step.highest.reshape(len(step.s), 8, -1)
        highest = np.maximum.reduce(here, axis=1)
        if np.maximum.reduce(highest, None) <= _WINDOW and np.minimum.reduce(highest, None) >= -_WINDOW:
            stack.seen.fill(True)
            stack.all_seen = True
            return
        away = ~(highest <= _WINDOW) | (~stack.seen & (highest < -_WINDOW) & (highest > -np.inf))
        shift = np.where(away, highest, 0)
        shrink = np.where(stack.seen, exponential(-shift), 0)  # what is yet unseen has nothing to shrink
        stack.seen |= highest > -np.inf
        stack.all_seen = bool(stack.seen.all())
        if not away.any():
            return
        np.subtract(step.s, shift[:, None, None], out=step.s)
        stack.reference += shift
        self._scores.subtract(stack.reference)
        stack.sums *= shrink[:, None, None]
        stack.o *= shrink[:, :, None]
        # What was the highest score is the reference now; those of earlier chunks do not count any more.
        np.copyto(stack.highest.reshape(-1, *here.shape), -np.inf, where=away[:, None])
        np.copyto(here, 0, where=away[:, None])

    def _finish(self, stack: _Stack, team: Team, rows: slice) -> None:
        o, l, m = (pick_team(result, team)[:, rows] for result in self._results)
        heads, count = l.shape

        def of_rows(x: np.ndarray) -> np.ndarray:
            """Return x, (stack, rows, ...), as (heads, count, ...)."""
            return x.reshape(heads, stack.shape.tiles * stack.shape.rows, *x.shape[2:])[:, :count]

        total = of_rows(np.add.reduce(stack.sums[:, :, 0], axis=1))
        by_chunk = stack.highest.reshape(-1, len(stack.o), 8, stack.shape.rows)
        highest = of_rows(np.maximum.reduce(by_chunk, axis=(0, 2)))
        unseen = None if stack.all_seen else highest == -np.inf
        below = total if self._dropout is None else total * total.dtype.type(1 / self._problem.dropout_scale)
        if unseen is not None:
            below = np.where(unseen, 1, below)
        np.divide(of_rows(stack.o), below[..., None], out=o, casting="unsafe")
        reference = of_rows(stack.reference)
        m[:] = from_units(highest + reference)
        # l is relative to m as it is returned, after its rounding: what the backward makes of both is then exact.
        np.multiply(total, exponential((reference - to_units(m)).astype(l.dtype)), out=l)
        if unseen is not None:
            l[unseen] = 0
