"""Score functions: values of tiles, slopes, and the gradients of the arrays that they read.

What depends on i - j alone is computed once for each difference and read through a view that repeats it along the
diagonals; what depends on rows or on keys alone broadcasts.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.lib.stride_tricks import as_strided

from cuattn.cpu.arithmetic import SUM, is_finite, summed_to
from cuattn.cpu.blocks import UNIT
from cuattn.io_model.sizes import cdiv
from cuattn.problem import OPERATIONS, Place, Problem, ScoreFunction
from cuattn.rng import BLOCK
from cuattn.tracing import Bound, I, J, Node, Program, S, Weight, addend, along, bounds, derivative, weights
from cuattn.tracing.bound import Layout
from cuattn.tracing.build import substitute
from cuattn.tracing.derivatives import on_diagonals
from cuattn.tracing.extremes import Extremes, of_dtype
from cuattn.tracing.graph import is_constant, load
from cuattn.tracing.ranges import Interval

_DIAGONAL = 64  # keys whose diagonals are summed together, at most: with more of them lines have more that is 0


Values = dict[str, Any]
"""Derivatives of a score function by name, see `_Compiled`."""


class Term(NamedTuple):
    """What is to be added to a gradient: values to elements of it, or to all, in C order."""

    name: str
    elements: ndarray | None
    values: ndarray

    def add_to(self, results: Mapping[str, ndarray]) -> None:
        """Add the values."""
        total = results[self.name].reshape(-1)
        if self.elements is None:
            total += self.values
        else:
            np.add.at(total, self.elements, self.values)


class _Compiled(NamedTuple):
    """What is computed of a score function.

    Attributes
    ----------
    program : Program
        Of the score, and of its derivatives.
    names : list of str
        Of these: "slope", of the score, and "weight 0", ..., by elements of arrays; "along ..." is a tangent by the
        tangents of arrays, "curve ..." the derivative by the score.  One is missing that is 0, a slope that is 1.
    diagonals : Program or None
        Of values that depend on i - j alone, which the program finds in further slots.
    weights : list of (Weight, Program)
        How the score depends on elements of arrays, and where in these they lie.
    """

    program: Program
    names: list[str]
    diagonals: Program | None
    weights: list[tuple[Weight, Program]]


@lru_cache(maxsize=256)
def _compiled(score: ScoreFunction, dtype: np.dtype, operation: str, *, moves: bool, even: bool) -> _Compiled:
    """Return what an operation computes of a score function.

    Where scores move, derivatives are those along tangents, too; `even` rows and keys have indices that follow each
    other.
    """
    facts, replays = score.facts, OPERATIONS[operation].replays
    found = [weight for slot in score.learned for weight in weights(score.root, slot)]
    first = {f"weight {n}": weight.weight for n, weight in enumerate(found)}
    if (replays or moves) and addend(score.root) is None:
        first["slope"] = derivative(score.root)
    tangents = dict(score.tangents)
    second = {"along": along(score.root, tangents)} if moves else {}
    for name, root in first.items() if moves and replays else ():
        second |= {f"along {name}": along(root, tangents), f"curve {name}": derivative(root)}
    wanted = first | {name: root for name, root in second.items() if not is_constant(root, 0)}
    roots = (score.root, *wanted.values())
    nodes = _diagonal_nodes(roots) if even else []
    slots = {node: load(slot, node.kind, ()) for slot, node in enumerate(nodes, len(facts.arrays))}
    layouts = [Layout(np.dtype(bool) if node.kind == "b" else dtype, ()) for node in nodes]
    program = Program(
        tuple([substitute(root, slots) for root in roots]), dtype, facts._replace(arrays=(*facts.arrays, *layouts))
    )
    diagonals = Program(tuple(nodes), dtype, facts) if nodes else None
    places = [(weight, Program((weight.offset,), dtype, facts)) for weight in found]
    return _Compiled(program, [*wanted], diagonals, places)


def _diagonal_nodes(roots: Sequence[Node]) -> list[Node]:
    """Return the largest parts of graphs that are the same all along each diagonal, but not everywhere."""
    found: dict[Node, bool] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = node.kind != "i" and node.depends & (I | J | S) == I | J and on_diagonals(node)
            waiting += [] if found[node] else node.args
    return [node for node, is_diagonal in found.items() if is_diagonal]


class Scores:
    """The score function of a call.

    Parameters
    ----------
    problem : Problem
    operands : mapping of str to ndarray
        The function's arrays among them.
    place : Place
    numbers : sequence
        The function's, by slot.
    """

    def __init__(self, problem: Problem, operands: Mapping[str, ndarray], place: Place, numbers: Sequence[Any]) -> None:
        score: Any = problem.score
        self.even = place.row_blocks is None and place.key_blocks is None
        unit = BLOCK if problem.dropout else 1
        self.rows = _indices(place.row, place.row_blocks, unit, problem.n_queries)
        self.keys = _indices(place.key, place.key_blocks, unit, problem.n_keys)
        self._first = place.batch, place.head
        self._bound = bound = Bound(score.root, tuple([operands[name] for name in score.names]), tuple(numbers))
        self._last = place.batch + math.prod(problem.batch) - 1, place.head + problem.heads - 1
        made = _compiled(score, problem.stat_dtype, problem.operation, moves=problem.moves, even=self.even)
        self.primal = "dq" in OPERATIONS[problem.operation].results
        self.compute, self.names = made.program.ready(bound), made.names
        self.diagonals = made.diagonals and made.diagonals.ready(bound)
        self.weights = [(weight, bound.arrays[weight.slot].size, where.ready(bound)) for weight, where in made.weights]

    @cached_property
    def largest(self) -> float:
        """What no number that the function adds is beyond; infinite if it does anything but add, or may add NaN."""
        rest = addend(self._bound.root)
        if rest is None:
            return math.inf
        ends = *zip(self._first, self._last, strict=True), *[(x[0], x[-1]) for x in (self.rows, self.keys)]
        variables = {name: Interval(*map(np.float64, pair)) for name, pair in zip("bhij", ends, strict=True)}
        found = bounds([rest], variables, [*map(_elements, self._bound.arrays)], self._bound.numbers)[rest]
        return math.inf if found.nan else float(max(-found.lo, found.hi))

    def of(self, batch: Any, heads: Any, rows: slice, keys: slice) -> "Stretch":
        """Return the function for some rows and keys of some heads.

        Parameters
        ----------
        batch, heads : array of int
            Local: flat index of the leading axes, and query heads; they broadcast to the heads' axes.
        rows, keys : slice
            Local; those that do not exist count as the last.
        """
        b, h = (np.add(x, first, dtype=np.int32) for x, first in zip((batch, heads), self._first, strict=True))
        return Stretch(self, b, h, rows, keys)


def _elements(array: ndarray) -> Extremes:
    """Return what bounds any element of an array."""
    if not array.size or array.dtype == bool:
        return of_dtype(array.dtype)
    ends = [np.float64(end) for end in (array.min(), array.max())]
    return lambda indices: Interval(*ends, nan=bool(np.isnan(ends[0])))


def _indices(first: int, blocks: ndarray | None, unit: int, length: int) -> ndarray:
    """Return the global indices of all rows or keys, given those of the first of every `unit` unless they are even."""
    if blocks is None:
        return np.arange(first, first + length, dtype=np.int32)
    return (blocks[:, None] + np.arange(unit, dtype=np.int32)).reshape(-1)[:length]


class Stretch:
    """A score function for rows and keys of some heads.

    Scores have the axes of the heads and (row tiles, key tiles, keys, rows).
    """

    def __init__(self, scores: Scores, b: ndarray, h: ndarray, rows: slice, keys: slice) -> None:
        self._scores, self._b, self._h, self._first_key = scores, b, h, keys.start
        self._i = scores.rows[np.minimum(np.arange(rows.start, rows.stop), len(scores.rows) - 1)]
        self._j = scores.keys[np.minimum(np.arange(keys.start, keys.stop), len(scores.keys) - 1)]
        self._lines: list[ndarray] = []
        if scores.diagonals is not None:
            first = self._i[0] - self._j[0]
            d = np.arange(first + 1 - len(self._j), first + len(self._i), dtype=np.int32)
            self._lines = scores.diagonals(self._of_differences(d, 1))

    def _heads(self, axes: int) -> dict[str, ndarray]:
        """Return b and h with further axes."""
        return {name: x.reshape(*x.shape, *[1] * axes) for name, x in (("b", self._b), ("h", self._h))}

    def _of_differences(self, d: ndarray, axes: int) -> dict[str, Any]:
        """Return variables with these differences i - j, which are indices of rows and of keys."""
        d = np.clip(d, -self._scores.keys[-1], self._scores.rows[-1])
        return {**self._heads(axes), "i": np.maximum(d, 0), "j": np.maximum(-d, 0)}

    def _variables(self, first: int, shape: tuple[int, ...]) -> dict[str, Any]:
        tiles, n, keys, rows = shape
        start = first - self._first_key
        j = self._j[start : start + n * keys].reshape(n, keys, 1)
        return {**self._heads(4), "i": self._i.reshape(tiles, 1, 1, rows), "j": j}

    def __call__(self, s: ndarray, first: int) -> Values:
        """Replace scores by the function's values.

        Parameters
        ----------
        s : ndarray
        first : int
            The first of their keys.

        Returns
        -------
        dict of str to ndarray
            The derivatives that the operation needs, which broadcast to the scores.
        """
        *_, keys, rows = s.shape
        start = len(self._j) - 1 - (first - self._first_key)
        views = []
        for line in self._lines:
            *steps, step = line.strides
            shape, strides = (*line.shape[:-1], *s.shape[-4:]), (*steps, rows * step, -keys * step, -step, step)
            views.append(as_strided(line[..., start:], shape, strides, writeable=False))
        variables = {"s": s, **self._variables(first, s.shape[-4:])}
        value, *more = self._scores.compute(variables, None if self._scores.names else s, views)
        found = {name: x.copy() if x is s else x for name, x in zip(self._scores.names, more, strict=True)}
        if value is not s:
            np.copyto(s, value)
        return found

    def move(self, t: ndarray, values: Values) -> Values:
        """Turn tangents of the scores that went into the function into those of its values.

        Returns
        -------
        dict of str to ndarray
            The tangents of "slope" and "weight 0", ..., that are not 0.
        """
        moved: Values = {}
        for name in values:
            kind, _, of = name.partition(" ")
            if kind in ("along", "curve") and of:
                moved[of] = moved.get(of, 0) + (values[name] if kind == "along" else values[name] * t)
        _multiply(t, values.get("slope"))
        if "along" in values:
            t += values["along"]
        return moved

    def differentiate(
        self, ds: ndarray, values: Values, first: int, tds: ndarray | None = None, moved: Values | None = None
    ) -> list[Term]:
        """Turn derivatives by the function's values, and their tangents, into those by the scores that went into it.

        Parameters
        ----------
        ds : ndarray
        values : dict of str to ndarray
            What the call returned for these scores.
        first : int
            The first of their keys.
        tds : ndarray, optional
            Tangents of the derivatives; None: there are none.
        moved : dict of str to ndarray, optional
            What `move` returned for these scores, where they have tangents.

        Returns
        -------
        list of Term
            Of the gradients of arrays.
        """
        moved, slope = moved or {}, values.get("slope")
        found = self._terms("dscore", ds, values, first) if self._scores.primal else []
        if tds is not None:
            found += self._terms("tdscore", tds, values, first) + self._terms("tdscore", ds, moved, first)
            _multiply(tds, slope)
            if "slope" in moved:
                tds += _product(ds, moved["slope"])
        _multiply(ds, slope)
        return found

    def _terms(self, gradient: str, ds: ndarray, values: Values, first: int) -> list[Term]:
        """Return the terms of gradients from derivatives by the function's values."""
        scores, found = self._scores, []
        for n, (weight, size, where) in enumerate(scores.weights):
            if f"weight {n}" not in values:
                continue
            x, variables = _product(ds, values[f"weight {n}"]), self._variables(first, ds.shape[-4:])
            if weight.place == "diagonal" and scores.even:
                x, d = along_diagonals(x)
                variables = self._of_differences(variables["i"][..., :1] - variables["j"][:, :1] + d, 4)
            (elements,) = where(variables)
            elements = elements.reshape(*[1] * (x.ndim - elements.ndim), *elements.shape)
            x = summed_to(x, elements.shape, SUM).reshape(-1).astype(SUM)  # a copy, as ds will change
            elements = elements.reshape(-1).astype(np.intp, copy=False)  # other dtypes would take ten times as long
            if x.size > size:
                x, elements = np.bincount(elements, x, size), None
            found.append(Term(f"{gradient}{weight.slot}", elements, x))
        return found


