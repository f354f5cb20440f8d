"""Which of the forward kernels computes a call: Hopper's own where it can, the portable one elsewhere."""

import dataclasses
from typing import Any

from cuattn.cuda import hopper
from cuattn.cuda.forward import forward as portable_forward
from cuattn.cuda.forward import plan as portable_plan
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["forward", "plan"]


def _hopper(problem: Problem, operands: Operands) -> Any:
    """Return what Hopper's kernel needs, or the reason why another one computes the call."""
    if problem.kernel == "sm80":
        return "kernel is 'sm80'"
    found = hopper.find(problem, operands)
    if isinstance(found, str) and problem.kernel == "sm90":
        raise UnsupportedError(f"kernel is 'sm90', but {found}")
    return found


def forward(problem: Problem, operands: Operands) -> tuple[Any, Any, Any]:
    """Compute attention on the current device and stream; see :func:`cuattn.cuda.forward.forward`."""
    found = _hopper(problem, operands)
    return portable_forward(problem, operands) if isinstance(found, str) else hopper.run(found, problem, operands)


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a forward for arrays on the current device; it says why the kernel is not Hopper's."""
    found = _hopper(problem, operands)
    if not isinstance(found, str):
        return found.plan
    made = portable_plan(problem, operands)
    return dataclasses.replace(made, notes=(*made.notes, f"not the sm90 kernel: {found}"))
