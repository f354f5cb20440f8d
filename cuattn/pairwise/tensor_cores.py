"""Sums over keys for every row, on a GPU, of float32 points with many coordinates: kernels/pairwise/points.cuh."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import pad
from cuattn.cuda.device import device_of
from cuattn.cuda.launch import Kernel
from cuattn.io_model.sizes import cdiv
from cuattn.pairwise.device import MOST_BATCH, address_of, log_sum, nothing, parts_of
from cuattn.pairwise.functions import FUNCTIONS
from cuattn.pairwise.pairs import Pairs, Sums, Wanted

MOST_DIM = 128
_THREADS = 128
_STEP = 16  # coordinates of a product
_TOP = 15  # largest exponent of a half
_LOG2_E = math.log2(math.e)

_ARRAYS = "x", "y", "tiles", "of_row", "of_key", "u", "v", "unit", "sums", "logs", "directions", "moments"
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in _ARRAYS),
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


def constants_of(function: int, dim: int, columns: int, tf32: bool, wanted: Wanted, hopper: bool) -> dict[str, Any]:
    """Return what the kernels are specialised by, for points of `dim` coordinates, a multiple of 16."""
    most = 4 if dim <= 64 and not wanted.slopes else 2
    width = cdiv(columns, max(cdiv(columns, most), 1))
    if wanted.slopes:
        keys, warpgroups = 32, 3 if dim <= 64 else 2
    else:
        keys, warpgroups = (64, 4) if dim <= 64 else (32, 3)
    return {
        "dim": dim,
        "width": width,
        "function": function,
        "tf32": tf32,
        "logs": wanted.key_log is not None,
        "values": wanted.sums,
        "block_n": keys,
        "warpgroups": warpgroups if hopper else 0,
        "stages": 4,
    }


class _Launches(NamedTuple):
    """What splits keys and what sums.

    In how many parts the keys and groups the columns are divided, and the keys of whole tiles.
    """

    split: Kernel
    sums: Kernel
    parts: int
    groups: int
    padded: int


@lru_cache(maxsize=256)
def _launches(
    device: int, slopes: bool, constants: tuple[tuple[str, Any], ...], sizes: tuple[int, int, int, int]
) -> _Launches:
    """Return the launches of a problem of some size."""
    batch, n_rows, n_keys, columns = sizes
    known = dict(constants)
    tile, dim, width, warpgroups = (int(known[name]) for name in ("block_n", "dim", "width", "warpgroups"))
    if warpgroups:
        name, rows = "warpgroup_slopes" if slopes else "warpgroups", 64 * warpgroups
        threads, blocks = 128 * warpgroups, 1
    else:
        name, rows = ("slopes", 64) if slopes else ("products", 128)
        threads, blocks = _THREADS, 512 // (64 + 5 * dim // 4)  # as many as registers are enough for
    groups, row_blocks, padded = max(cdiv(columns, max(width, 1)), 1), cdiv(n_rows, rows), pad(n_keys, tile)
    parts = parts_of(row_blocks * batch * groups, n_keys, blocks * device_of(device).multiprocessors)
    per_part = pad(cdiv(n_keys, parts), tile)
    parts = cdiv(n_keys, per_part)
    values = {"n_rows": n_rows, "n_keys": n_keys, "columns": columns, "parts": parts}
    values |= {"keys_per_part": per_part, "padded_keys": padded}
    names, slots = {name: n for n, name in enumerate(_ARRAYS)}, {name: name for name in _ARRAYS}
    stage = pad(4 * tile * (dim + 1 + (width or 4)), 128)
    common: dict[str, Any] = dict(device=device, names=names, path=f"pairwise/{name}.cu", constants=known, dtype=PARAMS)
    common |= dict(values=values, slots=slots, exact=warpgroups > 0)
    grid = cdiv(padded * (dim // 8), _THREADS), 1, batch
    split = Kernel(kernel="pairwise_split", grid=grid, threads=_THREADS, **common)
    grid, shared = (row_blocks, parts * groups, batch), known["stages"] * (stage + 16) + 128 if warpgroups else 0
    sums = Kernel(kernel=f"pairwise_{name}", grid=grid, threads=threads, shared_bytes=shared, **common)
    return _Launches(split, sums, parts, groups, padded)


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return sums over keys for the rows of a call's points, whose roles change with `transposed`; see `Wanted`."""
    xp = pairs.xp
    *batch, n_rows, _ = pairs.spread("xy"[transposed]).shape
    columns = 0 if wanted.v is None else wanted.v.shape[-1]
    if pairs.is_empty or (not wanted.logs and not columns):
        return nothing(xp, (*batch, n_rows), pairs.dim, columns)
    points = _Points(pairs, transposed)
    of_row, of_key = points.squares
    if wanted.key_log is not None:
        of_key = wanted.key_log * _LOG2_E - of_key
        of_row = -of_row if wanted.row_log is None else wanted.row_log * _LOG2_E - of_row
    n_keys, dim = points.y.shape[-2:]
    hopper = device_of(pairs.origin.device).arch == "sm_90"
    constants = constants_of(pairs.function.number, dim, columns, pairs.precision == "tf32", wanted, hopper)
    sizes = math.prod(batch), n_rows, n_keys, columns
    split, sums, parts, groups, padded = _launches(pairs.origin.device, wanted.slopes, tuple(constants.items()), sizes)
    stacked = parts * groups, *batch, n_rows
    v = wanted.v
    if v is not None and constants["warpgroups"]:
        v = _in_tiles(xp, v, constants["block_n"], constants["width"])
    given = {
        "x": points.x,
        "y": points.y,
        "tiles": xp.empty((sizes[0], padded, dim + 1), np.float32),
        "of_row": of_row,
        "of_key": of_key,
        "u": wanted.u,
        "v": v,
        "unit": points.unit,
    }
    given = {
        name: None if a is None else xp.ascontiguousarray(a.astype(np.float32, copy=False)) for name, a in given.items()
    }
    made = {
        "sums": xp.empty((parts, *batch, n_rows, columns), np.float32) if wanted.sums else None,
        "logs": xp.empty(stacked, np.float32) if wanted.logs else None,
        "directions": xp.empty((*stacked, dim), np.float32) if wanted.slopes else None,
        "moments": xp.empty(stacked, np.float32) if wanted.slopes else None,
    }
    addresses, stream = [address_of(array) for array in (*given.values(), *made.values())], pairs.origin.stream().ptr
    for kernel in (split, sums):
        kernel.launch(addresses, stream)
    if wanted.logs:
        return Sums(logs=(log_sum(xp, made["logs"]) - points.squares[0]) / _LOG2_E)
    totals, _, directions, moments = (None if a is None else a.sum(0) for a in made.values())
    if wanted.slopes:
        directions, moments = directions[..., : pairs.dim] / points.scale, moments / pairs.function.base
    return Sums(totals, None, directions, moments)


