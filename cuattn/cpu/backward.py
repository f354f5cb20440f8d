"""The backward walk: the forward's way over the keys once more, with the probabilities recomputed.

Row tiles are the outer loop, as in the forward: a row tile owns its dq, and its queries and do are transposed once.
What several row tiles add to, dk and dv of a step of keys, they add to in a fixed order, so the result does not depend
on the threads; sums of each thread's own would cost O(n_keys * head_dim) more memory per thread and give other bits
with other numbers of threads.  Threads that work on different heads never wait for each other, and those in the same
head follow each other through the steps.

With tangents, for which a dot stands, u = s. - lse. and the backward's dP and D, dS. = u dS + P (dP. - D.): every
product of the backward becomes two more, of one factor's tangent with the other factor.

Scores are made by the forward's products, so they have its bits; exponentials are relative to what the forward's ended
up with.  What a saturated softmax gives is then exact: its largest weight is exp(m - m) / l.
"""

from contextlib import AbstractContextManager
from itertools import repeat

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    differentiate_scores,
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

_FACTORS = {"q": ("k", "tk"), "do": ("v", "tv"), "tq": ("k",), "tdo": ("v",)}  # what rows are multiplied with


class BackwardWalk(Walk):
    """Computes items of work in one thread: algorithm 4, with the loops exchanged, perhaps along tangents."""

    def __init__(self, task: Tiles) -> None:
        blocks, d, dv = task.blocks, task.problem.head_dim, task.problem.head_dim_v
        parts = max(cdiv(blocks.keys * max(d, dv), blocks.rows), d) * blocks.step
        widths = dict.fromkeys(("ds", "t", "u", "tds") if task.along else ("ds",), blocks.step * blocks.keys)
        widths |= {"do": dv, "do transposed": dv, "parts": parts}
        for name, width in (("tq", d), ("tdo", dv)):
            if name in task.operands:
                widths |= dict.fromkeys((name, f"{name} transposed"), width)
        super().__init__(task, widths)

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
        self._load_rows(rows)
        self._gradients = {
            name: np.zeros_like(self._upright["q"]) for name in ("dq", "tdq") if name in self.task.results
        }
        self._terms: list[Term] = []  # of gradients of the score function's arrays
        self._over_keys = {}  # sums over keys of the bias's gradients, which this item makes alone
        for name in ("dbias", "tdbias"):
            dbias = self.task.results.get(name)
            if dbias is not None and dbias.shape[-1] == 1 < self.problem.n_keys:
                self._over_keys[name] = np.zeros_like(group.of_queries(dbias, self.item.rows).swapaxes(1, 2))

    def _load_rows(self, rows: dict[str, ndarray]) -> None:
        """Load the rows, and see whether care is needed: where something that is computed may not be finite."""
        weights, factor = row_weights(rows), self.task.factor
        scaled = self.problem.dropout_scale * weights.factors[..., None]
        factors = {"q": factor, "do": scaled, "tq": factor, "tdo": scaled}
        loaded = {name: self.load(name, rows[name], x, weights.empty) for name, x in factors.items() if name in rows}
        self._upright, self._columns = ({name: pair[n] for name, pair in loaded.items()} for n in (0, 1))
        self._delta = self._of_rows(weights.delta * weights.factors)  # for exponentials
        self._reference = None if weights.reference is None else self._of_rows(weights.reference)
        sizes = [np.abs(self._delta).max()]
        if weights.tdelta is not None:
            self._tdelta, self._mean = self._of_rows(weights.tdelta * weights.factors), self._of_rows(weights.mean)
            sizes += [np.abs(self._tdelta).max(), np.abs(self._mean).max()]
        if "tbias" in self.task.operands:
            sizes.append(np.abs(self.item.group.of_queries(self.task.operands["tbias"], self.item.rows)).max())
        lengths = {name: longest_of(upright) for name, upright in self._upright.items()}
        self._bounded = self.bounded(lengths["q"])
        norms = {name: self.task.max_norm(name, self.item.group) for name in ("k", "v", "tk", "tv")}
        # What is not a finite number shows in the sum; products of lengths bound what is computed of them.
        products = (length * (1 + sum(norms[keys] for keys in _FACTORS[name])) for name, length in lengths.items())
        largest = float(sum(sizes)) + sum(products) + sum(norms.values())
        self._careful = not largest < np.finfo(self.dtype).max or (self.task.along and self.task.score is not None)

    def _of_rows(self, values: ndarray) -> ndarray:
        """Return what there is for each row with axes like those of scores; 0 for rows that do not exist."""
        padded = np.zeros((self.members, 1, 1, self.blocks.rows), self.dtype)
        self.by_head(padded[:, 0, 0])[:, : self.count] = values
        return padded

    def _advance(self, part: Part, turn: AbstractContextManager) -> None:
        """Take the row tiles through a part of their tiles: algorithm 4, lines 11 to 22."""
        p, results = self._probabilities(part), self.task.results
        dropped = [] if self.task.dropout is None else list(self.dropped(part))
        ds = self.by_keys("ds", part, "v", self._columns["do"])  # line 17
        self.drop(ds, dropped)  # line 18
        differentiate_scores(ds, p, self._delta, careful=self._careful)  # line 20
        t, tds = self._tangents(part, p, ds, dropped) if self.task.along else (None, None)
        self.drop(p, dropped)  # line 15
        if t is not None:
            t *= p
        q, do, tq, tdo = map(self._upright.get, _FACTORS)
        dv = self._product(p, do) if "dv" in results else None
        with turn:
            if dv is not None:
                self._add("dv", part, dv)  # line 16
            self._add_products(part, [("tdv", t, do), ("tdv", p, tdo)])
            for name, x in (("dbias", ds), ("tdbias", tds)):
                if x is not None and name in results:
                    self._add_bias(name, part, x)
            self._through_scores(part, ds, tds)
            self._add_products(part, [("dk", ds, q), ("tdk", tds, q), ("tdk", ds, tq)])  # line 22
        for name, x, keys in (("dq", ds, "k"), ("tdq", tds, "k"), ("tdq", ds, "tk")):
            if x is not None and name in results and keys in self.tiles:
                self._add_dq(name, part, x, keys)  # line 21

    def _tangents(self, part: Part, p: ndarray, ds: ndarray, dropped: list) -> tuple[ndarray | None, ndarray]:
        """Return the tangents of the scores relative to that of lse, None for 0, and of the derivatives by scores."""
        q, do, tq, tdo = map(self._columns.get, _FACTORS)
        tds = self.sum_by_keys("tds", part, [("tv", do), ("v", tdo)])
        self.drop(tds, dropped)
        differentiate_scores(tds, p, self._tdelta, careful=self._careful)
        if not self.problem.moves:
            return None, tds
        t = self.make_tangents(part, q, tq)
        t -= self._mean
        if self._careful:
            t[p == 0] = 0
        tds += np.multiply(t, ds, self.buffers.get("u", *ds.shape))
        return t, tds

    def _through_scores(self, part: Part, ds: ndarray, tds: ndarray | None) -> None:
        """Turn derivatives by scores, and their tangents, into those by scaled products."""
        if self.task.score is not None:
            tangents = repeat((None, 0)) if tds is None else self.by_head_and_run(part, tds)
            runs = zip(self.by_head_and_run(part, ds), tangents, self.slopes, self.moved or repeat(None), strict=False)
            for (tiles, first), (t, _), slopes, moved in runs:
                self._terms += self._stretch.differentiate(tiles, slopes, first, t, moved)
        if self.cap is not None:
            self.cap.differentiate(ds, tds, careful=self._careful)

    def _probabilities(self, part: Part) -> ndarray:
        """Return P of a part, unweighted: algorithm 4, lines 11 to 13."""
        s, masks = self.make_scores(part, self._columns["q"], careful=self._careful)
        exponentials(s, self._reference, bounded=self._bounded)
        for tile, shown in masks:
            hide(tile, shown)
        return s

    def _product(self, weights: ndarray, rows: ndarray) -> ndarray:
        """Return weights @ rows, (members, tiles, keys, width)."""
        out = self.buffers.get("parts", *weights.shape[:3], rows.shape[-1])
        return product(weights, rows[:, None], out, careful=self._careful)

    def _add_products(self, part: Part, terms: list[tuple[str, ndarray | None, ndarray | None]]) -> None:
        """Add products of weights with rows to those sums of keys that are wanted; None is 0."""
        for name, weights, rows in terms:
            if name in self.task.results and weights is not None and rows is not None:
                self._add(name, part, self._product(weights, rows))

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
