"""The CUDA backend: CuPy arrays in, CuPy arrays out, on CuPy's current device and stream."""

from cuattn.cuda.backward import backward
from cuattn.cuda.backward import plan as _plan_backward
from cuattn.cuda.choice import forward
from cuattn.cuda.choice import plan as _plan_forward
from cuattn.cuda.merge import merge
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["backward", "forward", "merge", "plan"]


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of ``problem.direction`` for arrays on the current device."""
    return (_plan_backward if problem.direction == "backward" else _plan_forward)(problem, operands)
