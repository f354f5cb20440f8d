"""Small problems: whole score matrices of as many heads as fit a fixed memory, by the textbook's steps.

Scores are transposed, (*batch, kv_heads, keys, rows), and the query heads that read the same keys are joined to rows,
so no key or value is copied (but to the precision of the sums).  References and exponentials are those of the walks.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import product as every
from typing import Any

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    WINDOW,
    RowWeights,
    add_bias,
    differentiate_scores,
    exponentials,
    exponentiate,
    hide,
    highest,
    is_finite,
    is_for_blas,
    product,
    reference_of,
    row_weights,
    statistics_of,
    summed,
    summed_to,
    transposed,
    visible_bits,
)
from cuattn.cpu.blocks import SMALL_PRODUCT, place_of
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.score import Scores, Stretch, Term, Values
from cuattn.cpu.softcap import Softcap
from cuattn.cpu.task import Arrays, Task
from cuattn.io_model.sizes import cdiv
from cuattn.problem import OPERATIONS, Problem

_SCORES = 1 << 17  # that are computed at a time: they stay in a second-level cache
_MOST = 1 << 18  # scores of the query heads that read the same keys
_MOST_OF_FEW = 1 << 22  # where they are few rows, for which tiles would have to be padded
_FEW = 16
_COPIED = 32  # rows of which a small product with their copy as columns takes less time, the copy's included
_TIMES = {"forward": 1.0, "backward": 2.2, "jvp": 3.0, "backward_jvp": 6.0, "double_backward": 5.0}  # of a forward's
_NANOSECONDS = 1_500_000  # that a batch is to take: a few times what its calls cost

Index = tuple[slice, ...]  # into axes (*batch, kv_heads)


def is_small(problem: Problem) -> bool:
    """Whether whole score matrices are to be made; with dropout, which takes most of the time then, they are not."""
    if problem.dropout:
        return False
    rows = problem.group * problem.n_queries
    return rows * problem.n_keys <= (_MOST_OF_FEW if rows <= _FEW else _MOST)


def nanoseconds(problem: Problem) -> float:
    """Return how long a problem takes one thread, about."""
    widths = problem.head_dim + problem.head_dim_v
    of_head = problem.group * problem.n_queries * problem.n_keys * (1.5 + widths / 55) + problem.n_keys * widths / 4
    return math.prod(problem.batch) * problem.kv_heads * (300 + of_head) * _TIMES[problem.operation]


@lru_cache(maxsize=256)
def layout(problem: Problem) -> tuple[list[Index], dict[str, int]]:
    """Return the batches of a small problem, and the sizes of a thread's buffers.

    Nothing here depends on the number of threads, as sums may depend on this.
    """
    shape = *problem.batch, problem.kv_heads
    keys, rows = problem.n_keys, problem.group * problem.n_queries
    most = max(1, int(min(_SCORES / (keys * rows), _NANOSECONDS * math.prod(shape) / nanoseconds(problem))))
    batches = _batches(shape, most)
    heads = max(math.prod([part.stop - part.start for part in index]) for index in batches)
    replays = OPERATIONS[problem.operation].replays
    names = ["s", "ds" if replays else "halves", *["tanh"] * (problem.softcap is not None)]
    if problem.operation not in ("forward", "backward"):
        names += ["t", "u", *["tds"] * replays, *["slope"] * (problem.softcap is not None)]
    sizes = dict.fromkeys(names, heads * rows * keys)
    widths = {"q": problem.head_dim} | ({"do": problem.head_dim_v} if replays else {})
    widths = [width for name, width in widths.items() if _is_copied(problem, width) or (name == "q" and keys > width)]
    return batches, sizes | ({"columns": heads * rows * max(widths)} if widths else {})


def _is_copied(problem: Problem, width: int) -> bool:
    """Whether products with rows of a width are made of their copy as columns."""
    rows = problem.group * problem.n_queries
    return rows >= _COPIED and problem.n_keys * rows * width <= SMALL_PRODUCT


def _batches(shape: tuple[int, ...], most: int) -> list[Index]:
    """Cut an array into about equal parts of up to so many elements; neighbours are of the same heads."""
    if not shape:
        return [()]
    parts = cdiv(shape[0], max(1, most // math.prod(shape[1:])))
    step = cdiv(shape[0], parts)
    slices = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    return [(part, *rest) for rest in _batches(shape[1:], most) for part in slices]


class WholeHeads(Task):
    """A call by whole heads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches, self.buffer_sizes = layout(self.problem)
        self.sizes = [len(self.batches)]
        if self.problem.bias is not None:
            biases = {name: np.moveaxis(x, -1, -3) for name, x in self._grouped(self.operands).items()}  # as scores
            self.operands = {**self.operands, **biases}
            self.results = {**self.results, **self._grouped(self.results)}

    def _grouped(self, arrays: Arrays) -> dict[str, ndarray]:
        """Return what there is of biases, (*batch, heads, ...), with axes (*batch, kv_heads, group, ...)."""
        found = {}
        for name, x in arrays.items():
            if name.endswith("bias"):
                *batch, heads, rows, keys = x.shape
                group = min(heads, self.problem.group)
                found[name] = x.reshape(*batch, heads // group, group, rows, keys)
        return found

    def item(self, _: int, n: int) -> tuple[Index, AbstractContextManager]:
        """Return an item of work: a batch and its turn at shared sums."""
        return self.batches[n], self.turns.take(()) if self.shares else nullcontext()


class Direct:
    """Computes batches of heads in one thread: algorithms 1 and 3, with references as in the walks."""

    def __init__(self, task: WholeHeads) -> None:
        self.task, self.problem, self.dtype = task, task.problem, task.problem.stat_dtype
        self.buffers = Buffers(self.dtype, task.buffer_sizes)
        self.group, self.rows = self.problem.group, self.problem.group * self.problem.n_queries
        self._last_shown: dict[tuple, ndarray] = {}  # bits, by the instances of masks whose they are
        self._last_biases: dict[str, tuple] = {}  # by name: its place, and a copy
        self.cap = None if self.problem.softcap is None else Softcap(self.problem.softcap, self.buffers)
        self.moved: Values = {}  # tangents of what the score function gives

    def __call__(self, item: tuple[Index, AbstractContextManager]) -> None:
        """Compute a batch; again, with care for what is hidden, if something is not a finite number."""
        self.index, turn = item
        self.lead = [part.stop - part.start for part in self.index]
        self.heads = (*self.lead[:-1], self.lead[-1] * self.group)
        *batch, kv = self.index
        self.of_heads = (*batch, slice(kv.start * self.group, kv.stop * self.group))
        task = self.task
        self.operands = {name: self._operand(name, x) for name, x in task.operands.items()}
        self.terms: list[Term] = []
        compute = self._backward if task.replays else self._forward
        results = compute(careful=False) or compute(careful=True)
        with turn:
            for term in self.terms:
                term.add_to(task.results)
            for name, part in results.items():
                target = self.take(name, task.results[name])
                if task.shares:
                    target += summed_to(part, target.shape, target.dtype)
                elif not np.may_share_memory(part, target):
                    target[...] = part.reshape(target.shape)

    def _operand(self, name: str, array: ndarray) -> ndarray:
        part = self.take(name, array)
        if part.dtype != self.dtype:
            part = part.astype(self.dtype)
        return part if name[-1] not in "kv" or is_for_blas(part) else part.copy()  # of rows see `rows_of`

    def take(self, name: str, array: ndarray) -> ndarray:
        """Return the part of an array, whose leading axes may be 1, that belongs to the batch."""
        if len(self.task.batches) == 1:
            return array
        by_kv_head = name.removeprefix("t").removeprefix("d") in ("k", "v", "bias")
        return array[place_of(array, self.index if by_kv_head else self.of_heads)]

    def result(self, name: str, *shape: int) -> ndarray:
        """Return where to make a result of this shape: in its place, if that is not to be added to or rounded."""
        target = self.take(name, self.task.results[name])
        if self.task.shares or target.dtype != self.dtype:
            return np.empty(shape, self.dtype)
        return target.reshape(shape)

    def rows_of(self, name: str, empty: ndarray | None = None) -> ndarray:
        """Return the rows of q or do, (..., rows, width); `empty` ones are 0: nothing may depend on what they hold.

        They are as BLAS takes them: other products would have other bits forward, and backward beside empty rows.
        """
        source = self.operands[name]
        if empty is not None:
            source = np.where(empty[..., None], 0, source)
        elif source.shape[:-2] != self.heads:
            source = np.broadcast_to(source, (*self.heads, *source.shape[-2:]))
        rows = source.reshape(*self.lead, self.rows, source.shape[-1])
        return rows if is_for_blas(rows) else rows.copy()

    def products(self, out: str, keys: str, rows: ndarray, factor: float = 1.0) -> ndarray:
        """Return k or v times rows of q or do, times a factor, (..., keys, rows)."""
        s, columns, width = self.room(out), rows.swapaxes(-1, -2), rows.shape[-1]
        scaled = factor != 1 and self.problem.n_keys > width  # rows, which are less than scores
        if _is_copied(self.problem, width):
            copy = self.buffers.get("columns", *columns.shape)
            if scaled:
                np.multiply(columns, factor, copy)
            else:
                np.copyto(copy, columns)  # in half the time
            columns = copy
        elif scaled:
            columns = np.multiply(rows, factor, self.buffers.get("columns", *rows.shape)).swapaxes(-1, -2)
        np.matmul(self.operands[keys], columns, s)
        if factor != 1 and not scaled:
            s *= factor
        return s

    def room(self, name: str) -> ndarray:
        """Return a buffer for scores."""
        return self.buffers.get(name, *self.lead, self.problem.n_keys, self.rows)

    def sum_of_products(self, out: str, terms: list[tuple[str, ndarray | None]]) -> ndarray:
        """Return a sum of products of k, v or their tangents with rows; those that are not there are 0."""
        there = [(keys, rows) for keys, rows in terms if keys in self.operands and rows is not None]
        if not there:
            total = self.room(out)
            total.fill(0)
            return total
        total = self.products(out, *there[0])
        for keys, rows in there[1:]:
            total += self.products("u", keys, rows)
        return total

    def weigh(self, terms: list[tuple[str, ndarray | None, ndarray | None]], *, careful: bool) -> dict[str, ndarray]:
        """Return sums of weights, (..., keys, rows), times rows or keys, by the results that they are; None is 0."""
        found: dict[str, ndarray] = {}
        for name, weights, data in terms:
            if name not in self.task.results:
                continue
            of_rows, width = name[-1] in "oq", self.problem.head_dim_v if name[-1] in "ov" else self.problem.head_dim
            shape = *self.lead, self.rows if of_rows else self.problem.n_keys, width
            if weights is None or data is None:
                made = np.zeros(shape, self.dtype)
            else:
                out = np.empty(shape, self.dtype) if name in found else self.result(name, *shape)
                made = product(weights.swapaxes(-1, -2) if of_rows else weights, data, out, careful=careful)
            made = made.reshape(*self.heads, -1, width) if name[-1] == "q" else made
            found[name] = found[name] + made if name in found else made
        return found

    def to_scores(self, x: ndarray | None) -> ndarray | None:
        """Return what there is for each row with axes like those of scores, (..., 1, rows)."""
        return None if x is None else x.reshape(*self.lead, 1, self.rows)

    def by_group(self, s: ndarray) -> ndarray:
        """Return (..., keys, rows) as (..., keys, group, queries)."""
        return s.reshape(*s.shape[:-1], self.group, self.problem.n_queries)

    def by_head(self, s: ndarray) -> ndarray:
        """Return (*batch, kv_heads, keys, rows) as (*batch, kv_heads, group, 1, 1, keys, queries)."""
        return np.moveaxis(self.by_group(s), -2, -3)[..., None, None, :, :]

    def _stretch_of(self, score: Scores) -> Stretch:
        """Return the score function for the heads of a batch."""
        problem, (*batch, kv) = self.problem, self.index
        flat = np.arange(math.prod(problem.batch)).reshape(problem.batch)[tuple(batch)][..., None, None]
        heads = np.arange(kv.start * self.group, kv.stop * self.group).reshape(-1, self.group)
        return score.of(flat, heads, slice(0, problem.n_queries), slice(0, problem.n_keys))

    def scores(self, q: ndarray, *, careful: bool) -> ndarray:
        """Return the scores: algorithm 2, lines 10 and 11; what masks hide is not yet."""
        s = self.products("s", "k", q, self.task.factor)
        if self.cap is not None:
            self.cap(s)
        if self.task.score is not None:
            self.stretch = self._stretch_of(self.task.score)
            self.slopes = self.stretch(self.by_head(s), 0)
        if "bias" in self.operands:
            add_bias(self.by_group(s), self.bias("bias"), careful=careful)
        return s

    def tangents(self, q: ndarray, p: ndarray, *, careful: bool) -> ndarray:
        """Return the tangents of the scores, which were made last; p says which of them are seen."""
        tq = self.rows_of("tq") if "tq" in self.operands else None
        t = self.sum_of_products("t", [("k", tq), ("tk", q)])
        t *= self.task.factor
        if self.cap is not None:
            self.cap.move(t)
        if self.task.score is not None:
            self.moved = self.stretch.move(self.by_head(t), self.slopes)
        if "tbias" in self.operands:
            by_group = self.by_group(t)
            by_group += self.bias("tbias")
        if careful:
            t[p == 0] = 0
        return t

    def bias(self, name: str) -> ndarray:
        """Return a bias, contiguous, with axes (..., keys, group, queries); kept for batches that have the same."""
        bias = self.operands[name]
        if bias.flags.c_contiguous:
            return bias
        place = place_of(self.task.operands[name], self.index)
        if place != self._last_biases.get(name, (None,))[0]:
            *lead, keys, group, queries = bias.shape
            copy = transposed(np.moveaxis(bias, -3, -1).reshape(*lead, group * queries, keys))
            self._last_biases[name] = place, copy.reshape(bias.shape)
        return self._last_biases[name][1]

    def hide(self, s: ndarray, value: float = 0.0) -> None:
        """Set what masks hide to a number."""
        if self.task.masks:
            hide(self.by_group(s), self.shown(), value)

    def shown(self) -> ndarray:
        """Return the bits of what the heads see, which broadcast to (..., keys, group, queries)."""
        ranges = [range(part.start, part.stop) for part in self.of_heads]
        if all(math.prod(mask.leading) == 1 for mask in self.task.masks):
            ranges = [part[:1] for part in ranges]
        shown = [self._shown(tuple([mask.instance(head) for mask in self.task.masks])) for head in every(*ranges)]
        if all(one is shown[0] for one in shown):
            return shown[0][:, None]
        return np.moveaxis(np.array(shown).reshape(*self.lead, self.group, *shown[0].shape), -3, -2)

    def _shown(self, instances: tuple) -> ndarray:
        """Return the bits of what a head sees, (keys, queries)."""
        if instances not in self._last_shown:
            rows, keys = slice(0, self.problem.n_queries), slice(0, self.problem.n_keys)
            masks = zip(self.task.masks, instances, strict=True)
            hidden = [mask.hidden(instance, rows, keys) for mask, instance in masks]
            bits = visible_bits(hidden, (keys.stop, rows.stop), np.dtype(f"u{self.dtype.itemsize}"))
            self._last_shown = {instances: bits}
        return self._last_shown[instances]

    def _forward(self, *, careful: bool) -> dict[str, ndarray] | None:
        """Return o and, if they are wanted, l, m and the tangents of o and lse; None where care is needed."""
        q, v, statistics = self.rows_of("q"), self.operands["v"], self.problem.statistics
        s = self.scores(q, careful=careful)
        if not statistics and max(s.max(), -s.min()) <= WINDOW:  # then all references are 0, whatever is hidden
            m, reference, p = None, None, exponentiate(s)
            self.hide(p)
        else:
            m, reference, p = self.exponentials(s)
        l = self.sum(p)
        seen, results = np.where(l == 0, 1, l), self.weigh([("o", p, v)], careful=careful)
        if self.task.along:
            tp, mean = None, np.zeros(l.shape, self.dtype)
            if self.problem.moves:
                tp = self.tangents(q, p, careful=careful)
                mean = self.sum(np.multiply(p, tp, self.buffers.get("u", *tp.shape))) / seen
                mean = mean.astype(self.dtype)
                tp -= self.to_scores(mean)
                tp *= p
            results |= self.weigh([("to", p, self.operands.get("tv")), ("to", tp, v)], careful=careful)
            results["tlse"] = mean
        if not (careful or is_finite(l, *results.values())):
            return None
        for name in results.keys() & {"o", "to"}:
            results[name] /= seen.astype(self.dtype)[..., None]
        return results | (statistics_of(l, m, reference) if statistics else {})

    def exponentials(self, s: ndarray) -> tuple[ndarray, ndarray | None, ndarray]:
        """Return the highest scores, what rows are relative to, and in place of the scores their exponentials."""
        self.hide(s, -np.inf)
        m = highest(s, self.buffers.get("halves", s.size))
        reference = reference_of(m)
        bounded = not (self.task.masks or "bias" in self.operands or self.task.score)
        return m, reference, exponentials(s, self.to_scores(reference), bounded=bounded)

    def sum(self, p: ndarray) -> ndarray:
        """Return sums over keys, in a wider type."""
        return summed(p, self.buffers.get("halves", p.size))

    def _backward(self, *, careful: bool) -> dict[str, ndarray] | None:
        """Return the gradients and, if they are wanted, their tangents; None where care is needed."""
        operands, weights, along = self.operands, row_weights(self.operands), self.task.along
        q, do = self.rows_of("q", weights.empty), self.rows_of("do", weights.empty)
        p = self.probabilities(q, weights, careful=careful)
        ds, tds = self.products("ds", "v", do), None
        differentiate_scores(ds, p, self.to_scores(weights.delta), careful=careful)
        terms = [("dv", p, do)]
        if along:
            tq, tdo = (self.rows_of(name, weights.empty) if name in operands else None for name in ("tq", "tdo"))
            tp, tds = self._tangents({"q": q, "do": do, "tdo": tdo}, weights, p, ds, careful=careful)
            terms += [("tdv", tp, do), ("tdv", p, tdo)]
        results = self.weigh(terms, careful=careful)
        for name, x in (("dbias", ds), ("tdbias", tds)):
            if name in self.task.results:
                results[name] = self.sum_bias(name, x)
        if self.task.score is not None:
            of_heads = None if tds is None else self.by_head(tds)
            self.terms = self.stretch.differentiate(self.by_head(ds), self.slopes, 0, of_heads, self.moved)
        if self.cap is not None:
            self.cap.differentiate(ds, tds, careful=careful)
        ds *= self.task.factor
        k = operands["k"]
        terms = [("dk", ds, q), ("dq", ds, k)]
        if along:
            tds *= self.task.factor
            terms += [("tdk", tds, q), ("tdk", ds, tq), ("tdq", tds, k), ("tdq", ds, operands.get("tk"))]
        results |= self.weigh(terms, careful=careful)
        # What is not a finite number shows in dq, unless a cap or a function made a finite score of it.
        names = results if along else ("dq",) if self.cap is None and self.task.score is None else ("dq", "dk")
        return results if careful or is_finite(*[results[name] for name in names]) else None

    def _tangents(
        self, rows: dict[str, ndarray], weights: RowWeights, p: ndarray, ds: ndarray, *, careful: bool
    ) -> tuple[ndarray | None, ndarray]:
        """Return the tangents of P, None for 0, and of its scores' derivatives."""
        tds = self.sum_of_products("tds", [("tv", rows["do"]), ("v", rows.get("tdo"))])
        differentiate_scores(tds, p, self.to_scores(weights.tdelta), careful=careful)
        if not self.problem.moves:
            return None, tds
        t = self.tangents(rows["q"], p, careful=careful)
        t -= self.to_scores(weights.mean)
        if careful:
            t[p == 0] = 0
        tds += np.multiply(t, ds, self.buffers.get("u", *t.shape))
        t *= p
        return t, tds

    def probabilities(self, q: ndarray, weights: RowWeights, *, careful: bool) -> ndarray:
        """Return P."""
        bounded = "bias" not in self.operands and self.task.score is None
        s = self.scores(q, careful=careful)
        p = exponentials(s, self.to_scores(weights.reference), bounded=bounded)
        self.hide(p)
        p *= self.to_scores(weights.factors)
        return p

    def sum_bias(self, name: str, ds: ndarray) -> ndarray:
        """Return the gradient of the bias, or its tangent, of derivatives by scores."""
        dbias, like = np.moveaxis(self.by_group(ds), -3, -1), self.take(name, self.task.results[name])
        dtype = np.float64 if 1 in like.shape[-2:] else self.dtype
        return summed_to(dbias, like.shape, dtype).copy()  # as ds may change
