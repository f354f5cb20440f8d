"""Problems and operands as the backend is handed them."""

from types import SimpleNamespace

from cuattn import problem as room
from cuattn.masks.base import Mask


def problem_of(q, k, v, *, operation="forward", mask=None, **options):
    """Return the checked problem of a call, its operands by name and its masks."""
    options.pop("rng", None)
    arrays = {"q": q, "k": k, "v": v, "bias": options.pop("bias", None)}
    given = () if mask is None else mask.parts if isinstance(mask, Mask) else (room.borrowed_mask(mask),)
    problem = room.check(room.OPERATIONS[operation], arrays, given, room.Options(**options), None)
    return problem, room.bind(problem, arrays), given


def plain(q, k, v, **options):
    """Return a case as comparisons with the oracle want it."""
    return SimpleNamespace(q=q, k=k, v=v, reference=lambda: options)
