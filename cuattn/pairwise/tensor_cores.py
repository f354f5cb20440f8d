"""Sums over keys for every row, on a GPU, of float32 points with many coordinates: kernels/pairwise/points.cuh."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import address_of, pad
from cuattn.cuda.device import device_of
from cuattn.cuda.launch import Kernel
from cuattn.io_model.sizes import cdiv
from cuattn.pairwise.device import MOST_BATCH, log_sum, nothing, parts_of
from cuattn.pairwise.functions import FUNCTIONS
from cuattn.pairwise.pairs import Pairs, Sums, Wanted

MOST_DIM = 128
_THREADS = 128
_STEP = 16  # coordinates of a product
_PREPARING = 256  # threads of a block that scales points
_LOG2_E = math.log2(math.e)

_ADDERS = 64  # blocks that sum keys for their mean
_GIVEN = "given_x", "given_y", "factors", "added", "row_log", "key_log"
_PREPARED = *_GIVEN, "extent", "x", "y", "of_row", "of_key", "unit", "squares", "scale"
_SUMMED = "x", "y", "tiles", "of_row", "of_key", "u", "v", "unit", "sums", "logs", "directions", "moments"
_ARRAYS = tuple(dict.fromkeys((*_PREPARED, *_SUMMED)))
PREPARE = np.dtype(
    [
        *((name, np.uint64) for name in _PREPARED),
        ("factor", np.float64),
        *((name, np.int64) for name in ("n_rows", "n_keys")),
        ("given_dim", np.int32),
    ],
    align=True,
)
"""Mirror of ``PrepareParams``."""
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in _SUMMED),
        *((name, np.int32) for name in ("n_rows", "n_keys", "columns", "parts", "keys_per_part", "padded_keys")),
    ],
    align=True,
)
"""Mirror of ``ProductParams``."""


TAKEN = "float32, at most 128 coordinates, no mask, and another function than the Laplacian"


def takes(pairs: Pairs) -> bool:
    """Return whether the kernels are for a call's points: the Laplacian asks for more digits where points are near."""
    fits = pairs.work == np.float32 and pairs.dim <= MOST_DIM and math.prod(pairs.batch) <= MOST_BATCH
    return fits and not pairs.is_masked and pairs.function is not FUNCTIONS["laplacian"]


def constants_of(pairs: Pairs, wanted: Wanted, hopper: bool) -> dict[str, Any]:
    """Return what the kernels are specialised by."""
    dim, columns = pad(pairs.dim, _STEP), 0 if wanted.v is None else wanted.v.shape[-1]
    most = 4 if dim <= 64 and not wanted.slopes else 2
    width = cdiv(columns, max(cdiv(columns, most), 1))
    logs = [log.dtype for log in (wanted.row_log, wanted.key_log) if log is not None]
    warpgroups, keys = 0, 64 if dim <= 64 and not wanted.slopes else 32
    if hopper and dim > 16:  # what was fastest; nothing is gained of 16 coordinates
        if dim <= 64:
            warpgroups, keys = 2 if wanted.slopes else 4, 64
        else:
            warpgroups, keys = (2, 64) if wanted.logs else (2 if wanted.slopes else 3, 32)
    return {
        "dim": dim,
        "width": width,
        "function": pairs.function.number,
        "tf32": pairs.precision == "tf32",
        "logs": wanted.key_log is not None,
        "log": "double" if np.float64 in logs else "float",
        "values": wanted.sums,
        "block_n": keys,
        "warpgroups": warpgroups,
        "stages": 4,
        "adders": _ADDERS,
    }


class _Launches(NamedTuple):
    """Kernels in their order; in how many parts the keys and groups the columns are divided; keys of whole tiles."""

    kernels: tuple[Kernel, ...]
    parts: int
    groups: int
    padded: int


class _Sizes(NamedTuple):
    """Of a problem."""

    batch: int
    n_rows: int
    n_keys: int
    columns: int
    dim: int


