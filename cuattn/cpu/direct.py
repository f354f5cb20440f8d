"""Small problems: whole score matrices of as many heads as fit a fixed memory, by the textbook's steps.

Scores are transposed, (*batch, kv_heads, keys, rows), and the query heads that read the same keys are joined to rows,
so no key or value is copied (but to the precision of the sums).  References and exponentials are those of the walks.
"""

import math
from functools import cached_property, lru_cache
from itertools import product as every
from typing import Any

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    WINDOW,
    differentiate_scores,
    differentiate_softcap,
    exponential,
    exponentiate,
    fold,
    hide,
    is_finite,
    product,
    relative,
    row_weights,
    summed_to,
    total,
)
from cuattn.cpu.blocks import place_of
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.task import Task
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

_SCORES = 1 << 17  # that are computed at a time: they stay in a second-level cache
_MOST = 1 << 18  # scores of the query heads that read the same keys
_MOST_OF_FEW = 1 << 22  # where they are few rows, for which tiles would have to be padded
_FEW = 16
_SHARES = {"forward": 1.0, "backward": 2.5}  # of a forward's time
_NANOSECONDS = 1_500_000  # that a batch is to take: a few times what its calls cost
_LOW = -40.0  # bias above which nothing is as good as hidden

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
    of_head = problem.group * problem.n_queries * problem.n_keys * (1.5 + widths / 55) + problem.n_keys * widths / 12
    return math.prod(problem.batch) * problem.kv_heads * (1500 + of_head) * _SHARES[problem.operation]


@lru_cache(maxsize=256)
def layout(problem: Problem) -> tuple[list[Index], dict[str, int]]:
    """Return the batches of a small problem, and the sizes of a thread's buffers.

    Nothing here depends on the number of threads, as sums may depend on this.
    """
    shape = *problem.batch, problem.kv_heads
    keys, rows, d, dv = problem.n_keys, problem.group * problem.n_queries, problem.head_dim, problem.head_dim_v
    most = max(1, int(min(_SCORES / (keys * rows), _NANOSECONDS * math.prod(shape) / nanoseconds(problem))))
    batches = _batches(shape, most)
    heads = max(math.prod([part.stop - part.start for part in index]) for index in batches)
    widths = {"s": keys, "q": d}
    if problem.softcap is not None:
        widths["tanh"] = keys
    if problem.operation == "forward":
        widths["o"] = dv
    else:
        widths |= {"ds": keys, "do": dv, "dq": d}
        widths |= {"dk": cdiv(keys * d, rows), "dv": cdiv(keys * dv, rows)}
    return batches, {name: heads * rows * width for name, width in widths.items()}


