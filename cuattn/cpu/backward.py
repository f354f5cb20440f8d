"""The backward walk: the forward's way over the keys once more, with the probabilities recomputed.

Row tiles are the outer loop, as in the forward: a row tile owns its dq, and its queries and do are transposed once.
What several row tiles add to, dk and dv of a step of keys, they add to in a fixed order, so the result does not depend
on the threads; sums of each thread's own would cost O(n_keys * head_dim) more memory per thread and give other bits
with other numbers of threads.  Threads that work on different heads never wait for each other, and those in the same
head follow each other through the steps.

Scores are made by the forward's products, so they have its bits; exponentials are relative to what the forward's ended
up with.  What a saturated softmax gives is then exact: its largest weight is exp(m - m) / l.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.buffers import Shapes
from cuattn.cpu.exponent import exponentiate, relative
from cuattn.cpu.scores import Item, Rows, Task, Walk, differentiate_softcap, longest_of, selecting_product
from cuattn.cpu.sums import OrderedSum, summed_to
from cuattn.cpu.tiles import Part, RowGroup
from cuattn.cpu.weights import RowWeights
from cuattn.problem import Problem

__all__ = ["END", "BackwardWalk"]

END = -1  # what an item adds to when it ends, in place of a part's index


class BackwardWalk(Walk):
    """Computes items of work in one thread: algorithm 4, with the loops exchanged.

    Parameters
    ----------
    task : Task
    totals : dict of ndarray
        Sums of the gradients "q", "k", "v" and, if there is one, "bias", of their operands' shapes.
    turns : OrderedSum
        Of all threads.
    """

    def __init__(self, task: Task, totals: Mapping[str, np.ndarray], turns: OrderedSum) -> None:
        super().__init__(task, self.shapes(task.problem, task.operands, task.blocks))
        self._totals, self._turns = totals, turns
        self._shares_q = task.operands["q"].shape[:-2] != (*task.problem.batch, task.problem.heads)

    @staticmethod
    def shapes(problem: Problem, operands: Mapping[str, np.ndarray], blocks: Blocks) -> Shapes:
        """Return the shapes of a thread's buffers."""
        d, dv, members = problem.head_dim, problem.head_dim_v, blocks.heads * blocks.stack
        common = Walk.shapes(problem, operands, blocks)
        return {
            **common,
            "ds": common["s"],
            **Rows.shapes("q", blocks, d),
            **Rows.shapes("do", blocks, dv),
            "parts": (common["s"][0], max(blocks.keys * max(d, dv), blocks.rows * d)),
            "dq": (members, blocks.rows, d),
            "dq of a part": (members, blocks.rows, d),
            "reference": (members, blocks.rows),
            "delta": (members, blocks.rows),
        }

    def __call__(self, item: Item) -> None:
        """Compute an item."""
        self._begin(item)
        numbers = iter(item.numbers)
        for row_group in item.row_groups:
            for part in row_group.steps:
                self._advance(item, row_group, part, next(numbers))
        self._finish(item, next(numbers))

    def _begin(self, item: Item) -> None:
        """Load the rows: algorithm 4, line 10.  Those of empty rows are 0: nothing may depend on what they hold."""
        group, rows, problem = item.group, self.rows_of(item), self.problem
        operands = {
            name: group.of_queries(x)[:, rows]
            for name, x in self.task.operands.items()
            if name not in ("k", "v", "bias")
        }
        weights = RowWeights(operands)
        stack = group.count, sum(row_group.count for row_group in item.row_groups), self.blocks.rows
        self._q = Rows(self.buffers, "q", *stack, problem.head_dim)
        self._q.load(operands["q"], self.task.factor, weights.empty)
        self._do = Rows(self.buffers, "do", *stack, problem.head_dim_v)
        factors = weights.weight * weights.weight.dtype.type(problem.dropout_scale)
        self._do.load(operands["do"], factors[..., None], weights.empty)
        self._reference, self._delta = (self.buffers.get(name, *stack) for name in ("reference", "delta"))
        reference = np.zeros_like(weights.delta) if weights.reference is None else weights.reference
        for buffer, values in ((self._reference, reference), (self._delta, weights.delta)):
            flat = buffer.reshape(len(buffer), stack[1] * stack[2])
            flat[:, : values.shape[1]] = values
            flat[:, values.shape[1] :] = 0
        self._dq = self.buffers.get("dq", *stack, problem.head_dim)
        self._dq.fill(0)
        self._dbias: np.ndarray | None = None  # sums over keys, which this item makes alone
        longest_q, longest_do = (longest_of(x.upright) for x in (self._q, self._do))
        k_norm, v_norm = (self.task.max_norm(name, group) for name in ("k", "v"))
        self._moved = weights.reference is not None
        self._bounded = self.task.bounded(longest_q * k_norm) and not self._moved
        largest = longest_q + k_norm + longest_do * v_norm + float(np.abs(self._delta).max())  # NaN stays
        self._careful = not largest < np.finfo(problem.stat_dtype).max
        self.kv.turn_to(group)

    def _advance(self, item: Item, row_group: RowGroup, part: Part, number: int) -> None:
        """Take some row tiles through a part of their tiles: algorithm 4, lines 11 to 22."""
        where = slice(row_group.start, row_group.start + row_group.count)
        p = self._probabilities(item, row_group, part, where)
        ds = self.buffers.get("ds", *p.shape)
        for first, slot, count in part.runs:  # line 17
            place = first % self.kv.values.shape[2]
            v = self.kv.values[:, :, place : place + count]
            np.matmul(v, self._do.transposed[:, where, None], ds[:, :, slot : slot + count])
        dropped = [] if self.task.dropout is None else list(self.dropped(item, row_group, part))
        self.drop(ds, dropped)  # line 18
        np.subtract(ds, self._delta[:, where, None, None], ds)
        np.multiply(ds, p, ds)  # line 20
        if self._careful:
            ds[p == 0] = 0  # 0 * NaN and 0 * inf
        self.drop(p, dropped)  # line 15
        dv = self._product(p, self._do.upright[:, where, None])
        self._turns.wait((item.line, part.index), number)
        self._add("v", item, part, dv)  # line 16
        if "bias" in self._totals:
            self._add_bias(item, row_group, part, ds)
        if self.problem.softcap is not None:
            differentiate_softcap(ds, self.tanh, self.problem.softcap, careful=self._careful)
        self._add("k", item, part, self._product(ds, self._q.upright[:, where, None]))  # line 22
        self._turns.release((item.line, part.index))
        self._add_dq(part, ds, where)  # line 21

    def _probabilities(self, item: Item, row_group: RowGroup, part: Part, where: slice) -> np.ndarray:
        """Return P of a part, unweighted: algorithm 4, lines 11 to 13."""
        s, masks = self.make_scores(item, row_group, part, self._q.transposed[:, where], careful=self._careful)
        if self._bounded:
            exponentiate(s)
            for tile, mask in masks:
                mask.zero(tile)
            return s
        for tile, mask in masks:
            mask.fill(tile, -np.inf)
        if self._moved:
            s -= self._reference[:, where, None, None]
        return relative(s)

    def _product(self, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return weights @ rows, (heads, row tiles, tiles, keys, width)."""
        product = self.buffers.get("parts", *weights.shape[:4], rows.shape[-1])
        (selecting_product if self._careful else np.matmul)(weights, rows, product)
        return product

    def _add(self, name: str, item: Item, part: Part, products: np.ndarray) -> None:
        """Add parts of dk or dv, (heads, row tiles, tiles, keys, width)."""
        total = item.group.of_keys(self._totals[name])
        heads, tiles, *shape = products.shape
        shares = 1 if len(total) == 1 else heads
        products = products.reshape(shares, heads * tiles // shares, *shape)
        while (half := products.shape[1] // 2) > 0:
            np.add(products[:, :half], products[:, -half:], products[:, :half])
            products = products[:, :-half]
        for first, slot, count in part.runs:
            target = total[:, first * self.blocks.keys : (first + count) * self.blocks.keys]
            some = products[:, 0, slot : slot + count].reshape(shares, count * shape[1], shape[2])
            np.add(target, some[:, : target.shape[1]], target)

    def _add_dq(self, part: Part, ds: np.ndarray, where: slice) -> None:
        heads, tiles, count, _, rows = ds.shape
        products = self.buffers.get("parts", heads, tiles, count, rows, self.problem.head_dim)
        for first, slot, tiles_of_run in part.runs:
            place = first % self.kv.keys.shape[2]
            k = self.kv.keys[:, :, place : place + tiles_of_run]
            some = ds[:, :, slot : slot + tiles_of_run].swapaxes(3, 4), k, products[:, :, slot : slot + tiles_of_run]
            (selecting_product if self._careful else np.matmul)(*some)
        dq = self._dq[:, where]
        if count > 1:
            total = self.buffers.get("dq of a part", heads, tiles, rows, self.problem.head_dim)
            dq += np.add.reduce(products, 2, None, total)
        else:
            dq += products[:, :, 0]

    def _add_bias(self, item: Item, row_group: RowGroup, part: Part, ds: np.ndarray) -> None:
        """Add parts of dbias; sums over keys are kept until the item ends."""
        total = item.group.of_queries(self._totals["bias"])
        if total.shape[2] == 1 < self.problem.n_keys:
            if self._dbias is None:
                self._dbias = np.zeros_like(total)
            total = self._dbias
        for part_of_ds, target in self.bias_of(total, item, row_group, part, ds):
            target += summed_to(part_of_ds, target.shape, target.dtype)

    def _finish(self, item: Item, number: int) -> None:
        """Write dq, and add what the item alone has summed up."""
        heads, rows = len(self._dq), self.rows_of(item)
        dq = self._dq.reshape(heads, -1, self.problem.head_dim)[:, : rows.stop - rows.start]
        dq *= dq.dtype.type(self.task.factor)
        target = item.group.of_queries(self._totals["q"])[:, rows]
        if not self._shares_q:
            target[...] = dq
        if self._shares_q or "bias" in self._totals:
            self._turns.wait((item.line, END), number)
            if self._shares_q:
                target += summed_to(dq, target.shape, target.dtype)
            if self._dbias is not None:
                total = item.group.of_queries(self._totals["bias"])
                some = rows if total.shape[1] > 1 else slice(None)
                total[:, some] += self._dbias[:, some]
            self._turns.release((item.line, END))
