"""Small problems: whole score matrices of as many heads as fit a fixed memory, by the textbook's steps.

Scores are transposed, (*batch, kv_heads, keys, rows), and the query heads that read the same keys are joined to rows,
so no key or value is copied (but to the precision of the sums).  References and exponentials are those of the walks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cuattn.cpu.buffers import Buffers, Shapes
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import WINDOW, exponential, exponentiate, relative
from cuattn.cpu.scores import differentiate_softcap, selecting_product
from cuattn.cpu.sums import OrderedSum, summed_to
from cuattn.cpu.weights import RowWeights
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

__all__ = ["DirectBackward", "DirectForward", "Index", "is_small", "layout", "nanoseconds"]

_SCORES = 1 << 17  # that are computed at a time: they stay in a second-level cache
_MOST = 1 << 18  # scores of the query heads that read the same keys
_MOST_OF_FEW = 1 << 22  # where they are few rows, for which tiles would have to be padded
_FEW = 16
_NANOSECONDS = 1_500_000  # that a batch is to take: a few times what its calls cost
_LOW = -40.0  # bias above which nothing is as good as hidden
_COPIED = 48  # rows from which it pays to transpose q and do
_LINES = 128  # keys that may be added up one by one
_FOLDED = 1 << 13  # scores of a head from which it is quicker to compare halves than lines

Index = tuple[slice, ...]  # into axes (*batch, kv_heads)
Arrays = Mapping[str, np.ndarray]


class Layout(NamedTuple):
    """How a small problem is computed; nothing here depends on the number of threads, as sums may depend on this."""

    batches: tuple[Index, ...]
    shapes: Shapes  # of the buffers of a thread


def is_small(problem: Problem) -> bool:
    """Whether whole score matrices are to be made."""
    rows = problem.group * problem.n_queries
    return rows * problem.n_keys <= (_MOST_OF_FEW if rows <= _FEW else _MOST)


def nanoseconds(problem: Problem) -> float:
    """Return how long a forward takes one thread, about."""
    widths = problem.head_dim + problem.head_dim_v
    of_head = problem.group * problem.n_queries * problem.n_keys * (1.5 + widths / 55) + problem.n_keys * widths / 12
    return math.prod(problem.batch) * problem.kv_heads * of_head


@lru_cache(maxsize=256)
def layout(problem: Problem) -> Layout:
    """Return the batches and the buffers of a small problem."""
    shape = *problem.batch, problem.kv_heads
    keys, rows = problem.n_keys, problem.group * problem.n_queries
    most = max(1, int(min(_SCORES / (keys * rows), _NANOSECONDS * math.prod(shape) / nanoseconds(problem))))
    axis = len(shape) - 1  # which is cut; those behind it are whole
    while axis and math.prod(shape[axis:]) <= most:
        axis -= 1
    step = max(1, most // math.prod(shape[axis + 1 :]))
    step = cdiv(shape[axis], cdiv(shape[axis], step))
    outer = [[slice(i, i + 1) for i in range(n)] for n in shape[:axis]]
    cuts = [slice(start, min(start + step, shape[axis])) for start in range(0, shape[axis], step)]
    heads, d, dv = step * math.prod(shape[axis + 1 :]), problem.head_dim, problem.head_dim_v
    shapes = {"s": (heads, keys, rows), "half": (heads, cdiv(keys, 2), rows)}
    shapes |= {"q": (heads, rows, d), "q transposed": (heads, d, rows)}
    if problem.softcap is not None:
        shapes["tanh"] = shapes["s"]
    if problem.operation == "forward":
        shapes["o"] = heads, rows, dv
    else:
        shapes |= {"ds": shapes["s"], "do": (heads, rows, dv), "do transposed": (heads, dv, rows)}
        shapes |= {"dq": (heads, rows, d), "dk": (heads, keys, d), "dv": (heads, keys, dv)}
    whole = [slice(0, n) for n in shape[axis + 1 :]]
    return Layout(tuple([(*index, *whole) for index in product(*outer, cuts)]), shapes)


class _Direct:
    """What both directions share; computes batches of heads in one thread."""

    def __init__(
        self, problem: Problem, operands: Arrays, masks: Sequence[Any], dropout: Dropout | None, totals: Arrays
    ) -> None:
        self.problem, self._masks, self._dropout = problem, masks, dropout
        self.operands, self.totals = (
            {name: x if name in ("k", "v") else self._grouped(x) for name, x in arrays.items()}
            for arrays in (operands, totals)
        )
        self.dtype, self.rows = problem.stat_dtype, problem.group * problem.n_queries
        self.factor = problem.scale / (problem.softcap or 1)
        batches, shapes = layout(problem)
        self._whole, self.buffers = len(batches) == 1, Buffers(self.dtype, shapes)
        bias = self.operands.get("bias")
        if bias is not None and bias.size == bias.shape[-2] * bias.shape[-1]:  # of all heads: transposed once
            bias = self.operands["bias"] = np.ascontiguousarray(bias.swapaxes(-1, -2)).swapaxes(-1, -2)
        self._hides = bool(masks) or (bias is not None and not bias.min() > _LOW)
        self._shown: dict[tuple, np.ndarray] = {}  # by instances of the masks, of the last batch

    def _grouped(self, x: np.ndarray) -> np.ndarray:
        """Return an array of axes (*batch, heads, ...) with axes (*batch, kv_heads, group, ...)."""
        axis, group = len(self.problem.batch), self.problem.group
        split = (1, 1) if x.shape[axis] == 1 else (x.shape[axis] // group, group)
        return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])

    def take(self, array: np.ndarray, index: Index) -> np.ndarray:
        """Return the part of an array, whose leading axes may be 1, that belongs to a batch."""
        if self._whole:
            return array
        return array[tuple([part if n > 1 else slice(None) for part, n in zip(index, array.shape, strict=False)])]

    def keys_of(self, name: str, index: Index) -> np.ndarray:
        """Return the keys or values of a batch, in the precision of the sums."""
        return self.take(self.operands[name], index).astype(self.dtype, copy=False)

    def by_group(self, s: np.ndarray) -> np.ndarray:
        """Return (..., width, rows) as (..., group, queries, width)."""
        s = s.reshape(*s.shape[:-1], self.problem.group, self.problem.n_queries)
        return s.swapaxes(-3, -2).swapaxes(-2, -1)

    def scores(self, index: Index, empty: np.ndarray | None = None, *, careful: bool) -> np.ndarray:
        """Return the scores of a batch, -inf where hidden: algorithm 2, lines 10 and 11."""
        problem, lead = self.problem, tuple([part.stop - part.start for part in index])
        self.q = self.buffers.get("q", *lead, self.rows, problem.head_dim)
        by_group = self.q.reshape(*lead, problem.group, problem.n_queries, problem.head_dim)
        np.multiply(self.take(self.operands["q"], index), self.factor, by_group, dtype=self.dtype, casting="unsafe")
        if empty is not None:
            by_group[np.broadcast_to(empty, by_group.shape[:-1])] = 0
        s = self.buffers.get("s", *lead, problem.n_keys, self.rows)
        np.matmul(self.keys_of("k", index), self.transposed("q", self.q), s)
        if problem.softcap is not None:
            self.tanh = np.tanh(s, self.buffers.get("tanh", *s.shape))
            np.multiply(self.tanh, problem.softcap, s)
        if "bias" in self.operands:
            bias = self.take(self.operands["bias"], index)
            target = self.by_group(s)
            target += np.ascontiguousarray(bias.swapaxes(-1, -2)).swapaxes(-1, -2)
            if careful:  # hidden even where the score itself is NaN
                np.copyto(target, -np.inf, where=bias == -np.inf)
        if self._masks:
            shown = self._shown_of(index)
            bits = self.by_group(s).view(shown.dtype)
            bits &= shown
            bits |= ~shown & np.array(-np.inf, s.dtype).view(shown.dtype)
        return s

    def transposed(self, name: str, x: np.ndarray) -> np.ndarray:
        """Return (..., width, rows) of (..., rows, width), as a copy where products are slower without."""
        view = x.swapaxes(-1, -2)
        if self.rows < _COPIED:
            return view
        copy = self.buffers.get(f"{name} transposed", *view.shape)
        np.copyto(copy, view)
        return copy

    def exponentials(self, s: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
        """Replace the scores of a batch by exponentials relative to (..., rows), or to 0: algorithm 2, line 12."""
        if reference is not None:
            s -= reference.reshape(*s.shape[:-2], 1, self.rows)
        elif not self._hides:
            return exponentiate(s)
        return relative(s)

    def _shown_of(self, index: Index) -> np.ndarray:
        """Return the bits of what the heads of a batch see, which broadcast to (..., group, queries, keys)."""
        *batch, kv = index
        group = self.problem.group
        ranges = [range(part.start, part.stop) for part in (*batch, slice(kv.start * group, kv.stop * group))]
        if all(math.prod(mask.leading) == 1 for mask in self._masks):
            ranges = [part[:1] for part in ranges]
        by_head = [tuple([mask.instance(head) for mask in self._masks]) for head in product(*ranges)]
        self._shown = {key: self._shown.get(key) for key in set(by_head)}
        for key, known in self._shown.items():
            if known is None:
                self._shown[key] = self._shown_by(key)
        if len(self._shown) == 1:
            return self._shown[by_head[0]].T
        shown = np.array([self._shown[key] for key in by_head])
        lead = [len(part) for part in ranges[:-1]]
        return shown.reshape(*lead, kv.stop - kv.start, group, *shown.shape[1:]).swapaxes(-1, -2)

    def _shown_by(self, instances: tuple) -> np.ndarray:
        problem, hidden = self.problem, np.zeros((1, 1), bool)
        for mask, instance in zip(self._masks, instances, strict=True):
            hidden = hidden | mask.hidden(instance, slice(0, problem.n_queries), slice(0, problem.n_keys))
        hidden = np.broadcast_to(hidden, (problem.n_keys, problem.n_queries))
        return np.subtract(hidden, 1, dtype=np.dtype(f"u{self.dtype.itemsize}"), casting="unsafe")

    def fold(self, ufunc: np.ufunc, s: np.ndarray) -> np.ndarray:
        """Reduce (..., keys, rows) over the keys: by halves, a sum's error grows with their number's logarithm."""
        keys, rows = s.shape[-2:]
        if rows == 1:
            return ufunc.reduce(s[..., 0], -1)[..., None]
        if keys * rows < _FOLDED and keys <= _LINES:
            return ufunc.reduce(s, -2)
        folded = self.buffers.get("half", *s.shape[:-2], keys // 2, rows)
        while keys > 1:
            half = keys // 2
            ufunc(s[..., :half, :], s[..., half : 2 * half, :], out=folded[..., :half, :])
            if keys % 2:
                ufunc(folded[..., 0, :], s[..., keys - 1, :], out=folded[..., 0, :])
            s, keys = folded, half
        return s[..., 0, :].copy()

    def dropped(self, index: Index, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the scores of a head in each array, and which of them dropout takes, (queries, keys)."""
        *batch, kv = index
        group, problem = self.problem.group, self.problem
        by_group = [self.by_group(array) for array in arrays]
        for *where, head in product(*(range(part.stop - part.start) for part in index), range(group)):
            element = tuple(part.start + i for part, i in zip(batch, where, strict=False))
            number = (kv.start + where[-1]) * group + head
            kept = self._dropout.kept(element, number, slice(0, problem.n_queries), slice(0, problem.n_keys))
            yield *(array[(*where, head)] for array in by_group), ~kept