def _batches(shape: tuple[int, ...], most: int) -> list[Index]:
    """Cut an array into about equal parts of up to so many elements."""
    if not shape:
        return [()]
    parts = cdiv(shape[0], max(1, most // math.prod(shape[1:])))
    step = cdiv(shape[0], parts)
    slices = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    return [(part, *rest) for part in slices for rest in _batches(shape[1:], most)]


class WholeHeads(Task):
    """A call by whole heads."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.batches, self.buffer_sizes = layout(self.problem)
        self.sizes = [len(self.batches)]
        # Arrays of axes (*batch, heads, ...) get axes (*batch, kv_heads, group, ...).
        self.operands, self.results = (
            {name: x if name.removeprefix("d") in ("k", "v") else self._grouped(x) for name, x in arrays.items()}
            for arrays in (self.operands, self.results)
        )
        if "bias" in self.operands:
            bias = np.moveaxis(self.operands["bias"], -1, -3)  # as scores are
            of_all = bias.size == bias.shape[-3] * bias.shape[-1]
            self.operands["bias"] = np.ascontiguousarray(bias) if of_all else bias

    @cached_property
    def low(self) -> bool:
        """Whether a bias makes scores as good as hidden."""
        return "bias" in self.operands and not self.operands["bias"].min() > _LOW

    def _grouped(self, x: ndarray) -> ndarray:
        axis, group = len(self.problem.batch), self.problem.group
        split = (1, 1) if x.shape[axis] == 1 else (x.shape[axis] // group, group)
        return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])

    def item(self, _: int, n: int) -> tuple[Index, int]:
        """Return an item of work: a batch and its turn at shared sums."""
        return self.batches[n], n


class Direct:
    """Computes batches of heads in one thread: algorithms 1 and 3, with references as in the walks."""

    def __init__(self, task: WholeHeads) -> None:
        self.task, self.problem, self.dtype = task, task.problem, task.problem.stat_dtype
        self.buffers = Buffers(self.dtype, task.buffer_sizes)
        self.rows = self.problem.group * self.problem.n_queries
        self._last_shown: tuple[tuple, ndarray] | None = None  # bits, and the instances of masks whose they are

    def __call__(self, item: tuple[Index, int]) -> None:
        """Compute a batch; again, with care for what is hidden, if something is not a finite number."""
        index, number = item
        self.index, self.lead = index, [part.stop - part.start for part in index]
        self.operands = {name: self.take(x).astype(self.dtype, copy=False) for name, x in self.task.operands.items()}
        compute = self._forward if self.problem.operation == "forward" else self._backward
        results = compute(careful=False) or compute(careful=True)
        if self.task.shares:
            self.task.turns.wait((), number)
        for name, part in results.items():
            target = self.take(self.task.results[name])
            if self.task.shares:
                target += summed_to(part, target.shape, target.dtype)
            else:
                target[...] = part.reshape(target.shape)
        if self.task.shares:
            self.task.turns.release(())

    def take(self, array: ndarray) -> ndarray:
        """Return the part of an array, whose leading axes may be 1, that belongs to the batch."""
        return array if len(self.task.batches) == 1 else array[place_of(array, self.index)]

    def load(self, name: str, factors: Any, empty: ndarray | None = None) -> ndarray:
        """Return the rows of q or do, (..., rows, width), times `factors`; `empty` rows are 0."""
        source = self.operands[name]
        rows = self.buffers.get(name, *self.lead, self.problem.group, *source.shape[-2:])
        np.multiply(source, factors, rows)
        if empty is not None:
            rows[empty] = 0
        return rows.reshape(*self.lead, self.rows, rows.shape[-1])

    def products(self, out: str, keys: str, rows: ndarray) -> ndarray:
        """Return k or v times rows of q or do, (..., keys, rows)."""
        return np.matmul(
            self.operands[keys],
            rows.swapaxes(-1, -2),
            self.buffers.get(out, *self.lead, self.problem.n_keys, self.rows),
        )

    def by_group(self, s: ndarray) -> ndarray:
        """Return (..., keys, rows) as (..., keys, group, queries)."""
        return s.reshape(*s.shape[:-1], self.problem.group, self.problem.n_queries)

    def scores(self, q: ndarray, *, careful: bool) -> ndarray:
        """Return the scores: algorithm 2, lines 10 and 11; what masks hide is not yet."""
        s = self.products("s", "k", q)
        if self.problem.softcap is not None:
            self.tanh = np.tanh(s, self.buffers.get("tanh", *s.shape))
            np.multiply(self.tanh, self.problem.softcap, s)
        if "bias" in self.operands:
            bias, target = np.ascontiguousarray(self.operands["bias"]), self.by_group(s)
            target += bias
            if careful:  # hidden even where the score itself is NaN
                np.copyto(target, -np.inf, where=bias == -np.inf)
        return s

    def exponentials(self, s: ndarray, reference: ndarray | None, *, low: bool) -> ndarray:
        """Replace scores by exponentials relative to (..., rows), or to 0: algorithm 2, line 12."""
        if reference is not None:
            s -= reference.reshape(*self.lead, 1, self.rows)
        return relative(s) if low or reference is not None else exponentiate(s)

    def hide(self, s: ndarray, value: float = 0.0) -> None:
        """Set what masks hide to a number."""
        if self.task.masks:
            hide(self.by_group(s), self.shown(), value)

    def shown(self) -> ndarray:
        """Return the bits of what the heads see, which broadcast to (..., keys, group, queries)."""
        *batch, kv = self.index
        group, masks = self.problem.group, self.task.masks
        ranges = [range(part.start, part.stop) for part in (*batch, slice(kv.start * group, kv.stop * group))]
        if all(math.prod(mask.leading) == 1 for mask in masks):
            ranges = [part[:1] for part in ranges]
        shown = [self._shown(tuple([mask.instance(head) for mask in masks])) for head in every(*ranges)]
        if all(one is shown[0] for one in shown):
            return shown[0][:, None]
        return np.moveaxis(np.array(shown).reshape(*self.lead, group, *shown[0].shape), -3, -2)

    def _shown(self, instances: tuple) -> ndarray:
        if self._last_shown is not None and self._last_shown[0] == instances:
            return self._last_shown[1]
        problem, hidden = self.problem, np.zeros((1, 1), bool)
        for mask, instance in zip(self.task.masks, instances, strict=True):
            hidden = hidden | mask.hidden(instance, slice(0, problem.n_queries), slice(0, problem.n_keys))
        hidden = np.broadcast_to(hidden, (problem.n_keys, problem.n_queries))
        bits = np.subtract(hidden, 1, dtype=np.dtype(f"u{self.dtype.itemsize}"), casting="unsafe")
        self._last_shown = instances, bits
        return bits

    def _forward(self, *, careful: bool) -> dict[str, ndarray] | None:
        """Return o and, if they are wanted, l and m; None where care is needed."""
        s = self.scores(self.load("q", self.task.factor), careful=careful)
        hides, low, reference = bool(self.task.masks), self.task.low, None
        if hides and not self.problem.statistics and not low and max(s.max(), -s.min()) <= WINDOW:
            p, m = exponentiate(s), s
            self.hide(p)
        else:
            self.hide(s, -np.inf)
            m = fold(np.maximum, s)
            if not np.abs(m).max() <= WINDOW:
                reference = np.where((np.abs(m) <= WINDOW) | (m == -np.inf) | np.isnan(m), 0, m)
            p = self.exponentials(s, reference, low=hides or low)
        l = total(p)
        o = self.buffers.get("o", *l.shape, self.problem.head_dim_v)
        product(p.swapaxes(-1, -2), self.operands["v"], o, careful=careful)
        if not (careful or is_finite(o, l)):
            return None
        empty = l == 0 if hides or low else False
        o /= np.where(empty, 1, l)[..., None]
        if not self.problem.statistics:
            return {"o": o}
        relative_to = exponential(m if reference is None else m - reference)
        return {"o": o, "l": np.where(empty, 0, l / relative_to), "m": np.where(empty, -np.inf, m)}

    def _backward(self, *, careful: bool) -> dict[str, ndarray] | None:
        """Return the gradients; None where care is needed."""
        problem, get, weights = self.problem, self.buffers.get, row_weights(self.operands, 1.0)
        q = self.load("q", self.task.factor, weights.empty)
        p = self.exponentials(self.scores(q, careful=careful), weights.reference, low=self.task.low)
        self.hide(p)
        do = self.load("do", weights.factors, weights.empty)
        ds = self.products("ds", "v", do)
        differentiate_scores(ds, p, weights.delta.reshape(*self.lead, 1, self.rows), careful=careful)
        results = {"dv": product(p, do, get("dv", *p.shape[:-1], problem.head_dim_v), careful=careful)}
        if "dbias" in self.task.results:
            dbias, like = np.moveaxis(self.by_group(ds), -3, -1), self.take(self.task.results["dbias"])
            dtype = np.float64 if 1 in like.shape[-2:] else self.dtype
            results["dbias"] = summed_to(dbias, like.shape, dtype).copy()  # as ds may change
        if problem.softcap is not None:
            differentiate_softcap(ds, self.tanh, problem.softcap, careful=careful)
        results["dk"] = product(ds, q, get("dk", *p.shape[:-1], problem.head_dim), careful=careful)
        dq = product(ds.swapaxes(-1, -2), self.operands["k"], get("dq", *q.shape), careful=careful)
        if not (careful or is_finite(results["dv"], results["dk"], dq)):
            return None
        dq *= self.dtype.type(self.task.factor)
        return results | {"dq": dq.reshape(*self.lead, problem.group, problem.n_queries, problem.head_dim)}
