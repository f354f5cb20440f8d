"""The way of a call from the caller's arrays to the backend that computes it.

A :class:`Call` is made at the door, by :mod:`cuattn.api`, and handed on whole.  What it comes to is remembered by what
its arguments look like: a call like an earlier one is not checked again, and on a GPU only passes addresses to the
launches that were prepared for it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
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
    Operation,
    Options,
    Origin,
    Problem,
    bind,
    borrowed_mask,
    check,
    check_band,
    check_parts,
    drawn_state,
    pieces,
    place_of,
    replayed_state,
    whole_offset,
)


@dataclass
class Call:
    """One call of an operation, as the caller made it.

    Attributes
    ----------
    operation : Operation
    arrays : dict of str to array, Mask or None
        Its operands by name, in the order of `operation.inputs`; of a call that is only planned those up to mask.
    options : Options
    random : object
        The argument rng or, where dropout is replayed, the forward's state.
    origin : Origin | None
    out : object
        Where results are wanted: one array, or a sequence with an item for each result; None for new arrays.
    """

    operation: Operation
    arrays: dict[str, Any]
    options: Options
    random: Any = None
    origin: Origin | None = None
    out: Any = None

    @property
    def has_runs(self) -> bool:
        """Whether the call is part of a larger problem, in several pieces."""
        if self.origin is None:
            return False
        if not isinstance(self.origin, Origin):
            raise DtypeError(f"origin is {shown(self.origin)}; expected a cuattn.Origin or None")
        return self.origin.has_runs


@dataclass
class _Known:
    """What calls of one signature come to; empty until the first of them was checked."""

    problem: Problem | None = None
    origin: interop.ArrayOrigin | None = None
    sequence: Any = None
    allocate: Any = None


@lru_cache(maxsize=1024)
def _known(*signature: Any) -> _Known:
    """Memo cell: empty until the first call with this signature."""
    return _Known()


def _cell(call: Call, layouts: tuple, masks: tuple) -> _Known:
    """Return the memo cell of a call whose arrays have these layouts; a cell of its own where it cannot be hashed."""
    options, window = call.options, call.options.window
    try:
        kinds = tuple(map(type, options)), None if window is None else tuple(map(type, window))
        shapes = tuple([mask.layout for mask in masks])
        return _known(call.operation, layouts, shapes, options, kinds, call.origin is None, call.has_runs)
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
    seen = interop.signature(call.arrays.values()) if call.out is None and not call.has_runs else None
    if seen is None:
        return _compute(call, masks)
    layouts, addresses = seen
    known = _cell(call, layouts, masks)
    if known.sequence is None:
        return _compute(call, masks, known, addresses)
    state = _state(call, known.problem)
    place = None if call.origin is None else place_of(known.problem, call.origin)
    return _launch(known, addresses, masks, state, place, ()), state


def _compute(call: Call, masks: tuple, known: _Known | None = None, seen: Any = None) -> tuple[list[Any], Any]:
    """Run a call that is checked; what it comes to is kept in `known` if its arrays are at the addresses `seen`."""
    outputs = Outputs(call.operation.results if call.options.statistics else call.operation.results[:1], call.out)
    views, origin = _enter(call, outputs)
    with origin.scope():
        known, operands, masks, all_masks = _check(call, views, masks, known)
        problem = known.problem
        place, state = place_of(problem, call.origin), _state(call, problem)
        made = call.operation.made(problem, views)
        outputs.check(made, views, origin)
        backend = _backend_of(origin, problem.kernel)
        if origin.backend == "cpu":
            _check_host(masks, state)
            found = backend.run(problem, operands, all_masks, state, place, bind(problem, outputs.direct))
            results = [found[name].reshape(shape) for name, (shape, _) in made.items()]
        else:
            inputs = {**operands, "mask": views["mask"]}
            addresses = [0 if inputs.get(name) is None else inputs[name].data.ptr for name in call.arrays]
            if seen not in (None, addresses):  # of copies
                known = _cell(call, _layouts(views), masks)
            allocate = outputs.allocator(origin, made)
            if known.sequence is None:
                sequence = backend.launch_sequence(problem, operands, all_masks)
                vars(known).update(problem=problem, origin=origin, sequence=sequence, allocate=allocate)
            copies = [a for name, a in operands.items() if a.data.ptr != views[name].data.ptr]
            place = None if call.origin is None else place
            results = _launch(replace(known, allocate=allocate), addresses, masks, state, place, copies)
        return outputs.fill(dict(zip(made, map(origin.from_backend, results), strict=True))), state


def _launch(known: _Known, *arguments: Any) -> list[Any]:
    """Run a prepared sequence of launches; `arguments` are those of its `run` after the stream."""
    origin, run = known.origin, known.sequence.run
    if origin.is_current():
        return run(known.allocate, origin.stream(), *arguments)
    with origin.on_device():
        return run(known.allocate, origin.stream(), *arguments)


def _layouts(views: dict[str, Any]) -> tuple:
    """Return all that checks and, on a GPU, a sequence of launches depend on of each array."""
    found: list[Any] = []
    for a in views.values():
        found.append(None if a is None else (a.dtype, a.shape))
        if not isinstance(a, (np.ndarray, type(None))):
            found += a.strides, a.data.device_id, a.data.ptr & 15
    return tuple(found)


def _state(call: Call, problem: Problem) -> Any:
    """Return the state of dropout's random numbers; None without dropout."""
    return (replayed_state if call.operation.replays else drawn_state)(problem, call.random)


