"""Bounds of every value of a graph over tiles of rows and keys, for all tiles at once; tile states of masks."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuattn.tracing.bound import Bound
from cuattn.tracing.extremes import Extremes, described
from cuattn.tracing.graph import Node, order
from cuattn.tracing.operations import DIVISIONS, TABLE
from cuattn.tracing.ranges import OPEN, Interval, anything, point, whole, widened

SKIP, PARTIAL, FULL = 0, 1, 2
_STRIP = 1 << 16  # tiles that are bounded at once


@functools.lru_cache(maxsize=256)
def _uses(roots: tuple[Node, ...]) -> tuple[list[Node], dict[Node, int]]:
    """Return the nodes of graphs in order, and how often each is an operand or a root."""
    nodes = order(*roots)
    return nodes, collections.Counter([*roots, *(arg for node in nodes for arg in node.args)])


def bounds(
    roots: Sequence[Node],
    variables: Mapping[str, Interval],
    arrays: Sequence[Extremes] = (),
    numbers: Sequence[Any] = (),
    *,
    keep: bool = False,
    integers: Callable[[Interval], Interval] = whole,
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
    integers : callable, optional
        What becomes of the bounds of integers: by default they are left open where float64 does not hold them.

    Returns
    -------
    dict of Node to Interval

    Examples
    --------
    >>> from cuattn.tracing.functions import MASK, trace
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
        "constant": lambda node: _of_number(node.value),
        "variable": lambda node: variables.get(node.value, OPEN._replace(nan=True)),
        "parameter": lambda node: _of_number(numbers[node.value]),
        "offset": lambda node: OPEN._replace(lo=np.float64(0)),
    }
    with np.errstate(all="ignore"):
        for node in nodes:
            operands = [found[x] for x in node.args]
            if node.op in leaf:
                result = leaf[node.op](node)
            else:
                result = _rounded(node, arrays[node.value](operands) if node.op == "load" else _bounded(node, operands))
            found[node] = integers(result._replace(nan=False)) if node.kind == "i" else result
            for arg in node.args if not keep else ():
                left[arg] -= 1
                if not left[arg]:
                    del found[arg]
    return found


def _of_number(value: Any) -> Interval:
    """Return the bounds of a number, which the accumulator may have to round."""
    if isinstance(value, Interval):
        return value
    is_exact = not isinstance(value, float | np.floating) or float(np.float32(value)) == value
    return point(value) if is_exact else widened(point(value))


def _bounded(node: Node, operands: list[Interval]) -> Interval:
    return (anything if node.op in DIVISIONS and node.kind == "f" else TABLE[node.op].bounds)(*operands)


def _rounded(node: Node, result: Interval) -> Interval:
    is_exact = node.kind != "f" or (node.op in TABLE and TABLE[node.op].exact)
    return result if is_exact else widened(result)


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
    >>> from cuattn.tracing.functions import MASK, trace
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
    if not states.size:
        return states
    strip = max(_STRIP // len(keys[0]), 1)
    j = Interval(np.asarray(keys[0], np.float64), np.asarray(keys[1], np.float64))
    for start in range(0, len(states), strip):
        part = slice(start, start + strip)
        first, last = (np.asarray(x[part], np.float64)[:, None] for x in rows)
        variables = {"b": point(b), "h": point(h), "i": Interval(first, last), "j": j}
        lo, hi = bounds([bound.root], variables, extremes, bound.numbers)[bound.root][:2]
        np.add(lo, hi, out=states[part], dtype=np.int8, casting="unsafe")
    return states
