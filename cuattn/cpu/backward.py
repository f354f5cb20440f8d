"""The backward walk: the forward's way over the keys once more, with the probabilities recomputed.

Row tiles are the outer loop, as in the forward: a row tile owns its dq, and its queries and do are transposed once.
What several row tiles add to, dk and dv of a step of keys, they add to in a fixed order, so the result does not depend
on the threads; sums of each thread's own would cost O(n_keys * head_dim) more memory per thread and give other bits
with other numbers of threads.  Threads that work on different heads never wait for each other, and those in the same
head follow each other through the steps.

Scores are made by the forward's products, so they have its bits; exponentials are relative to what the forward's ended
up with.  What a saturated softmax gives is then exact: its largest weight is exp(m - m) / l.
"""

from contextlib import AbstractContextManager

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    differentiate_scores,
    differentiate_softcap,
    exponentials,
    hide,
    longest_of,
    product,
    row_weights,
    summed_to,
)
from cuattn.cpu.score import Term
from cuattn.cpu.tiles import Part
from cuattn.cpu.walk import Item, Tiles, Walk
from cuattn.io_model.sizes import cdiv


class BackwardWalk(Walk):
    """Computes items of work in one thread: algorithm 4, with the loops exchanged."""

    def __init__(self, task: Tiles) -> None:
        blocks, d, dv = task.blocks, task.problem.head_dim, task.problem.head_dim_v
        parts = max(cdiv(blocks.keys * max(d, dv), blocks.rows), d) * blocks.step
        super().__init__(task, {"ds": blocks.step * blocks.keys, "do": dv, "do transposed": dv, "parts": parts})

    def __call__(self, item: Item) -> None:
        """Compute an item."""
        self.turn_to(item)
        self._begin()
        for part, turn in zip(item.parts, item.turns, strict=False):
            self._advance(part, turn)
        self._finish()

    def _begin(self) -> None:
        """Load the rows: algorithm 4, line 10.  Those of empty rows are 0: nothing may depend on what they hold."""
        group, problem = self.item.group, self.problem
        rows = {
            name: group.of_queries(x, self.item.rows)
            for name, x in self.task.operands.items()
            if name not in ("k", "v", "bias")
        }
        weights = row_weights(rows)
        self._q, self._q_transposed = self.load("q", rows["q"], self.task.factor, weights.empty)
        self._do, self._do_transposed = self.load(
            "do", rows["do"], problem.dropout_scale * weights.factors[..., None], weights.empty
        )
        self._delta = self._of_rows(weights.delta * weights.factors)  # for exponentials
        self._reference = None if weights.reference is None else self._of_rows(weights.reference)
        self._dq = np.zeros_like(self._q)
        self._terms: list[Term] = []  # of gradients of the score function's arrays
        dbias, self._dbias = self.task.results.get("dbias"), None  # sums over keys, which this item makes alone
        if dbias is not None and dbias.shape[-1] == 1 < problem.n_keys:
            self._dbias = np.zeros_like(group.of_queries(dbias, self.item.rows).swapaxes(1, 2))
        longest_q, longest_do = longest_of(self._q), longest_of(self._do)
        self._bounded = self.bounded(longest_q)
        k_norm, v_norm = (self.task.max_norm(name, group) for name in "kv")
        largest = longest_q + k_norm + longest_do * v_norm + float(np.abs(self._delta).max())  # NaN stays
        self._careful = not largest < np.finfo(self.dtype).max

    def _of_rows(self, values: ndarray) -> ndarray:
        """Return what there is for each row with axes like those of scores; 0 for rows that do not exist."""
        padded = np.zeros((self.members, 1, 1, self.blocks.rows), self.dtype)
        self.by_head(padded[:, 0, 0])[:, : self.count] = values
        return padded

    def _advance(self, part: Part, turn: AbstractContextManager) -> None:
        """Take the row tiles through a part of their tiles: algorithm 4, lines 11 to 22."""
        p, careful = self._probabilities(part), self._careful
        ds = self.buffers.get("ds", *p.shape)
        for slots, v in self.by_run(part, self.values):  # line 17
            np.matmul(v, self._do_transposed[:, None], ds[:, slots])
        dropped = [] if self.task.dropout is None else list(self.dropped(part))
        self.drop(ds, dropped)  # line 18
        differentiate_scores(ds, p, self._delta, careful=careful)  # line 20
        self.drop(p, dropped)  # line 15
        dv = self._product(p, self._do)
        with turn:
            self._add("dv", part, dv)  # line 16
            if "dbias" in self.task.results:
                self._add_bias(part, ds)
            for more, (tiles, first) in zip(self.slopes, self.by_head_and_run(part, ds), strict=False):
                self._terms += self._stretch.differentiate(tiles, more, first)
            if self.problem.softcap is not None:
                differentiate_softcap(ds, self.tanh, self.problem.softcap, careful=careful)
            self._add("dk", part, self._product(ds, self._q))  # line 22
        self._add_dq(part, ds)  # line 21

    def _probabilities(self, part: Part) -> ndarray:
        """Return P of a part, unweighted: algorithm 4, lines 11 to 13."""
        s, masks = self.make_scores(part, self._q_transposed, careful=self._careful)
        exponentials(s, self._reference, bounded=self._bounded)
        for tile, shown in masks:
            hide(tile, shown)
        return s

    def _product(self, weights: ndarray, rows: ndarray) -> ndarray:
        """Return weights @ rows, (members, tiles, keys, width)."""
        out = self.buffers.get("parts", *weights.shape[:3], rows.shape[-1])
        return product(weights, rows[:, None], out, careful=self._careful)

    def _add(self, name: str, part: Part, products: ndarray) -> None:
        """Add parts of dk or dv, (members, tiles, keys, width)."""
        products = products.reshape(len(products), part.count * self.blocks.keys, -1)
        for _, slots, keys in part.runs:
            start, target = slots.start * self.blocks.keys, self.item.group.of_keys(self.task.results[name], keys)
            target += summed_to(products[:, start : start + keys.stop - keys.start], target.shape, target.dtype)

    def _add_dq(self, part: Part, ds: ndarray) -> None:
        members, count, _, rows = ds.shape
        products = self.buffers.get("parts", members, count, rows, self.problem.head_dim)
        for slots, k in self.by_run(part, self.keys):
            product(ds[:, slots].swapaxes(2, 3), k, products[:, slots], careful=self._careful)
        self._dq += np.add.reduce(products, 1)

    def _add_bias(self, part: Part, ds: ndarray) -> None:
        """Add parts of dbias; sums over keys are kept until the item ends."""
        for part_of_ds, total in self.bias_of(self.task.results["dbias"], part, ds):
            target = total if self._dbias is None else self._dbias
            target += summed_to(part_of_ds, target.shape, target.dtype)

    def _finish(self) -> None:
        """Write dq, and add what the item alone has summed up."""
        dq = self.by_head(self._dq)[:, : self.count]
        dq *= dq.dtype.type(self.task.factor)
        target = self.item.group.of_queries(self.task.results["dq"], self.item.rows)
        if not self.task.shares:
            target[...] = dq
            if self._dbias is None:
                return
        with self.item.turns[-1]:
            if self.task.shares:
                target += summed_to(dq, target.shape, target.dtype)
            for term in self._terms:
                term.add_to(self.task.results)
            if self._dbias is not None:
                total = self.item.group.of_queries(self.task.results["dbias"], self.item.rows).swapaxes(1, 2)
                total += self._dbias
