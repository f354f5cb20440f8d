"""Which kernels compute a call: Hopper's own where they can, the portable ones elsewhere."""

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

from cuattn.cuda.launch import Record
from cuattn.cuda.sm80 import backward, forward
from cuattn.cuda.sm90 import backward as hopper_backward
from cuattn.cuda.sm90 import forward as hopper
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem, mask_as_band

__all__ = ["plan", "record"]

_MAX_RECORDS = 1024
_records: dict[tuple, tuple[Problem, Record]] = {}


def record(problem: Problem, operands: Operands) -> Record:
    """Return what a call launches for arrays of this layout on the current device, made once.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        CuPy arrays; the mask may be a host mask, which is copied once and kept.

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    CompileError
    """
    key = (id(problem), operands.q.device.id, *map(_layout, operands[:5]), *map(_layout, operands[6:]))
    known = _records.get(key)
    if known is None:
        choice = _choose(problem, operands)
        made = choice.kernels.record(choice.problem, choice.operands)
        if len(_records) >= _MAX_RECORDS:
            _records.clear()
        # The problem is held so that its id, which is part of the key, stays its own.
        known = _records[key] = problem, made
    return known[1]


def _layout(operand: Any) -> tuple | None:
    """Return all that a record depends on of an array or a mask."""
    if operand is None or hasattr(operand, "layout"):
        return operand and operand.layout
    return operand.shape, operand.strides, operand.dtype, operand.data.ptr & 15


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a call for arrays on the current device; it says why the kernel is not Hopper's."""
    choice = _choose(problem, operands)
    made = choice.kernels.plan(choice.problem, choice.operands)
    notes = [] if choice.against is None else [f"not the sm90 kernel: {choice.against}"]
    if choice.problem.mask != problem.mask:
        notes.append("the mask is a band and is taken as one: nothing reads its vectors")
    return dataclasses.replace(made, notes=(*made.notes, *notes))


class _Choice(NamedTuple):
    """Who computes a call, what they are given, and why Hopper's kernels do not."""

    kernels: ModuleType
    problem: Problem
    operands: Operands
    against: str | None


def _choose(problem: Problem, operands: Operands) -> _Choice:
    own, portable = (hopper_backward, backward) if problem.direction == "backward" else (hopper, forward)
    if problem.kernel == "sm80":
        return _Choice(portable, problem, operands, "kernel is 'sm80'")
    taken = mask_as_band(problem, operands)  # they take no boolean mask
    against = own.reason_against(*taken)
    if against is None:
        return _Choice(own, *taken, None)
    if problem.kernel == "sm90":
        raise UnsupportedError(f"kernel is 'sm90', but {against}")
    return _Choice(portable, problem, operands, against)
