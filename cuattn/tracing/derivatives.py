"""Exact derivatives of graphs, as graphs that can be differentiated again.

Tangents are carried from the leaves to the root.  A choice chooses among the tangents too, and a factor is taken into
the branches of a tangent that is 0 elsewhere: nothing is ever multiplied by a 0 that stands for "not chosen", so that
an infinite or undefined slope of what was not chosen leaves no NaN.
"""

import functools
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from cuattn.tracing.build import apply, linear_terms, substitute
from cuattn.tracing.graph import I, J, Node, S, constant, is_constant, load, offset, order, variable
from cuattn.tracing.operations import COMPARISONS, TABLE
from cuattn.tracing.proxy import Proxy, as_node

_ZERO, _ONE = constant(0.0), constant(1.0)
_AFFINE = {"add", "subtract", "negative", "to_float"}
_LINEAR = {"multiply": ([0], [1]), "true_divide": ([0],), "select": ([1], [2], [1, 2])}  # in which of their operands


@functools.lru_cache(maxsize=1024)
def derivative(root: Node, leaf: Node | None = None) -> Node:
    """Return the partial derivative of a graph.

    Parameters
    ----------
    root : Node
        Of kind float.
    leaf : Node, optional
        By default s; or one load of an array (see `weights`), or a parameter.

    Returns
    -------
    Node

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> derivative(trace(lambda s, b, h, i, j: s * s + np.tanh(s)).root)
    add(add(s, s), subtract(1.0, multiply(tanh(s), tanh(s))))
    >>> derivative(trace(lambda s, b, h, i, j: np.where(i < j, np.sqrt(s), 0)).root)
    select(less(i, j), true_divide(0.5, sqrt(s)), 0.0)
    """
    return tangent(root, {variable("s") if leaf is None else leaf: _ONE})


def tangent(root: Node, seeds: dict[Node, Node]) -> Node:
    """Return the derivative of a graph along the tangents of its leaves.

    Parameters
    ----------
    root : Node
    seeds : dict of Node to Node
        Tangents of leaves; those of all others are 0.
    """
    tangents: dict[Node, Node] = {}
    for node in order(root):
        tangents[node] = seeds[node] if node in seeds else _rule(node, [tangents[x] for x in node.args])
    return tangents[root]


def _rule(node: Node, tangents: list[Node]) -> Node:
    """Return the tangent of an operation from those of its operands."""
    if node.kind != "f" or node.op not in TABLE or all(x is _ZERO for x in tangents):
        return _ZERO
    row, operands = TABLE[node.op], [Proxy(x) for x in node.args]
    if row.chosen is not None:
        return apply("select", as_node(row.chosen(*operands)), *tangents[-2:])
    slopes = row.slopes(*operands, Proxy(node)) if row.slopes else ()
    terms = [times(as_node(slope), x) for slope, x in zip(slopes, tangents, strict=False) if x is not _ZERO]
    return functools.reduce(functools.partial(apply, "add"), terms, _ZERO)


def times(factor: Node, x: Node) -> Node:
    """Return a product; where the second factor is a choice with 0, a choice of products with 0.

    Examples
    --------
    >>> s, c = variable("s"), apply("less", variable("i"), variable("j"))
    >>> times(s, apply("select", c, s, constant(0.0)))
    select(less(i, j), multiply(s, s), 0.0)
    """
    choices: list[tuple[Node, bool]] = []
    while x.op == "select" and any(is_constant(branch, 0) for branch in x.args[1:]):
        condition, first, second = x.args
        choices.append((condition, is_constant(second, 0)))
        x = first if is_constant(second, 0) else second
    product = x if is_constant(x, 0) else apply("multiply", factor, x)
    for condition, is_first in reversed(choices):
        product = apply("select", condition, *((product, _ZERO) if is_first else (_ZERO, product)))
    return product


class Weight(NamedTuple):
    """How a score depends on the elements of an array that one expression reads.

    Attributes
    ----------
    slot : int
        Of the array.
    indices : tuple of Node
        Which element is read, before negative ones wrap and all are clamped.
    weight : Node
        The derivative of the score by it: the cotangent of the score times this is the element's.
    """

    slot: int
    indices: tuple[Node, ...]
    weight: Node

    @property
    def place(self) -> str:
        """Which scores read the same element, so that their cotangents are summed before they are scattered.

        "head": all of a batch and head; "row": those of a row; "key": those of a key; "diagonal": those of equal
        i - j; "element": it cannot be told.  The index may be read from arrays in each case.
        """
        bits = functools.reduce(lambda x, y: x | y.depends, self.indices, 0) & (I | J)
        if bits == I | J:
            return "diagonal" if all(map(on_diagonals, self.indices)) else "element"
        return {0: "head", I: "row", J: "key"}[bits]

    @property
    def offset(self) -> Node:
        """Where the element lies in an array of that shape in C order: in that of the gradient."""
        return offset(self.slot, self.indices)


def on_diagonals(node: Node) -> bool:
    """Return whether a value depends on i and j by their difference alone.

    Examples
    --------
    >>> i, j = variable("i"), variable("j")
    >>> clipped = apply("minimum", apply("subtract", apply("add", i, constant(7)), j), constant(9))
    >>> on_diagonals(clipped), on_diagonals(apply("add", i, j))
    (True, False)
    """
    found: dict[Node, bool] = {}
    i, j = variable("i"), variable("j")
    for part in order(node):
        compared = part.op in COMPARISONS and part.args[0].kind == "i"
        sides = part.args if compared else (part, constant(0))
        terms = linear_terms(*sides) if compared or part.kind == "i" else {part: 1}
        if terms == {part: 1}:
            found[part] = part.op != "variable" or part not in (i, j)
            found[part] = found[part] and all(found[x] for x in part.args)
        else:
            found[part] = terms.pop(i, 0) == -terms.pop(j, 0) and all(found.get(x, True) for x in terms)
    return found[node]


