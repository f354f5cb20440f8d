"""The way of a call from the caller's arrays to the backend that computes it."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cuattn import interop
from cuattn.errors import DtypeError, UnsupportedError
from cuattn.masks import BlockMask, ColumnMask
from cuattn.problem import Operands, Problem, validate


class Call(NamedTuple):
    """A checked call, ready for its backend."""

    home: Any
    backend: ModuleType
    problem: Problem
    operands: Operands
    arrays: dict[str, Any]
    rank: int


def prepare(direction: str, arrays: dict[str, Any], mask: Any, options: dict, rng_state: Any = None) -> Call:
    """Take the caller's arrays in, check everything, and find the backend."""
    sparse = isinstance(mask, (ColumnMask, BlockMask))
    views, home = interop.enter(arrays if sparse else {**arrays, "mask": mask})
    if "do" in arrays:
        options["do"] = views["do"]
        options["fwd"] = (views["fwd.o"], views["fwd.l"], views["fwd.m"], rng_state)
    problem, operands, size = validate(
        direction, views["q"], views["k"], views["v"],
        mask=mask if sparse else views.get("mask"), bias=views["bias"], **options,
    )  # fmt: skip
    if home.backend == "cpu":
        if sparse and mask.on_device:
            raise DtypeError("mask holds device vectors but q is on the CPU; expected a mask of host vectors")
        if operands.rng is not None and not isinstance(operands.rng.offset, int):
            raise DtypeError("rng.offset is a device array but q is on the CPU; expected an int")
    return Call(home, backend_of(home, problem.kernel), problem, operands, views, size.rank)


def backend_of(home: Any, kernel: str | None) -> ModuleType:
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
