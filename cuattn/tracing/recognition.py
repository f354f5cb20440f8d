"""Mask functions that are column masks in disguise: which rows each key is hidden from, as intervals.

A comparison that divides into ``u(i) ? v(j)``, with u rising, falling or in few such pieces, or with values that lie in
few runs of rows, shows to each key intervals of rows, which `numpy.searchsorted` finds.  Conjunctions, disjunctions and
negations combine intervals; of a conjunction one side may need the other, as where positions begin anew in each
document: within the rows of its document, that of a key, they rise.  Where all of that applies and no key needs more
than two hidden intervals, the mask is a column mask, exactly.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cuattn.tracing.bound import Bound
from cuattn.tracing.build import apply, linear_sum, linear_terms
from cuattn.tracing.extremes import Extremes, described
from cuattn.tracing.graph import I, J, Node, S, constant, order
from cuattn.tracing.operations import COMPARISONS
from cuattn.tracing.ranges import Interval, point
from cuattn.tracing.tiles import bounds
from cuattn.tracing.values import evaluate

_MOST = 6  # intervals of a key while they are combined
_EFFORT = 256  # conditions that are solved


class _Rows(NamedTuple):
    """The rows that each key sees: disjoint intervals in ascending order, (K, n_keys) or (K, 1); empty ones last."""

    starts: np.ndarray
    stops: np.ndarray


class NotColumns(Exception):
    """A mask has another form than that of intervals per key."""


class _Solver:
    """Solves the boolean nodes of one graph for one matrix."""

    def __init__(self, bound: Bound, rows: np.ndarray, keys: np.ndarray, b: int, h: int, dtype: np.dtype) -> None:
        self._bound, self._dtype = bound, dtype
        self._n = len(rows)
        self._variables = {"b": np.int32(b), "h": np.int32(h), "i": rows.astype(np.int32), "j": keys.astype(np.int32)}
        self._extremes: list[Extremes] = [described(x) for x in bound.arrays]
        self._ranges = {"b": point(b), "h": point(h)}
        for name, values in (("i", rows), ("j", keys)):
            self._ranges[name] = Interval(np.float64(values.min()), np.float64(values.max()))
        self._solved: dict[Node, _Rows | None] = {}
        self._effort = 0

    def solve(self, node: Node, inside: _Rows | None = None) -> _Rows:
        """Return the rows where a condition holds, of each key: of all rows, or only of those inside of intervals."""
        if node not in self._solved:
            self._effort += 1
            if self._effort > _EFFORT:
                raise NotColumns
            try:
                self._solved[node] = self._rows(node, None)
            except NotColumns:
                self._solved[node] = None
        found = self._solved[node]
        if found is not None:
            return found if inside is None else self.both(inside, found)
        if inside is None:
            raise NotColumns
        return self._rows(node, inside)

    def _rows(self, node: Node, inside: _Rows | None) -> _Rows:
        if not node.depends & I:
            shown = np.atleast_1d(self._values(node))
            return self._few(np.zeros((1, len(shown)), np.int32), np.where(shown, self._n, 0)[None])
        if not node.depends & J:
            return self._few(*_runs(np.atleast_1d(self._values(node))))
        rule = _LOGIC.get(node.op)
        if rule is not None:
            return rule(self, inside, *node.args)
        if node.op not in COMPARISONS:
            raise NotColumns
        x, y = node.args
        return self._compare(node.op, x, y, inside)

    def _values(self, node: Node) -> np.ndarray:
        return evaluate(self._bound.of(node), self._variables, self._dtype)

    # Sets of rows.

    def _few(self, starts: np.ndarray, stops: np.ndarray) -> _Rows:
        """Return disjoint intervals (K, n) in order, without those that are empty for all keys."""
        if starts.ndim == 1:
            starts, stops = starts[:, None], stops[:, None]
        shown = starts < stops
        lines = shown.any(1)
        shown, starts, stops = shown[lines], starts[lines], stops[lines]
        count = int(shown.sum(0, np.int32).max(initial=0))
        if count > _MOST:
            raise NotColumns
        # Of disjoint intervals the first begins and ends first, so that both may be sorted by themselves.
        last = np.int32(self._n)
        return _Rows(*(_sorted(np.where(shown, x.astype(np.int32), last))[:count] for x in (starts, stops)))

    def hidden(self, rows: _Rows) -> _Rows:
        """Return the rows outside of intervals."""
        shape = (1, rows.starts.shape[1])
        starts = np.concatenate([np.zeros(shape, np.int32), rows.stops])
        return self._few(starts, np.concatenate([rows.starts, np.full(shape, self._n, np.int32)]))

    def without(self, rows: _Rows, inside: _Rows | None) -> _Rows:
        """Return the rows outside of intervals, of all or of those inside of others."""
        return self.hidden(rows) if inside is None else self.both(inside, self.hidden(rows))

    def conjunction(self, inside: _Rows | None, x: Node, y: Node) -> _Rows:
        """Return the rows where two conditions hold, of which either may need the other."""
        for first, second in ((x, y), (y, x)):
            try:
                return self.solve(second, self.solve(first, inside))
            except NotColumns:
                continue
        raise NotColumns

    def both(self, x: _Rows, y: _Rows) -> _Rows:
        """Return the rows within two sets."""
        starts = np.maximum(x.starts[:, None], y.starts[None])
        stops = np.minimum(x.stops[:, None], y.stops[None])
        return self._few(starts.reshape(-1, starts.shape[2]), stops.reshape(-1, stops.shape[2]))

    def either(self, x: _Rows, y: _Rows) -> _Rows:
        """Return the rows within one of two sets, or both."""
        return self.hidden(self.both(self.hidden(x), self.hidden(y)))

    # Comparisons.

    def _compare(self, form: str, x: Node, y: Node, inside: _Rows | None) -> _Rows:
        """Return the rows where x < y, x <= y or x == y."""
        if x.kind == "f":
            sides = [side.depends & (I | J) for side in (x, y)]
            if sides == [I, J]:
                return self._split(form, x, y, inside)
            if sides == [J, I]:
                return self._split(form, apply("negative", y), apply("negative", x), inside)
            raise NotColumns
        found = self._bounded(x, y)
        terms = linear_terms(x, y)
        mixed = [node for node in terms if node.depends & I and node.depends & J]
        if not found:
            raise NotColumns
        if mixed:
            return self.solve(_rewritten(form, x, y), inside)
        u = linear_sum({node: factor for node, factor in terms.items() if node.depends & I})
        v = linear_sum({node: -factor for node, factor in terms.items() if not node.depends & I})
        if not self._bounded(u, v):
            raise NotColumns
        return self._split(form, u, v, inside)

    def _bounded(self, *nodes: Node) -> bool:
        """Return whether integers are known to stay far below 2**63, so that sums may be regrouped."""
        found = bounds(nodes, self._ranges, self._extremes, self._bound.numbers, keep=True)
        return all(bool(np.isfinite(found[x].lo) and np.isfinite(found[x].hi)) for x in order(*nodes) if x.kind == "i")

    def _split(self, form: str, u: Node, v: Node, inside: _Rows | None) -> _Rows:
        """Return the rows where u(i) ? v(j)."""
        left, right = np.broadcast_to(self._values(u), self._n), np.atleast_1d(self._values(v))
        if left.dtype.kind == "f" and (np.isnan(left).any() or np.isnan(right).any()):
            raise NotColumns
        if form == "equal" and inside is None:
            return self._equal(left, right)
        below = self._below if inside is None else functools.partial(self._below_inside, inside)
        if form == "equal":
            return self.without(below("less", left, right), below("less_equal", left, right))
        return below(form, left, right)

    def _below_inside(self, inside: _Rows, form: str, u: np.ndarray, v: np.ndarray) -> _Rows:
        """Return the rows where u(i) is below v(j) inside of intervals, in each of which u rises or falls."""
        below = {"less": np.less, "less_equal": np.less_equal}[form]
        start, stop = (np.broadcast_to(x, (len(x), max(x.shape[1], len(v)))) for x in inside)
        falls, rises = (np.concatenate([[0], np.cumsum(f(u[1:], u[:-1]))]) for f in (np.less, np.greater))
        first, last = np.minimum(start, self._n - 1), np.maximum(stop - 1, 0)
        rising, falling = falls[first] == falls[last], rises[first] == rises[last]
        if not (rising | falling | (start >= stop)).all():
            raise NotColumns
        low, high = start.copy(), np.maximum(stop, start)
        for _ in range(self._n.bit_length()):  # the first row where u is no longer on the side of the interval's start
            middle = low + (high - low) // 2
            same = (below(u[np.minimum(middle, self._n - 1)], v) == rising) & (middle < high)
            low, high = np.where(same, middle + 1, low), np.where(same, high, middle)
        return self._few(np.where(rising, start, low), np.where(rising, low, stop))

    def _below(self, form: str, u: np.ndarray, v: np.ndarray) -> _Rows:
        """Return the rows where u(i) is below v(j), piece by piece in which u rises or falls."""
        side = "left" if form == "less" else "right"
        step = np.greater(u[1:], u[:-1]).astype(np.int8) - np.less(u[1:], u[:-1])
        moves = np.flatnonzero(step)
        cuts = moves[1:][step[moves[1:]] != step[moves[:-1]]]
        if len(cuts) >= _MOST:
            raise NotColumns
        starts, stops = [], []
        for first, last in zip([0, *(cuts + 1)], [*(cuts + 1), len(u)], strict=True):
            piece = u[first:last]
            rising = piece[0] <= piece[-1]
            count = np.searchsorted(piece if rising else piece[::-1], v, side)
            starts.append(np.full(len(v), first) if rising else last - count)
            stops.append(first + count if rising else np.full(len(v), last))
        return self._few(np.stack(starts), np.stack(stops))

    def _equal(self, u: np.ndarray, v: np.ndarray) -> _Rows:
        """Return the rows whose value u(i) is v(j): the runs of rows with that value."""
        cuts = np.flatnonzero(u[1:] != u[:-1]) + 1
        starts, stops = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(u)]])
        by_value = np.argsort(u[starts], kind="stable")
        values = u[starts][by_value]
        first, last = np.searchsorted(values, v, "left"), np.searchsorted(values, v, "right")
        count = int((last - first).max(initial=0))
        if count > _MOST:
            raise NotColumns
        place = first + np.arange(count)[:, None]
        run = by_value[np.minimum(place, len(values) - 1)]
        return self._few(np.where(place < last, starts[run], 0), np.where(place < last, stops[run], 0))


def _sorted(lines: np.ndarray) -> np.ndarray:
    """Sort a few long lines of numbers element by element, in place."""
    for last in range(len(lines) - 1, 0, -1):
        for x, y in itertools.pairwise(lines[: last + 1]):
            smaller = np.minimum(x, y)
            np.maximum(x, y, out=y)
            x[...] = smaller
    return lines


def _runs(shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs of rows that are shown."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], shown, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2]


_LOGIC: dict[str, Callable[..., _Rows]] = {
    "logical_not": lambda solver, inside, x: solver.without(solver.solve(x, inside), inside),
    "logical_and": _Solver.conjunction,
    "logical_or": lambda solver, inside, x, y: solver.either(solver.solve(x, inside), solver.solve(y, inside)),
    "logical_xor": lambda solver, inside, x, y: solver.solve(
        apply("logical_and", apply("logical_or", x, y), apply("logical_not", apply("logical_and", x, y))), inside
    ),
    "select": lambda solver, inside, c, x, y: solver.solve(_chosen(c, x, y), inside),
}


def _chosen(c: Node, x: Node, y: Node) -> Node:
    """Return a choice of conditions as conjunctions."""
    return apply("logical_or", apply("logical_and", c, x), apply("logical_and", apply("logical_not", c), y))


def _rewritten(form: str, x: Node, y: Node) -> Node:
    """Return a comparison of integers without the function around its first or its second side."""
    both = I | J
    if x.op in _UNWRAPPED and x.depends & both == both:
        return _UNWRAPPED[x.op](form, y, *x.args)
    if y.op in _UNWRAPPED and y.depends & both == both:
        opposite = {"less": "less_equal", "less_equal": "less", "equal": "equal"}[form]
        found = _UNWRAPPED[y.op](opposite, x, *y.args)
        return found if form == "equal" else apply("logical_not", found)
    raise NotColumns


# What f(...) ? y is without f.


def _of_absolute(form: str, y: Node, x: Node) -> Node:
    return _of_extreme("logical_and", form, y, x, apply("negative", x))


def _of_extreme(joined: str, form: str, y: Node, a: Node, b: Node) -> Node:
    """Of a maximum, which is below if both of its operands are, or of a minimum."""
    if form == "equal":
        below, above = [_of_extreme(joined, side, y, a, b) for side in ("less_equal", "less")]
        return apply("logical_and", below, apply("logical_not", above))
    return apply(joined, apply(form, a, y), apply(form, b, y))


def _of_select(form: str, y: Node, c: Node, a: Node, b: Node) -> Node:
    return _chosen(c, apply(form, a, y), apply(form, b, y))


def _of_quotient(form: str, y: Node, x: Node, divisor: Node) -> Node:
    """Of x // c, for a constant c > 0."""
    if divisor.op != "constant" or divisor.value <= 0:
        raise NotColumns
    start, stop = apply("multiply", y, divisor), apply("multiply", apply("add", y, constant(1)), divisor)
    below = apply("less", x, start if form == "less" else stop)
    return apply("logical_and", apply("less_equal", start, x), below) if form == "equal" else below


