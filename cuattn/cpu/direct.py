"""Small problems: whole score matrices of as many heads as fit a fixed memory, by the textbook's steps.

Scores are transposed, (*batch, kv_heads, keys, rows), and the query heads that read the same keys are joined to rows,
so no key or value is copied (but to the precision of the sums).  References and exponentials are those of the walks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from cuattn.cpu.buffers import Buffers, Shapes
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import WINDOW, exponential, exponentiate, relative
from cuattn.cpu.scores import selecting_product
from cuattn.cpu.sums import OrderedSum, summed_to
from cuattn.cpu.weights import RowWeights
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

__all__ = ["DirectBackward", "DirectForward", "Index", "batches", "is_small", "nanoseconds"]

_SCORES = 1 << 17  # that are computed at a time: they stay in a second-level cache
_MOST = 1 << 18  # scores of the query heads that read the same keys
_MOST_OF_FEW = 1 << 22  # where they are few rows, for which tiles would have to be padded
_FEW = 16
_NANOSECONDS = 250_000  # that a batch is to take: a few times what its calls cost
_FOLDED = 1 << 13  # scores of a head from which it is quicker to compare halves than lines

Index = tuple[slice, ...]  # into axes (*batch, kv_heads)
Arrays = Mapping[str, np.ndarray]


def is_small(problem: Problem) -> bool:
    """Whether whole score matrices are to be made."""
    rows = problem.group * problem.n_queries
    return rows * problem.n_keys <= (_MOST_OF_FEW if rows <= _FEW else _MOST)


def nanoseconds(problem: Problem) -> float:
    """Return how long a forward takes one thread, about."""
    widths = problem.head_dim + problem.head_dim_v
    scores = problem.group * problem.n_queries * problem.n_keys
    of_head = scores * (1.5 + widths / 40) + problem.n_keys * widths / 3
    return math.prod(problem.batch) * problem.kv_heads * of_head


def batches(problem: Problem) -> list[Index]:
    """Cut a problem into batches of heads; nothing here depends on the number of threads, as sums may depend on this."""
    shape = *problem.batch, problem.kv_heads
    scores = problem.group * problem.n_queries * problem.n_keys
    most = max(1, int(min(_SCORES / scores, _NANOSECONDS * math.prod(shape) / nanoseconds(problem))))
    axis = len(shape) - 1  # which is cut; those behind it are whole
    while axis and math.prod(shape[axis:]) <= most:
        axis -= 1
    step = max(1, most // math.prod(shape[axis + 1 :]))
    step = cdiv(shape[axis], cdiv(shape[axis], step))
    outer = [[slice(i, i + 1) for i in range(n)] for n in shape[:axis]]
    cuts = [slice(start, min(start + step, shape[axis])) for start in range(0, shape[axis], step)]
    return [(*index, *(slice(0, n) for n in shape[axis + 1 :])) for index in product(*outer, cuts)]


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
        self.buffers = Buffers(self.dtype, self.shapes(problem))
        self._hides = bool(masks) or "bias" in operands
        self._shown: dict[tuple, np.ndarray] = {}  # by instances of the masks, of the last batch

    @staticmethod
    def shapes(problem: Problem) -> Shapes:
        """Return the shapes of the buffers that every thread needs."""
        heads = math.prod(part.stop - part.start for part in batches(problem)[0])
        rows = problem.group * problem.n_queries
        scores = heads, problem.n_keys, rows
        tanh = {} if problem.softcap is None else {"tanh": scores}
        return {
            "s": scores,
            "half": (heads, cdiv(problem.n_keys, 2), rows),
            "q": (heads, problem.head_dim, rows),
            **tanh,
        }

    def _grouped(self, x: np.ndarray) -> np.ndarray:
        """Return an array of axes (*batch, heads, ...) with axes (*batch, kv_heads, group, ...)."""
        axis, group = len(self.problem.batch), self.problem.group
        split = (1, 1) if x.shape[axis] == 1 else (x.shape[axis] // group, group)
        return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])

    def keys_of(self, name: str, index: Index) -> np.ndarray:
        """Return the keys or values of a batch, in the precision of the sums."""
        return take(self.operands[name], index).astype(self.dtype, copy=False)

    def by_group(self, s: np.ndarray) -> np.ndarray:
        """Return scores with axes (..., keys, group, queries)."""
        return s.reshape(*s.shape[:-1], self.problem.group, self.problem.n_queries)

    def scores(self, index: Index, empty: np.ndarray | None = None, *, careful: bool) -> np.ndarray:
        """Return the scores of a batch, -inf where hidden: algorithm 2, lines 10 and 11."""
        problem, lead = self.problem, tuple([part.stop - part.start for part in index])
        self.q = self.buffers.get("q", *lead, problem.head_dim, self.rows)  # transposed
        by_group = np.moveaxis(self.by_group(self.q), -3, -1)
        np.multiply(take(self.operands["q"], index), self.factor, by_group, dtype=self.dtype, casting="unsafe")
        if empty is not None and empty.any():
            by_group[np.broadcast_to(empty, by_group.shape[:-1])] = 0
        s = self.buffers.get("s", *lead, problem.n_keys, self.rows)
        np.matmul(self.keys_of("k", index), self.q, s)
        if problem.softcap is not None:
            self.tanh = np.tanh(s, self.buffers.get("tanh", *s.shape))
            np.multiply(self.tanh, problem.softcap, s)
        if "bias" in self.operands:
            bias = np.ascontiguousarray(np.moveaxis(take(self.operands["bias"], index), -1, -3))
            target = self.by_group(s)
            target += bias
            if careful:  # hidden even where the score itself is NaN
                np.copyto(target, -np.inf, where=bias == -np.inf)
        if self._masks:
            shown = self._shown_of(index)
            bits = self.by_group(s).view(shown.dtype)
            bits &= shown
            bits |= ~shown & np.array(-np.inf, s.dtype).view(shown.dtype)
        return s

    def exponentials(self, s: np.ndarray, reference: np.ndarray) -> np.ndarray:
        """Replace the scores of a batch by exponentials relative to (..., rows): algorithm 2, line 12."""
        if reference.any():
            s -= reference.reshape(*s.shape[:-2], 1, self.rows)
        elif not self._hides:
            return exponentiate(s)
        return relative(s)

    def _shown_of(self, index: Index) -> np.ndarray:
        """Return the bits of what the heads of a batch see, which broadcast to (..., keys, group, queries)."""
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
            return self._shown[by_head[0]][:, None]
        shown = np.array([self._shown[key] for key in by_head])
        lead = [len(part) for part in ranges[:-1]]
        return np.moveaxis(shown.reshape(*lead, kv.stop - kv.start, group, *shown.shape[1:]), -3, -2)

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
        if keys * rows < _FOLDED:
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
        """Yield the scores of a head in each array, and which of them dropout takes, (keys, queries)."""
        *batch, kv = index
        group, problem = self.problem.group, self.problem
        by_group = [self.by_group(array) for array in arrays]
        for *where, head in product(*(range(part.stop - part.start) for part in index), range(group)):
            element = tuple(part.start + i for part, i in zip(batch, where, strict=False))
            number = (kv.start + where[-1]) * group + head
            kept = self._dropout.kept(element, number, slice(0, problem.n_queries), slice(0, problem.n_keys))
            yield *(array[(*where, slice(None), head)] for array in by_group), ~kept.T


class DirectForward(_Direct):
    """Computes batches of a forward: algorithm 1, with references as in the walk."""

    @staticmethod
    def shapes(problem: Problem) -> Shapes:
        shapes = _Direct.shapes(problem)
        return {**shapes, "o": (shapes["s"][0], shapes["s"][2], problem.head_dim_v)}

    def __call__(self, index: Index, *, careful: bool = False) -> None:
        """Compute a batch; again, with care for what is hidden, if something is not a finite number."""
        s = self.scores(index, careful=careful)
        m = self.fold(np.maximum, s)
        reference = np.where((np.abs(m) <= WINDOW) | (m == -np.inf) | np.isnan(m), 0, m)
        p = self.exponentials(s, reference)
        l = self.fold(np.add, p)
        if self._dropout is not None:
            for part, which in self.dropped(index, p):
                np.copyto(part, 0, where=which)
        o = self.buffers.get("o", *l.shape, self.problem.head_dim_v)
        product_of(careful)(p.swapaxes(-1, -2), self.keys_of("v", index), o)
        if not (careful or np.isfinite(o).all()):
            self(index, careful=True)
            return
        empty = l == 0
        below = np.where(empty, 1, l)
        o *= (self.dtype.type(self.problem.dropout_scale) / below)[..., None]
        results = {"o": o}
        if "l" in self.totals:
            results["l"] = np.where(empty, 0, l / exponential(np.where(empty, 0, m - reference)))
            results["m"] = np.where(empty, -np.inf, m)
        for name, values in results.items():
            target = take(self.totals[name], index)
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

    @staticmethod
    def shapes(problem: Problem) -> Shapes:
        shapes = _Direct.shapes(problem)
        heads, keys, rows = shapes["s"]
        d, dv = problem.head_dim, problem.head_dim_v
        return {
            **shapes, "ds": shapes["s"], "do": (heads, rows, dv), "do transposed": (heads, dv, rows),
            "q rows": (heads, rows, d), "dq": (heads, rows, d), "dk": (heads, keys, d), "dv": (heads, keys, dv),
        }  # fmt: skip

    def __call__(self, item: tuple[Index, int], *, careful: bool = False) -> None:
        """Compute a batch, whose turn at shared sums is given; again, with care, if something is not finite."""
        index, number = item
        names = [name for name in ("do", "o", "l", "m", "dlse") if name in self.operands]
        weights = RowWeights({name: take(self.operands[name], index) for name in names})
        p = self.exponentials(self.scores(index, weights.empty, careful=careful), weights.reference)
        lead, (keys, rows), problem = p.shape[:-2], p.shape[-2:], self.problem
        do = self.buffers.get("do", *lead, rows, problem.head_dim_v)
        by_group = do.reshape(*lead, problem.group, problem.n_queries, problem.head_dim_v)
        weights.weigh(take(self.operands["do"], index), problem.dropout_scale, by_group)
        transposed = self.buffers.get("do transposed", *lead, problem.head_dim_v, rows)
        np.copyto(transposed, do.swapaxes(-1, -2))
        q = self.buffers.get("q rows", *lead, rows, problem.head_dim)
        np.copyto(q, self.q.swapaxes(-1, -2))
        ds = np.matmul(self.keys_of("v", index), transposed, self.buffers.get("ds", *p.shape))
        dropped = [] if self._dropout is None else list(self.dropped(index, p, ds))
        for _, part, which in dropped:
            np.copyto(part, 0, where=which)
        ds -= weights.delta.reshape(*lead, 1, rows)
        ds *= p
        if careful:
            ds[p == 0] = 0  # 0 * NaN and 0 * inf
        for part, _, which in dropped:
            np.copyto(part, 0, where=which)
        times = product_of(careful)
        gradients = {"v": times(p, do, self.buffers.get("dv", *lead, keys, problem.head_dim_v))}
        if "bias" in self.operands:
            like = take(self.totals["bias"], index)
            part = np.moveaxis(self.by_group(ds), -3, -1)
            dtype = np.float64 if 1 in like.shape[-2:] else self.dtype
            gradients["bias"] = summed_to(part, like.shape, dtype) + self.dtype.type(0)  # a copy, as ds will change
        if problem.softcap is not None:
            slope = np.multiply(self.tanh, self.tanh, self.tanh)
            np.subtract(1, slope, slope)
            ds *= np.multiply(slope, problem.softcap, slope)
        gradients["k"] = times(ds, q, self.buffers.get("dk", *lead, keys, problem.head_dim))
        dq = times(ds.swapaxes(-1, -2), self.keys_of("k", index), self.buffers.get("dq", *q.shape))
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
            target = take(self.totals[name], index)
            if self._turns is None:
                target[...] = part
            else:
                target += summed_to(part, target.shape, target.dtype)
        if self._turns is not None:
            self._turns.release(())


def take(array: np.ndarray, index: Index) -> np.ndarray:
    """Return the part of an array, whose leading axes may be 1, that belongs to a batch."""
    return array[tuple([part if n > 1 else slice(None) for part, n in zip(index, array.shape, strict=False)])]


def product_of(careful: bool) -> Callable[..., np.ndarray]:
    """Return what multiplies weights with rows."""
    return selecting_product if careful else np.matmul
