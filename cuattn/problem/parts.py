"""Checks of the parts that :func:`cuattn.merge` combines."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn.errors import DtypeError, ShapeError
from cuattn.problem.model import DTYPES, stat_dtype


def unpack_part(index: int, part: Any) -> tuple[Any, Any, Any, Any]:
    """Return ``(o, l, m, rng_state)`` of one part."""
    if not isinstance(part, (tuple, list)) or len(part) != 4:
        raise DtypeError(f"parts[{index}] is {type(part).__name__}; expected a Forward (o, l, m, rng_state)")
    return tuple(part)


def check_parts(parts: list[tuple[Any, Any, Any]]) -> None:
    """Check that all parts, at least one, have one shape and dtype and that l, m fit o."""
    shape, dtype = tuple(parts[0][0].shape), np.dtype(parts[0][0].dtype)
    if len(shape) < 2:
        raise ShapeError(f"parts[0].o has shape {shape}; expected (..., Nq, dv)")
    if dtype not in DTYPES:
        raise DtypeError(f"parts[0].o has dtype {dtype}; expected float16, bfloat16, float32 or float64")
    statistics = stat_dtype(dtype)
    for index, part in enumerate(parts):
        for name, array, wanted, kind in zip(
            "olm", part, (shape, shape[:-1], shape[:-1]), (dtype, statistics, statistics), strict=True
        ):
            if tuple(array.shape) != wanted:
                raise ShapeError(f"parts[{index}].{name} has shape {tuple(array.shape)}; expected {wanted}")
            if array.dtype != kind:
                raise DtypeError(f"parts[{index}].{name} has dtype {array.dtype}; expected {kind}")