class DirectForward(_Direct):
    """Computes batches of a forward: algorithm 1, with references as in the walk."""

    def __call__(self, index: Index, *, careful: bool = False) -> None:
        """Compute a batch; again, with care for what is hidden, if something is not a finite number."""
        s = self.scores(index, careful=careful)
        m = self.fold(np.maximum, s)
        reference = None
        if not np.abs(m).max() <= WINDOW:
            reference = np.where((np.abs(m) <= WINDOW) | (m == -np.inf) | np.isnan(m), 0, m)
        p = self.exponentials(s, reference)
        l = self.fold(np.add, p)
        if self._dropout is not None:
            for part, which in self.dropped(index, p):
                np.copyto(part, 0, where=which)
        o = self.buffers.get("o", *l.shape, self.problem.head_dim_v)
        _product(p.swapaxes(-1, -2), self.keys_of("v", index), o, careful=careful)
        if not (careful or (np.isfinite(o).all() and np.isfinite(l).all())):
            self(index, careful=True)
            return
        self._write(index, o, l, m, reference)

    def _write(self, index: Index, o: np.ndarray, l: np.ndarray, m: np.ndarray, reference: np.ndarray | None) -> None:
        below = l
        if self._hides:
            empty = l == 0
            below = np.where(empty, 1, l)
        o *= (self.dtype.type(self.problem.dropout_scale) / below)[..., None]
        results = {"o": o}
        if "l" in self.totals:
            relative_to = exponential(m if reference is None else m - reference)
            results |= {"l": l / relative_to, "m": m}
            if self._hides:
                results |= {"l": np.where(empty, 0, results["l"]), "m": np.where(empty, -np.inf, m)}
        for name, values in results.items():
            target = self.take(self.totals[name], index)
            target[...] = values.reshape(target.shape)


