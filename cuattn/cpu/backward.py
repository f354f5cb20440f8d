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
    RowWeights,
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

    def __init__(self, task: Tiles, **widths: int) -> None:
        blocks, d, dv = task.blocks, task.problem.head_dim, task.problem.head_dim_v
        parts = max(cdiv(blocks.keys * max(d, dv), blocks.rows), d) * blocks.step
        own = {"ds": blocks.step * blocks.keys, "do": dv, "do transposed": dv, "parts": parts}
        super().__init__(task, own | widths)

    def __call__(self, item: Item) -> None:
        """Compute an item."""
        self.turn_to(item)
        self._begin()
        for part, turn in zip(item.parts, item.turns, strict=False):
            self._advance(part, turn)
        self._finish()

    def _begin(self) -> None:
        """Load the rows: algorithm 4, line 10.  Those of empty rows are 0: nothing may depend on what they hold."""
        group = self.item.group
        rows = {
            name: group.of_queries(x, self.item.rows)
            for name, x in self.task.operands.items()
            if name not in self.tiles and not name.endswith("bias")
        }
        largest = self._load_rows(rows, row_weights(rows))
        self._careful = not largest < np.finfo(self.dtype).max
        self._gradients = {name: np.zeros_like(self._q) for name in ("dq", "tdq") if name in self.task.results}
        self._terms: list[Term] = []  # of gradients of the score function's arrays
        self._over_keys = {}  # sums over keys of the bias's gradients, which this item makes alone
        for name in ("dbias", "tdbias"):
            dbias = self.task.results.get(name)
            if dbias is not None and dbias.shape[-1] == 1 < self.problem.n_keys:
                self._over_keys[name] = np.zeros_like(group.of_queries(dbias, self.item.rows).swapaxes(1, 2))

    def _load_rows(self, rows: dict[str, ndarray], weights: RowWeights) -> float:
        """Load the rows; return what no number that is computed exceeds, NaN if that may be NaN."""
        self._factors = self.problem.dropout_scale * weights.factors[..., None]
        self._q, self._q_transposed = self.load("q", rows["q"], self.task.factor, weights.empty)
        self._do, self._do_transposed = self.load("do", rows["do"], self._factors, weights.empty)
        self._delta = self._of_rows(weights.delta * weights.factors)  # for exponentials
        self._reference = None if weights.reference is None else self._of_rows(weights.reference)
        longest_q, longest_do = longest_of(self._q), longest_of(self._do)
        self._bounded = self.bounded(longest_q)
        k_norm, v_norm = (self.task.max_norm(name, self.item.group) for name in "kv")
        return longest_q + k_norm + longest_do * v_norm + float(np.abs(self._delta).max())

    def _of_rows(self, values: ndarray) -> ndarray:
        """Return what there is for each row with axes like those of scores; 0 for rows that do not exist."""
        padded = np.zeros((self.members, 1, 1, self.blocks.rows), self.dtype)
        self.by_head(padded[:, 0, 0])[:, : self.count] = values
        return padded

    def _advance(self, part: Part, turn: AbstractContextManager) -> None:
        """Take the row tiles through a part of their tiles: algorithm 4, lines 11 to 22."""
        p, careful = self._probabilities(part), self._careful
        ds = self.by_keys("ds", part, "v", self._do_transposed)  # line 17
        dropped = [] if self.task.dropout is None else list(self.dropped(part))
        self.drop(ds, dropped)  # line 18
        differentiate_scores(ds, p, self._delta, careful=careful)  # line 20
        self.drop(p, dropped)  # line 15
        dv = self._product(p, self._do)
        with turn:
            self._add("dv", part, dv)  # line 16
            if "dbias" in self.task.results:
                self._add_bias("dbias", part, ds)
            for more, (tiles, first) in zip(self.slopes, self.by_head_and_run(part, ds), strict=False):
                self._terms += self._stretch.differentiate(tiles, more, first)
            if self.problem.softcap is not None:
                differentiate_softcap(ds, self.tanh, self.problem.softcap, careful=careful)
            self._add("dk", part, self._product(ds, self._q))  # line 22
        self._add_dq("dq", part, ds, "k")  # line 21

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

    def _add_dq(self, name: str, part: Part, ds: ndarray, keys: str) -> None:
        """Add parts of dq: products with keys, "k" or "tk"."""
        members, count, _, rows = ds.shape
        products = self.buffers.get("parts", members, count, rows, self.problem.head_dim)
        for slots, k in self.by_run(part, keys):
            product(ds[:, slots].swapaxes(2, 3), k, products[:, slots], careful=self._careful)
        self._gradients[name] += np.add.reduce(products, 1)

    def _add_bias(self, name: str, part: Part, ds: ndarray) -> None:
        """Add parts of dbias; sums over keys are kept until the item ends."""
        for part_of_ds, total in self.bias_of(self.task.results[name], part, ds):
            target = self._over_keys.get(name, total)
            target += summed_to(part_of_ds, target.shape, target.dtype)

    def _finish(self) -> None:
        """Write dq, and add what the item alone has summed up."""
        results, group, rows = self.task.results, self.item.group, self.item.rows
        gradients = {name: self.by_head(x)[:, : self.count] for name, x in self._gradients.items()}
        for name, dq in gradients.items():
            dq *= dq.dtype.type(self.task.factor)
            if not self.task.shares:
                group.of_queries(results[name], rows)[...] = dq
        if not (self.task.shares or self._over_keys):
            return
        with self.item.turns[-1]:
            for name, dq in gradients.items() if self.task.shares else ():
                target = group.of_queries(results[name], rows)
                target += summed_to(dq, target.shape, target.dtype)
            for term in self._terms:
                term.add_to(results)
            for name, total in self._over_keys.items():
                target = group.of_queries(results[name], rows).swapaxes(1, 2)
                target += total
