"""The backward walk with tangents: the gradients that are wanted, and their derivatives along tangents.

With a dot for a tangent, u = s. - lse. and the backward's dP and D, dS. = u dS + P (dP. - D.): every product of the
backward becomes two, of one factor's tangent with the other factor.
"""

from contextlib import AbstractContextManager

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    RowWeights,
    differentiate_moved_softcap,
    differentiate_scores,
    differentiate_softcap,
    longest_of,
)
from cuattn.cpu.backward import BackwardWalk
from cuattn.cpu.tiles import Part
from cuattn.cpu.walk import Tiles


class BackwardJvpWalk(BackwardWalk):
    """Computes items of work in one thread."""

    def __init__(self, task: Tiles) -> None:
        blocks, problem = task.blocks, task.problem
        widths = dict.fromkeys("tu", blocks.step * blocks.keys) | {"tds": blocks.step * blocks.keys}
        for name, width in (("tq", problem.head_dim), ("tdo", problem.head_dim_v)):
            if name in task.operands:
                widths |= dict.fromkeys((name, f"{name} transposed"), width)
        super().__init__(task, **widths)

    def _load_rows(self, rows: dict[str, ndarray], weights: RowWeights) -> float:
        largest = super()._load_rows(rows, weights)
        factors = {"tq": self.task.factor, "tdo": self._factors}
        self._tangents = {
            name: self.load(name, rows[name], factor, weights.empty) for name, factor in factors.items() if name in rows
        }
        tdelta = np.vecdot(rows["do"], rows["to"], dtype=self.dtype, casting="unsafe")
        if "tdo" in rows:
            tdelta += np.vecdot(rows["tdo"], rows["o"], dtype=self.dtype, casting="unsafe")
        mean = np.array(rows["tlse"])
        if weights.empty is not None:
            tdelta[weights.empty] = mean[weights.empty] = 0
        self._tdelta, self._mean = self._of_rows(tdelta * weights.factors), self._of_rows(mean)
        # What is not a finite number shows in the sum; products of lengths bound what is computed of them.
        pairs = [(self._q, "tk"), (self._do, "tv"), *((upright, name) for name, (upright, _) in self._tangents.items())]
        of = {"tq": "k", "tdo": "v"}
        group = self.item.group
        largest += sum(longest_of(x) * (1 + self.task.max_norm(of.get(name, name), group)) for x, name in pairs)
        largest += sum(self.task.max_norm(name, group) for name in ("tk", "tv"))
        for x in (self._tdelta, self._mean, *(rows[name] for name in ("tbias",) if name in rows)):
            largest += float(np.abs(x).max())
        return np.nan if self.task.score is not None else largest

    def _advance(self, part: Part, turn: AbstractContextManager) -> None:
        """Take the row tiles through a part of their tiles."""
        p, results = self._probabilities(part), self.task.results
        t = self._relative_tangents(part, p) if self.problem.moves else None
        dropped = [] if self.task.dropout is None else list(self.dropped(part))
        ds, tds = self._derivatives(part, p, t, dropped)
        self.drop(p, dropped)
        if t is not None:
            t *= p
        with turn:
            for name in ("dv", "tdv"):
                if name in results:
                    self._add_all(name, part, self._factors_of_values(name, p, t))
            for name, x in (("dbias", ds), ("tdbias", tds)):
                if name in results:
                    self._add_bias(name, part, x)
            self._through_scores(part, ds, tds)
            tq, _ = self._tangents.get("tq", (None, None))
            self._add_all("dk", part, [(ds, self._q)])
            self._add_all("tdk", part, [(tds, self._q), (ds, tq)])
        for name, x, keys in (("dq", ds, "k"), ("tdq", tds, "k"), ("tdq", ds, "tk")):
            if name in results and keys in self.tiles:
                self._add_dq(name, part, x, keys)

    def _relative_tangents(self, part: Part, p: ndarray) -> ndarray:
        """Return the tangents of the scores relative to that of lse."""
        _, tq = self._tangents.get("tq", (None, None))
        t = self.make_tangents(part, self._q_transposed, tq)
        t -= self._mean
        if self._careful:
            t[p == 0] = 0
        return t

    def _derivatives(self, part: Part, p: ndarray, t: ndarray | None, dropped: list) -> tuple[ndarray, ndarray]:
        """Return the derivatives by scores and their tangents."""
        careful, terms = self._careful, []
        ds = self.by_keys("ds", part, "v", self._do_transposed)
        self.drop(ds, dropped)
        differentiate_scores(ds, p, self._delta, careful=careful)
        if "tv" in self.tiles:
            terms.append(("tv", self._do_transposed))
        if "tdo" in self._tangents:
            terms.append(("v", self._tangents["tdo"][1]))
        tds = self.sum_by_keys("tds", part, terms, len(ds))
        self.drop(tds, dropped)
        differentiate_scores(tds, p, self._tdelta, careful=careful)
        if t is not None:
            tds += np.multiply(t, ds, self.buffers.get("u", *ds.shape))
        return ds, tds

    def _factors_of_values(self, name: str, p: ndarray, tp: ndarray | None) -> list[tuple]:
        """Return the products that dv or its tangent is the sum of."""
        tdo, _ = self._tangents.get("tdo", (None, None))
        return [(p, self._do)] if name == "dv" else [(tp, self._do), (p, tdo)]

    def _add_all(self, name: str, part: Part, products: list[tuple]) -> None:
        """Add products of weights with rows to a sum of keys, if it is wanted; factors that are None are 0."""
        for weights, rows in products:
            if name in self.task.results and weights is not None and rows is not None:
                self._add(name, part, self._product(weights, rows))

    def _through_scores(self, part: Part, ds: ndarray, tds: ndarray) -> None:
        """Turn derivatives by scores into those by scaled products."""
        moved = self.moved or [{}] * len(self.slopes)
        runs = zip(self.by_head_and_run(part, ds), self.by_head_and_run(part, tds), self.slopes, moved, strict=False)
        for (tiles, first), (tangents, _), slopes, more in runs:
            self._terms += self._stretch.differentiate_moved(tiles, tangents, slopes, more, first)
        softcap = self.problem.softcap
        if softcap is not None and self.problem.moves:
            differentiate_moved_softcap(ds, tds, self.slope, self.tanh, careful=self._careful)
        elif softcap is not None:
            differentiate_softcap(ds, self.tanh, softcap, careful=self._careful)
            tds *= self.tanh  # which the slope has become
