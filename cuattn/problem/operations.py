"""The operations: one row each, with its operands and results by name.

A row says what the door (:mod:`cuattn.dispatch`) has to check and to return, so that a new operation is a row here and
an entry in each backend's table of operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn.errors import expect_array
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
    replays : bool
        Whether o, l, m and dropout's state come from a forward.
    """

    name: str
    operands: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]
    replays: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every array of a call, in the order in which backends are given addresses; a score function's come after."""
        return ("q", "k", "v", "bias", "mask", *self.operands, *self.optional)

    def label(self, name: str) -> str:
        """Return what an error message calls an operand."""
        return f"fwd.{name}" if self.replays and name in ("o", "l", "m") else name

    def check(self, problem: Problem, operands: dict[str, Any]) -> None:
        """Check the operands beside q, k, v, bias and mask against the problem."""
        for name in (*self.operands, *self.optional):
            if operands.get(name) is not None:
                shape, dtype = _of_rows(problem, name)
                unrounded = (problem.stat_dtype,) if name == "o" else ()
                expect_array(self.label(name), operands[name], shape, dtype, *unrounded)

    def made(self, problem: Problem, operands: dict[str, Any]) -> dict[str, Array]:
        """Return shape and dtype of each result of a call."""
        if not self.replays:
            wanted = self.results if problem.statistics else self.results[:1]
            found = {name: _of_rows(problem, name) for name in wanted}
            return {**found, "o": (found["o"][0], problem.out_dtype)}
        wanted = (*self.results, *(f"dscore{slot}" for slot in problem.learned))
        given = {name: operands.get(name.removeprefix("d")) for name in wanted}
        return {n: (tuple(x.shape), problem.grad_dtype(np.dtype(x.dtype))) for n, x in given.items() if x is not None}


def _of_rows(problem: Problem, name: str) -> Array:
    """Return shape and dtype of an array with something for each query: l, m, dlse, or o and do."""
    rows = (*problem.leading, problem.n_queries)
    return (rows, problem.stat_dtype) if name in ("l", "m", "dlse") else ((*rows, problem.head_dim_v), problem.dtype)


FORWARD = Operation("forward", (), (), ("o", "l", "m"))
BACKWARD = Operation("backward", ("do", "o", "l", "m"), ("dlse",), ("dq", "dk", "dv", "dbias"), replays=True)
OPERATIONS = {row.name: row for row in (FORWARD, BACKWARD)}
