"""Logarithms of sums over keys, on a GPU, of float32 points with few coordinates: kernels/pairwise/near.cu."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import address_of
from cuattn.cuda.device import device_of
from cuattn.cuda.launch import Kernel
from cuattn.io_model.sizes import cdiv
from cuattn.pairwise.pairs import Pairs

MOST_DIM = 3
_MANY = 2**32  # pairs that repay putting rows in an order
_THREADS = 128  # of a block that makes points ready
_KEYS = 64  # between looks at the sums
_WAVES = 8  # of blocks, at least, as some have less to do than others
_FULL = 0.96  # share of the last wave that is enough
_MOST_PARTS = 32
CONSTANTS = {"tiles": 4, "warps": 4, "blocks": 4}
"""Sixteens of rows of a warp, warps of a block, blocks of a multiprocessor."""

_ORDERED = "points", "least", "most", "order", "logs", "codes", "packed"
ORDER = np.dtype(
    [*((name, np.uint64) for name in _ORDERED), *((name, np.int32) for name in ("count", "padded"))], align=True
)
"""Mirror of ``OrderParams``."""
_SUMMED = "rows", "keys", "factors", "boxes", "floors", "of_parts", "logs"
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in _SUMMED),
        ("factor", np.float64),
        *((name, np.int32) for name in ("n_rows", "tiles", "of_warps", "parts")),
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


class _Launches(NamedTuple):
    """Kernels in their order; in how many parts the keys are divided, and how many warps have the rows."""

    kernels: tuple[Kernel, ...]
    parts: int
    of_warps: int


def parts_of(row_blocks: int, tiles: int, at_once: int) -> int:
    """Return in how many parts the keys are divided, so that the blocks are several full waves of so many."""
    few = cdiv(_WAVES * at_once, row_blocks)
    waves = {parts: row_blocks * parts / at_once for parts in range(few, 2 * few + 1)}
    parts = max(waves, key=lambda parts: (min(waves[parts] / math.ceil(waves[parts]), _FULL), -parts))
    return max(min(parts, _MOST_PARTS, tiles // _KEYS), 1)


@lru_cache(maxsize=256)
def _summing(device: int, sizes: tuple[int, int, int], factor: float) -> _Launches:
    """Return what sums, of a batch of rows and of tiles of keys."""
    batch, n_rows, tiles = sizes
    of_warps = cdiv(n_rows, 16 * CONSTANTS["tiles"])
    row_blocks = cdiv(of_warps, CONSTANTS["warps"])
    parts = parts_of(row_blocks * batch, tiles, CONSTANTS["blocks"] * device_of(device).multiprocessors)
    values = {"factor": factor, "n_rows": n_rows, "tiles": tiles, "of_warps": of_warps, "parts": parts}
    given: dict[str, Any] = dict(device=device, names={name: n for n, name in enumerate(_SUMMED)}, constants=CONSTANTS)
    given |= dict(dtype=PARAMS, values=values, slots={name: name for name in _SUMMED})
    far: dict[str, Any] = dict(path="pairwise/far.cu", threads=_THREADS, **given)
    near: dict[str, Any] = dict(path="pairwise/near.cu", threads=32 * CONSTANTS["warps"], **given)
    kernels = (
        Kernel(kernel="pairwise_boxes", grid=(cdiv(tiles, _THREADS // 32), 1, batch), **far),
        Kernel(kernel="pairwise_floors", grid=(cdiv(of_warps, _THREADS // 32), 1, batch), **far),
        Kernel(kernel="pairwise_near", grid=(row_blocks, parts, batch), **near),
        Kernel(kernel="pairwise_merge", grid=(cdiv(n_rows, near["threads"]), 1, batch), **near),
    )
    return _Launches(kernels, parts, of_warps)


def _prepare(pairs: Pairs, kernel: str, points: Any, padded: int, **others: Any) -> None:
    """Launch what makes points ready."""
    *batch, count, dim = points.shape
    logs = others.get("logs")
    log = "double" if logs is not None and logs.dtype == np.float64 else "float"
    launch = _preparing(pairs.origin.device, kernel, dim, log, (math.prod(batch), count, padded))
    given = {"points": points, **others}
    launch.launch([address_of(given.get(name)) for name in _ORDERED], pairs.origin.stream().ptr)


def _order(pairs: Pairs, name: str) -> Any:
    """Return an order of points in which neighbours are near, which is kept."""
    xp, key = pairs.xp, f"order of {name}"
    if key not in pairs.kept:
        points = xp.ascontiguousarray(pairs.spread(name))
        codes = xp.empty(points.shape[:-1], np.uint64)
        least, most = (xp.ascontiguousarray(of(axis=-2)) for of in (points.min, points.max))
        _prepare(pairs, "codes", points, points.shape[-2], least=least, most=most, codes=codes)
        pairs.kept[key] = xp.ascontiguousarray(xp.argsort(codes, axis=-1))
    return pairs.kept[key]


def log_sums(pairs: Pairs, x: Any, y: Any, key_log: Any, factor: tuple[Any, float]) -> Any:
    """Return log sum_j exp(key_log_j - w_ij).

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
    if "rows" not in pairs.kept:
        rows = pairs.kept["rows"] = xp.empty((*batch, n_rows, 4), np.float32)
        _prepare(pairs, "pack", x, n_rows, order=_order(pairs, "x"), packed=rows)
    tiles = cdiv(y.shape[-2], _KEYS)
    keys = xp.empty((*batch, tiles * _KEYS, 4), np.float32)
    logs = xp.ascontiguousarray(key_log)
    _prepare(pairs, "pack", y, tiles * _KEYS, order=_order(pairs, "y"), logs=logs, packed=keys)
    factors, number = factor
    launches = _summing(pairs.origin.device, (math.prod(batch), n_rows, tiles), number)
    made = {"boxes": (tiles, 8), "floors": (launches.of_warps, 2), "logs": (n_rows,)}
    arrays = {"rows": pairs.kept["rows"], "keys": keys, "factors": factors}
    arrays |= {name: xp.empty((*batch, *shape), np.float32) for name, shape in made.items()}
    arrays["of_parts"] = xp.empty((launches.parts, *batch, n_rows), np.float32)
    addresses = [address_of(arrays[name]) for name in _SUMMED]
    for kernel in launches.kernels:
        kernel.launch(addresses, pairs.origin.stream().ptr)
    return arrays["logs"]