def _multiply(ds: ndarray, slope: ndarray | None) -> None:
    """Multiply derivatives by a slope, if there is one."""
    if slope is not None:
        np.copyto(ds, _product(ds, slope))


def _product(ds: ndarray, factor: ndarray) -> ndarray:
    """Return derivatives times a factor; 0, as where something is hidden, stays 0, whatever the factor is."""
    if factor.ndim == 0 and factor == 1:
        return ds
    product = ds * factor
    if not is_finite(product):
        product[ds == 0] = 0
    return product


def along_diagonals(x: ndarray) -> tuple[ndarray, ndarray]:
    """Sum along diagonals, some keys at a time.

    Parameters
    ----------
    x : ndarray, (..., keys, rows)

    Returns
    -------
    sums : ndarray, (..., parts, diagonals)
    differences : ndarray of int, (parts, diagonals)
        Row - key of each.

    Examples
    --------
    >>> along_diagonals(np.arange(9.0).reshape(3, 3))
    (array([[ 6., 10., 12.,  6.,  2.]]), array([[-2, -1,  0,  1,  2]], dtype=int32))
    """
    *lead, keys, rows = x.shape
    some, most = math.gcd(keys, _DIAGONAL), min(rows, _DIAGONAL)
    if not min(most, UNIT) <= some <= 2 * most:  # lest lines have much more that is 0
        some = most
        x = np.concatenate([x, np.zeros((*lead, -keys % some, rows), x.dtype)], -2)
    parts, width = cdiv(keys, some), some + rows - 1
    lines = np.zeros((*lead, parts, some * (width + 1)), x.dtype)
    lines[..., : some * width].reshape(*lead, parts, some, width)[..., :rows] = x.reshape(*lead, parts, some, rows)
    # In lines that are longer by one, each key's stand one column to the left of those of the key before.
    sums = np.add.reduce(lines.reshape(*lead, parts, some, width + 1), -2)
    differences = np.arange(1 - some, rows, dtype=np.int32) - some * np.arange(parts, dtype=np.int32)[:, None]
    return np.concatenate([sums[..., width + 2 - some :], sums[..., :rows]], -1), differences
