"""How a score function depends on the arrays that a backward differentiates, as kernels are told of it."""

import functools
import math
from typing import NamedTuple

import numpy as np

from cuattn.problem import Problem, ScoreFunction
from cuattn.tracing import B, H, I, J, Node, S, Weight, derivative, is_linear, row_step, weights
from cuattn.tracing.build import substitute
from cuattn.tracing.graph import constant, order, variable
from cuattn.tracing.proxy import Proxy, as_node

_MULTIPLES = "multiply", "true_divide", "negative"
_SLICE = 256  # elements that a block of threads keeps sums of


class Line(NamedTuple):
    """A weight that is a multiple of s, the same for all rows, and a rest that grows by the same from row to row.

    Attributes
    ----------
    tilt : Node
        The factor of s.
    step : Node
        By which the rest grows.
    rests : bool
        Whether there is one.
    """

    tilt: Node
    step: Node
    rests: bool


class Learned(NamedTuple):
    """One expression in which a function reads such an array.

    Attributes
    ----------
    weight : Weight
    place : str
        As of the weight, or "slice": in each head it reads no more than a few elements, a slice of the array.
    length : int
        Of the slice; else 0.
    number : Node
        Which element of the slice is read.
    offset : Node
        Which element of the array; of a slice, of its element number i + j.
    base : Node
        The first element that a head may read.
    reach : int
        How far behind that the last one lies.
    line : Line or None
        Of the weight, if it is one.
    alike : bool
        Heads read alike: how far an element lies behind `base` is the same for all.
    """

    weight: Weight
    place: str
    length: int
    number: Node
    offset: Node
    base: Node
    reach: int
    line: Line | None
    alike: bool


def learned(problem: Problem) -> tuple[Learned, ...]:
    """Return how a problem's score function depends on arrays that are differentiated."""
    return () if problem.score is None else _learned(problem.score, problem.runs)


@functools.lru_cache(maxsize=256)
def _learned(score: ScoreFunction, runs: bool) -> tuple[Learned, ...]:
    found = (weight for slot in score.learned for weight in weights(score.root, slot))
    return tuple(_described(weight, score, runs) for weight in found)


def _described(weight: Weight, score: ScoreFunction, runs: bool) -> Learned:
    shape = score.facts.arrays[weight.slot].shape
    inner = [axis for axis, index in enumerate(weight.indices) if index.depends & (I | J)]
    first = tuple(constant(0) if axis in inner else index for axis, index in enumerate(weight.indices))
    reach = sum((shape[axis] - 1) * math.prod(shape[axis + 1 :]) for axis in inner)
    length = math.prod(shape[axis] for axis in inner)
    place, number, offset = weight.place, constant(0), weight.offset
    if runs and place == "diagonal":  # those of the whole problem are no diagonals of the part
        place = "element"
    _, _, rows, keys = score.facts.limits
    if place == "element" and length <= min(_SLICE, rows + keys - 1):
        place, number = "slice", _number_in(weight, shape, inner)
        offset = weight._replace(indices=_numbered(weight, shape, inner)).offset
    base = weight._replace(indices=first).offset
    line = None if runs else _line(weight.weight)
    alike = not any(weight.indices[axis].depends & (B | H) for axis in inner)
    return Learned(weight, place, length * (place == "slice"), number, offset, base, reach, line, alike)


def _line(weight: Node) -> Line | None:
    """Return what a weight is as a line."""
    tilt, rest = derivative(weight), is_linear(weight) and substitute(weight, {variable("s"): constant(0.0)})
    step = row_step(rest) if rest else None
    if step is None or tilt.depends & I:
        return None
    multiple = all(node.op in ("variable", *_MULTIPLES) for node in order(weight) if node.depends & S)
    return Line(tilt, step, not (weight.depends & S and multiple))


def _number_in(weight: Weight, shape: tuple[int, ...], inner: list[int]) -> Node:
    """Return the number of the element that is read among those of the axes `inner`."""
    number = Proxy(constant(0))
    for axis in inner:
        index, size = Proxy(weight.indices[axis]), shape[axis]
        index = np.where(index < 0, index + size, index)
        number = number * size + np.minimum(np.maximum(index, 0), size - 1)
    return as_node(number)


def _numbered(weight: Weight, shape: tuple[int, ...], inner: list[int]) -> tuple[Node, ...]:
    """Return the indices of the element with number i + j there."""
    indices, rest = list(weight.indices), Proxy(variable("i")) + Proxy(variable("j"))
    for axis in reversed(inner):
        indices[axis] = as_node(rest % shape[axis] if axis != inner[0] else rest)
        rest = rest // shape[axis]
    return tuple(indices)
