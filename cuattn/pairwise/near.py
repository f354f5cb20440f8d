"""Logarithms of sums over keys, on a GPU, of float32 points with few coordinates: kernels/pairwise/near.cu."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn.cuda.arguments import pad
from cuattn.cuda.device import device_of
from cuattn.cuda.launch import Kernel
from cuattn.io_model.sizes import cdiv
from cuattn.pairwise.pairs import Pairs

MOST_DIM = 3
_MANY = 2**32  # pairs that repay putting rows in an order
_THREADS = 128  # of a block that makes points ready
_KEYS = 64  # between looks at the sums
_ITEMS = 8  # blocks for each that a multiprocessor has at once, so that the last ones are few
CONSTANTS = {"tiles": 4, "warps": 4, "blocks": 4, "emulated": 0}
"""Sixteens of rows of a warp, warps of a block, blocks of a multiprocessor, exponentials of sixteen by products."""

_ORDERED = "points", "least", "most", "order", "logs", "codes", "packed"
ORDER = np.dtype([*((name, np.uint64) for name in _ORDERED), *((name, np.int32) for name in ("count", "padded"))], align=True)
"""Mirror of ``OrderParams``."""
_SUMMED = "rows", "keys", "factors", "logs"
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in _SUMMED),
        ("factor", np.float64),
        *((name, np.int32) for name in ("n_rows", "padded_keys", "keys_per_part")),
    ],
    align=True,
)
"""Mirror of ``NearParams``."""


def takes(pairs: Pairs, n_rows: int, n_keys: int) -> bool:
    """Return whether the kernel is for the points of a log-sum-exp, none of them masked."""
    many = math.prod(pairs.batch) * n_rows * n_keys >= _MANY
    return pairs.work == np.float32 and pairs.dim <= MOST_DIM and pairs.kernel is None and many


@lru_cache(maxsize=256)
def _preparing(device: int, kernel: str, dim: int, log: str, sizes: tuple[int, int, int]) -> Kernel:
    """Return a launch that makes points ready."""
    batch, count, padded = sizes
    names = {name: n for n, name in enumerate(_ORDERED)}
    slots, values = {name: name for name in _ORDERED}, {"count": count, "padded": padded}
    known, grid = {"dim": dim, "log": log}, (cdiv(padded, _THREADS), 1, batch)
    return Kernel(device, names, "pairwise/order.cu", f"pairwise_{kernel}", known, grid, _THREADS, ORDER, values, slots)


@lru_cache(maxsize=256)
def _summing(device: int, sizes: tuple[int, int, int], factor: float) -> tuple[Kernel, int]:
    """Return a launch, and in how many parts the keys are divided."""
    batch, n_rows, padded = sizes
    row_blocks = cdiv(n_rows, 16 * CONSTANTS["tiles"] * CONSTANTS["warps"])
    at_once = CONSTANTS["blocks"] * device_of(device).multiprocessors
    parts = min(max(cdiv(_ITEMS * at_once, row_blocks * batch), 1), 32, max(padded // 4096, 1))
    per_part = pad(cdiv(padded, parts), _KEYS)
    parts = cdiv(padded, per_part)
    values = {"factor": factor, "n_rows": n_rows, "padded_keys": padded, "keys_per_part": per_part}
    names, slots = {name: n for n, name in enumerate(_SUMMED)}, {name: name for name in _SUMMED}
    grid, threads = (row_blocks, parts, batch), 32 * CONSTANTS["warps"]
    kernel = Kernel(
        device, names, "pairwise/near.cu", "pairwise_near", CONSTANTS, grid, threads, PARAMS, values, slots
    )
    return kernel, parts


def _prepare(pairs: Pairs, kernel: str, points: Any, padded: int, **others: Any) -> None:
    """Launch what makes points ready."""
    *batch, count, dim = points.shape
    logs = others.get("logs")
    log = "double" if logs is not None and logs.dtype == np.float64 else "float"
    launch = _preparing(pairs.origin.device, kernel, dim, log, (math.prod(batch), count, padded))
    given = {"points": points, **others}
    addresses = [given[name].data.ptr if name in given else 0 for name in _ORDERED]
    launch.launch(addresses, pairs.origin.stream().ptr)


def _rows(pairs: Pairs, points: Any) -> Any:
    """Return rows in an order in which neighbours are near, each with its place, as (..., rows, 4)."""
    xp = pairs.xp
    *batch, count, _ = points.shape
    codes, rows = xp.empty((*batch, count), np.uint64), xp.empty((*batch, count, 4), np.float32)
    least, most = (xp.ascontiguousarray(of(axis=-2)) for of in (points.min, points.max))
    _prepare(pairs, "codes", points, count, least=least, most=most, codes=codes)
    order = xp.ascontiguousarray(xp.argsort(codes, axis=-1))
    _prepare(pairs, "pack", points, count, order=order, packed=rows)
    return rows


def log_sums(pairs: Pairs, x: Any, y: Any, key_log: Any, factor: tuple[Any, float]) -> Any:
    """Return base-2 logarithms of the sums of parts of the keys, which lie along the first axis.

    Parameters
    ----------
    pairs : Pairs
    x, y : array
        Rows and keys of all the batch, contiguous.
    key_log : array
    factor : (array or None, float)
        The factor of z: on the device, or the number.
    """
    xp = pairs.xp
    *batch, n_rows, _ = x.shape
    n_keys, rows = y.shape[-2], pairs.kept.get("rows")
    if rows is None:
        rows = pairs.kept["rows"] = _rows(pairs, x)
    padded = pad(n_keys, _KEYS)
    keys = xp.empty((*batch, padded, 4), np.float32)
    _prepare(pairs, "pack", y, padded, logs=xp.ascontiguousarray(key_log), packed=keys)
    factors, number = factor
    kernel, parts = _summing(pairs.origin.device, (math.prod(batch), n_rows, padded), number)
    logs = xp.empty((parts, *batch, n_rows), np.float32)
    addresses = [0 if array is None else array.data.ptr for array in (rows, keys, factors, logs)]
    kernel.launch(addresses, pairs.origin.stream().ptr)
    return logs
