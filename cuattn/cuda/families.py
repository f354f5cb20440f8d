"""Which kernels compute a call: the first family that has nothing against it.

A family is a set of kernels for some GPUs.  What ``kernel=`` accepts, the choice and the reasons in plans follow from
:data:`FAMILIES`; a new family is registered, and a new operation is an entry in a family's table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuattn.cuda import sm80, sm90
from cuattn.cuda.call import Call
from cuattn.cuda.sequence import LaunchSequence
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Problem

Operands = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A set of kernels.

    Attributes
    ----------
    name : str
        What ``kernel=`` calls it.
    reason : str
        What speaks for it, as its plans say.
    operations : mapping of str to type
        How it does each operation, on the current device.
    """

    name: str
    reason: str
    operations: Mapping[str, type[Call]]


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which they are asked."""


def register_family(family: Family) -> None:
    """Add a family, to be asked before the others."""
    others = {name: other for name, other in FAMILIES.items() if name != family.name}
    FAMILIES.clear()
    FAMILIES.update({family.name: family, **others})


register_family(Family("sm80", "portable tensor-core kernel", {"forward": sm80.Forward, "backward": sm80.Backward}))
_REASON = "bulk tensor copies and warpgroup products"
register_family(Family("sm90", _REASON, {"forward": sm90.Forward, "backward": sm90.Backward}))


def _choose(problem: Problem, operands: Operands, masks: Sequence[Any]) -> tuple[Call, Family, list[str]]:
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
                if taken.masks != problem.masks:
                    notes.append("the mask is a band and is taken as one: nothing reads its vectors")
                return call, family, notes
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
    call, family, notes = _choose(problem, operands, masks)
    made = call.prepare()
    reason = f"{family.reason}, {call.device.arch}"
    return replace(made, kernel=family.name, reason=reason, notes=(*made.notes, *notes))
