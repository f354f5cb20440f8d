"""Which kernels compute a call: the first family that has nothing against it.

A family is a set of kernels for some GPUs.  What ``kernel=`` accepts, the choice and the reasons in plans follow from
:data:`FAMILIES`; a new family is an entry there, and a new operation one in a family's table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cuattn.cuda import sm80, sm90
from cuattn.cuda.call import Call
from cuattn.cuda.sequence import LaunchSequence
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Problem

Operands = Mapping[str, Any]


class Family(NamedTuple):
    """A set of kernels.

    Attributes
    ----------
    reason : str
        What speaks for it, as its plans say.
    operations : mapping of str to type
        How it does each operation, on the current device.
    """

    reason: str
    operations: Mapping[str, type[Call]]


FAMILIES = {
    "sm90": Family(
        "bulk tensor copies and warpgroup products",
        {
            "forward": sm90.Forward,
            "backward": sm90.Backward,
            "jvp": sm90.Jvp,
            "backward_jvp": sm90.BackwardJvp,
            "double_backward": sm90.DoubleBackward,
        },
    ),
    "sm80": Family(
        "portable tensor-core kernel",
        {
            "forward": sm80.Forward,
            "backward": sm80.Backward,
            "jvp": sm80.Jvp,
            "backward_jvp": sm80.BackwardJvp,
            "double_backward": sm80.BackwardJvp,
        },
    ),
}
"""All families by the name that ``kernel=`` gives them, in the order in which they are asked."""


def _choose(problem: Problem, operands: Operands, masks: Sequence[Any]) -> tuple[Call, str, list[str]]:
    """Return the first family's call that nothing speaks against, and what does against those asked before."""
    notes: list[str] = []
    reason = None
    for name, family in FAMILIES.items():
        if problem.kernel not in (None, name):
            notes.append(f"not the {name} kernel: kernel is {problem.kernel!r}")
            continue
        operation = family.operations.get(problem.operation)
        reason = f"it does no {problem.operation}"
        if operation is not None:
            taken, left = operation.simplify(problem, masks)
            call = operation(taken, operands, left)
            reason = call.unsupported_reason()
            if reason is None:
                if len(taken.masks) < len(problem.masks):
                    notes.append("the mask is a band and is taken as one: nothing reads its vectors")
                elif taken.masks != problem.masks:
                    notes.append("the mask function is computed ahead, into a bit for each element")
                return call, name, notes
        notes.append(f"not the {name} kernel: {reason}")
    raise UnsupportedError(reason if problem.kernel is None else f"kernel is {problem.kernel!r}, but {reason}")


def launch_sequence(problem: Problem, operands: Operands, masks: Sequence[Any]) -> LaunchSequence:
    """Return what a call launches for arrays of this layout on the current device.

    Parameters
    ----------
    problem : Problem
    operands : mapping of str to cupy.ndarray
    masks : sequence of Mask
        On the arrays' GPU or on the host, from where one is copied once and kept.

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    """
    call, *_ = _choose(problem, operands, masks)
    call.prepare()
    return call.sequence


def plan(problem: Problem, operands: Operands, masks: Sequence[Any]) -> Plan:
    """Return the plan of a call for arrays on the current device; it says why other families do not take it."""
    call, kernel, notes = _choose(problem, operands, masks)
    made = call.prepare()
    reason = f"{FAMILIES[kernel].reason}, {call.device.arch}"
    return replace(made, kernel=kernel, reason=reason, notes=(*made.notes, *notes))
