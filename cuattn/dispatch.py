"""The way of a call from the caller's arrays to the backend that computes it.

A call on a GPU is checked and planned once: what it comes to is remembered by what its arguments look like, and a
warm call only passes addresses to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuattn import interop
from cuattn.errors import DtypeError, UnsupportedError
from cuattn.masks import BlockMask, ColumnMask
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem, check_parts, drawn_state, replayed_state, validate

__all__ = ["compute", "merge", "plan", "same_state"]


class _Warm(NamedTuple):
    """A checked and planned kind of call on a GPU, which only needs its arrays' addresses."""

    home: interop.Home
    problem: Problem
    record: Any
    allocate: Any

    def run(self, addresses: list[int], mask: Any, state: Any, held: Sequence[Any] = ()) -> list[Any]:
        home = self.home
        if home.is_current():
            return self.record.run(self.allocate, home.stream(), addresses, mask, state, held)
        with home.on_device():
            return self.record.run(self.allocate, home.stream(), addresses, mask, state, held)


@lru_cache(maxsize=1024, typed=True)
def _slot(direction: str, layouts: tuple, mask: tuple | None, *options: Any) -> list[_Warm]:
    """Return the list that holds what calls that look like this come to, once one was made."""
    return []


def compute(
    direction: str, arrays: dict[str, Any], options: dict[str, Any], given: Any, *, statistics: bool = True
) -> tuple[list[Any], Any]:
    """Run a forward or a backward.

    Parameters
    ----------
    direction : {"forward", "backward"}
    arrays : dict of str to array or None
        q, k, v, bias, mask and, for a backward, do, fwd.o, fwd.l and fwd.m, in this order.
    options : dict of str to object
        All other arguments, always in the same order.
    given : object
        The argument rng or, for a backward, fwd.rng_state.
    statistics : bool
        Whether a forward's l and m are wanted; a GPU, which has them anyway, always gives them.

    Returns
    -------
    results : list of array
        o, l, m, or o alone; or the gradients of q, k, v and, if there is one, the bias.
    state : RNGState or None
        Of dropout.
    """
    mask = None if arrays["mask"] is None else _take_sparse(arrays)
    seen = interop.look(arrays.values())
    slot: list[_Warm] = []
    if seen is not None:
        try:
            slot = _slot(direction, seen[0], None if mask is None else mask.layout, *options.values())
        except TypeError:  # an option that cannot be hashed, a 0-d array: checked in every call
            seen = None
    if slot:
        warm, addresses = slot[0], seen[1]
        state = (replayed_state if direction == "backward" else drawn_state)(warm.problem, given)
        return warm.run(addresses, mask, state), state
    views, home = interop.enter(arrays)
    with home.scope():
        problem, operands, rank = _check(direction, views, mask, home, options, given)
        backend = _backend_of(home, problem.kernel)
        if home.backend == "cpu":
            run = backend.backward if direction == "backward" else partial(backend.forward, statistics=statistics)
            results = [x for x in run(problem, operands) if x is not None]
            shapes = _shapes(direction, rank, views, results)
            results = [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]
        else:
            record = backend.record(problem, operands)
            shapes = _shapes(direction, rank, views, record.results)
            wanted = [(shape, result.dtype) for shape, result in zip(shapes, record.results, strict=True)]
            warm = _Warm(home, problem, record, home.allocator(wanted))
            inputs = (*operands[:4], operands.mask if mask is None else None, *operands[6:])[: len(arrays)]
            addresses = [0 if array is None else array.data.ptr for array in inputs]
            if seen is not None and addresses == seen[1]:
                slot.append(warm)
            taken = zip(inputs, views.values(), strict=True)
            copies = [array for array, view in taken if array is not None and array.data.ptr != view.data.ptr]
            results = warm.run(addresses, mask, operands.rng, copies)
        return [home.leave(result) for result in results], operands.rng