_UNWRAPPED: dict[str, Callable[..., Node]] = {
    "absolute": _of_absolute,
    "maximum": functools.partial(_of_extreme, "logical_and"),
    "minimum": functools.partial(_of_extreme, "logical_or"),
    "select": _of_select,
    "floor_divide": _of_quotient,
}


def columns(
    bound: Bound, rows: Any, keys: Any, b: int = 0, h: int = 0, dtype: np.dtype | type = np.float32
) -> np.ndarray | None:
    """Return which rows a mask function hides from each key, if two intervals say it.

    Parameters
    ----------
    bound : Bound
        With a boolean root and arrays on the host.
    rows, keys : array of int
        Global indices of the call's rows and keys.
    b, h : int, optional
        Which matrix.
    dtype : dtype_like, default float32
        In which numbers are computed.

    Returns
    -------
    int32 array, (4, n_keys), or None
        lts, lte, uts, ute: key j is hidden from the call's rows lts <= i < lte and uts <= i < ute, exactly; of the
        two, uts begins with the first row where one does.  None: the function has another form.

    Examples
    --------
    >>> from cuattn.tracing.functions import MASK, trace
    >>> window = trace(lambda b, h, i, j: (j <= i) & (i < j + 2), MASK).bind()
    >>> columns(window, np.arange(4), np.arange(4))
    array([[2, 3, 4, 4],
           [4, 4, 4, 4],
           [0, 0, 0, 0],
           [0, 1, 2, 3]], dtype=int32)
    """
    rows, keys = np.asarray(rows), np.asarray(keys)
    if not len(rows) or not len(keys):
        return np.zeros((4, len(keys)), np.int32)
    if bound.root.depends & S or any(not isinstance(x, np.ndarray) for x in bound.arrays):
        return None
    solver = _Solver(bound, rows, keys, b, h, np.dtype(dtype))
    try:
        hidden = solver.hidden(solver.solve(bound.root))
    except NotColumns:
        return None
    if len(hidden.starts) > 2:
        return None
    n = len(rows)
    starts, stops = (np.broadcast_to(x, (len(x), len(keys))) for x in hidden)
    pad = np.full((2 - len(starts), len(keys)), n)
    (first, second), (first_stop, second_stop) = np.concatenate([starts, pad]), np.concatenate([stops, pad])
    above = first == 0
    lts, lte = np.where(above, second, first), np.where(above, second_stop, first_stop)
    uts, ute = np.where(above, first, second), np.where(above, first_stop, second_stop)
    uts, ute = np.where(uts == n, 0, uts), np.where(uts == n, 0, ute)
    return np.stack([lts, lte, uts, ute]).astype(np.int32)
