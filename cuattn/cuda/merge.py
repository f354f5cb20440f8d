"""Combining forwards over disjoint key sets, on a GPU."""

import functools
import math
from collections.abc import Sequence

import numpy as np

from cuattn.cuda.arguments import function
from cuattn.cuda.launch import Array, Record
from cuattn.cuda.params import MAX_PARTS, MERGE_PARAMS
from cuattn.cuda.sm80.forward_plan import CUDA_TYPES

__all__ = ["add_merge", "merge_record", "result_arrays"]

_WARPS = 4
_FEW_ROWS = 4096  # below this, the warps of a block share a row


@functools.lru_cache(maxsize=256)
def merge_record(device: int, count: int, shape: tuple[int, ...], dtype: np.dtype, stat: np.dtype) -> Record:
    """Return the record that combines C-contiguous parts of equal shapes.

    Parameters
    ----------
    device : int
        The current device.
    count : int
        Number of parts; the record's inputs are their o, l, m, part by part.
    shape : tuple of int
        Of o; l and m lack its last axis.
    dtype, stat : dtype
        Of o, and of l and m.

    Returns
    -------
    Record
        Its results are o, in the parts' dtype and rounded once, l and m.
    """
    parts = [tuple(f"{name} {part}" for name in "olm") for part in range(count)]
    inputs, scratch = [name for part in parts for name in part], {}
    launches, level = [], 0  # each level leaves one part where there were MAX_PARTS
    while len(parts) > MAX_PARTS:
        level += 1
        groups = [parts[first : first + MAX_PARTS] for first in range(0, len(parts), MAX_PARTS)]
        parts = [tuple(f"{name} {group} of level {level}" for name in "olm") for group in range(len(groups))]
        launches += [
            (group, out, dtype if level == 1 else stat, stat) for group, out in zip(groups, parts, strict=True)
        ]
        for part in parts:
            scratch.update(zip(part, result_arrays(shape, stat, stat).values(), strict=True))
    launches.append((parts, tuple("olm"), stat if level else dtype, dtype))
    record = Record(inputs, result_arrays(shape, dtype, stat), scratch)
    for group, out, own, merged in launches:
        slots = {f"{name}.{index}": part[place] for index, part in enumerate(group) for place, name in enumerate("olm")}
        add_merge(record, device, len(group), shape, (own, merged, stat), slots=slots, out=out)
    return record


def result_arrays(shape: tuple[int, ...], dtype: np.dtype, stat: np.dtype) -> dict[str, Array]:
    """Return o, l, m of a forward as arrays to be allocated; `shape` is o's."""
    return {"o": Array(shape, dtype), "l": Array(shape[:-1], stat), "m": Array(shape[:-1], stat)}


def add_merge(
    record: Record,
    device: int,
    parts: int,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    *,
    slots: dict[str, str] | None = None,
    stacked: Sequence[str] = (),
    out: Sequence[str] = ("o", "l", "m"),
) -> None:
    """Append the launch that combines contiguous parts, at most MAX_PARTS.

    Parameters
    ----------
    record : Record
    device : int
        The current device.
    parts : int
    shape : tuple of int
        Of o.
    dtypes : (dtype, dtype, dtype)
        Of the parts' o, the merged o, and l and m.
    slots : dict of str to str, optional
        Slots of ``MergeParams`` and the names of the parts that they take.
    stacked : sequence of str, optional
        Or else: names of three arrays that hold the o, l and m of all parts, one part after another.
    out : sequence of str, optional
        Names of the merged o, l and m.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows == 0:
        return
    dtype, merged, stat = dtypes
    row_warps = _WARPS if rows < _FEW_ROWS and parts >= _WARPS else 1
    constants = (
        ("acc", CUDA_TYPES[stat.name]),
        ("part", CUDA_TYPES[dtype.name]),
        ("out", CUDA_TYPES[merged.name]),
        ("row_warps", row_warps),
    )
    values = {"rows": rows, "head_dim_v": columns, "parts": parts}
    slots = {**(slots or {}), **dict(zip(("o_out", "l_out", "m_out"), out, strict=True))}
    sizes = (rows * columns * dtype.itemsize, rows * stat.itemsize, rows * stat.itemsize)
    runs = [
        (MAX_PARTS * place, name, np.arange(parts, dtype=np.uint64) * np.uint64(size))
        for place, (name, size) in enumerate(zip(stacked, sizes, strict=False))
    ]
    kernel = function(device, "util/merge.cu", "attention_merge", constants)
    grid = (-(-rows * row_warps // _WARPS), max(-(-columns // 32), 1) if row_warps > 1 else 1)
    record.add(kernel, grid, 32 * _WARPS, MERGE_PARAMS, values, slots, runs=runs)
