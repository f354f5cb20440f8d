"""Exact attention for arrays: FlashAttention and FlashMask, forward and backward.

NumPy arrays in, NumPy arrays out on the CPU; CuPy arrays in, CuPy arrays out on the GPU; any other DLPack array
(PyTorch, JAX) in, the same kind out.

Public are the names in ``__all__`` of this module, of its rooms ``errors``, ``masks``, ``rng``, ``pairwise``,
``distributed``, ``io_model`` and ``reference``, and of its wrappers ``torch``, ``jax``, ``transformers`` and
``sklearn``, which need the library they are named after.  All other modules are internal: any version may change them.

Examples
--------
>>> import numpy as np, cuattn
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 128, 64), np.float32)
>>> cuattn.attention(q, k, v, is_causal=True).shape
(8, 128, 64)
"""

import importlib
from typing import Any

from cuattn import errors, masks
from cuattn.api import attention, backward, forward, merge, plan
from cuattn.derivatives import backward_jvp, double_backward, jvp
from cuattn.errors import (
    ArgumentError,
    CompileError,
    CuattnError,
    DtypeError,
    MaskError,
    ShapeError,
    UnsupportedError,
)
from cuattn.masks import BlockMask, ColumnMask
from cuattn.plans import Plan
from cuattn.problem import Origin
from cuattn.results import DoubleGradients, Forward, Gradients, Jvp
from cuattn.rng import RNGState

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BlockMask",
    "ColumnMask",
    "CompileError",
    "CuattnError",
    "DoubleGradients",
    "DtypeError",
    "Forward",
    "Gradients",
    "Jvp",
    "MaskError",
    "Origin",
    "Plan",
    "RNGState",
    "ShapeError",
    "UnsupportedError",
    "attention",
    "backward",
    "backward_jvp",
    "double_backward",
    "errors",
    "forward",
    "jvp",
    "masks",
    "merge",
    "plan",
]

_WRAPPERS = {"distributed", "jax", "pairwise", "sklearn", "torch", "transformers"}


def __getattr__(name: str) -> Any:
    """Import what is about another library when it is first asked for."""
    if name not in _WRAPPERS:
        raise AttributeError(f"module 'cuattn' has no attribute {name!r}")
    try:
        return importlib.import_module(f"cuattn.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"cuattn.{name} cannot be imported: {error}") from error