def _in_tiles(xp: Any, v: Any, tile: int, width: int) -> Any:
    """Return (..., keys, columns) as (..., groups, tiles, width, tile), with zeros where there is nothing."""
    *batch, n_keys, columns = v.shape
    more = [(0, 0)] * len(batch) + [(0, -n_keys % tile), (0, -columns % width)]
    divided = xp.pad(v, more).reshape(*batch, cdiv(n_keys, tile), tile, cdiv(columns, width), width)
    at = len(batch)
    return xp.moveaxis(divided, (at + 2, at, at + 3, at + 1), (at, at + 1, at + 2, at + 3))


class _Points:
    """Rows x and keys y relative to their mean, in units in which |x - y|^2 is z, times a power of two.

    Attributes
    ----------
    x, y : array
        In float32, with as many coordinates as the kernels take at a time, none above 2^15.
    squares : tuple of array
        |x|^2 and |y|^2 without the power of two, in float64.
    unit : array
        What x.y has to be multiplied by; 0-d.
    scale : array
        What the caller's coordinates were multiplied by; 0-d.
    """

    def __init__(self, pairs: Pairs, transposed: bool) -> None:
        xp, more = pairs.xp, -pairs.dim % _STEP
        x, y = (pairs.spread(name) for name in ("yx" if transposed else "xy"))
        centre = y.mean(tuple(range(y.ndim - 1)), dtype=np.float64)
        root = xp.sqrt(xp.asarray(pairs.factor * pairs.function.base, np.float64))
        widths = [(0, 0)] * (x.ndim - 1) + [(0, more)]
        x, y = (xp.pad(((p - centre) * root).astype(np.float32), widths) for p in (x, y))
        self.squares = tuple(xp.square(p, dtype=np.float64).sum(-1) for p in (x, y))
        _, exponent = xp.frexp(xp.maximum(*(xp.where(xp.isfinite(p), xp.abs(p), 0).max() for p in (x, y))))
        up = xp.ldexp(xp.ones((), np.float64), _TOP - exponent)
        self.x, self.y = ((p * up).astype(np.float32) for p in (x, y))
        self.unit, self.scale = 2 / (up * up), root * up
