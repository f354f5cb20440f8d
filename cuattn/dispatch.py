"""The way of a call from the caller's arrays to the backend that computes it.

A :class:`Call` is made at the door, by :mod:`cuattn.api`, and handed on whole.  What it comes to is remembered by what
its arguments look like: a call like an earlier one is not checked again, and on a GPU only passes addresses to the
launches that were prepared for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from cuattn import interop
from cuattn.errors import ArgumentError, DtypeError, UnsupportedError, shown
from cuattn.interop import Outputs
from cuattn.masks.base import Mask
from cuattn.masks.constructors import band_of_runs
from cuattn.plans import Plan
from cuattn.problem import (
    Checked,
    Operation,
    Options,
    Origin,
    Place,
    Runs,
    bind,
    borrowed_mask,
    check,
    check_band,
    check_parts,
    drawn_state,
    pieces,
    place_of_call,
    replayed_state,
    whole_offset,
)

__all__ = ["Call", "compute", "merge", "plan", "same_state"]


@dataclass
class Call:
    """One call of an operation, as the caller made it.

    Attributes
    ----------
    operation : Operation
    arrays : dict of str to array or None
        Its operands by name: q, k, v first.
    mask : Mask | array | None
    options : Options
    random : object
        The argument rng or, where dropout is replayed, the forward's state.
    origin : Origin | None
    out : object
        Where results are wanted: one array, or a sequence with an item for each result; None for new arrays.
    whole : bool
        Whether all its operands are there; one that is only planned has q, k and v.
    """

    operation: Operation
    arrays: dict[str, Any]
    mask: Any = None
    options: Options = field(default_factory=Options)
    random: Any = None
    origin: Origin | None = None
    out: Any = None
    whole: bool = True


@dataclass
class _Known:
    """What calls of one signature come to; empty until the first of them was checked."""

    checked: Checked | None = None
    origin: interop.ArrayOrigin | None = None
    sequence: Any = None
    allocate: Any = None


@lru_cache(maxsize=1024)
def _known(signature: tuple) -> _Known:
    """Memo cell: empty until the first call with this signature."""
    return _Known()


def _signature(call: Call, layouts: tuple, masks: tuple) -> _Known:
    """Return the memo cell of a call whose arrays have these layouts; a cell of its own where it cannot be hashed."""
    options, window = call.options, call.options.window
    kinds = tuple(map(type, options)), None if window is None else tuple(map(type, window))
    shapes = tuple([mask.layout for mask in masks])
    return _known((call.operation, layouts, shapes, options, kinds, call.origin is None, _has_runs(call)))


def _has_runs(call: Call) -> bool:
    """Return whether the call is part of a larger problem, in several pieces."""
    if call.origin is None:
        return False
    if not isinstance(call.origin, Origin):
        raise DtypeError(f"origin is {shown(call.origin)}; expected a cuattn.Origin or None")
    return call.origin.has_runs


def _cell(call: Call, layouts: tuple, masks: tuple) -> _Known:
    try:
        return _signature(call, layouts, masks)
    except (TypeError, ValueError):  # an option that cannot be hashed: checked in every call
        return _Known()


def compute(call: Call) -> tuple[list[Any], Any]:
    """Run a call; PyTorch's compiler, where it is in use, is kept from looking inside.

    Returns
    -------
    results : list of array
        The operation's results, in its order.
    state : RNGState or None
        Of dropout.
    """
    if "torch._dynamo" not in sys.modules:
        return _run(call)
    if sys.modules["torch"].compiler.is_compiling():
        raise UnsupportedError(
            "q, k, v are being traced by torch.compile, and cuattn runs on real memory alone; call it through "
            "torch.compiler.disable(cuattn.attention), or without fullgraph=True"
        )
    return _opaque()(call)


@lru_cache(maxsize=1)
def _opaque() -> Any:
    """Return `_run` as a function in which PyTorch's compiler traces nothing."""
    return sys.modules["torch._dynamo"].disable(_run)


def _run(call: Call) -> tuple[list[Any], Any]:
    masks = _take_masks(call)
    seen = interop.signature(call.arrays.values()) if call.out is None and not _has_runs(call) else None
    if seen is None:
        return _compute(call, masks, _Known(), None)
    known = _cell(call, seen[0], masks)
    if known.sequence is None:
        return _compute(call, masks, known, seen[1])
    checked = known.checked
    state = _state(call, checked)
    place = None if call.origin is None else place_of_call(checked, call.origin)
    return _launch(known, seen[1], masks, state, place), state


