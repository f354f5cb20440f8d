"""The problem of a call: its description and the one place that checks it."""

from cuattn.problem.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, Dtype, register_dtype, row_of
from cuattn.problem.model import Band, Place, Problem
from cuattn.problem.operations import OPERATIONS, Operation, register_operation
from cuattn.problem.origin import Origin, Runs, pieces, whole_offset
from cuattn.problem.parts import check_parts, unpack_part
from cuattn.problem.scalars import check_band
from cuattn.problem.validate import (
    Checked,
    Options,
    bind,
    borrowed_mask,
    check,
    drawn_state,
    place_of_call,
    replayed_state,
)

__all__ = [
    "BFLOAT16",
    "DTYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "OPERATIONS",
    "Band",
    "Checked",
    "Dtype",
    "Operation",
    "Options",
    "Origin",
    "Place",
    "Problem",
    "Runs",
    "bind",
    "borrowed_mask",
    "check",
    "check_band",
    "check_parts",
    "drawn_state",
    "pieces",
    "place_of_call",
    "register_dtype",
    "register_operation",
    "replayed_state",
    "row_of",
    "unpack_part",
    "whole_offset",
]