def plan(direction: str, arrays: dict[str, Any], options: dict[str, Any], rng: Any) -> Plan:
    """Return the plan of a call; arguments as for :func:`compute`, of which q, k and v are enough."""
    mask = _take_sparse(arrays)
    views, home = interop.enter(arrays)
    with home.scope():
        problem, operands, _ = _check(direction, views, mask, home, options, rng)
        return _backend_of(home, problem.kernel).plan(problem, operands)


def merge(parts: dict[str, Any]) -> list[Any]:
    """Combine forwards; `parts` holds the o, l and m of each, in turn, under the names that errors use."""
    views, home = interop.enter(parts)
    flat = list(views.values())
    triples = [tuple(flat[index : index + 3]) for index in range(0, len(flat), 3)]
    check_parts(triples)
    with home.scope():
        backend = _backend_of(home, None)
        if home.backend == "cpu":
            return [home.leave(array) for array in backend.merge(triples)]
        o, l, _ = triples[0]
        record = backend.merge_record(home.device, len(triples), o.shape, o.dtype, l.dtype)
        allocate = home.allocator([(result.shape, result.dtype) for result in record.results])
        copies = [sys.modules["cupy"].ascontiguousarray(array) for array in flat]
        held = [copy for copy, array in zip(copies, flat, strict=True) if copy is not array]
        results = record.run(allocate, home.stream(), [copy.data.ptr for copy in copies], held=held)
        return [home.leave(result) for result in results]


def _take_sparse(arrays: dict[str, Any]) -> ColumnMask | BlockMask | None:
    """Return the mask among the arguments and leave None in its place, unless it is an array."""
    mask = arrays["mask"]
    if not isinstance(mask, (ColumnMask, BlockMask)):
        return None
    arrays["mask"] = None
    return mask


def _check(
    direction: str, views: dict[str, Any], mask: Any, home: interop.Home, options: dict[str, Any], given: Any
) -> tuple[Problem, Operands, int]:
    """Check all arguments against each other; return the problem, its operands and the rank of q."""
    results = {}
    if "do" in views:
        results = {"do": views["do"], "fwd": (views["fwd.o"], views["fwd.l"], views["fwd.m"], given)}
    problem, operands, size = validate(
        direction, views["q"], views["k"], views["v"],
        mask=views["mask"] if mask is None else mask, bias=views["bias"],
        rng=None if results else given, **results, **options,
    )  # fmt: skip
    if home.backend == "cpu":
        if mask is not None and mask.on_device:
            raise DtypeError("mask holds device vectors but q is on the CPU; expected a mask of host vectors")
        if operands.rng is not None and not isinstance(operands.rng.offset, int):
            raise DtypeError("rng.offset is a device array but q is on the CPU; expected an int")
    return problem, operands, size.rank


def _shapes(direction: str, rank: int, views: dict[str, Any], results: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the shapes in which a caller who gave q with `rank` axes expects the results."""
    if direction == "backward":
        return [tuple(views[name].shape) for name in ("q", "k", "v", "bias")[: len(results)]]
    return [tuple(result.shape)[1 if rank == 2 else 0 :] for result in results]


def _backend_of(home: interop.Home, kernel: str | None) -> ModuleType:
    """Return the module that computes where the arrays are."""
    if home.backend == "cpu":
        if kernel not in (None, "cpu"):
            raise UnsupportedError(f"kernel is {kernel!r} but q is in host memory; expected an array on a GPU")
        from cuattn import cpu

        return cpu
    if kernel == "cpu":
        raise UnsupportedError("kernel is 'cpu' but q is on a GPU; expected an array in host memory")
    from cuattn import cuda

    return cuda


def same_state(a: Any, b: Any) -> bool:
    """Whether two random states are known to be equal, without reading a device."""
    if a is None or b is None:
        return False
    return all(
        isinstance(x, (int, np.integer)) and isinstance(y, (int, np.integer)) and x == y
        for x, y in zip(a, b, strict=True)
    )