def _compute(call: Call, masks: tuple, known: _Known, seen: list[int] | None) -> tuple[list[Any], Any]:
    """Run a call that is checked; what it comes to is kept in `known` if its arrays are at the addresses `seen`."""
    outputs = Outputs(_results(call), call.out)
    views, origin = _enter(call, outputs.given)
    with origin.scope():
        given = {label: views.pop(label) for label in outputs.given}
        checked, place, operands, all_masks = _check(call, views, masks)
        masks = all_masks[: len(all_masks) - (views["mask"] is not None)]
        state = _state(call, checked)
        specs = call.operation.result_specs(checked.problem, checked.sizes, views)
        outputs.check(given, specs, views, origin)
        backend = _backend_of(origin, checked.problem.kernel)
        if origin.backend == "cpu":
            _check_host(masks, state)
            ready = bind(checked.problem, outputs.direct)
            found = backend.run(checked.problem, operands, all_masks, state, place, ready)
            results = [found[name].reshape(shape) for name, (shape, _) in specs.items()]
        else:
            inputs = {**operands, "mask": views["mask"]}
            addresses = [0 if inputs.get(name) is None else inputs[name].data.ptr for name in call.arrays]
            if addresses != seen:  # of copies, or of arrays that tell nothing at a glance
                known = _cell(call, tuple(map(_layout, views.values())), masks)
            if known.sequence is None:
                sequence = backend.launch_sequence(checked.problem, operands, all_masks)
                allocate = origin.allocator([(shape, dtype) for shape, (dtype,) in specs.values()])
                vars(known).update(checked=checked, origin=origin, sequence=sequence, allocate=allocate)
            made = known
            if outputs.direct:
                made = replace(made, allocate=outputs.allocator(origin, specs))
            copies = [a for name, a in operands.items() if a.data.ptr != views[name].data.ptr]
            results = _launch(made, addresses, masks, state, None if call.origin is None else place, copies)
        return outputs.fill(dict(zip(specs, map(origin.from_backend, results), strict=True))), state


def _launch(
    known: _Known, addresses: Sequence[int], masks: tuple, state: Any, place: Place | None, held: Sequence[Any] = ()
) -> list[Any]:
    """Run a prepared sequence of launches for arrays at these addresses."""
    origin = known.origin
    if origin.is_current():
        return known.sequence.run(known.allocate, origin.stream(), addresses, masks, state, place, held)
    with origin.on_device():
        return known.sequence.run(known.allocate, origin.stream(), addresses, masks, state, place, held)


def _layout(array: Any) -> tuple | None:
    """Return all that a sequence of launches depends on of an array on a GPU."""
    return (
        None if array is None else (array.dtype, array.shape, array.strides, array.data.device_id, array.data.ptr & 15)
    )


def _results(call: Call) -> tuple[str, ...]:
    return call.operation.results if call.options.statistics else call.operation.results[:1]


def _state(call: Call, checked: Checked) -> Any:
    """Return the state of dropout's random numbers; None without dropout."""
    return (replayed_state if call.operation.replays else drawn_state)(checked.problem, call.random)


def _enter(call: Call, given: dict[str, Any]) -> tuple[dict[str, Any], interop.ArrayOrigin]:
    """Return NumPy or CuPy views of a call's arrays by name, those in which results are wanted last."""
    label = call.operation.label
    named = {**{label(name): array for name, array in call.arrays.items()}, **given}
    needed = {"q", "k", "v", *map(label, call.operation.operands)} if call.whole else set("qkv")
    views, origin = interop.to_backend(named, optional=frozenset(named) - needed)
    return dict(zip((*call.arrays, *given), views.values(), strict=True)), origin


def _check(call: Call, views: dict[str, Any], masks: tuple) -> tuple[Checked, Place, dict[str, Any], tuple]:
    """Check a call; return what it is, its place, its operands and its masks, of which an array is the last."""
    if _has_runs(call):
        call, masks = _folded(call, views, masks)
    arrays = {name: array for name, array in views.items() if name != "mask"}
    layouts = tuple([None if array is None else (array.dtype, array.shape) for array in views.values()])
    known = _cell(call, layouts, masks)
    if views["mask"] is not None:
        masks = (*masks, borrowed_mask(views["mask"]))
    if known.checked is None:
        known.checked = check(call.operation, arrays, masks, call.options, call.origin)
    checked = known.checked
    return checked, place_of_call(checked, call.origin), bind(checked.problem, arrays), masks


