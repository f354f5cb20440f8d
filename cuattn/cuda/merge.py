"""Combining forwards over disjoint key sets, on a GPU."""

import functools
import math
from collections.abc import Iterable, Sequence

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

    def arrays(names: Sequence[str], o_dtype: np.dtype) -> dict[str, Array]:
        o, *rest = names
        return {o: Array(shape, o_dtype)} | {name: Array(shape[:-1], stat) for name in rest}

    parts = [tuple(f"{name} {part}" for name in "olm") for part in range(count)]
    inputs, scratch = [name for part in parts for name in part], {}
    launches, own = [], dtype  # each level leaves one part where there were MAX_PARTS
    while len(parts) > MAX_PARTS:
        groups = [parts[first : first + MAX_PARTS] for first in range(0, len(parts), MAX_PARTS)]
        parts = [tuple(f"{name} of {len(groups)}: {group}" for name in "olm") for group in range(len(groups))]
        launches += [(group, out, (own, stat, stat)) for group, out in zip(groups, parts, strict=True)]
        for part in parts:
            scratch |= arrays(part, stat)
        own = stat
    sequence = LaunchSequence(device, inputs, arrays("olm", dtype), scratch)
    for group, out, dtypes in [*launches, (parts, "olm", (own, dtype, stat))]:
        _add(sequence, len(group), shape, dtypes, out, zip("olm", zip(*group, strict=True), strict=True))
    return sequence


def add(sequence: LaunchSequence, count: int, stacked: Sequence[str], dtype: np.dtype) -> None:
    """Append the launch that combines parts into a forward's results.

    Parameters
    ----------
    sequence : LaunchSequence
    count : int
        Number of parts.
    stacked : sequence of str
        Names of three arrays that hold the o, l and m of all parts, one part after another.
    dtype : dtype
        Of these arrays.
    """
    o = sequence.results["o"]
    out = [name if name in sequence.results else "" for name in "olm"]
    sizes = (o.size, *2 * [math.prod(o.shape[:-1])])
    steps = [np.arange(count, dtype=np.uint64) * np.uint64(size * dtype.itemsize) for size in sizes]
    runs = zip("olm", stacked, steps, strict=True)
    _add(sequence, count, o.shape, (dtype, o.dtype, dtype), out, runs=runs)


def _add(
    sequence: LaunchSequence,
    count: int,
    shape: tuple[int, ...],
    dtypes: tuple[np.dtype, np.dtype, np.dtype],
    out: Sequence[str],
    parts: Iterable[tuple[str, Sequence[str]]] = (),
    runs: Iterable[tuple[str, str, np.ndarray]] = (),
) -> None:
    """Append a launch; `dtypes` are those of the parts' o, of the merged o, and of l and m."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if rows == 0:
        return
    row_warps = _WARPS if rows < _FEW_ROWS and count >= _WARPS else 1
    part, merged, acc = (row_of(dtype).cuda for dtype in dtypes)
    constants = {"acc": acc, "part": part, "out": merged, "row_warps": row_warps}
    slots = {**dict(parts), **dict(zip(("o_out", "l_out", "m_out"), out, strict=True))}
    values = {"rows": rows, "head_dim_v": columns, "parts": count}
    grid = (cdiv(rows * row_warps, _WARPS), max(cdiv(columns, 32), 1) if row_warps > 1 else 1)
    launched = "util/merge.cu", "attention_merge", constants, grid, 32 * _WARPS
    sequence.add(*launched, MERGE_PARAMS, values, slots, runs=runs)
