"""Combining forwards, or jvps, over disjoint key sets, on a GPU."""

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import numpy as np

from cuattn.cuda.arguments import Array
from cuattn.cuda.params import MAX_PARTS, MERGE_JVP_PARAMS, MERGE_PARAMS
from cuattn.cuda.sequence import LaunchSequence
from cuattn.io_model.sizes import cdiv
from cuattn.problem import DTYPES

_WARPS = 4
_FEW_ROWS = 4096  # below this, the warps of a block share a row


@functools.lru_cache(maxsize=256)
def merge_sequence(
    device: int,
    count: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    stat: np.dtype,
    results: tuple[str, ...] = ("o", "l", "m"),
    out: np.dtype | None = None,
    width: int = 1,
) -> LaunchSequence:
    """Return what combines C-contiguous parts of equal shapes.

    Parameters
    ----------
    device : int
        The current device.
    count : int
        Number of parts; the inputs are the `results` of each, part by part.
    shape : tuple of int
        Of o; l and m lack its last axis.
    dtype, stat : dtype
        Of o and its tangent, and of l, m and lse's tangent.
    results : tuple of str, optional
        Those of a forward, or of a jvp.
    out : dtype, optional
        Of the merged o; by default `dtype`.
    width : int, optional
        How many elements, a power of two that divides o's columns, every o is aligned to.

    Returns
    -------
    LaunchSequence
        Its results are o, rounded once, l and m; and of jvps the tangents likewise.
    """
    out = out or dtype
    levels = [[f" {part}" for part in range(count)]]  # names; each level has one part where there were MAX_PARTS
    while len(levels[-1]) > MAX_PARTS:
        levels.append([f" {part} of level {len(levels)}" for part in range(cdiv(len(levels[-1]), MAX_PARTS))])
    levels.append([""])

    def arrays(names: Iterable[str], o_dtype: np.dtype) -> dict[str, Array]:
        wide, rows = Array(shape, o_dtype), Array(shape[:-1], stat)
        part = {own: wide if own in ("o", "to") else rows for own in results}
        return {f"{own}{name}": array for name in names for own, array in part.items()}

    inputs, scratch = arrays(levels[0], dtype), arrays(chain(*levels[1:-1]), stat)
    sequence = LaunchSequence(device, list(inputs), arrays([""], out), scratch)
    for parts, merged in pairwise(levels):
        dtypes = dtype if parts is levels[0] else stat, out if merged is levels[-1] else stat, stat
        for number, name in enumerate(merged):
            some = parts[number * MAX_PARTS :][:MAX_PARTS]
            add(sequence, shape, dtypes, some, name, results=results, width=width)
    return sequence


def add(
    sequence: LaunchSequence,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    parts: Sequence[str],
    out: str = "",
    stacked: int = 0,
    results: tuple[str, ...] = ("o", "l", "m"),
    width: int = 1,
) -> None:
    """Append the launch that combines parts.

    Parameters
    ----------
    sequence : LaunchSequence
    shape : tuple of int
        Of o.
    dtypes : tuple of dtype
        Of the parts' o, of the merged o, and of l and m.
    parts : sequence of str
        What follows those of `results` in the names of each part's arrays.
    out : str, optional
        Likewise of the merged arrays; l and m need not be there.
    stacked : int, optional
        How many parts there are in the arrays of the only name in `parts`, which the launch before makes; 0: one in
        the arrays of each.
    results : tuple of str, optional
        Those of a forward, or of a jvp.
    width : int, optional
        How many elements every o is aligned to.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows == 0:
        return
    count, tangents = stacked or len(parts), "to" in results
    row_warps = _WARPS if rows < _FEW_ROWS and count >= _WARPS else 1
    constants = dict(zip(("part", "out", "acc"), (DTYPES[dtype].cuda for dtype in dtypes), strict=True))
    width = width if row_warps == 1 else 1
    constants |= {"row_warps": row_warps, "stacked": stacked > 0, "tangents": tangents, "width": width}
    values = {"rows": rows, "head_dim_v": columns, "parts": count}
    grid = (cdiv(rows * row_warps, _WARPS), max(cdiv(columns, 32), 1) if row_warps > 1 else 1)
    slots = {name: [f"{name}{part}" for part in parts] for name in results}
    slots |= {f"{name}_out": [f"{name}{out}"] for name in results if f"{name}{out}" in sequence.names}
    dtype = MERGE_JVP_PARAMS if tangents else MERGE_PARAMS
    launched = "util/merge.cu", "attention_merge", constants, grid, 32 * _WARPS, dtype, values, slots
    sequence.add(*launched, early=stacked > 0)
