"""Score functions for the kernels' tests: each with its arguments for a case, and what NumPy makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cuattn.tracing import SCORE, Bound, derivative, evaluate, trace, weights
from tests.cuda.cases import Case


class Score(NamedTuple):
    """A score function and its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()

    @property
    def bound(self) -> Bound:
        """The traced function with its arguments."""
        return trace(self.function, SCORE, self.args).bind(self.args)

    def of_scores(self, case: Case, **places: Any) -> Callable[[Any], Any]:
        """Return what gives the textbook values and derivatives of scores."""

        def score(s: Any) -> tuple[Any, Any]:
            named = {"s": s, **indices(case, s.shape, **places)}
            dtype = np.float64 if s.dtype.itemsize > 4 else np.float32
            named["s"] = s.astype(dtype)
            roots = self.bound.root, derivative(self.bound.root)
            return tuple(np.broadcast_to(evaluate(self.bound.of(x), named, dtype), s.shape) for x in roots)

        return score

    def gradients(self, case: Case, s: Any, ds: Any, sizes: bool = False, **places: Any) -> list[Any]:
        """Return the gradients by the arrays of floats among the arguments, None of others.

        s are the scores that the function was given, ds the gradients by what it returned, of which `sizes` adds the
        absolute values.
        """
        bound, named = self.bound, {"s": s.astype(np.float64), **indices(case, s.shape, **places)}
        found = []
        for slot, array in enumerate(bound.arrays):
            total = np.zeros(array.shape) if array.dtype.kind not in "biu" else None
            for weight in weights(bound.root, slot) if total is not None else ():
                at = np.broadcast_to(evaluate(bound.of(weight.offset), named, np.float64), s.shape)
                values = evaluate(bound.of(weight.weight), named, np.float64)
                shares = np.where(ds == 0, 0, ds * values).astype(np.float64)
                shares = np.abs(shares) if sizes else shares
                total += np.bincount(at.ravel(), shares.ravel(), array.size).reshape(array.shape)
            found.append(total)
        return found


def indices(case: Case, shape: tuple[int, ...], rows: Any = 0, keys: Any = 0, batch: int = 0, head: int = 0) -> dict:
    """Return b, h, i and j of scores; rows and keys begin at a number, or have these."""
    *lead, heads, n_queries, n_keys = shape
    whole = np.arange(math.prod(lead), dtype=np.int32).reshape(*lead, 1, 1, 1)
    i, j = (np.arange(n, dtype=np.int32) for n in (n_queries, n_keys))
    return {
        "b": whole + np.int32(batch),
        "h": np.arange(heads, dtype=np.int32)[:, None, None] + np.int32(head),
        "i": (rows if isinstance(rows, np.ndarray) else i + np.int32(rows))[:, None],
        "j": keys if isinstance(keys, np.ndarray) else j + np.int32(keys),
    }


def _table(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def alibi(case: Case) -> Score:
    return Score(lambda s, b, h, i, j, slope: s + slope[h] * (j - i), (_table(case.heads) / 16,))


def relative_table(case: Case) -> Score:
    size = case.n_queries + case.n_keys - 1
    return Score(lambda s, b, h, i, j, t: s + t[h, i - j + (case.n_keys - 1)], (_table(case.heads, size),))


def buckets(case: Case) -> Score:
    """Relative positions by their logarithm, in a table of the inputs' own dtype."""

    def score(s, b, h, i, j, table):
        far = np.floor(3 * np.log2(np.abs(i - j) + 1.0) + 0.01).astype(int)
        return s + table[np.where(i > j, 16, 0) + np.minimum(far, 15), h]

    return Score(score, (_table(32, case.heads, dtype=case.dtype),))


def key_bias(case: Case) -> Score:
    batch = math.prod(case.batch)
    return Score(lambda s, b, h, i, j, x: s + x[b, j], (_table(max(batch, 1), max(case.n_keys, 1)),))


def row_temperature(case: Case) -> Score:
    return Score(lambda s, b, h, i, j, x: s * np.exp(x[h, i]), (0.3 * _table(case.heads, max(case.n_queries, 1)),))


def head_temperature(case: Case) -> Score:
    """Two arrays, of which one is read twice."""
    x, y = 1 + 0.1 * _table(case.heads), 0.01 * _table(case.heads + 1)
    return Score(lambda s, b, h, i, j, x, y: s * x[h] + y[h] * j - y[h + 1] * i, (x.astype(np.float32), y))


def head_factor(case: Case) -> Score:
    """The same without arrays."""
    return Score(lambda s, b, h, i, j: s * (1.0 + 0.1 * h))


def softcap(case: Case) -> Score:
    return Score(lambda s, b, h, i, j, cap: cap * np.tanh(s / cap), (4.0,))


def gated(case: Case) -> Score:
    return Score(lambda s, b, h, i, j: s / (1 + np.exp(-s)))


def pair_bias(case: Case) -> Score:
    return Score(lambda s, b, h, i, j, x: s + x[h, i, j], (_table(case.heads, case.n_queries, max(case.n_keys, 1)),))


def graph(case: Case) -> Score:
    distance = np.random.default_rng(5).integers(0, 6, (case.n_queries, max(case.n_keys, 1))).astype(np.int8)
    return Score(lambda s, b, h, i, j, d, t: s + t[d[i, j], h], (distance, _table(6, case.heads)))


def grid(case: Case) -> Score:
    """Relative positions in two dimensions."""
    table = _table(case.heads, 25, 9)
    return Score(lambda s, b, h, i, j, t: s + t[h, i // 16 - j // 16 + 12, i % 5 - j % 5 + 4], (table,))


def roots(case: Case) -> Score:
    """Values and slopes that are NaN above the diagonal, for calls that hide it."""
    return Score(lambda s, b, h, i, j, x: s * np.sqrt(i - j) * x[h], (0.1 + np.abs(_table(case.heads)) / 4,))


def hidden(case: Case) -> Score:
    return Score(lambda s, b, h, i, j: np.where((i + j) % 3 == 0, -np.inf, s * 0.5 + h))


ADDITIVE = {f.__name__: f for f in (alibi, relative_table, buckets, key_bias, pair_bias, graph, grid)}
SCORES = {
    **ADDITIVE,
    **{f.__name__: f for f in (row_temperature, head_temperature, head_factor, softcap, gated, hidden)},
}
