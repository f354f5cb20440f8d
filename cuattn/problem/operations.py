"""The operations: one row each, with its operands and results by name.

A row says what the door (:mod:`cuattn.dispatch`) has to check and to return, so that a new operation is a row here and
an entry in each backend's table of operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn.errors import ArgumentError, expect_array
from cuattn.problem.model import Problem

Array = tuple[tuple[int, ...], np.dtype]
"""Shape, as the caller sees it, and dtype."""


@dataclass(frozen=True)
class Operation:
    """An operation on q, k, v.

    Attributes
    ----------
    name : str
        What ``plan(direction=...)`` and the backends' tables call it.
    operands : tuple of str
        Arrays that it needs beside q, k, v.
    optional : tuple of str
        Arrays that it takes if they are given, beside bias and mask.
    results : tuple of str
        What it returns, in order: o, l, m, or "d" and the operand of which it is the gradient.
        Before each may stand a "t": of its tangent.
    source : str
        The argument that o, l, m and dropout's state come from; "" of an operation that computes them.
    tangents : str
        What stands before an operand's name in that of the argument with its tangent.
    """

    name: str
    operands: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]
    source: str = ""
    tangents: str = "t"

    @property
    def replays(self) -> bool:
        """Whether o, l, m and dropout's state are given."""
        return bool(self.source)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every array of a call, in the order in which backends are given addresses; a score function's come after."""
        return (*self.needed, "bias", "mask", *self.optional)

    @property
    def needed(self) -> tuple[str, ...]:
        """The arrays without which there is no call."""
        return ("q", "k", "v", *self.operands)

    def given(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of a call's arrays that there are, and what stands for those that it needs, in their order."""
        needed = self.needed
        return {n: arrays[n] for n in self.inputs if n in arrays and (n in needed or arrays[n] is not None)}

    def label(self, name: str) -> str:
        """Return what an error message calls an operand."""
        if name in ("o", "l", "m", "to", "tlse", "rng_state"):
            return f"{self.source}.{name}" if self.source else name
        if self.tangents == "gd" and name.startswith("t"):
            return f"gd{name[1:].replace('score_args', 'score')}"
        return name

    def check(self, problem: Problem, operands: dict[str, Any]) -> None:
        """Check the operands beside q, k, v, bias and mask against the problem."""
        for name in (*self.operands, *self.optional):
            if operands.get(name) is None:
                continue
            shape, dtype = _of_rows(problem, name)
            if name in TANGENTS and name != "tdo":
                operand = operands.get(name[1:])
                if operand is None:
                    raise ArgumentError(f"{self.label(name)} is given but {name[1:]} is None; expected None")
                shape, dtype = tuple(operand.shape), np.dtype(operand.dtype)
            unrounded = (problem.stat_dtype,) if name in ("o", "to") else ()
            expect_array(self.label(name), operands[name], shape, dtype, *unrounded)

    def made(self, problem: Problem, operands: dict[str, Any]) -> dict[str, Array]:
        """Return shape and dtype of each result of a call."""
        if not self.replays:
            wanted = self.results if problem.statistics else self.results[:1]
            found = {name: _of_rows(problem, name) for name in wanted}
            return found | {name: (found[name][0], problem.out_dtype) for name in ("o", "to") if name in found}
        given = {name: operands.get(operand_of(name)) for name in self._gradients(problem)}
        return {n: (tuple(x.shape), problem.grad_dtype(np.dtype(x.dtype))) for n, x in given.items() if x is not None}

    def _gradients(self, problem: Problem) -> Iterator[str]:
        """Yield the results of an operation that returns gradients, those by a score function's arrays among them."""
        for name in self.results:
            yield name
            if name.endswith("dbias"):
                yield from (name.replace("bias", f"score{slot}") for slot in problem.learned)


def operand_of(name: str) -> str:
    """Return of which operand a result is the gradient, or the gradient's tangent.

    >>> operand_of("dq"), operand_of("tdbias"), operand_of("ddo")
    ('q', 'bias', 'do')
    """
    return name.removeprefix("t").removeprefix("d")


def _of_rows(problem: Problem, name: str) -> Array:
    """Return shape and dtype of an array with something for each query: l, m, tlse, dlse, or o, do and the like."""
    rows = (*problem.leading, problem.n_queries)
    return (rows, problem.stat_dtype) if name in OF_ROWS else ((*rows, problem.head_dim_v), problem.dtype)


SCORE_ARGS = [f"score_args[{index}]" for index in range(1000)]
"""Names of a score function's arguments among the arrays of a call."""
OF_ROWS = ("l", "m", "tlse", "dlse")
"""Arrays with one number for each query."""
TANGENTS = ("tq", "tk", "tv", "tbias", "tdo")
"""Tangents of operands: of their shape and dtype; None is 0, and costs nothing."""
GRADIENTS = ("dq", "dk", "dv", "dbias")
_TANGENTS_OF_GRADIENTS = tuple([f"t{name}" for name in GRADIENTS])
_JVP = ("do", "o", "l", "m", "to", "tlse")

FORWARD = Operation("forward", (), (), ("o", "l", "m"))
BACKWARD = Operation("backward", ("do", "o", "l", "m"), ("dlse",), GRADIENTS, "fwd")
JVP = Operation("jvp", (), TANGENTS[:-1], ("o", "l", "m", "to", "tlse"))
BACKWARD_JVP = Operation("backward_jvp", _JVP, ("dlse", *TANGENTS), (*GRADIENTS, *_TANGENTS_OF_GRADIENTS), "jvp")
# The gradient of <gdq, dq> + <gdk, dk> + ...: by do it is the tangent of o along gdq, ..., by q the tangent of dq.
DOUBLE_BACKWARD = Operation(
    "double_backward", _JVP, ("dlse", *TANGENTS[:-1]), ("ddo", *_TANGENTS_OF_GRADIENTS), "fwd", "gd"
)
OPERATIONS = {row.name: row for row in (FORWARD, BACKWARD, JVP, BACKWARD_JVP, DOUBLE_BACKWARD)}
