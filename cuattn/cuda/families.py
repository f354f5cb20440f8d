"""Which kernels compute a call: the first family that has nothing against it.

A family is a set of kernels for some GPUs.  What ``kernel=`` accepts, the choice and the reasons in plans follow from
:data:`FAMILIES`; a new family is registered, and a new operation is an entry in a family's table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from cuattn.cuda import sm80, sm90
from cuattn.cuda.call import Call
from cuattn.cuda.sequence import LaunchSequence
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["FAMILIES", "Family", "launch_sequence", "plan", "register_family"]

Operands = Mapping[str, Any]


class Family(Protocol):
    """A set of kernels.

    Attributes
    ----------
    name : str
        What ``kernel=`` calls it.
    operations : mapping of str to type
        How it does each operation, on the current device.
    """

    name: str
    operations: Mapping[str, type[Call]]

    def simplify(self, problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        """Return a problem and masks that come to the same, and that its kernels do faster."""


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which they are asked."""


def register_family(family: Family) -> None:
    """Add a family, to be asked before the others."""
    others = {name: other for name, other in FAMILIES.items() if name != family.name}
    FAMILIES.clear()
    FAMILIES.update({family.name: family, **others})


for _family in (sm80.FAMILY, sm90.FAMILY):
    register_family(_family)


def _choose(problem: Problem, operands: Operands, masks: Sequence[Any]) -> tuple[Call, list[str]]:
    """Return the first family's call that nothing speaks against, and what does against those asked before."""
    notes: list[str] = []
    reason: str | None = None
    for name, family in FAMILIES.items():
        if problem.kernel not in (None, name):
            notes.append(f"not the {name} kernel: kernel is {problem.kernel!r}")
            continue
        operation = family.operations.get(problem.operation)
        reason = f"it does no {problem.operation}"
        if operation is not None:
            taken, left = family.simplify(problem, masks)
            call = operation(taken, operands, left)
            reason = call.unsupported_reason()
            if reason is None:
                if taken.masks != problem.masks:
                    notes.append("the mask is a band and is taken as one: nothing reads its vectors")
                return call, notes
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
    call, _ = _choose(problem, operands, masks)
    call.prepare()
    call.sequence.shifts = problem.band is not None
    return call.sequence


def plan(problem: Problem, operands: Operands, masks: Sequence[Any]) -> Plan:
    """Return the plan of a call for arrays on the current device; it says why other families do not take it."""
    call, notes = _choose(problem, operands, masks)
    made = call.prepare()
    return replace(made, notes=(*made.notes, *notes))
