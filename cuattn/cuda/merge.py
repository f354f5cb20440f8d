"""Combining forwards over disjoint key sets, on a GPU."""

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from cuattn.cuda.arguments import Array
from cuattn.cuda.params import MAX_PARTS, MERGE_PARAMS
from cuattn.cuda.sequence import LaunchSequence
from cuattn.io_model.sizes import cdiv
from cuattn.problem import row_of

_WARPS = 4
_FEW_ROWS = 4096  # below this, the warps of a block share a row


@functools.lru_cache(maxsize=256)
def merge_sequence(device: int, count: int, shape: tuple[int, ...], dtype: np.dtype, stat: np.dtype) -> LaunchSequence:
    """Return what combines C-contiguous parts of equal shapes.

    Parameters
    ----------
    device : int
        The current device.
    count : int
        Number of parts; the inputs are their o, l, m, part by part.
    shape : tuple of int
        Of o; l and m lack its last axis.
    dtype, stat : dtype
        Of o, and of l and m.

    Returns
    -------
    LaunchSequence
        Its results are o, in the parts' dtype and rounded once, l and m.
    """

    def arrays(part: str, o_dtype: np.dtype) -> dict[str, Array]:
        return {f"o{part}": Array(shape, o_dtype)} | {f"{name}{part}": Array(shape[:-1], stat) for name in "lm"}

    parts = [f" {part}" for part in range(count)]
    inputs, scratch = [f"{name}{part}" for part in parts for name in "olm"], {}
    launches, own = [], dtype  # each level leaves one part where there were MAX_PARTS
    while len(parts) > MAX_PARTS:
        groups = [parts[first : first + MAX_PARTS] for first in range(0, len(parts), MAX_PARTS)]
        parts = [f" {group} of {len(groups)}" for group in range(len(groups))]
        launches += [(group, out, (own, stat, stat)) for group, out in zip(groups, parts, strict=True)]
        for part in parts:
            scratch |= arrays(part, stat)
        own = stat
    sequence = LaunchSequence(device, inputs, arrays("", dtype), scratch)
    for group, out, dtypes in [*launches, (parts, "", (own, dtype, stat))]:
        slots = {name: [f"{name}{part}" for part in group] for name in "olm"}
        slots |= {f"{name}_out": [f"{name}{out}"] for name in "olm"}
        add(sequence, len(group), shape, dtypes, slots)
    return sequence


def add(
    sequence: LaunchSequence,
    count: int,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    slots: Mapping[str, Sequence[str]],
    stacked: bool = False,
) -> None:
    """Append the launch that combines parts.

    Parameters
    ----------
    sequence : LaunchSequence
    count : int
        Number of parts.
    shape : tuple of int
        Of o.
    dtypes : tuple of dtype
        Of the parts' o, of the merged o, and of l and m.
    slots : mapping of str to (sequence of) str
        The names of the arrays: "o", "l", "m" of the parts, and "o_out", "l_out", "m_out".
    stacked : bool, optional
        Whether "o", "l", "m" are each one array that holds all parts.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows == 0:
        return
    row_warps = _WARPS if rows < _FEW_ROWS and count >= _WARPS else 1
    part, merged, acc = (row_of(dtype).cuda for dtype in dtypes)
    constants = {"acc": acc, "part": part, "out": merged, "row_warps": row_warps, "stacked": stacked}
    values = {"rows": rows, "head_dim_v": columns, "parts": count}
    grid = (cdiv(rows * row_warps, _WARPS), max(cdiv(columns, 32), 1) if row_warps > 1 else 1)
    sequence.add("util/merge.cu", "attention_merge", constants, grid, 32 * _WARPS, MERGE_PARAMS, values, slots)
