"""The problem of a call: its description and the one place that checks it."""

from cuattn.problem.bands import mask_as_band
from cuattn.problem.model import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, Band, Operands, Origin, Problem
from cuattn.problem.parts import check_parts, unpack_part
from cuattn.problem.validate import drawn_state, replayed_state, validate

__all__ = [
    "BFLOAT16",
    "DTYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "Band",
    "Operands",
    "Origin",
    "Problem",
    "check_parts",
    "drawn_state",
    "mask_as_band",
    "replayed_state",
    "unpack_part",
    "validate",
]
