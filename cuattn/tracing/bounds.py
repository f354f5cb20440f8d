"""Bounds of every value of a graph over tiles of rows and keys, for all tiles at once; tile states of masks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuattn.tracing.bound import Bound
from cuattn.tracing.graph import Node, order
from cuattn.tracing.operations import TABLE
from cuattn.tracing.ranges import EITHER, OPEN, Interval, point, whole, widened

SKIP, PARTIAL, FULL = 0, 1, 2
_STRIP = 1 << 16  # tiles that are bounded at once

Extremes = Callable[[Sequence[Interval]], Interval]
"""Bounds the elements of an array over bounds of its indices, one for each axis, before these wrap and are clamped."""


def described(array: Any) -> Extremes:
    """Return what bounds the elements of an array: all of one of NumPy, of others what the dtype says.

    Examples
    --------
    >>> found = described(np.array([3, 1, 2]))([Interval(np.float64(1), np.float64(2))])
    >>> float(found.lo), float(found.hi)
    (1.0, 2.0)
    """
    return _Elements(array) if isinstance(array, np.ndarray) and array.size else of_dtype(np.dtype(array.dtype))


def of_dtype(dtype: np.dtype) -> Extremes:
    """Return the bounds of any element of an array."""
    if dtype.kind in "iu":
        found = whole(Interval(np.float64(np.iinfo(dtype).min), np.float64(np.iinfo(dtype).max)))
    else:
        found = EITHER if dtype.kind == "b" else OPEN._replace(nan=True)
    return lambda indices: found


class _Elements:
    """Least and greatest elements of boxes of an array of NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        self._boolean = array.dtype == bool
        values = array.astype(np.float64)
        self._nan = bool(np.isnan(values).any())
        self._values = values
        self._tables: dict[Any, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def __call__(self, indices: Sequence[Interval]) -> Interval:
        indices = [wrapped(index, length) for index, length in zip(indices, self._values.shape, strict=True)]
        lows, highs, fixed, moving = self._values, self._values, [], []
        for axis, index in enumerate(indices):
            single = np.size(index.lo) == 1 and np.size(index.hi) == 1
            (fixed if single else moving).append(axis)
        for axis in reversed(fixed):  # one range for all tiles
            part = slice(int(np.min(indices[axis].lo)), int(np.max(indices[axis].hi)) + 1)
            key = (slice(None),) * axis + (part,)
            lows, highs = lows[key].min(axis), highs[key].max(axis)
        for axis in moving[:-1][::-1]:  # all of the axis, but of the last one
            lows, highs = lows.min(moving.index(axis)), highs.max(moving.index(axis))
        lo, hi = (lows, highs) if not moving else self._ranges(lows, highs, indices, fixed, moving)
        if self._boolean:
            lo, hi = np.asarray(lo) != 0, np.asarray(hi) != 0
        return OPEN._replace(nan=True) if self._nan else Interval(lo, hi)

    def _ranges(self, lows: Any, highs: Any, indices: Sequence[Interval], fixed: list, moving: list) -> tuple[Any, Any]:
        """Return the extremes of ranges along the last axis that moves, from those of 1, 2, 4, ... elements."""
        key = tuple([(axis, float(np.min(indices[axis].lo)), float(np.max(indices[axis].hi))) for axis in fixed])
        if key not in self._tables:
            if len(self._tables) >= 64:
                self._tables.clear()
            self._tables[key] = _doubled(lows, np.minimum), _doubled(highs, np.maximum)
        first, last = (np.asarray(x, np.int64) for x in indices[moving[-1]][:2])
        level = np.frexp(np.asarray(last - first + 1, np.float64))[1] - 1  # the largest power of 2 within the range
        second = last - (np.int64(1) << level) + 1
        lo, hi = (
            combine(table[level, first], table[level, second])
            for table, combine in zip(self._tables[key], (np.minimum, np.maximum), strict=True)
        )
        return lo, hi


def _doubled(values: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """Return the extremes of 2**level elements from each element on, (levels, n)."""
    levels = [values]
    for level in range(len(values).bit_length() - 1):
        step, last = 1 << level, levels[-1]
        levels.append(np.concatenate([combine(last[:-step], last[step:]), last[-step:]]))
    return np.stack(levels)


@functools.lru_cache(maxsize=256)
def _uses(roots: tuple[Node, ...]) -> tuple[list[Node], dict[Node, int]]:
    """Return the nodes of graphs in order, and how often each is an operand or a root."""
    nodes, uses = order(*roots), {}
    for node in (*roots, *(arg for node in nodes for arg in node.args)):
        uses[node] = uses.get(node, 0) + 1
    return nodes, uses


def bounds(
    roots: Sequence[Node],
    variables: Mapping[str, Interval],
    arrays: Sequence[Extremes] = (),
    numbers: Sequence[Any] = (),
    *,
    keep: bool = False,
) -> dict[Node, Interval]:
    """Bound the values of graphs.

    Parameters
    ----------
    roots : sequence of Node
    variables : mapping of str to Interval
        Bounds of b, h, i and j per tile; s may have any value where it is not given.
    arrays : sequence of callable
        By slot, see `described`.
    numbers : sequence
        By slot of the parameters: a number, or its bounds.
    keep : bool, default False
        Whether to return the bounds of every node, not of the roots alone.

    Returns
    -------
    dict of Node to Interval

    Examples
    --------
    >>> from cuattn.tracing.trace import MASK, trace
    >>> i, j = (Interval(np.array(lo), np.array(lo) + 3) for lo in ([[0.0], [4.0]], [0.0, 4.0]))
    >>> root = trace(lambda b, h, i, j: j <= i, MASK).root
    >>> never, ever = bounds([root], {"i": i, "j": j})[root][:2]
    >>> never.astype(int) + ever
    array([[1, 0],
           [2, 1]])
    """
    nodes, uses = _uses(tuple(roots))
    found: dict[Node, Interval] = {}
    left = dict(uses)
    leaf = {
        "constant": lambda node: point(node.value),
        "variable": lambda node: variables.get(node.value, OPEN._replace(nan=True)),
        "parameter": lambda node: _of_number(node, numbers),
        "load": lambda node: _loaded(node, [found[x] for x in node.args], arrays),
    }
    with np.errstate(all="ignore"):
        for node in nodes:
            if node.op in leaf:
                found[node] = leaf[node.op](node)
            else:
                found[node] = _bounded(node, [found[x] for x in node.args])
            for arg in node.args if not keep else ():
                left[arg] -= 1
                if not left[arg]:
                    del found[arg]
    return found


def _bounded(node: Node, operands: list[Interval]) -> Interval:
    """Return the bounds of an operation."""
    row = TABLE[node.op]
    if node.kind == "i":
        return whole((row.bounds_integer or row.bounds)(*operands)._replace(nan=False))
    result = row.bounds(*operands)
    return result if node.kind == "b" or row.exact else widened(result)


def _of_number(node: Node, numbers: Sequence[Any]) -> Interval:
    value = numbers[node.value]
    if isinstance(value, Interval):
        return value
    return widened(point(float(value))) if node.kind == "f" else point(value)


def wrapped(index: Interval, length: int) -> Interval:
    """Return the bounds of an index after negative ones wrapped and all were clamped to [0, length)."""
    lo = np.where(index.lo >= 0, index.lo, np.where(index.hi < 0, index.lo + length, 0))
    hi = np.where(index.hi < 0, index.hi + length, np.where(index.lo < 0, np.maximum(index.hi, length - 1), index.hi))
    return Interval(np.clip(lo, 0, length - 1), np.clip(hi, 0, length - 1))


def _loaded(node: Node, indices: list[Interval], arrays: Sequence[Extremes]) -> Interval:
    found = arrays[node.value](indices)
    return whole(found) if node.kind == "i" else (found if node.kind == "b" else widened(found))


def tile_states(
    bound: Bound,
    rows: tuple[np.ndarray, np.ndarray],
    keys: tuple[np.ndarray, np.ndarray],
    b: int = 0,
    h: int = 0,
    extremes: Sequence[Extremes] | None = None,
) -> np.ndarray:
    """Classify tiles under a mask function, soundly.

    Parameters
    ----------
    bound : Bound
        With a boolean root.
    rows, keys : tuple of array
        The first and the last row (key) of each row tile (key tile), global indices.
    b, h : int, optional
        Which matrix.
    extremes : sequence of callable, optional
        The arrays `described`, which keeps tables of them; made anew by default.

    Returns
    -------
    int8 array, (row tiles, key tiles)
        0 = nothing is visible, 2 = everything is, 1 = elements must be tested.

    Examples
    --------
    >>> from cuattn.tracing.trace import MASK, trace
    >>> first = np.arange(0, 8, 2)
    >>> window = trace(lambda b, h, i, j: (0 <= i - j) & (i - j < 3), MASK).bind()
    >>> tile_states(window, (first, first + 1), (first, first + 1))
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]], dtype=int8)
    """
    extremes = list(map(described, bound.arrays)) if extremes is None else extremes
    states = np.empty((len(rows[0]), len(keys[0])), np.int8)
    strip = max(_STRIP // max(len(keys[0]), 1), 1)
    j = Interval(*(np.asarray(x, np.float64) for x in keys))
    for start in range(0, len(states), strip):
        part = slice(start, start + strip)
        i = Interval(*(np.asarray(x[part], np.float64)[:, None] for x in rows))
        variables = {"b": point(b), "h": point(h), "i": i, "j": j}
        lo, hi = bounds([bound.root], variables, extremes, bound.numbers)[bound.root][:2]
        np.add(lo, hi, out=states[part], dtype=np.int8, casting="unsafe")
    return states
