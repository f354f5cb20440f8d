"""Score functions that add an array read by row and key, ``s + x[h, i, j]``: that array is taken as a bias.

A bias is read as it lies in memory, tile by tile, where a function would gather its elements one by one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.problem import Place, Problem
from cuattn.tracing import Node, addend, weights
from cuattn.tracing.build import substitute
from cuattn.tracing.graph import constant, order, variable

_VARIABLES = tuple(map(variable, "bhij"))
_PAIR = {*_VARIABLES[2:]}
_UNCHANGED = variable("s")


class Pairs(NamedTuple):
    """What became the bias: an array of a score function.

    Attributes
    ----------
    slot : int
        Which one.
    learned : bool
        Whether its gradient is wanted.
    shape : tuple of int
    view : callable
        Returns the part of an array of this shape that is the bias.
    """

    slot: int
    learned: bool
    shape: tuple[int, ...]
    view: Callable[[ndarray], ndarray]


def with_bias(
    problem: Problem, operands: Mapping[str, ndarray], place: Place
) -> tuple[Problem, Mapping[str, ndarray], Pairs | None]:
    """Return a problem and its operands with what the score function adds by row and key as the bias."""
    score = problem.score
    whole = problem.operation in ("forward", "backward") and not problem.runs
    term = None if score is None or problem.bias is not None or not whole else term_of(score.root)
    if term is None:
        return problem, operands, None
    (slot, indices), rest = term
    array, axes = operands[f"score{slot}"], [_VARIABLES.index(x) if x in _VARIABLES else -1 for x in indices]
    firsts = place.batch, place.head, place.row, place.key
    lengths = math.prod(problem.batch), problem.heads, problem.n_queries, problem.n_keys, 1
    index = tuple([
        slice(firsts[axis], firsts[axis] + lengths[axis]) if axis >= 0 else slice(x.value, x.value + 1 or None)
        for x, axis in zip(indices, axes, strict=True)
    ])  # fmt: skip
    if array[index].shape != tuple([lengths[axis] for axis in axes]):  # what lies beyond its ends is read, too
        return problem, operands, None
    batch = problem.batch if 0 in axes else (1,) * len(problem.batch)
    shape = *batch, problem.heads if 1 in axes else 1, problem.n_queries, problem.n_keys
    order = np.argsort(axes)

    def view(array: ndarray) -> ndarray:
        return array[index].transpose(order).reshape(shape)

    learned = tuple(other for other in score.learned if other != slot)
    left = None if rest is _UNCHANGED and not learned else score._replace(root=rest, learned=learned)
    problem = replace(problem, score=left, bias=array.dtype)
    return problem, {**operands, "bias": view(array)}, Pairs(slot, learned != score.learned, array.shape, view)


@lru_cache(maxsize=256)
def term_of(root: Node) -> tuple[tuple[int, tuple[Node, ...]], Node] | None:
    """Return the slot and the indices of an array that a score function adds by row and key, and what it does beside.

    Parameters
    ----------
    root : Node

    Examples
    --------
    >>> from cuattn.tracing import trace
    >>> term_of(trace(lambda s, b, h, i, j, x=np.ones((2, 4, 4)): s - h + x[h, i, j]).root)
    ((0, (h, i, j)), subtract(s, to_float(h)))
    """
    for node in reversed(order(root)) if addend(root) else ():
        by_pair = node.op == "load" and node.kind == "f" and _is_pair(node.args)
        if by_pair and [read.weight for read in weights(root, node.value)] == [constant(1.0)]:
            return (node.value, node.args), substitute(root, {node: constant(0.0)})
    return None


def _is_pair(indices: tuple[Node, ...]) -> bool:
    """Return whether indices are i, j and perhaps b and h, each at most once, and constants."""
    variables = [x for x in indices if x.op == "variable"]
    return {*variables} >= _PAIR and all(variables.count(x) == 1 or x.op == "constant" for x in indices)
