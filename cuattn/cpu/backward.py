"""The backward pass: the forward's walk over the keys once more, with the probabilities recomputed.

Row tiles are the outer loop, as in the forward: a row tile owns its dq, and its queries and do are transposed
once.  What several row tiles add to, dk and dv of a chunk of keys, they add to in a fixed order (see
:mod:`cuattn.cpu.turns`), so the result does not depend on the threads; the alternative, sums of each thread's own,
would cost O(n_keys * head_dim) more memory per thread and give other bits with other numbers of threads.  Threads
that work on different heads never wait for each other, and those in the same head follow each other through the
chunks.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import NamedTuple

import numpy as np

from cuattn.cpu import threads
from cuattn.cpu.blocks import Shape, choose, is_plain, stack_shape
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import exponential, to_units
from cuattn.cpu.heads import Team, pick_team, team_groups
from cuattn.cpu.panel import Panel
from cuattn.cpu.scores import Rows, Scores
from cuattn.cpu.steps import Call, Steps
from cuattn.cpu.sums import BiasSum, KeySums, RowSum, Share, Spare, shares_of
from cuattn.cpu.tiles import Tiles
from cuattn.cpu.turns import Turns
from cuattn.cpu.views import Chunk
from cuattn.problem import Operands, Problem

__all__ = ["backward"]


class Item(NamedTuple):
    """A stack of row tiles, of a head or of a team of heads, what they see, and what they add to."""

    group: int
    team: Team
    row_tile: int  # the first
    chunks: list[Chunk]
    dk: Share
    dv: Share


def backward(problem: Problem, operands: Operands) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Compute the gradients of attention.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : Operands
        Its arrays, on the host, with do and the forward's o, l and m.

    Returns
    -------
    dq, dk, dv : ndarray
        Gradients, of their operands' shapes and dtypes; summed in float32 (float64) and rounded once.
    dbias : ndarray or None
        Gradient of the bias, of its shape and dtype; None without a bias.

    Notes
    -----
    Bitwise reproducible, whatever the number of threads.  Extra memory is a few MB per thread and, in the
    precision of the sums, dk and dv of the heads that are being worked on.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 4, with the loops exchanged.
    """
    if not problem.n_keys or 0 in problem.stat_shape:
        return tuple(None if x is None else np.zeros(x.shape, x.dtype) for x in operands[:4])
    task = _Task(problem, operands)
    threads.run(
        threads.Dispatcher([len(group) * task.stacks for group in task.groups]),
        task.prepare,
        lambda: _Worker(task),
        threads.useful(problem, task.blocks),
        task.turns.abort,
    )
    return task.results()


class _Task:
    """A whole backward pass."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem, self.operands = problem, operands
        self.blocks = choose(problem, operands)
        self.turns = Turns()
        self.groups = team_groups(problem, operands, self.blocks.team)
        self.tiles = Tiles(problem, operands, self.blocks)
        self.dq, self.dk, self.dv = (np.empty(x.shape, x.dtype) for x in operands[:3])  # all of it will be written
        self.dq_sum = self.dbias = None
        leading = (*problem.batch, problem.heads)
        if operands.q.shape[:-2] != leading:
            self.dq_sum = RowSum(operands.q, problem.stat_dtype, self.blocks, self.turns, self.groups)
        if operands.bias is not None:
            self.dbias = BiasSum(problem, operands.bias, self.blocks, self.turns, self.groups)
        self.stacks = -(-self.blocks.row_tiles // self.blocks.stack)
        self._sums: dict[int, KeySums] = {}
        self._spare = Spare()
        self._left = [len(group) * self.stacks for group in self.groups]  # items that are not finished
        self._lock = threading.Lock()

    def prepare(self, group: int, index: int) -> Item:
        """Return an item of work; called for one item of a group after the other."""
        if group not in self._sums:
            common = self.problem, self.operands, self.blocks, self.turns
            self._sums[group] = KeySums(*common, self.groups[group], self._spare)
        team, stack = divmod(index, self.stacks)
        team, row_tile = self.groups[group][team], stack * self.blocks.stack
        chunks = self.tiles.view(team.heads[0], row_tile).chunks
        return Item(group, team, row_tile, chunks, *self._sums[group].shares(team, chunks))

    def finish(self, item: Item) -> None:
        """Round dk and dv of a group when its last item is done."""
        with self._lock:
            self._left[item.group] -= 1
            last = self._left[item.group] == 0
        if last:
            self._sums.pop(item.group).write(self.dk, self.dv, self.problem.scale)

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the gradients."""
        dq = self.dq if self.dq_sum is None else self.dq_sum.total.astype(self.dq.dtype, copy=False)
        return dq, self.dk, self.dv, None if self.dbias is None else self.dbias.result()


