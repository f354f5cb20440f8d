"""Sums over keys for every row, on a GPU, of float32 points with many coordinates: kernels/pairwise/products.cu."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn.cuda.arguments import pad
from cuattn.cuda.device import device_of
from cuattn.cuda.launch import Kernel
from cuattn.io_model.sizes import cdiv
from cuattn.pairwise.device import MOST_BATCH, address_of, log_sum, nothing, parts_of
from cuattn.pairwise.functions import FUNCTIONS
from cuattn.pairwise.pairs import Pairs, Sums, Wanted

MOST_DIM = 128
_THREADS = _ROWS = 128  # of a block
_STEP = 16  # coordinates of a product
_TOP = 15  # largest exponent of a half
_LOG2_E = math.log2(math.e)

_ARRAYS = "x", "y", "fragments", "of_row", "of_key", "v", "unit", "sums", "logs"
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in _ARRAYS),
        *((name, np.int32) for name in ("n_rows", "n_keys", "columns", "parts", "keys_per_part", "padded_keys")),
    ],
    align=True,
)
"""Mirror of ``ProductParams``."""


def takes(pairs: Pairs) -> bool:
    """Return whether the kernels are for a call's points: the Laplacian asks for more digits where points are near."""
    fits = pairs.work == np.float32 and pairs.dim <= MOST_DIM and math.prod(pairs.batch) <= MOST_BATCH
    return fits and not pairs.masks and pairs.function is not FUNCTIONS["laplacian"]


def constants_of(function: int, dim: int, columns: int, logs: bool, tf32: bool) -> dict[str, Any]:
    """Return what the kernels are specialised by, for points of `dim` coordinates, a multiple of 16."""
    most = 4 if dim <= 64 else 2
    width = max(cdiv(columns, max(cdiv(columns, most), 1)), 1)
    return {
        "dim": dim,
        "width": width,
        "reduction": int(logs),
        "function": function,
        "tf32": tf32,
        "block_n": 64 if dim <= 64 else 32,
    }


@lru_cache(maxsize=256)
def _launches(
    device: int, constants: tuple[tuple[str, Any], ...], sizes: tuple[int, int, int, int]
) -> tuple[Kernel, Kernel, int, int]:
    """Return the launches, in how many parts the keys are divided, and their number in whole tiles."""
    batch, n_rows, n_keys, columns = sizes
    known = dict(constants)
    tile, steps = int(known["block_n"]), int(known["dim"]) // _STEP
    groups, row_blocks, padded = max(cdiv(columns, int(known["width"])), 1), cdiv(n_rows, _ROWS), pad(n_keys, tile)
    blocks = 512 // (64 + 5 * int(known["dim"]) // 4)  # as many as registers are enough for
    parts = parts_of(row_blocks * batch * groups, n_keys, blocks * device_of(device).multiprocessors)
    per_part = pad(cdiv(n_keys, parts), tile)
    parts = cdiv(n_keys, per_part)
    values = {"n_rows": n_rows, "n_keys": n_keys, "columns": columns, "parts": parts}
    values |= {"keys_per_part": per_part, "padded_keys": padded}
    names, slots = {name: n for n, name in enumerate(_ARRAYS)}, {name: name for name in _ARRAYS}
    grids = {
        "pairwise_split": (cdiv(padded // 8 * steps * 32, _THREADS), 1, batch),
        "pairwise_products": (row_blocks, parts * groups, batch),
    }
    split, products = (
        Kernel(device, names, "pairwise/products.cu", name, known, grid, _THREADS, PARAMS, values, slots)
        for name, grid in grids.items()
    )
    return split, products, parts, padded


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return sums or logarithms for the rows of a call's points, whose roles change with `transposed`."""
    xp = pairs.xp
    *batch, n_rows, _ = pairs.spread("xy"[transposed]).shape
    columns = 0 if wanted.v is None else wanted.v.shape[-1]
    if pairs.is_empty or (wanted.sums and not columns):
        return nothing(xp, (*batch, n_rows), pairs.dim, columns)
    x, y, exponent = _points(pairs, transposed)
    of_row, of_key = (xp.square(p, dtype=np.float64).sum(-1) for p in (x, y))
    x, y = (xp.ascontiguousarray(xp.ldexp(p, _TOP - exponent)) for p in (x, y))
    if wanted.logs:
        of_key = wanted.key_log * _LOG2_E - of_key
    logs, n_keys, dim = wanted.logs, y.shape[-2], y.shape[-1]
    constants = constants_of(pairs.function.number, dim, columns, logs, pairs.precision == "tf32")
    sizes = math.prod(batch), n_rows, n_keys, columns
    split, products, parts, padded = _launches(pairs.origin.device, tuple(constants.items()), sizes)
    given = {
        "x": x,
        "y": y,
        "fragments": xp.empty((sizes[0], padded, dim), np.float32),
        "of_row": of_row.astype(np.float32),
        "of_key": of_key.astype(np.float32),
        "v": None if wanted.v is None else xp.ascontiguousarray(wanted.v.astype(np.float32, copy=False)),
        "unit": xp.ldexp(xp.ones((), np.float32), 2 * (exponent - _TOP) + 1),
        "sums": None if logs else xp.empty((parts, *batch, n_rows, columns), np.float32),
        "logs": xp.empty((parts, *batch, n_rows), np.float32) if logs else None,
    }
    addresses, stream = [address_of(array) for array in given.values()], pairs.origin.stream().ptr
    for kernel in (split, products):
        kernel.launch(addresses, stream)
    if logs:
        return Sums(logs=(log_sum(xp, given["logs"]) - of_row) / _LOG2_E)
    return Sums(sums=given["sums"].sum(0))


def _points(pairs: Pairs, transposed: bool) -> tuple[Any, Any, Any]:
    """Return rows and keys relative to their mean, scaled so that |x - y|^2 is z, and a bound of their exponents.

    With as many coordinates as the kernel takes at a time.
    """
    xp, more = pairs.xp, -pairs.dim % _STEP
    x, y = (pairs.spread(name) for name in ("yx" if transposed else "xy"))
    centre = y.mean(tuple(range(y.ndim - 1)), dtype=np.float64)
    root = xp.sqrt(xp.asarray(pairs.factor * pairs.function.base, np.float64))
    widths = [(0, 0)] * (x.ndim - 1) + [(0, more)]
    x, y = (xp.pad(((p - centre) * root).astype(np.float32), widths) for p in (x, y))
    _, exponent = xp.frexp(xp.fmax(*(xp.nanmax(xp.abs(p)) for p in (x, y))))
    return x, y, exponent