def _folded(call: Call, views: dict[str, Any], masks: tuple) -> tuple[Call, tuple]:
    """Turn the band of a part that is made of several pieces into a mask of its own rows and keys."""
    rows, keys = (views[name].shape[-2] if views[name].ndim > 1 else 0 for name in "qk")
    options, origin = call.options, call.origin
    band, bottom_right = check_band(options.is_causal, options.window, rows, keys, sharded=True)
    if band is None:
        return call, masks
    offset = whole_offset(origin) if bottom_right else 0
    mask = _band_mask(origin.row, rows, origin.key, keys, band.left, band.right, offset)
    return replace(call, options=options._replace(is_causal=False, window=None)), (*masks, mask)


@lru_cache(maxsize=64)
def _band_mask(row: Runs, rows: int, key: Runs, keys: int, left: int | None, right: int | None, offset: int) -> Any:
    """Return the ColumnMask that a band is for global rows and keys; kept, since it holds tables on a GPU."""
    return band_of_runs(pieces(row, rows), pieces(key, keys), left, right, offset)


def plan(call: Call) -> Plan:
    """Return the plan of a call, of whose arrays q, k and v are enough."""
    masks = _take_masks(call)
    views, origin = _enter(call, {})
    with origin.scope():
        checked, _, operands, masks = _check(call, views, masks)
        if not isinstance(call.random, np.random.Generator):  # which planning must not draw from
            drawn_state(checked.problem, call.random)
        return _backend_of(origin, checked.problem.kernel).plan(checked.problem, operands, masks)


def merge(parts: dict[str, Any], out: Any) -> list[Any]:
    """Combine forwards; `parts` holds the o, l and m of each, in turn, under the names that errors use."""
    outputs = Outputs(("o", "l", "m"), out)
    views, origin = interop.to_backend({**parts, **outputs.given}, optional=frozenset())
    given = {label: views.pop(label) for label in outputs.given}
    flat = list(views.values())
    triples = [tuple(flat[index : index + 3]) for index in range(0, len(flat), 3)]
    specs = check_parts(triples)
    outputs.check(given, specs, views, origin)
    with origin.scope():
        backend = _backend_of(origin, None)
        if origin.backend == "cpu":
            results = backend.merge(triples)
            outputs.direct.clear()  # they are filled below
        else:
            o, l, _ = triples[0]
            sequence = backend.merge_sequence(origin.device, len(triples), o.shape, o.dtype, l.dtype)
            copies = [sys.modules["cupy"].ascontiguousarray(array) for array in flat]
            held = [copy for copy, array in zip(copies, flat, strict=True) if copy is not array]
            addresses = [copy.data.ptr for copy in copies]
            results = sequence.run(outputs.allocator(origin, specs), origin.stream(), addresses, held=held)
        return outputs.fill(dict(zip(specs, map(origin.from_backend, results), strict=True)))


def _take_masks(call: Call) -> tuple:
    """Return the masks of a call that are no arrays; an array stays among its arrays."""
    mask = call.mask
    if isinstance(mask, Mask):
        return mask.parts
    call.arrays["mask"] = mask
    return ()


def _check_host(masks: tuple, state: Any) -> None:
    """Refuse what lies on a GPU in a call on the CPU."""
    if any(mask.on_device for mask in masks):
        raise DtypeError("mask holds device vectors but q is on the CPU; expected a mask of host vectors")
    if state is not None and not isinstance(state.offset, int):
        raise DtypeError("rng.offset is a device array but q is on the CPU; expected an int")


def _backend_of(origin: interop.ArrayOrigin, kernel: str | None) -> ModuleType:
    """Return the module that computes where the arrays are."""
    from cuattn import cpu

    if origin.backend == "cpu" and kernel in (None, *cpu.FAMILIES):
        return cpu
    from cuattn import cuda

    if kernel not in (None, *cpu.FAMILIES, *cuda.FAMILIES):
        names = ", ".join(map(repr, (*cpu.FAMILIES, *cuda.FAMILIES)))
        raise ArgumentError(f"kernel is {shown(kernel)}; expected None or one of {names}")
    if origin.backend == "cpu":
        raise UnsupportedError(f"kernel is {kernel!r} but q is in host memory; expected an array on a GPU")
    if kernel in cpu.FAMILIES:
        raise UnsupportedError(f"kernel is {kernel!r} but q is on a GPU; expected an array in host memory")
    return cuda


def same_state(a: Any, b: Any) -> bool:
    """Whether two random states are known to be equal, without reading a device."""
    if a is None or b is None:
        return False
    return all(
        isinstance(x, (int, np.integer)) and isinstance(y, (int, np.integer)) and x == y
        for x, y in zip(a, b, strict=True)
    )