def _enter(call: Call, outputs: Outputs) -> tuple[dict[str, Any], interop.ArrayOrigin]:
    """Return NumPy or CuPy views of a call's arrays by name; `outputs` takes those in which results are wanted."""
    label, needed = call.operation.label, {"q", "k", "v", *call.operation.operands}
    named = {label(name): array for name, array in call.arrays.items() if array is not None or name in needed}
    views, origin = interop.to_backend({**named, **outputs.given})
    taken = outputs.take(views)
    return {name: taken.get(label(name)) for name in call.arrays}, origin


def _check(call: Call, views: dict[str, Any], masks: tuple, known: _Known | None = None) -> tuple:
    """Check a call; return its memo cell, its operands, its masks that are no arrays, and all its masks."""
    if call.has_runs:
        call, masks = _folded(call, views, masks)
    known = known or _cell(call, _layouts(views), masks)
    all_masks = masks if views["mask"] is None else (*masks, borrowed_mask(views["mask"]))
    arrays = {name: array for name, array in views.items() if name != "mask"}
    if known.problem is None:
        known.problem = check(call.operation, arrays, all_masks, call.options, call.origin)
    return known, bind(known.problem, arrays), masks, all_masks


def _folded(call: Call, views: dict[str, Any], masks: tuple) -> tuple[Call, tuple]:
    """Turn the band of a part that is made of several pieces into a mask of its own rows and keys."""
    rows, keys = (views[name].shape[-2] if views[name].ndim > 1 else 0 for name in "qk")
    options, origin = call.options, call.origin
    band = check_band(options.is_causal, options.window, rows, keys, sharded=True)
    if band is None:
        return call, masks
    offset = whole_offset(origin) if band.bottom_right else 0
    mask = _band_mask(pieces(origin.row, rows), pieces(origin.key, keys), band.left, band.right, offset)
    return replace(call, options=options._replace(is_causal=False, window=None)), (*masks, mask)


_band_mask = lru_cache(maxsize=64)(band_of_runs)  # kept, since a mask holds tables on a GPU


def plan(call: Call) -> Plan:
    """Return the plan of a call, of whose arrays q, k and v are enough."""
    masks = _take_masks(call)
    views, origin = _enter(call, Outputs((), None))
    with origin.scope():
        known, operands, _, masks = _check(call, views, masks)
        place_of(known.problem, call.origin)
        if not isinstance(call.random, np.random.Generator):  # which planning must not draw from
            drawn_state(known.problem, call.random)
        return _backend_of(origin, known.problem.kernel).plan(known.problem, operands, masks)


def merge(parts: dict[str, Any], out: Any) -> list[Any]:
    """Combine forwards; `parts` holds the o, l and m of each, in turn, under the names that errors use."""
    outputs = Outputs(("o", "l", "m"), out)
    views, origin = interop.to_backend({**parts, **outputs.given})
    made = check_parts(outputs.take(views))
    flat = list(views.values())
    triples = list(zip(*[iter(flat)] * 3, strict=True))
    outputs.check(made, views, origin)
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
            results = sequence.run(outputs.allocator(origin, made), origin.stream(), addresses, held=held)
        return outputs.fill(dict(zip(made, map(origin.from_backend, results), strict=True)))


def _take_masks(call: Call) -> tuple:
    """Return the masks of a call that are no arrays; an array stays among its arrays."""
    mask = call.arrays["mask"]
    if not isinstance(mask, Mask):
        return ()
    call.arrays["mask"] = None
    return mask.parts


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
    known = a is not None and b is not None and all(isinstance(x, (int, np.integer)) for x in (*a, *b))
    return known and tuple(a) == tuple(b)
