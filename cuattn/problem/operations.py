"""The operations: one row each, with its operands and results by name.

A row says what the door (:mod:`cuattn.dispatch`) has to check and to return, so that a new operation is a row here and
an entry in each backend's table of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
        What it returns, in order.
    expected : callable
        ``expected(problem)`` returns shape and dtype of each of `operands` and `optional`.
    made : callable
        ``made(problem, operands)`` returns shape and dtype of each result.
    labels : dict of str to str
        What error messages call an operand that the caller passes under another name.
    replays : bool
        Whether dropout's state comes from a forward.
    """

    name: str
    operands: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]
    expected: Callable[[Problem], dict[str, Array]]
    made: Callable[[Problem, dict[str, Any]], dict[str, Array]]
    labels: dict[str, str] = field(default_factory=dict)
    replays: bool = False

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every array of a call, in the order in which backends are given addresses."""
        return ("q", "k", "v", "bias", "mask", *self.operands, *self.optional)

    def label(self, name: str) -> str:
        """Return what an error message calls an operand."""
        return self.labels.get(name, name)

    def check(self, problem: Problem, operands: dict[str, Any]) -> None:
        """Check the operands beside q, k, v, bias and mask against the problem."""
        for name, (shape, dtype) in self.expected(problem).items():
            if operands.get(name) is not None:  # of o, that of the sums is as good
                dtypes = (dtype, problem.stat_dtype) if name == "o" else (dtype,)
                expect_array(self.label(name), operands[name], shape, *dtypes)


def _o(problem: Problem, dtype: np.dtype) -> Array:
    return (*problem.leading, problem.n_queries, problem.head_dim_v), dtype


def _statistics(problem: Problem, *names: str) -> dict[str, Array]:
    return dict.fromkeys(names, ((*problem.leading, problem.n_queries), problem.stat_dtype))


def _forward_results(problem: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    return {"o": _o(problem, problem.out_dtype), **_statistics(problem, *("lm" if problem.statistics else ""))}


def _backward_operands(problem: Problem) -> dict[str, Array]:
    return {**dict.fromkeys(("do", "o"), _o(problem, problem.dtype)), **_statistics(problem, "l", "m", "dlse")}


def _gradients(problem: Problem, operands: dict[str, Any]) -> dict[str, Array]:
    given = {name: operands[name] for name in ("q", "k", "v", "bias") if operands.get(name) is not None}
    return {f"d{name}": (tuple(x.shape), problem.grad_dtype(np.dtype(x.dtype))) for name, x in given.items()}


FORWARD = Operation("forward", (), (), ("o", "l", "m"), lambda problem: {}, _forward_results)
BACKWARD = Operation(
    "backward",
    ("do", "o", "l", "m"),
    ("dlse",),
    ("dq", "dk", "dv", "dbias"),
    _backward_operands,
    _gradients,
    labels={"o": "fwd.o", "l": "fwd.l", "m": "fwd.m"},
    replays=True,
)
OPERATIONS = {row.name: row for row in (FORWARD, BACKWARD)}
