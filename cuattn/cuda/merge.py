"""Combining forwards over disjoint key sets, on a GPU."""

import math
from typing import Any

import numpy as np

from cuattn.cuda.launch import Struct, function
from cuattn.cuda.params import MAX_PARTS, MERGE_PARAMS
from cuattn.cuda.plan import CUDA_TYPES

__all__ = ["merge", "merge_parts"]

_WARPS = 4
_FEW_ROWS = 4096  # below this, the warps of a block share a row


def merge(parts: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    """Combine (o, l, m) of disjoint key sets, on the current device and stream.

    Parameters
    ----------
    parts : list of (o, l, m)
        CuPy arrays of equal shapes; o of one dtype, l and m float32 (float64).

    Returns
    -------
    o, l, m : cupy.ndarray
        o in the parts' dtype, rounded once.
    """
    import cupy

    o, l, m = parts[0]
    dtype, stat = o.dtype, l.dtype
    while True:
        last = len(parts) <= MAX_PARTS
        merged = []
        for first in range(0, len(parts), MAX_PARTS):
            group = [tuple(map(cupy.ascontiguousarray, part)) for part in parts[first : first + MAX_PARTS]]
            out = cupy.empty(o.shape, dtype if last else stat), cupy.empty(l.shape, stat), cupy.empty(m.shape, stat)
            pointers = [tuple(array.data.ptr for array in part) for part in group]
            merge_parts(cupy.cuda.runtime.getDevice(), pointers, group[0][0].dtype, *out)
            merged.append(out)
        if last:
            return merged[0]
        parts = merged


def merge_parts(device: int, pointers: list[tuple[int, int, int]], dtype: np.dtype, o: Any, l: Any, m: Any) -> None:
    """Launch the merge of at most MAX_PARTS contiguous parts, given by their addresses, into o, l and m."""
    rows, columns = l.size, o.shape[-1]
    if rows == 0:
        return
    row_warps = _WARPS if rows < _FEW_ROWS and len(pointers) >= _WARPS else 1
    constants = (
        ("acc", CUDA_TYPES[l.dtype.name]),
        ("part", CUDA_TYPES[np.dtype(dtype).name]),
        ("out", CUDA_TYPES[o.dtype.name]),
        ("row_warps", row_warps),
    )
    columns_of = np.zeros((3, MAX_PARTS), np.uint64)
    columns_of[:, : len(pointers)] = np.array(pointers, np.uint64).T
    struct = Struct(
        MERGE_PARAMS,
        {
            "o": columns_of[0], "l": columns_of[1], "m": columns_of[2],
            "o_out": o.data.ptr, "l_out": l.data.ptr, "m_out": m.data.ptr,
            "rows": rows, "head_dim_v": columns, "parts": len(pointers),
        },
        (),
    )  # fmt: skip
    kernel = function(device, "util/merge.cu", "attention_merge", constants)
    kernel((math.ceil(rows / (_WARPS // row_warps)),), (32 * _WARPS,), (struct.seal(struct.fill([])),))
