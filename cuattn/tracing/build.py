"""Nodes made and simplified: kinds promoted as NumPy's, constants folded, what is known in advance left out."""

import math
import operator
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from cuattn.errors import ArgumentError
from cuattn.tracing.graph import HOST_DTYPES, KINDS, PARAMETER, Node, S, constant, intern, is_constant, order, rewrite
from cuattn.tracing.operations import DIVISIONS, SHIFTS, TABLE, Operation

INT64 = (-(2**63), 2**63 - 1)
_EXPANDED = 16  # the largest whole exponent that is multiplied out
_OURS = (str(Path(__file__).parent), str(Path(np.__file__).parent))


def _is_users(filename: str) -> bool:
    return not filename.startswith(_OURS)


def complaint(text: str) -> ArgumentError:
    """Return an error that begins with the user's file and line, where the code that runs is a user's.

    Parameters
    ----------
    text : str
        What is wrong, and what to write instead.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return ArgumentError(f"{frame.f_code.co_filename}:{frame.f_lineno}: {text}" if frame else text)


def place_in(trace: TracebackType | None) -> str:
    """Return file and line of the user's last frame in a traceback, as errors write it; "" if there is none."""
    frames = [entry for entry in traceback.extract_tb(trace) if _is_users(entry.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def apply(name: str, *operands: Node) -> Node:
    """Return an operation on nodes, simplified.

    Parameters
    ----------
    name : str
        Of a row of :data:`cuattn.tracing.operations.TABLE`.
    *operands : Node
        Promoted to the kinds that the operation takes.

    Raises
    ------
    ArgumentError
        The operation does not take such operands.

    Examples
    --------
    >>> from cuattn.tracing.graph import variable
    >>> i, j = variable("i"), variable("j")
    >>> apply("add", apply("subtract", i, j), constant(0))
    subtract(i, j)
    >>> apply("multiply", variable("s"), apply("subtract", i, j)).kind
    'f'
    """
    row = TABLE[name]
    kinds = [x.kind for x in operands]
    if row.boolean is not None and set(kinds) == {"b"}:
        if not row.boolean:
            raise complaint(f"np.{name} of a boolean: expected numbers; write np.where(condition, 1, 0)")
        return apply(row.boolean, *operands)
    for signature in row.signatures:
        wanted, _, kind = signature.partition("-")
        if all("bif".index(have) <= "bif".index(want) for have, want in zip(kinds, wanted, strict=True)):
            return _made(row, [convert(x, want) for x, want in zip(operands, wanted, strict=True)], kind)
    shown = " and ".join(KINDS[kind] for kind in kinds)
    raise complaint(f"np.{name} of {shown}: expected {KINDS[row.signatures[-1][-3]]} too; convert with .astype(int)")


def convert(node: Node, kind: str) -> Node:
    """Return a node as one of another kind: numbers become integers of int32, towards 0 (NaN 0).

    Examples
    --------
    >>> convert(constant(3), "f"), convert(constant(-2.5), "i")
    (3.0, -2)
    """
    if node.kind == kind:
        return node
    if kind == "b":
        return apply("logical_not", apply("equal", node, constant(0)))
    return apply({"i": "to_integer", "f": "to_float"}[kind], node)


def _made(row: Operation, operands: list[Node], kind: str) -> Node:
    if row.name in DIVISIONS | SHIFTS and kind == "i":
        _check_divisor(row.name, operands[1])
    if all(x.op == "constant" for x in operands):
        return _folded(row, operands, kind)
    if len(operands) == 2:
        for x, other, neutral in zip(operands, operands[::-1], (row.left, row.right), strict=True):
            if neutral is not None and is_constant(x, neutral):
                return other
            if row.absorbing is not None and kind != "f" and is_constant(x, row.absorbing):
                return x
    rewritten = _REWRITES[row.name](*operands) if row.name in _REWRITES else None
    return intern(row.name, operands, kind) if rewritten is None else rewritten


_EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "negative": operator.neg,
    "left_shift": lambda x, count: x << count if 0 <= count < 64 else 0,
}


def _folded(row: Operation, operands: list[Node], kind: str) -> Node:
    """Return the constant that an operation on constants gives."""
    values = [x.value for x in operands]
    with np.errstate(all="ignore"):
        if kind == "i" and row.name in _EXACT:
            return constant(checked_integer(_EXACT[row.name](*values)))
        options = {} if kind == "b" and isinstance(row.ufunc, np.ufunc) else {"dtype": HOST_DTYPES[kind]}
        return constant(row.ufunc(*values, **options).item())


def checked_integer(value: int) -> int:
    """Return an integer that fits into int64; others are an ArgumentError."""
    if not INT64[0] <= value <= INT64[1]:
        raise complaint(f"the integer {value} leaves int64: expected one in [-2**63, 2**63)")
    return value


def _check_divisor(name: str, divisor: Node) -> None:
    what = "shift" if name in SHIFTS else "divisor"
    if name in DIVISIONS and is_constant(divisor, 0):
        raise complaint(f"np.{name} of integers by the constant 0: expected another divisor")
    if divisor.depends == PARAMETER and any(node.op == "parameter" for node in order(divisor)):
        raise complaint(
            f"an integer of the arguments as {what} of np.{name}: expected a number that is known when the function is "
            "compiled; take it from a closure, as in: def make(n): return lambda b, h, i, j: i // n"
        )


def is_uniform(node: Node) -> bool:
    """Return whether a value is made of constants and parameters alone, so that the host knows it in each call."""
    return not node.depends & ~PARAMETER


def _divided(x: Node, y: Node) -> Node | None:
    """Multiply by the inverse where the host knows it: of scores, and by powers of 2; 41 / 41 of indices stays 1."""
    if is_constant(y) and np.isfinite(y.value) and abs(y.value) > 1e-30:
        is_exact = abs(math.frexp(y.value)[0]) == 0.5
        return apply("multiply", x, constant(1 / y.value)) if is_exact or x.depends & S else None
    if y.op != "constant" and is_uniform(y) and x.depends & S:
        return apply("multiply", x, intern("true_divide", (constant(1.0), y)))
    return None


def raised(x: Node, exponent: int) -> Node:
    """Return a power with a whole exponent >= 1 by multiplications.

    Examples
    --------
    >>> from cuattn.tracing.graph import variable
    >>> raised(variable("s"), 3)
    multiply(multiply(s, s), s)
    """
    half = raised(x, exponent // 2) if exponent > 1 else x
    if exponent == 1:
        return x
    square = apply("multiply", half, half)
    return apply("multiply", square, x) if exponent % 2 else square


def _powered(x: Node, y: Node) -> Node | None:
    if is_constant(y, 0):
        return constant(1.0)
    if is_constant(y, 0.5):
        return apply("sqrt", x)
    if y.op == "constant" and y.value == int(y.value or 0) and 0 < abs(y.value) <= _EXPANDED:
        found = raised(x, int(abs(y.value)))
        return found if y.value > 0 else apply("true_divide", constant(1.0), found)
    return apply("exp2", y) if is_constant(x, 2) else None


def integer_power(x: Node, y: Node) -> Node:
    """Return a power of integers: with a constant exponent, or of the base 2."""
    if y.op == "constant" and 0 <= y.value <= 63:
        return raised(x, y.value) if y.value else constant(1)
    if is_constant(x, 2):
        return apply("left_shift", constant(1), y)
    raise complaint("an integer to the power of an integer that is no constant: write a float base, 2.0 ** h")


def _summed(x: Node, y: Node) -> Node | None:
    """Put integer constants last, and join two."""
    if x.kind != "i":
        return None
    if x.op == "constant":
        return apply("add", y, x)
    if y.op == "constant" and x.op == "add" and x.args[1].op == "constant":
        total = x.args[1].value + y.value
        return apply("add", x.args[0], constant(total)) if INT64[0] <= total <= INT64[1] else None
    return None


def _less(x: Node, y: Node) -> Node | None:
    if x.kind == "i" and y.op == "constant":
        return apply("add", x, constant(checked_integer(-y.value)))
    return apply("negative", y) if is_constant(x, 0) else None


def _scaled(x: Node, y: Node) -> Node | None:
    if is_constant(y, -1):
        return apply("negative", x)
    return apply("negative", y) if is_constant(x, -1) else None


def _selected(c: Node, x: Node, y: Node) -> Node | None:
    if c.op == "constant" or x is y:
        return x if c.op != "constant" or c.value else y
    return apply("select", c.args[0], y, x) if c.op == "logical_not" else None


def _signed(x: Node) -> Node | None:
    """Convert before the sign changes, which costs nothing on numbers."""
    return apply(x.op, convert(x.args[0], "f")) if x.op in ("absolute", "negative") else None


def _twice(name: str) -> Callable[[Node], Node | None]:
    return lambda x: x.args[0] if x.op == name else None


_REWRITES: dict[str, Callable[..., Node | None]] = {
    "true_divide": _divided,
    "power": _powered,
    "add": _summed,
    "subtract": _less,
    "multiply": _scaled,
    "select": _selected,
    "logical_not": _twice("logical_not"),
    "negative": _twice("negative"),
    "to_float": _signed,
}


def substitute(root: Node, values: dict[Node, Node]) -> Node:
    """Return a graph with some nodes replaced, simplified anew.

    Parameters
    ----------
    root : Node
    values : dict of Node to Node

    Examples
    --------
    >>> from cuattn.tracing.graph import variable
    >>> substitute(apply("add", variable("s"), variable("h")), {variable("s"): constant(0.0)})
    to_float(h)
    """
    return rewrite(root, lambda node, args: values[node] if node in values else remade(node, args))


def remade(node: Node, args: tuple[Node, ...]) -> Node:
    """Return the operation of a node on other operands."""
    if args == node.args:
        return node
    if node.op in ("load", "offset"):
        return intern(node.op, args, node.kind, node.value)
    return apply(node.op, *args)


def linear_terms(x: Node, y: Node) -> dict[Node, int]:
    """Return x - y of integers as a sum: factors by term, of which the constant's is 1.

    Examples
    --------
    >>> from cuattn.tracing.graph import variable
    >>> i, j = variable("i"), variable("j")
    >>> linear_terms(apply("add", apply("subtract", i, j), constant(3)), apply("multiply", j, constant(2)))
    {j: -3, 1: 3, i: 1}
    """
    found: dict[Node, int] = {}
    waiting = [(x, 1), (y, -1)]
    while waiting:
        node, factor = waiting.pop()
        if node.op in ("add", "subtract"):
            waiting += [(node.args[0], factor), (node.args[1], factor if node.op == "add" else -factor)]
        elif node.op == "negative":
            waiting.append((node.args[0], -factor))
        elif node.op == "multiply" and any(arg.op == "constant" for arg in node.args):
            number, other = sorted(node.args, key=lambda arg: arg.op != "constant")
            waiting.append((other, factor * number.value))
        else:
            term, times = (constant(1), node.value) if node.op == "constant" else (node, 1)
            found[term] = found.get(term, 0) + factor * times
    return {node: factor for node, factor in found.items() if factor}


def linear_sum(terms: dict[Node, int]) -> Node:
    """Return the sum of terms times factors."""
    total = constant(0)
    for node, factor in terms.items():
        total = apply("add", total, apply("multiply", node, constant(factor)))
    return total