class _Step(NamedTuple):
    """The arrays that a chunk works on, and the calls that work on them, bound to them once (as in the forward)."""

    s: np.ndarray  # (stack, tiles, keys, rows): scores, then probabilities
    dp: np.ndarray  # of the same shape: the derivatives of the probabilities, then of the scores
    make_products: tuple[Call, ...]  # q k and do v
    weigh_probabilities: Call
    take_whole: tuple[Call, ...]  # all up to there, where no visible score is hidden and no exponential slow
    find_dv: tuple[Call, ...]
    find_dk: tuple[Call, ...]
    find_dq: tuple[Call, ...]  # and add it
    dv: np.ndarray  # (shares, tiles, keys, head_dim_v), in memory that dk and dq use, too
    dk: np.ndarray


class _Stack:
    """What a thread keeps for a stack of row tiles."""

    def __init__(self, task: _Task, panel: Panel, buffers: Buffers, shape: Shape) -> None:
        problem, blocks = self._problem, self._blocks = task.problem, task.blocks
        self._panel, self._buffers = panel, buffers
        self._shares_k, self._shares_v = (shares_of(x, problem, shape.heads) for x in task.operands[1:3])
        self.shape = shape
        stack, rows = shape.heads * shape.tiles, shape.rows
        self.step: Steps[_Step] = Steps(self._bind)  # what to do with a chunk
        self._all: list[tuple] = []
        self.q = Rows(buffers, shape, problem.head_dim, plain=True)
        self.do = Rows(buffers, shape, problem.head_dim_v, plain=True)
        for name in ("s", "dp"):  # once for all chunks
            buffers.get(name, stack, blocks.chunk, blocks.keys, rows)
        depth, width = problem.head_dim, problem.head_dim_v
        buffers.get("parts", stack, blocks.chunk, max(blocks.keys * max(depth, width), rows * depth))
        self.dq = buffers.new(stack, rows, problem.head_dim)
        self.dq_chunk = buffers.new(stack, rows, problem.head_dim)
        self.together = is_plain(problem)

    def fill(self, values: np.ndarray) -> np.ndarray:
        """Return numbers of (heads, count) rows as (stack, rows), 0 for the rows that do not exist."""
        full = np.zeros((self.shape.heads, self.shape.tiles * self.shape.rows), values.dtype)
        full[:, : values.shape[1]] = values
        return full.reshape(len(self.dq), self.shape.rows)

    def all_steps(self, chunks: list[Chunk]) -> list[tuple]:
        """Return (calls up to dv, dv, calls for dk, dk, calls for dq) of chunks that are the same every time."""
        if not self._all:
            for step in map(self.step, chunks):
                until_dv = (*step.take_whole, *step.find_dv)
                self._all.append((until_dv, step.dv, step.find_dk, step.dk, step.find_dq))
        return self._all

    def _bind(self, chunk: Chunk) -> _Step:
        stack, rows, keys, problem = len(self.dq), self.shape.rows, self._blocks.keys, self._problem
        get, count = self._buffers.get, chunk.count
        s, dp = get("s", stack, count, keys, rows), get("dp", stack, count, keys, rows)
        # One after the other in the same memory, which then stays in the cache.
        dv, dk, dq = (
            get("parts", stack, count, length, width)
            for length, width in ((keys, problem.head_dim_v), (keys, problem.head_dim), (rows, problem.head_dim))
        )
        make_products, find_dq = [], []
        for tile, slot, n in chunk.runs:
            k, v = self._panel.run(self.shape.heads, tile, n)
            here = slice(slot, slot + n)
            make_products.append(partial(np.matmul, k, self.q.augmented, s[:, here]))
            make_products.append(partial(np.matmul, v, self.do.augmented, dp[:, here]))
            find_dq.append(partial(np.matmul, dp[:, here].swapaxes(2, 3), k[..., :-1], dq[:, here]))
        weigh = partial(np.multiply, s, dp, dp)
        add_dv, sum_dv = self._fold(dv, self._shares_v)
        add_dk, sum_dk = self._fold(dk, self._shares_k)
        return _Step(
            s,
            dp,
            tuple(make_products),
            weigh,
            (*make_products, partial(exponential, s, s), weigh),
            (partial(np.matmul, s, self.do.plain, dv), *add_dv),
            (partial(np.matmul, dp, self.q.plain, dk), *add_dk),
            (*find_dq, *self._collect(dq)),
            sum_dv,
            sum_dk,
        )

    def _fold(self, parts: np.ndarray, shares: int) -> tuple[list[Call], np.ndarray]:
        """Return the calls that add up, by what they share, parts of dk or dv, (stack, ...); and where the sums are."""
        parts = parts.reshape(shares, len(parts) // shares, *parts.shape[1:])
        calls = []
        while (half := parts.shape[1] // 2) > 0:
            calls.append(partial(np.add, parts[:, :half], parts[:, -half:], parts[:, :half]))
            parts = parts[:, :-half]
        return calls, parts[:, 0]

    def _collect(self, parts: np.ndarray) -> tuple[Call, ...]:
        """Return the calls that add the parts of dq, (stack, tiles, rows, width), to it."""
        stack, tiles, *_ = parts.shape
        total, add = self.dq_chunk, partial(np.add, self.dq, self.dq_chunk, self.dq)
        if tiles == 1:
            return (partial(np.add, self.dq, parts[:, 0], self.dq),)
        if not self.together:  # tile by tile: one that adds nothing may be missing
            return partial(np.add.reduce, parts, 1, None, total), add
        ones = np.ones((1, tiles), parts.dtype)  # this product reads and writes less than a sum does
        return partial(np.matmul, ones, parts.reshape(stack, tiles, -1), total.reshape(stack, 1, -1)), add


class _Worker:
    """Computes stacks of row tiles, in one thread."""

    def __init__(self, task: _Task) -> None:
        self._task, self._problem, self._operands, self._blocks = task, task.problem, task.operands, task.blocks
        self._buffers = Buffers(self._problem.stat_dtype)
        common = self._problem, self._operands, self._blocks, task.tiles, self._buffers
        self._panel = Panel(*common, counts=1)
        self._scores = Scores(*common)
        self._dropout = Dropout(self._problem, self._operands, self._blocks) if self._problem.dropout else None
        self._bare = self._scores.bare and self._dropout is None  # no bias, so no dbias either
        # Whether all rows see the same and one panel holds all keys.
        self._uniform = is_plain(self._problem) and self._blocks.panel >= self._blocks.key_tiles
        self._everything = tuple(range(-(-self._blocks.key_tiles // self._blocks.chunk)))  # chunks
        self._stacks: dict[Shape, _Stack] = {}

    def __call__(self, item: Item) -> None:
        stack = self._stack_at(item)
        start = item.row_tile * self._blocks.rows
        rows = slice(start, min(start + stack.shape.tiles * stack.shape.rows, self._problem.n_queries))
        dbias = self._task.dbias
        target = None if dbias is None else dbias.open(item.team.heads[0], item.row_tile)
        self._begin(stack, item.team, rows)
        if not self._take_all(stack, item):
            self._take_each(stack, item, target)
        if dbias is not None:
            dbias.close(target, item.team.heads[0], item.row_tile)
        self._write_dq(stack, item, rows)
        self._task.finish(item)

    def _take_all(self, stack: _Stack, item: Item) -> bool:
        """Take a stack through all keys where no chunk needs a look; return whether.

        What Python runs between two calls comes from distant memory each time, and only one thread at a time runs it.
        """
        if not (self._uniform and self._panel.hold(item.team, self._everything)):
            return False
        if not self._scores.normal(self._panel.reach):
            return False
        dk, dv = item.dk, item.dv
        for index, (until_dv, part_of_dv, find_dk, part_of_dk, find_dq) in enumerate(stack.all_steps(item.chunks)):
            for call in until_dv:
                call()
            dv.sum.add_whole(index, dv.turns[index], part_of_dv)
            for call in find_dk:
                call()
            dk.sum.add_whole(index, dk.turns[index], part_of_dk)
            for call in find_dq:
                call()
        return True

    def _take_each(self, stack: _Stack, item: Item, dbias: np.ndarray | None) -> None:
        """Take a stack through the keys that it sees."""
        for index, chunk in enumerate(item.chunks):
            self._panel.hold(item.team, (chunk.index,))
            step = stack.step(chunk)
            normal = self._scores.normal(self._panel.reach)
            if self._bare and normal and not chunk.partial:  # keys that do not exist are 0 and add nothing that is kept
                for call in step.take_whole:
                    call()
            else:
                for call in step.make_products:
                    call()
                self._scores.complete(step.s, chunk, hide=not normal)
                self._scores.exponentiate(step.s, self._panel.reach)
                self._differentiate(step, item, chunk, dbias)
            for call in step.find_dv:
                call()
            item.dv.sum.add(chunk, item.dv.turns[index], step.dv)
            for call in step.find_dk:
                call()
            item.dk.sum.add(chunk, item.dk.turns[index], step.dk)
            for call in step.find_dq:
                call()

    def _stack_at(self, item: Item) -> _Stack:
        shape = stack_shape(self._problem, self._blocks, len(item.team.heads), item.row_tile)
        if shape not in self._stacks:
            self._stacks[shape] = _Stack(self._task, self._panel, self._buffers, shape)
        return self._stacks[shape]

    def _begin(self, stack: _Stack, team: Team, rows: slice) -> None:
        """Load the rows.  Those of empty rows are 0, whatever they hold: nothing may depend on them."""
        do, o, l, m = (pick_team(x, team)[:, rows] for x in self._operands[6:10])
        empty = l == 0
        # The probabilities are exponentials relative to m; 1 / l, and what the rounding of m in our units makes up
        # for, multiply do instead, and so everything that the probabilities meet.
        exact = to_units(m)
        exact[empty] = 0
        reference = exact.astype(l.dtype)
        weight = exponential((reference - exact).astype(l.dtype)) / l
        weight[empty] = 0
        self._scores.load(team, rows, stack.q, empty)
        self._scores.begin(team, rows.start // self._blocks.rows, stack.q.augmented)
        self._scores.subtract(stack.fill(reference))
        products = self._buffers.get("products", *do.shape)  # new memory would cost its first touch in every stack
        delta = np.add.reduce(np.multiply(do, o, out=products, dtype=l.dtype), axis=2) * weight
        delta[empty] = 0
        weight *= l.dtype.type(self._problem.dropout_scale)
        stack.do.load(do, empty=empty, weights=weight)
        self._delta = stack.fill(delta)
        if self._dropout is None:
            stack.do.subtract(self._delta)
        self._empty = empty
        stack.dq.fill(0)

    def _differentiate(self, step: _Step, item: Item, chunk: Chunk, dbias: np.ndarray | None) -> None:
        """Make the derivatives of the products q k of those of the probabilities, in place."""
        p, ds = step.s, step.dp
        if self._dropout is not None:
            dropped = self._dropout.dropped(chunk, item.team.heads[0], item.row_tile)
            self._dropout.zero(ds, dropped)
            ds -= self._delta[:, None, None]
        step.weigh_probabilities()
        self._scores.zero_hidden(ds)  # 0 * NaN and 0 * inf are not 0
        if self._dropout is not None:
            self._dropout.zero(p, dropped)
        if dbias is not None:
            self._task.dbias.add(dbias, item.row_tile, chunk, ds[0])
        self._scores.differentiate_softcap(ds)

    def _write_dq(self, stack: _Stack, item: Item, rows: slice) -> None:
        heads, tiles, height = stack.shape
        dq = stack.dq.reshape(heads, tiles * height, self._problem.head_dim)[:, : rows.stop - rows.start]
        dq *= dq.dtype.type(self._problem.scale)
        dq[self._empty] = 0
        shared = self._task.dq_sum
        if shared is None:
            pick_team(self._task.dq, item.team)[:, rows] = dq
            return
        head = item.team.heads[0]
        shared.wait(head, item.row_tile)
        total = shared.rows(head, item.row_tile, dq.shape[1])
        total += dq[0]
        shared.give(head, item.row_tile)
