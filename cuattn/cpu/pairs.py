"""Score functions that add an array read by row and key, ``s + x[h, i, j]``: that array is taken as a bias.

A bias is read as it lies in memory, tile by tile, where a function would gather its elements one by one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from numpy import ndarray

from cuattn.problem import Place, Problem
from cuattn.tracing import Node, addend
from cuattn.tracing.build import substitute
from cuattn.tracing.graph import constant, order, variable

_VARIABLES = tuple(map(variable, "bhij"))
_PAIR = {*_VARIABLES[2:]}
_UNCHANGED = variable("s")


class _Term(NamedTuple):
    """An array that a function adds by row and key: its slot, its indices, and the function without it."""

    slot: int
    indices: tuple[Node, ...]
    rest: Node


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
    term = None if score is None or problem.bias is not None or problem.runs else term_of(score.root)
    if term is None:
        return problem, operands, None
    array = operands[f"score{term.slot}"]
    index = _place_in(array.shape, term.indices, problem, place)
    if index is None:
        return problem, operands, None
    read = [x for x in _VARIABLES if x in term.indices]
    order = [[x for x in term.indices if x in read].index(x) for x in read]
    batch = problem.batch if _VARIABLES[0] in read else (1,) * len(problem.batch)

    def view(array: ndarray) -> ndarray:
        part = array[index].transpose(order)[tuple([slice(None) if x in read else None for x in _VARIABLES])]
        return part.reshape(*batch, *part.shape[1:])

    learned = tuple(slot for slot in score.learned if slot != term.slot)
    pairs = Pairs(term.slot, learned != score.learned, array.shape, view)
    left = None if term.rest is _UNCHANGED and not learned else score._replace(root=term.rest, learned=learned)
    return replace(problem, score=left, bias=array.dtype), {**operands, "bias": view(array)}, pairs


def _place_in(
    shape: tuple[int, ...], indices: tuple[Node, ...], problem: Problem, place: Place
) -> tuple[int | slice, ...] | None:
    """Return where in an array the elements for a problem are; None where indices leave it."""
    firsts = place.batch, place.head, place.row, place.key
    lengths = math.prod(problem.batch), problem.heads, problem.n_queries, problem.n_keys
    whole = {x: slice(first, first + n) for x, first, n in zip(_VARIABLES, firsts, lengths, strict=True)}
    found = tuple([whole.get(x, x.value) for x in indices])
    fits = [x.stop <= n if isinstance(x, slice) else -n <= x < n for x, n in zip(found, shape, strict=True)]
    return found if all(fits) else None


@lru_cache(maxsize=256)
def term_of(root: Node) -> _Term | None:
    """Return the array that a score function adds by row and key, one of them if there are some.

    Parameters
    ----------
    root : Node

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.tracing import trace
    >>> term_of(trace(lambda s, b, h, i, j, x=np.ones((2, 4, 4)): s - h + x[h, i, j]).root)
    _Term(slot=0, indices=(h, i, j), rest=subtract(s, to_float(h)))
    """
    waiting, nodes = [addend(root)], order(root)
    while waiting and waiting[-1] is not None:
        node = waiting.pop()
        if node.op in ("add", "subtract"):
            waiting += node.args[: 2 if node.op == "add" else 1]
        elif node.op == "load" and node.kind == "f" and _is_pair(node.args):
            uses = [x for x in nodes if node in x.args or (x.op, x.value) == (node.op, node.value)]
            if len(uses) == 2:  # itself and the sum
                return _Term(node.value, node.args, substitute(root, {node: constant(0.0)}))
    return None


def _is_pair(indices: tuple[Node, ...]) -> bool:
    """Return whether indices are i, j and perhaps b and h, each at most once, and constants."""
    variables = [x for x in indices if x.op == "variable"]
    return {*variables} >= _PAIR and all(variables.count(x) == 1 or x.op == "constant" for x in indices)
