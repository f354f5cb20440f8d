"""Combining forwards over disjoint key sets, on a GPU."""

import functools
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
            pointers = np.array([[array.data.ptr for array in part] for part in group], np.uint64).T
            merge_parts(cupy.cuda.runtime.getDevice(), pointers, group[0][0].dtype, *out)
            merged.append(out)
        if last:
            return merged[0]
        parts = merged


def merge_parts(device: int, parts: np.ndarray, dtype: np.dtype, o: Any, l: Any, m: Any, stream: Any = None) -> None:
    """Launch the merge of contiguous parts into o, l and m.

    Parameters
    ----------
    device : int
        The current device.
    parts : numpy.ndarray, (3, n), uint64
        Addresses of the parts' o, l and m; n <= MAX_PARTS.
    dtype : dtype
        Of the parts' o.
    """
    if l.size == 0:
        return
    kernel, struct, grid = _prepare(device, l.size, o.shape[-1], parts.shape[1], np.dtype(dtype), o.dtype, l.dtype)
    words = struct.fill((o.data.ptr, l.data.ptr, m.data.ptr))
    np.frombuffer(words, np.uint64, 3 * MAX_PARTS).reshape(3, MAX_PARTS)[:, : parts.shape[1]] = parts
    kernel(grid, (32 * _WARPS,), (struct.seal(words),), 0, stream)


@functools.lru_cache(maxsize=256)
def _prepare(device: int, rows: int, columns: int, parts: int, dtype: np.dtype, out: np.dtype, stat: np.dtype):
    row_warps = _WARPS if rows < _FEW_ROWS and parts >= _WARPS else 1
    constants = (
        ("acc", CUDA_TYPES[stat.name]),
        ("part", CUDA_TYPES[dtype.name]),
        ("out", CUDA_TYPES[out.name]),
        ("row_warps", row_warps),
    )
    values = {"rows": rows, "head_dim_v": columns, "parts": parts}
    struct = Struct(MERGE_PARAMS, values, ("o_out", "l_out", "m_out"))
    return function(device, "util/merge.cu", "attention_merge", constants), struct, (-(-rows * row_warps // _WARPS),)
