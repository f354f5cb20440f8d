"""Expression graphs: immutable nodes, of which equal ones are one object.

A node is an operation on other nodes, or a leaf: one of the five variables ``s, b, h, i, j``, a constant, a parameter
(a number that is known in each call), or an element of an array.  Because equal nodes are one object, a graph is its
own key: functions that compute the same have the same root, however they were written, and what is made of a graph is
made once.  Nothing of a user's text is in it, not even a name: parameters and arrays are numbered as they are used.
"""

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

S, B, H, I, J, ARRAY, PARAMETER = (1 << bit for bit in range(7))
"""What a node may depend on, as bits of `Node.depends`."""

VARIABLES = {"s": S, "b": B, "h": H, "i": I, "j": J}
_OF_SLOTS = {"parameter": PARAMETER, "load": ARRAY, "offset": ARRAY}
KINDS = {"b": "a boolean", "i": "an integer", "f": "a number"}
HOST_DTYPES = {"b": np.dtype(bool), "i": np.dtype(np.int64), "f": np.dtype(np.float64)}
"""Of what the host computes once, by kind."""

_LONGEST = 400  # of a node's text
_nodes: "weakref.WeakValueDictionary[tuple, Node]" = weakref.WeakValueDictionary()
_lock = threading.Lock()


class _Weakly:  # Python 3.11's dataclasses have weakref_slot
    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Node(_Weakly):
    """A value of a graph.

    Attributes
    ----------
    op : str
        The name of an operation (:mod:`cuattn.tracing.operations`), or "variable", "constant", "parameter", "load",
        "offset".
    args : tuple of Node
        Operands; of a load or an offset its indices.
    kind : str
        "b" boolean, "i" integer, "f" number of the accumulator's type.
    value : object
        Of a variable its name, of a constant the Python number, of the others without a rule the number of a slot.
    depends : int
        Bits of what the value depends on.
    """

    op: str
    args: "tuple[Node, ...]"
    kind: str
    value: Any
    depends: int

    def __reduce__(self) -> tuple[Any, ...]:
        nodes = order(self)
        places = {node: place for place, node in enumerate(nodes)}
        return _rebuilt, ([(x.op, [places[arg] for arg in x.args], x.kind, x.value) for x in nodes],)

    def __repr__(self) -> str:
        texts: dict[Node, str] = {}
        for node in order(self):
            text = _written(node, [texts[arg] for arg in node.args])
            texts[node] = text if len(text) <= _LONGEST else f"{node.op}(...)"
        return texts[self]


def _rebuilt(rows: list[tuple[str, list[int], str, Any]]) -> Node:
    """Return the last node of a list, whose operands are places in it: graphs may be too deep for pickle itself."""
    nodes: list[Node] = []
    for op, places, kind, value in rows:
        nodes.append(intern(op, [nodes[place] for place in places], kind, value))
    return nodes[-1]


def _written(node: Node, operands: list[str]) -> str:
    if node.op in ("variable", "constant"):
        return str(node.value)
    name = {"load": "array"}.get(node.op, node.op) + ("" if node.value is None else str(node.value))
    return name if node.op == "parameter" else f"{name}({', '.join(operands)})"


def intern(op: str, args: Sequence[Node], kind: str = "f", value: Any = None) -> Node:
    """Return the node with this content, as it stands: :func:`cuattn.tracing.build.apply` simplifies.

    Parameters
    ----------
    op, args, kind, value
        As in :class:`Node`.

    Examples
    --------
    >>> intern("add", (variable("i"), variable("j")), "i") is intern("add", (variable("i"), variable("j")), "i")
    True
    """
    key = (op, kind, repr(value), *args)  # by repr, -0.0 is not 0.0, and NaN is itself
    with _lock:
        node = _nodes.get(key)
        if node is None:
            own = VARIABLES[value] if op == "variable" else _OF_SLOTS.get(op, 0)
            bits = functools.reduce(operator.or_, [arg.depends for arg in args], own)
            node = _nodes[key] = Node(op, tuple(args), kind, value, bits)
        return node


def variable(name: str) -> Node:
    """Return the variable s, b, h, i or j."""
    return intern("variable", (), "f" if name == "s" else "i", name)


def constant(value: bool | int | float) -> Node:
    """Return a constant; its kind is the Python number's.

    Examples
    --------
    >>> constant(2).kind, constant(2.0).kind, constant(True).kind
    ('i', 'f', 'b')
    """
    return intern("constant", (), {bool: "b", int: "i"}.get(type(value), "f"), value)


def parameter(slot: int, kind: str) -> Node:
    """Return the number in a slot, which is known in each call."""
    return intern("parameter", (), kind, slot)


def load(slot: int, kind: str, indices: Sequence[Node]) -> Node:
    """Return an element of the array in a slot; indices wrap as NumPy's negative ones and are then clamped."""
    return intern("load", indices, kind, slot)


def offset(slot: int, indices: Sequence[Node]) -> Node:
    """Return where an element of the array in a slot lies among all of them, in C order, whatever its strides are."""
    return intern("offset", indices, "i", slot) if indices else constant(0)


def order(*roots: Node, inner: Callable[[Node], object] = lambda node: True) -> list[Node]:
    """Return the nodes of graphs, each once, operands first.

    Parameters
    ----------
    *roots : Node
    inner : callable, optional
        Whether the operands of a node are wanted.

    Examples
    --------
    >>> order(intern("negative", (variable("s"),)))
    [s, negative(s)]
    """
    found: dict[Node, None] = {}
    stack = list(reversed(roots))
    while stack:
        node = stack[-1]
        waiting = [arg for arg in node.args if arg not in found] if node not in found and inner(node) else []
        if waiting:
            stack.extend(reversed(waiting))
        else:
            found[stack.pop()] = None
    return list(found)


def rewrite(root: Node, change: Callable[[Node, tuple[Node, ...]], Node]) -> Node:
    """Return a graph made anew from its leaves upwards.

    Parameters
    ----------
    root : Node
    change : callable
        Of a node and its new operands; returns the new node.
    """
    made: dict[Node, Node] = {}
    for node in order(root):
        made[node] = change(node, tuple([made[arg] for arg in node.args]))
    return made[root]


def is_constant(node: Node, *values: object) -> bool:
    """Return whether a node is a constant, and one of the values where some are given (0 is also 0.0, not False).

    Examples
    --------
    >>> is_constant(constant(0.0), 0, 1), is_constant(constant(False), 0), is_constant(variable("s"))
    (True, False, False)
    """
    if node.op != "constant":
        return False
    return not values or any(node.value == value and (node.kind == "b") == isinstance(value, bool) for value in values)
