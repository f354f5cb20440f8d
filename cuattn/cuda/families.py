"""Which kernels compute a call: the first family that has nothing against it.

A family is a set of kernels for some GPUs.  What ``kernel=`` accepts, the choice and the reasons in plans follow from
:data:`FAMILIES`; a new family is registered, and a new operation is an entry in a family's table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuattn.cuda import sm80, sm90
from cuattn.cuda.call import Call
from cuattn.cuda.sequence import LaunchSequence
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Band, Problem

Operands = Mapping[str, Any]
Simpler = tuple[Problem, Sequence[Any]]


def _as_given(problem: Problem, masks: Sequence[Any]) -> Simpler:
    """Take masks as they are: a column mask must give the bits that its boolean twin gives."""
    return problem, masks


def _bands_apart(problem: Problem, masks: Sequence[Any]) -> Simpler:
    """Take a mask that is no more than a band as one."""
    reach = masks[0].reach if problem.masks == ("column",) and problem.band is None else None
    if reach is None:
        return problem, masks
    return replace(problem, masks=(), band=None if reach == (None, None) else Band(*reach, 0)), ()


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
    simplify : callable
        Returns a problem and masks that come to the same as its arguments, and that its kernels do faster.
    """

    name: str
    reason: str
    operations: Mapping[str, type[Call]]
    simplify: Callable[[Problem, Sequence[Any]], Simpler] = _as_given


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which they are asked."""


def register_family(family: Family) -> None:
    """Add a family, to be asked before the others."""
    others = {name: other for name, other in FAMILIES.items() if name != family.name}
    FAMILIES.clear()
    FAMILIES.update({family.name: family, **others})


register_family(Family("sm80", "portable tensor-core kernel", {"forward": sm80.Forward, "backward": sm80.Backward}))
register_family(
    Family(
        "sm90",
        "bulk tensor copies and warpgroup products",
        {"forward": sm90.Forward, "backward": sm90.Backward},
        _bands_apart,  # since it takes no boolean masks
    )
)


def _choose(problem: Problem, operands: Operands, masks: Sequence[Any]) -> tuple[Call, list[str]]:
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
            taken, left = family.simplify(problem, masks)
            call = operation(taken, operands, left)
            call.family = name
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
    reason = f"{FAMILIES[made.kernel].reason}, {call.device.arch}"
    return replace(made, reason=reason, notes=(*made.notes, *notes))
