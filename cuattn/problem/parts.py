"""Checks of the parts that :func:`cuattn.merge` combines."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn.errors import DtypeError, ShapeError, shown
from cuattn.problem.dtypes import DTYPES, dtype_names, row_of
from cuattn.problem.operations import Spec


def unpack_part(index: int, part: Any) -> tuple[Any, Any, Any, Any]:
    """Return ``(o, l, m, rng_state)`` of one part."""
    if not isinstance(part, (tuple, list)) or len(part) != 4:
        raise DtypeError(f"parts[{index}] is {type(part).__name__}; expected a Forward (o, l, m, rng_state)")
    return tuple(part)


def check_parts(parts: list[tuple[Any, Any, Any]]) -> dict[str, Spec]:
    """Check that all parts, at least one, have one shape and dtype and that l, m fit o; return the results' specs."""
    shape, dtype = tuple(parts[0][0].shape), np.dtype(parts[0][0].dtype)
    if len(shape) < 2:
        raise ShapeError(f"parts[0].o has shape {shape}; expected (..., Nq, dv)")
    if dtype not in DTYPES:
        raise DtypeError(f"parts[0].o has dtype {dtype}; expected {dtype_names()}")
    statistics = row_of(dtype).stat
    specs: dict[str, Spec] = {"o": (shape, (dtype,)), **dict.fromkeys("lm", (shape[:-1], (statistics,)))}
    for index, part in enumerate(parts):
        for array, (name, (wanted, (kind,))) in zip(part, specs.items(), strict=True):
            if tuple(array.shape) != wanted:
                raise ShapeError(f"parts[{index}].{name} has shape {shown(tuple(array.shape))}; expected {wanted}")
            if array.dtype != kind:
                raise DtypeError(f"parts[{index}].{name} has dtype {array.dtype}; expected {kind}")
    return specs
