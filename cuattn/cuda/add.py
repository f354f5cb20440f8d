"""Copying, converting and adding arrays on a GPU, at the rate of its memory."""

import functools
from typing import Any

import numpy as np

from cuattn.cuda.arguments import collapse
from cuattn.cuda.params import ADD_PARAMS
from cuattn.cuda.sequence import LaunchSequence
from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv
from cuattn.problem import DTYPES

_THREADS, _PACKS = 256, 4  # kThreads, kPacks
_WIDTHS = (8, 4, 2, 1)  # elements of a pack
_BYTES = 16  # kBytes: what a pack is aligned to, at most
_MOST = 65535  # blocks along the second axis of a grid


def add_sequence(out: Any, *terms: Any) -> LaunchSequence | None:
    """Return what rounds an array, or the sum of two, to `out`; None where rows do not begin evenly.

    Parameters
    ----------
    out : cupy.ndarray
        May be a term.
    *terms : cupy.ndarray
        One or two of one dtype, all of the shape of `out`.

    Returns
    -------
    LaunchSequence or None
        Its inputs are `out` and the terms; it has no results.
    """
    arrays = out, *terms
    if any(array.dtype not in DTYPES for array in arrays):
        return None
    steps = [tuple([step // array.itemsize for step in array.strides]) for array in arrays]
    try:
        axes = collapse(tuple(out.shape), steps, 2, "out")
    except UnsupportedError:
        return None
    picked = [axes.pick(each) for each in steps]
    rows, columns = axes.size
    if columns > 1 and any(column != 1 for _, column in picked):
        return None
    places = [row for row, _ in picked]
    width = next(n for n in _WIDTHS if _fits(n, columns, places, arrays))
    dtypes = out.dtype, terms[0].dtype
    return _sequence(out.device.id, dtypes, (rows, columns // width), tuple(places), width)


def _fits(width: int, columns: int, places: list[int], arrays: tuple[Any, ...]) -> bool:
    """Whether rows consist of packs of so many elements that are aligned in every array."""
    if any(number % width for number in (columns, *places)):
        return False
    return all(array.data.ptr % min(_BYTES, width * array.itemsize) == 0 for array in arrays)


@functools.lru_cache(maxsize=256)
def _sequence(
    device: int, dtypes: tuple[np.dtype, np.dtype], size: tuple[int, int], places: tuple[int, ...], width: int
) -> LaunchSequence:
    names = ("out", "a", "b")[: len(places)]
    sequence = LaunchSequence(device, names, {}, {})
    rows, packs = size
    if rows and packs:
        out, part = (DTYPES[dtype].cuda for dtype in dtypes)
        constants = {"out": out, "part": part, "adds": len(names) == 3, "width": width}
        values = {f"{name}_row": place for name, place in zip(names, places, strict=True)}
        grid = cdiv(packs, _THREADS * _PACKS), min(rows, _MOST)
        launched = "util/add.cu", "add", constants, grid, _THREADS, ADD_PARAMS
        sequence.add(*launched, {**values, "rows": rows, "packs": packs}, {name: name for name in names})
    return sequence
