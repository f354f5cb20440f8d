"""Small problems along tangents: whole score matrices of some heads at a time, by the textbook's steps."""

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    differentiate_moved_softcap,
    differentiate_scores,
    differentiate_softcap,
    is_finite,
    move_softcap,
    product,
    row_weights,
    statistics_of,
)
from cuattn.cpu.direct import Direct


class DirectJvp(Direct):
    """Computes batches of heads in one thread, as the walks along tangents do."""

    def compute(self, *, careful: bool) -> dict[str, ndarray] | None:
        """Return the results of a batch; None where care is needed."""
        results = (self._backward_jvp if self.task.replays else self._jvp)(careful=careful)
        finite = careful or is_finite(*[x for name, x in results.items() if name != "m"])
        return results if finite else None

    def _jvp(self, *, careful: bool) -> dict[str, ndarray]:
        q = self.rows_of("q")
        s = self.scores(q, careful=careful)
        m, reference, p = self.exponentials(s)
        l = self.sum(p)
        below, columns = np.where(l == 0, 1, l), p.swapaxes(-1, -2)
        o = product(columns, self.operands["v"], self.result("o", *l.shape, self.problem.head_dim_v), careful=careful)
        to, mean = np.zeros_like(o), np.zeros_like(l)
        if "tv" in self.operands:
            product(columns, self.operands["tv"], to, careful=careful)
        if self.problem.moves:
            t = self.tangents(q, p, careful=careful)
            mean = self.sum(np.multiply(p, t, self.buffers.get("u", *t.shape))) / below
            t -= self.to_scores(mean)
            t *= p
            to += product(t.swapaxes(-1, -2), self.operands["v"], np.empty_like(o), careful=careful)
        for x in (o, to):
            x /= below[..., None]
        return {"o": o, "to": to, "tlse": mean, **statistics_of(l, m, reference)}

    def tangents(self, q: ndarray, p: ndarray, *, careful: bool) -> ndarray:
        """Return the tangents of the scores, which were made last."""
        tq = self.rows_of("tq") if "tq" in self.operands else None
        t = self.sum_of_products("t", [("k", tq), ("tk", q)])
        t *= self.task.factor
        if self.problem.softcap is not None:
            self.slope = self.buffers.get("slope", *t.shape)
            move_softcap(t, self.tanh, self.slope, self.problem.softcap)
        if self.task.score is not None:
            self.moved = self.stretch.move(self.by_head(t), self.slopes)
        if "tbias" in self.operands:
            by_group = self.by_group(t)
            by_group += self.bias("tbias")
        if careful:
            t[p == 0] = 0
        return t

    def sum_of_products(self, out: str, terms: list[tuple[str, ndarray | None]]) -> ndarray:
        """Return a sum of products of k, v or their tangents with rows; those that are not there are 0."""
        there = [(keys, rows) for keys, rows in terms if keys in self.operands and rows is not None]
        if not there:
            total = self.buffers.get(out, *self.lead, self.problem.n_keys, self.rows)
            total.fill(0)
            return total
        total = self.products(out, *there[0])
        for keys, rows in there[1:]:
            total += self.products("u", keys, rows)
        return total

    def _backward_jvp(self, *, careful: bool) -> dict[str, ndarray]:
        operands, weights = self.operands, row_weights(self.operands)
        q, do = (self.rows_of(name, weights.empty) for name in ("q", "do"))
        tq, tdo = (self.rows_of(name, weights.empty) if name in operands else None for name in ("tq", "tdo"))
        p = self.probabilities(q, weights, careful=careful)
        t = None
        if self.problem.moves:
            t = self.tangents(q, p, careful=careful)
            t -= self.to_scores(np.where(operands["l"] == 0, 0, operands["tlse"]))
            if careful:
                t[p == 0] = 0
        ds = self.products("ds", "v", do)
        differentiate_scores(ds, p, self.to_scores(weights.delta), careful=careful)
        tds = self.sum_of_products("tds", [("tv", do), ("v", tdo)])
        tdelta = np.vecdot(operands["do"], operands["to"])
        if tdo is not None:
            tdelta = tdelta + np.vecdot(operands["tdo"], operands["o"])
        tdelta = np.where(operands["l"] == 0, 0, tdelta)
        differentiate_scores(tds, p, self.to_scores(tdelta), careful=careful)
        if t is not None:
            tds += np.multiply(t, ds, self.buffers.get("u", *t.shape))
            t *= p
        of_values = self._sums([("dv", p, do), ("tdv", t, do), ("tdv", p, tdo)], careful=careful)
        biases = {name: x for name, x in (("dbias", ds), ("tdbias", tds)) if name in self.task.results}
        found = of_values | {name: self.sum_bias(name, x) for name, x in biases.items()}
        self._through_scores(ds, tds, careful=careful)
        ds *= self.task.factor
        tds *= self.task.factor
        found |= self._sums([("dk", ds, q), ("tdk", tds, q), ("tdk", ds, tq)], careful=careful)
        columns, tcolumns = ds.swapaxes(-1, -2), tds.swapaxes(-1, -2)
        k, tk = operands["k"], operands.get("tk")
        rows = self._sums([("dq", columns, k), ("tdq", tcolumns, k), ("tdq", columns, tk)], careful=careful)
        shape = (*self.heads, self.problem.n_queries, self.problem.head_dim)
        return found | {name: x.reshape(shape) for name, x in rows.items()}

    def _sums(self, terms: list[tuple[str, ndarray | None, ndarray | None]], *, careful: bool) -> dict[str, ndarray]:
        """Return sums of products by the name of the result, of those that are wanted; None is 0."""
        found: dict[str, ndarray] = {}
        for name, weights, data in terms:
            if name not in self.task.results:
                continue
            width = self.problem.head_dim_v if name.endswith("v") else self.problem.head_dim
            if weights is None or data is None:
                keys = self.rows if name.endswith("q") else self.problem.n_keys
                found.setdefault(name, np.zeros((*self.lead, keys, width), self.dtype))
                continue
            out = np.empty((*weights.shape[:-1], width), self.dtype)
            made = product(weights, data, out, careful=careful)
            found[name] = found[name] + made if name in found else made
        return found

    def _through_scores(self, ds: ndarray, tds: ndarray, *, careful: bool) -> None:
        """Turn derivatives by scores into those by scaled products."""
        softcap, moves = self.problem.softcap, self.problem.moves
        if self.task.score is not None:
            moved = self.moved if moves else {}
            pair = self.by_head(ds), self.by_head(tds)
            self.terms = self.stretch.differentiate_moved(*pair, self.slopes, moved, 0)
        if softcap is not None and moves:
            differentiate_moved_softcap(ds, tds, self.slope, self.tanh, careful=careful)
        elif softcap is not None:
            differentiate_softcap(ds, self.tanh, softcap, careful=careful)
            tds *= self.tanh  # which the slope has become