class DirectBackward(_Direct):
    """Computes batches of a backward: algorithm 3.

    Parameters
    ----------
    turns : OrderedSum, optional
        At the sums that batches share, if they do.
    """

    def __init__(self, *arguments: Any, turns: OrderedSum | None = None) -> None:
        super().__init__(*arguments)
        self._turns = turns

    def __call__(self, item: tuple[Index, int], *, careful: bool = False) -> None:
        """Compute a batch, whose turn at shared sums is given; again, with care, if something is not finite."""
        index, number = item
        names = [name for name in ("do", "o", "l", "m", "dlse") if name in self.operands]
        weights = RowWeights({name: self.take(self.operands[name], index) for name in names})
        p = self.scores(index, weights.empty, careful=careful)
        self.exponentials(p, weights.reference)
        lead, (keys, rows), problem = p.shape[:-2], p.shape[-2:], self.problem
        do = self.buffers.get("do", *lead, rows, problem.head_dim_v)
        by_group = do.reshape(*lead, problem.group, problem.n_queries, problem.head_dim_v)
        weights.weigh(self.take(self.operands["do"], index), problem.dropout_scale, by_group)
        ds = self.buffers.get("ds", *p.shape)
        np.matmul(self.keys_of("v", index), self.transposed("do", do), ds)
        dropped = [] if self._dropout is None else list(self.dropped(index, p, ds))
        for _, part, which in dropped:
            np.copyto(part, 0, where=which)
        ds -= weights.delta.reshape(*lead, 1, rows)
        ds *= p
        if careful:
            ds[p == 0] = 0  # 0 * NaN and 0 * inf
        for part, _, which in dropped:
            np.copyto(part, 0, where=which)
        dv = self.buffers.get("dv", *lead, keys, problem.head_dim_v)
        gradients = {"v": _product(p, do, dv, careful=careful)}
        if "bias" in self.operands:
            like = self.take(self.totals["bias"], index)
            dtype = np.float64 if 1 in like.shape[-2:] else self.dtype
            gradients["bias"] = summed_to(self.by_group(ds), like.shape, dtype).copy()  # as ds may change
        if problem.softcap is not None:
            differentiate_softcap(ds, self.tanh, problem.softcap, careful=careful)
        dk, dq = self.buffers.get("dk", *lead, keys, problem.head_dim), self.buffers.get("dq", *self.q.shape)
        gradients["k"] = _product(ds, self.q, dk, careful=careful)
        _product(ds.swapaxes(-1, -2), self.keys_of("k", index), dq, careful=careful)
        dq *= self.dtype.type(self.factor)
        gradients["q"] = dq.reshape(*lead, problem.group, problem.n_queries, problem.head_dim)
        if not careful and not all(np.isfinite(gradients[name]).all() for name in "qkv"):
            self(item, careful=True)
        else:
            self._add(index, number, gradients)

    def _add(self, index: Index, number: int, gradients: Arrays) -> None:
        if self._turns is not None:
            self._turns.wait((), number)
        for name, part in gradients.items():
            target = self.take(self.totals[name], index)
            if self._turns is None:
                target[...] = part
            else:
                target += summed_to(part, target.shape, target.dtype)
        if self._turns is not None:
            self._turns.release(())


def _product(weights: np.ndarray, rows: np.ndarray, out: np.ndarray, *, careful: bool) -> np.ndarray:
    if careful:
        return selecting_product(weights, rows, out)
    if weights.shape[-1] == 1:  # matmul would multiply without BLAS
        return np.einsum("...ki,...id->...kd", weights, rows, out=out)
    return np.matmul(weights, rows, out)
