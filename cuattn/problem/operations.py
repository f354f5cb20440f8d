"""The operations: one row each, with its operands and results by name.

A row says what the door (:mod:`cuattn.dispatch`) has to check and to return, so that a new operation is a row here and
an entry in each backend's table of operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn.errors import DtypeError, ShapeError, shown

if TYPE_CHECKING:
    from cuattn.problem.model import Problem
    from cuattn.problem.shapes import Sizes

__all__ = ["BACKWARD", "FORWARD", "OPERATIONS", "Operation", "register_operation"]

Spec = tuple[tuple[int, ...], tuple[np.dtype, ...]]
"""Shape, as the caller sees it, and the dtypes that are allowed; of a result, the one that it has."""


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
        Arrays that it takes if they are given.
    results : tuple of str
        What it returns, in order.
    labels : dict of str to str
        What error messages call an operand that the caller passes under another name.
    operand_specs : callable
        ``operand_specs(problem, sizes)`` returns shape and dtypes of each of `operands` and of `optional` ones that
        q, k, v determine.
    result_specs : callable
        ``result_specs(problem, sizes, operands)`` returns shape and dtype of each result.
    replays : bool
        Whether dropout's state comes from a forward.
    """

    name: str
    operands: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]
    operand_specs: Callable[[Problem, Sizes], dict[str, Spec]]
    result_specs: Callable[[Problem, Sizes, dict[str, Any]], dict[str, Spec]]
    labels: dict[str, str] = field(default_factory=dict)
    replays: bool = False

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Every array of a call, in the order in which backends are given addresses."""
        return ("q", "k", "v", "bias", "mask", *self.operands, *(name for name in self.optional if name != "bias"))

    def label(self, name: str) -> str:
        """Return what an error message calls an operand."""
        return self.labels.get(name, name)

    def check(self, problem: Problem, sizes: Sizes, operands: dict[str, Any]) -> None:
        """Check the operands beside q, k, v, bias and mask against the problem."""
        for name, (shape, dtypes) in self.operand_specs(problem, sizes).items():
            array = operands.get(name)
            if array is None:
                continue
            if tuple(array.shape) != shape:
                raise ShapeError(f"{self.label(name)} has shape {shown(tuple(array.shape))}; expected {shape}")
            if array.dtype not in dtypes:
                expected = " or ".join(map(str, dict.fromkeys(dtypes)))
                raise DtypeError(f"{self.label(name)} has dtype {array.dtype}; expected {expected}")


OPERATIONS: dict[str, Operation] = {}


def register_operation(row: Operation) -> Operation:
    """Make an operation known to the door and to :func:`cuattn.plan`."""
    OPERATIONS[row.name] = row
    return row


def _statistics(problem: Problem, sizes: Sizes) -> dict[str, Spec]:
    rows = (*sizes.leading, sizes.n_queries)
    return dict.fromkeys("lm", (rows, (problem.stat_dtype,)))


def _forward_results(problem: Problem, sizes: Sizes, operands: dict[str, Any]) -> dict[str, Spec]:
    o = (*sizes.leading, sizes.n_queries, sizes.head_dim_v)
    return {"o": (o, (problem.out_dtype,)), **(_statistics(problem, sizes) if problem.statistics else {})}


def _backward_operands(problem: Problem, sizes: Sizes) -> dict[str, Spec]:
    o = (*sizes.leading, sizes.n_queries, sizes.head_dim_v)
    statistics = _statistics(problem, sizes)
    unrounded = (problem.dtype, problem.stat_dtype)
    return {"do": (o, (problem.dtype,)), "o": (o, unrounded), **statistics, "dlse": statistics["l"]}


def _gradients(problem: Problem, sizes: Sizes, operands: dict[str, Any]) -> dict[str, Spec]:
    found = {f"d{name}": (tuple(operands[name].shape), (problem.out_dtype,)) for name in "qkv"}
    bias = operands.get("bias")
    return found if bias is None else {**found, "dbias": (tuple(bias.shape), (problem.grad_dtype(bias.dtype),))}


FORWARD = register_operation(
    Operation("forward", (), ("bias",), ("o", "l", "m"), lambda problem, sizes: {}, _forward_results)
)
BACKWARD = register_operation(
    Operation(
        "backward",
        ("do", "o", "l", "m"),
        ("bias", "dlse"),
        ("dq", "dk", "dv", "dbias"),
        _backward_operands,
        _gradients,
        labels={"o": "fwd.o", "l": "fwd.l", "m": "fwd.m"},
        replays=True,
    )
)