@lru_cache(maxsize=256)
def _launches(
    device: int, slopes: bool, constants: tuple[tuple[str, Any], ...], sizes: _Sizes, factor: float
) -> _Launches:
    """Return the launches of a problem of some size."""
    batch, n_rows, n_keys, columns, given_dim = sizes
    known = dict(constants)
    tile, dim, width, warpgroups = (int(known[name]) for name in ("block_n", "dim", "width", "warpgroups"))
    if warpgroups:
        name, rows = "warpgroup_slopes" if slopes else "warpgroups", 64 * warpgroups
        threads, blocks = 128 * warpgroups, 1
    else:
        name, rows = ("slopes", 64) if slopes else ("products", 128)
        threads, blocks = _THREADS, 512 // (64 + 5 * dim // 4)  # as many as registers are enough for
    groups, row_blocks, padded = max(cdiv(columns, max(width, 1)), 1), cdiv(n_rows, rows), pad(n_keys, tile)
    multiprocessors = device_of(device).multiprocessors
    parts = parts_of(row_blocks * batch * groups, n_keys, blocks * multiprocessors)
    per_part = pad(cdiv(n_keys, parts), tile)
    parts = cdiv(n_keys, per_part)
    names = {name: n for n, name in enumerate(_ARRAYS)}
    points = {"factor": factor, "n_rows": batch * n_rows, "n_keys": batch * n_keys, "given_dim": given_dim}
    of_points = dict(device=device, names=names, constants=known, dtype=PREPARE, values=points, threads=_PREPARING)
    of_points |= dict(path="pairwise/prepare.cu", slots={name: name for name in _PREPARED})
    both = min(4 * multiprocessors, cdiv(batch * max(n_rows, n_keys), _PREPARING // 32)), 2
    values = {"n_rows": n_rows, "n_keys": n_keys, "columns": columns, "parts": parts}
    values |= {"keys_per_part": per_part, "padded_keys": padded}
    of_sums = dict(device=device, names=names, constants=known, dtype=PARAMS, values=values, exact=warpgroups > 0)
    of_sums |= dict(path=f"pairwise/{name}.cu", slots={name: name for name in _SUMMED})
    stage = pad(4 * tile * (dim + 1 + (width or 4)), 128)
    shared = known["stages"] * (stage + 16) + 128 if warpgroups else 0
    split, grid = (cdiv(padded * (dim // 8), _THREADS), 1, batch), (row_blocks, parts * groups, batch)
    kernels = (
        Kernel(kernel="pairwise_add", grid=(_ADDERS,), **of_points),
        Kernel(kernel="pairwise_extent", grid=both, **of_points),
        Kernel(kernel="pairwise_prepare", grid=both, **of_points),
        Kernel(kernel="pairwise_split", grid=split, threads=_THREADS, **of_sums),
        Kernel(kernel=f"pairwise_{name}", grid=grid, threads=threads, shared_bytes=shared, **of_sums),
    )
    return _Launches(kernels, parts, groups, padded)


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return sums over keys for the rows of a call's points, whose roles change with `transposed`; see `Wanted`."""
    xp = pairs.xp
    x, y = (pairs.spread(name) for name in ("yx" if transposed else "xy"))
    *batch, n_rows, given_dim = x.shape
    columns = 0 if wanted.v is None else wanted.v.shape[-1]
    if pairs.is_empty or (not wanted.logs and not columns):
        return nothing(xp, (*batch, n_rows), given_dim, columns)
    factor = pairs.factor * pairs.function.base
    factors, factor = (None, float(factor)) if isinstance(factor, float) else (factor, 0.0)
    hopper = device_of(pairs.origin.device).arch == "sm_90"
    given = {"given_x": x, "given_y": y}
    given |= {"factors": factors, "row_log": wanted.row_log, "key_log": wanted.key_log, "u": wanted.u}
    constants = constants_of(pairs, wanted, hopper)
    sizes = _Sizes(math.prod(batch), n_rows, y.shape[-2], columns, given_dim)
    kernels, parts, groups, padded = _launches(
        pairs.origin.device, wanted.slopes, tuple(constants.items()), sizes, factor
    )
    tiled = wanted.v is not None and constants["warpgroups"] > 0
    given["v"] = _in_tiles(xp, wanted.v, constants["block_n"], constants["width"]) if tiled else wanted.v
    types = {"factors": np.float64}
    types |= dict.fromkeys(("row_log", "key_log"), np.float64 if constants["log"] == "double" else np.float32)
    arrays = {
        name: xp.ascontiguousarray(array.astype(types.get(name, np.float32), copy=False))
        for name, array in given.items()
        if array is not None
    }
    dim, rows, stacked = constants["dim"], (*batch, n_rows), (parts * groups, *batch, n_rows)
    made = {"x": (*rows, dim), "y": (*batch, y.shape[-2], dim), "of_row": rows, "of_key": y.shape[:-1], "unit": ()}
    made |= {"tiles": (sizes.batch, padded, dim + 1)}
    made |= {"sums": (parts, *rows, columns)} if wanted.sums else {}
    made |= {"logs": stacked} if wanted.logs else {}
    made |= {"directions": (*stacked, dim), "moments": stacked} if wanted.slopes else {}
    arrays |= {name: xp.empty(shape, np.float32) for name, shape in made.items()}
    arrays |= {"extent": xp.zeros((), np.uint32), "scale": xp.empty((), np.float64)}
    arrays["added"] = xp.empty((_ADDERS, given_dim), np.float64)
    arrays |= {"squares": xp.empty(rows, np.float64)} if wanted.logs else {}
    addresses, stream = [address_of(arrays.get(name)) for name in _ARRAYS], pairs.origin.stream().ptr
    for kernel in kernels:
        kernel.launch(addresses, stream)
    if wanted.logs:
        return Sums(logs=(log_sum(xp, arrays["logs"]) - arrays["squares"]) / _LOG2_E)
    totals = arrays["sums"].sum(0) if wanted.sums else None
    if not wanted.slopes:
        return Sums(totals)
    directions = arrays["directions"].sum(0)[..., :given_dim] / arrays["scale"]
    return Sums(totals, None, directions, arrays["moments"].sum(0) / pairs.function.base)


def _in_tiles(xp: Any, v: Any, tile: int, width: int) -> Any:
    """Return (..., keys, columns) as (..., groups, tiles, width, tile), with zeros where there is nothing."""
    *batch, n_keys, columns = v.shape
    more = [(0, 0)] * len(batch) + [(0, -n_keys % tile), (0, -columns % width)]
    divided = xp.pad(v, more).reshape(*batch, cdiv(n_keys, tile), tile, cdiv(columns, width), width)
    at = len(batch)
    return xp.moveaxis(divided, (at + 2, at, at + 3, at + 1), (at, at + 1, at + 2, at + 3))
