"""The problem of a call: its description and the one place that checks it."""

from cuattn.problem.dtypes import DTYPES, FLOAT32, Dtype
from cuattn.problem.model import Band, Place, Problem, ScoreFunction
from cuattn.problem.operations import (
    BACKWARD,
    BACKWARD_JVP,
    DOUBLE_BACKWARD,
    FORWARD,
    GRADIENTS,
    JVP,
    OF_ROWS,
    OPERATIONS,
    SCORE_ARGS,
    TANGENTS,
    Array,
    Operation,
    operand_of,
)
from cuattn.problem.origin import Origin, pieces, place_of, whole_offset
from cuattn.problem.scalars import check_band
from cuattn.problem.validate import (
    Options,
    bind,
    borrowed_mask,
    check,
    check_axes,
    check_parts,
    check_state,
    drawn_state,
    replayed_state,
)

__all__ = [
    "BACKWARD",
    "BACKWARD_JVP",
    "DOUBLE_BACKWARD",
    "DTYPES",
    "FLOAT32",
    "FORWARD",
    "GRADIENTS",
    "JVP",
    "OF_ROWS",
    "OPERATIONS",
    "SCORE_ARGS",
    "TANGENTS",
    "Array",
    "Band",
    "Dtype",
    "Operation",
    "Options",
    "Origin",
    "Place",
    "Problem",
    "ScoreFunction",
    "bind",
    "borrowed_mask",
    "check",
    "check_axes",
    "check_band",
    "check_parts",
    "check_state",
    "drawn_state",
    "operand_of",
    "pieces",
    "place_of",
    "replayed_state",
    "whole_offset",
]