def row_step(node: Node) -> Node | None:
    """Return by how much a number grows from one row to the next, None unless that is the same for all rows.

    Examples
    --------
    >>> i, j, x = variable("i"), variable("j"), apply("exp", variable("h"))
    >>> row_step(apply("multiply", x, apply("subtract", j, apply("multiply", i, constant(2)))))
    multiply(exp(to_float(h)), -2.0)
    >>> row_step(x), row_step(apply("multiply", i, apply("sqrt", i)))
    (0.0, None)
    """
    if node.depends & S:
        return None
    if not node.depends & I:
        return _ZERO
    if node.op == "to_float" and node.args[0].kind == "i":
        terms = linear_terms(node.args[0], constant(0))
        factor = terms.pop(variable("i"), 0)
        return None if any(x.depends & I for x in terms) else constant(float(factor))
    found = [row_step(x) for x in node.args]
    steps = [step for step in found if step is not None]
    if node.op not in ("add", "subtract", "negative", "multiply") or node.kind != "f" or len(steps) < len(found):
        return None
    if node.op != "multiply":
        return apply(node.op, *steps)
    products = [(x, step) for x, step in zip(node.args, reversed(steps), strict=True) if step is not _ZERO]
    return apply("multiply", *products[0]) if len(products) == 1 else None


def weights(root: Node, slot: int) -> list[Weight]:
    """Return how a graph depends on the elements of an array, one entry for each expression that reads it.

    Parameters
    ----------
    root : Node
    slot : int

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> slope = np.ones(4)
    >>> weights(trace(lambda s, b, h, i, j: s + slope[h] * (j - i)).root, 0)
    [Weight(slot=0, indices=(h,), weight=to_float(subtract(j, i)))]
    """
    found = [Weight(slot, node.args, derivative(root, node)) for node in _loads(root, [slot])]
    return [weight for weight in found if weight.weight is not _ZERO]


def along(root: Node, slots: dict[int, int]) -> Node:
    """Return the derivative of a graph along tangents of its arrays, which lie in slots of their own.

    Parameters
    ----------
    root : Node
    slots : dict of int to int
        The slot of each array's tangent.
    """
    return tangent(root, {node: load(slots[node.value], "f", node.args) for node in _loads(root, slots)})


def _loads(root: Node, slots: Collection[int]) -> list[Node]:
    return [node for node in order(root) if node.op == "load" and node.value in slots and node.kind == "f"]


@functools.lru_cache(maxsize=1024)
def addend(root: Node) -> Node | None:
    """Return what a score function adds to s, a graph without s; None if it does anything else to s.

    Parameters
    ----------
    root : Node

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> addend(trace(lambda s, b, h, i, j: 1 + s - h).root)
    subtract(1.0, to_float(h))
    >>> [addend(trace(f).root) for f in (lambda s, b, h, i, j: 2 * s, lambda s, b, h, i, j: s + np.sign(s))]
    [None, None]
    """
    if not is_linear(root) or derivative(root) is not _ONE:
        return None
    return substitute(root, {variable("s"): _ZERO})


def is_linear(root: Node) -> bool:
    """Return whether a graph is a multiple of s, by a factor without s, and something without s.

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> [is_linear(trace(f).root) for f in (lambda s, b, h, i, j: h - s * i, lambda s, b, h, i, j: s + np.sign(s))]
    [True, False]
    """
    for node in order(root):
        with_s = [place for place, x in enumerate(node.args) if x.depends & S]
        if with_s and node.op not in ("add", "subtract", "negative") and with_s not in _LINEAR.get(node.op, ()):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def is_affine(x: Node) -> bool:
    """Return whether a graph is a sum of a multiple of i, one of j, and what depends on neither.

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> is_affine(addend(trace(lambda s, b, h, i, j: s + (j - i) / (h + 1)).root))
    True
    >>> is_affine(addend(trace(lambda s, b, h, i, j: s - abs(i - j)).root))
    False
    """
    by_place = [arg for arg in x.args if arg.depends & (I | J)]
    if not by_place:
        return x.op == "variable" or not x.depends & (I | J)
    kept = (
        x.op in _AFFINE
        or (x.op == "multiply" and len(by_place) == 1)
        or (x.op == "true_divide" and by_place == [x.args[0]])
    )
    return kept and all(map(is_affine, by_place))


@functools.lru_cache(maxsize=1024)
def split_visible(root: Node) -> tuple[Node | None, Node]:
    """Divide a score function into where it is visible and the score there.

    Parameters
    ----------
    root : Node

    Returns
    -------
    visible : Node or None
        The condition of a root ``where(condition, x, -inf)``; None if the root is no such choice.
    score : Node

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> split_visible(trace(lambda s, b, h, i, j: np.where(i < j, -np.inf, s / 2)).root)
    (logical_not(less(i, j)), multiply(s, 0.5))
    """
    visible: Node | None = None
    while root.op == "select" and any(is_constant(x, -np.inf) for x in root.args[1:]):
        condition, x, y = root.args
        if is_constant(x, -np.inf):
            condition, x = apply("logical_not", condition), y
        if condition.depends & S:
            break
        visible = condition if visible is None else apply("logical_and", visible, condition)
        root = x
    return visible, root
