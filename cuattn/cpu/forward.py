"""The forward walk: online softmax over the visible tiles, as many row tiles abreast as see the same.

Every sum over tiles runs in the order of the tiles, one tile after the other, and what is decided for a row depends on
its own scores alone.  So a tile that contributes nothing may be skipped or visited, and it does not matter which tiles
or row tiles are taken at once: the bits of the result are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.buffers import Shapes
from cuattn.cpu.exponent import WINDOW, exponential, exponentiate, lowest, relative
from cuattn.cpu.scores import LANES, Item, Rows, Task, Walk, longest_of, selecting_product
from cuattn.cpu.tiles import Part, RowGroup
from cuattn.problem import Problem

__all__ = ["ForwardWalk"]


class ForwardWalk(Walk):
    """Computes items of work in one thread: algorithm 2, with the loops exchanged.

    Parameters
    ----------
    task : Task
    results : dict of ndarray
        o and, if they are wanted, l and m, to write to.
    """

    def __init__(self, task: Task, results: Mapping[str, np.ndarray]) -> None:
        super().__init__(task, self.shapes(task.problem, task.operands, task.blocks))
        self._results, self._statistics = results, task.problem.statistics
        self._lowest = lowest(task.problem.stat_dtype)
        self._ones = np.ones((1, task.blocks.keys), task.problem.stat_dtype)

    @staticmethod
    def shapes(problem: Problem, operands: Mapping[str, np.ndarray], blocks: Blocks) -> Shapes:
        """Return the shapes of a thread's buffers."""
        members, columns = blocks.heads * blocks.stack, problem.head_dim_v + 1
        tiles = max(blocks.room, blocks.heads * blocks.abreast)
        return {
            **Walk.shapes(problem, operands, blocks),
            **Rows.shapes("q", blocks, problem.head_dim),
            "o": (members, columns, blocks.rows),
            "weighed": (tiles + blocks.heads * blocks.abreast, columns, blocks.rows),
            "m": (members, blocks.rows),
            "reference": (members, blocks.rows),
            "here": (blocks.heads * blocks.abreast, LANES * blocks.rows),
        }

    def __call__(self, item: Item) -> None:
        """Compute an item; again, with care for what is hidden, if something is not a finite number."""
        stack = item.group.count, sum(group.count for group in item.row_groups)
        size, get = (*stack, self.blocks.rows), self.buffers.get
        self._q = Rows(self.buffers, "q", *size, self.problem.head_dim)
        self._o = get("o", *stack, self.problem.head_dim_v + 1, self.blocks.rows)
        self._m, self._reference = get("m", *size), get("reference", *size)
        queries = item.group.of_queries(self.task.operands["q"])[:, self.rows_of(item)]
        self._q.load(queries, self.task.factor)
        self._bounded = self.task.bounded(longest_of(self._q.upright) * self.task.max_norm("k", item.group))
        self.kv.turn_to(item.group)
        self._attend(item, careful=False)
        if not np.isfinite(self._o).all():
            self._attend(item, careful=True)
        self._finish(item)

    def _attend(self, item: Item, *, careful: bool) -> None:
        """Take all row tiles of an item through the tiles that they see."""
        packs = self._bounded and self.blocks.held == self.blocks.key_tiles
        self._m.fill(-np.inf)
        self._reference.fill(0)
        for row_group in item.row_groups:
            where = slice(row_group.start, row_group.start + row_group.count)
            parts = row_group.packed if packs else row_group.steps
            if not (parts and self._bounded):
                self._o[:, where] = 0
            for index, part in enumerate(parts):
                first = self._bounded and index == 0
                self._advance(item, row_group, part, where, first=first, careful=careful)

    def _advance(
        self, item: Item, row_group: RowGroup, part: Part, where: slice, *, first: bool, careful: bool
    ) -> None:
        """Take some row tiles through a part of their tiles: algorithm 2, lines 10 to 16."""
        o, m = self._o[:, where], self._m[:, where]
        s, masks = self.make_scores(item, row_group, part, self._q.transposed[:, where], careful=careful)  # line 10
        if self._bounded:  # all scores are within the window, so references stay 0
            if self._statistics:
                for tile, mask in masks:
                    mask.fill(tile, self._lowest)
                np.maximum(m, self._row_max(s), out=m)
            exponentiate(s)
            for tile, mask in masks:
                mask.zero(tile)
        else:
            for tile, mask in masks:
                mask.fill(tile, -np.inf)  # line 11
            self._follow(s, o, m, self._reference[:, where])  # lines 12 and 13
            relative(s)
        weighed = self.buffers.get("weighed", *s.shape[:2], 1 + part.count, *o.shape[2:])
        np.matmul(self._ones, s, weighed[:, :, 1:, -1:])
        if self.task.dropout is not None:
            self.drop(s, self.dropped(item, row_group, part))  # line 14
        for tile, slot, count in part.runs:
            place = tile % self.kv.values.shape[2]
            v, p = self.kv.values[:, :, place : place + count], s[:, :, slot : slot + count]
            products = weighed[:, :, 1 + slot : 1 + slot + count, :-1]
            if careful:
                selecting_product(p.swapaxes(3, 4), v, products.swapaxes(3, 4))
            else:
                np.matmul(v.swapaxes(3, 4), p, products)
        if first:
            np.add.reduce(weighed[:, :, 1:], 2, None, o)
        else:
            np.copyto(weighed[:, :, 0], o)
            np.add.reduce(weighed, 2, None, o)  # lines 15 and 16

    def _row_max(self, s: np.ndarray) -> np.ndarray:
        heads, tiles, rows = *s.shape[:2], s.shape[-1]
        here = self.buffers.get("here", heads, tiles, LANES * rows)
        np.maximum.reduce(s.reshape(heads, tiles, -1, LANES * rows), 2, None, here)  # longer rows are faster to reduce
        return np.maximum.reduce(here.reshape(heads, tiles, LANES, rows), 2)

    def _follow(self, s: np.ndarray, o: np.ndarray, m: np.ndarray, reference: np.ndarray) -> None:
        """Move the references of the rows whose highest score has left the window, and take s relative to them."""
        seen = m > -np.inf
        np.maximum(m, self._row_max(s), out=m)
        away = (m > reference + WINDOW) | (~seen & (m < reference - WINDOW) & (m > -np.inf))
        if away.any():
            moved = np.where(away, m, reference)
            o *= np.where(seen, exponential(reference - moved), 0)[:, :, None]
            reference[...] = moved
        if reference.any():
            s -= reference[:, :, None, None]

    def _finish(self, item: Item) -> None:
        """Write the results of an item: algorithm 2, lines 15 and 16, once for all."""
        rows, total = self.rows_of(item), self._o[:, :, -1]
        below = np.where(total == 0, 1, total)
        below *= below.dtype.type(1 / self.problem.dropout_scale)
        weighed = self._o[:, :, :-1]
        np.divide(weighed, below[:, :, None], out=weighed)
        by_row = weighed.swapaxes(2, 3)
        target = item.group.of_queries(self._results["o"])[:, rows]
        whole, rest = divmod(rows.stop - rows.start, self.blocks.rows)
        cut = whole * self.blocks.rows
        target[:, :cut].reshape(len(target), whole, *by_row.shape[2:])[...] = by_row[:, :whole]
        if rest:
            target[:, cut:] = by_row[:, whole, :rest]
        if self._statistics:
            l, m = (item.group.of_queries(self._results[name])[:, rows] for name in ("l", "m"))
            count = rows.stop - rows.start
            self._m[total == 0] = -np.inf
            relative_to = exponential(np.where(total == 0, 0, self._m - self._reference))
            l[...] = (total / relative_to).reshape(len(l), -1)[:, :count]
            m[...] = self._m.reshape(len(m), -1)[:, :count]
