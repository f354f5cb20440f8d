"""Which kernels, with which tiles and constants, compute a backward on a device: pure functions, no CuPy.

Three kernels may take part.  The key kernel (sm80/bwd.cu) owns dk and dv and, unless the call is deterministic, adds dq
up in memory.  The row kernel (sm80/bwd_rows.cu) computes dq in a fixed order.  The bias kernel (sm80/bwd_bias.cu)
computes dbias.
"""

import functools
import math
from collections.abc import Container
from typing import NamedTuple

from cuattn.cuda.arguments import pad
from cuattn.cuda.constants import backward_constants
from cuattn.cuda.device import Device
from cuattn.cuda.sm80.forward_plan import flush_tiles
from cuattn.cuda.sm80.tiles import WIDE, BackwardTile, backward_tiles
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["STAT_ROWS", "Cut", "SharedKeys", "backward_plan", "cut", "is_sum", "shared_bytes", "shared_keys"]

STAT_ROWS = 128  # kStatRows: rows that one block of backward_preprocess looks at
_MAX_ROWS = 2**31 - 1  # counted through all heads, where a kernel is told one of them
_PADDING = 32  # elements: head dimensions are rounded up to a multiple of this, so that warps can share them evenly
_WIDEST_SUMMED = 256  # head dimension up to which dq may be added up in memory
_CHUNK = 64
_PART = 256


class Cut(NamedTuple):
    """How a backward is cut: the tiles of its three kernels, and the padded head dimensions."""

    keys: BackwardTile
    rows: BackwardTile
    bias: BackwardTile
    head_dim: int
    head_dim_v: int
    atomic: bool  # the key kernel adds dq up in memory, in no fixed order; if not, the row kernel computes it
    chunk: int = 0  # columns that come in at a time where whole rows do not fit (sm80/bwd_wide.cu), else 0
    part: int = 0  # columns of a gradient that one block then owns


class SharedKeys(NamedTuple):
    """The last key tiles, which would leave most multiprocessors without work: each for several blocks of the grid."""

    first: int  # number of the first of these tiles, and of the first block that has a part of one
    parts: int  # blocks to a tile
    row_tiles: int  # of each such block
    grid: int


def _heavy(problem: Problem, widest: int) -> bool:
    """Whether masks and scores take so many registers that the key kernel needs a smaller tile."""
    tested = len(problem.masks) > 1 or not set(problem.masks) <= {"column"}
    if problem.softcap is not None or tested or problem.bias is not None:
        return True
    return bool(problem.masks) and problem.dropout > 0 and widest <= 64


def cut(problem: Problem, device: Device) -> Cut:
    """Return how a backward is cut on a device."""
    head_dim, head_dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
    widest, products = max(head_dim, head_dim_v), problem.row.products
    tiles = backward_tiles(device.shared_bytes, products, widest)
    if tiles is None:
        parts = cdiv(widest, _PART)
        part = pad(cdiv(widest, parts), _CHUNK)
        columns = pad(problem.head_dim, _CHUNK), pad(problem.head_dim_v, _CHUNK)
        return Cut(*3 * (WIDE[products],), *columns, atomic=False, chunk=_CHUNK, part=part)
    keys = tiles.heavy if _heavy(problem, widest) else tiles.keys
    while not (_divides(keys, head_dim) and _divides(tiles.rows, head_dim)):
        head_dim += _PADDING
    atomic = not problem.deterministic and max(head_dim, head_dim_v) <= _WIDEST_SUMMED
    return Cut(keys, tiles.rows, tiles.bias, head_dim, head_dim_v, atomic)


def _divides(tile: BackwardTile, head_dim: int) -> bool:
    """Whether the warps can share dq's tile in blocks of 16 x 16 (square_partition in sm80/bwd_layout.cuh)."""
    along_rows = [m for m in (1, 2, 4, 8) if tile.warps % m == 0 and tile.block_m % (16 * m) == 0]
    return any(head_dim % (16 * tile.warps // m) == 0 for m in along_rows)


def _padded(width: int) -> int:
    unit = _PADDING if width <= 128 else 64 if width <= 256 else 256
    return pad(width, unit)


def shared_bytes(problem: Problem, made: Cut, kernel: str) -> int:
    """Return the shared memory of one block of a kernel ("keys", "rows", "bias", "convert"), as its layout has it."""
    products, size, acc = problem.row.products, problem.dtype.itemsize, problem.stat_dtype.itemsize
    padding, numbers = (32 if products == "double" else 16), (2 if products == "half" else 3)
    tile = made.keys if kernel == "convert" else getattr(made, kernel)
    width = (made.head_dim + made.head_dim_v) * size + 2 * padding  # of a row of q and do, or k and v
    unit = 4 / 16 if products == "split" else 0  # a float for 16 rows or keys
    scores = tile.block_m * (tile.block_n * size + padding) + int(tile.block_m * tile.block_n / 16 * unit)
    rows = tile.block_m * (width + numbers * acc) + int(2 * tile.block_m * unit)
    keys = tile.block_n * width + int(2 * tile.block_n * unit)
    exchange = tile.block_m * tile.block_n * acc if _paired(tile, products) else 0
    if made.chunk:
        row = made.chunk * size + padding
        rows = tile.block_m * numbers * acc
        keys = 2 * ((tile.block_m + tile.block_n) * row + int((tile.block_m + tile.block_n) * unit))
    if kernel == "convert":
        return tile.block_m * (made.head_dim * size + padding)
    if made.chunk and kernel != "bias":
        return keys + rows + scores
    if kernel == "keys":
        exchange = exchange if problem.softcap is not None else 0
        return keys + tile.stages * (rows + scores) + scores + exchange
    if kernel == "rows":
        return rows + tile.stages * keys + scores + exchange
    return max(rows + keys + exchange, tile.block_m * (tile.block_n + 1) * acc)


def _paired(tile: BackwardTile, products: str) -> bool:
    """Whether half of the warps compute scores and the others dp (sm80/bwd_layout.cuh)."""
    warps = tile.scores_m * min(tile.warps // tile.scores_m, tile.block_n // 16)
    return products == "double" and 2 * warps == tile.warps


def shared_keys(problem: Problem, made: Cut, multiprocessors: int, sums: Container[str] = ()) -> SharedKeys:
    """Return which blocks of the key kernel share their key tiles (float64, dq in no fixed order; else none).

    Where all tiles take the same time and blocks have a multiprocessor each, the tiles of the last round are dealt out
    to all multiprocessors.  Their sums have to be short, since such blocks do not add to memory after cfg::flush_every.
    `sums` names gradients that are sums over broadcast axes.
    """
    tile, products = made.keys, problem.row.products
    tiles = cdiv(problem.n_keys, tile.block_n) * problem.kv_heads * math.prod(problem.batch)
    row_tiles = cdiv(problem.n_queries, tile.block_m)
    none = SharedKeys(tiles, 1, row_tiles, tiles)
    in_turns = _paired(tile, products) and tile.stages == 2 and made.atomic
    together = flush_tiles(products, problem.n_queries * problem.group, tile.block_m)
    last = tiles % multiprocessors
    if not in_turns or not together or not last or tiles < multiprocessors:
        return none
    if problem.masks or problem.band is not None or "dk" in sums or "dv" in sums:
        return none
    each = cdiv(row_tiles, multiprocessors // last)
    parts = cdiv(row_tiles, each)
    if parts == 1 or tiles * tile.block_n > _MAX_ROWS or each * problem.group > together:
        return none
    return SharedKeys(tiles - last, parts, each, tiles + last * (parts - 1))


def is_sum(problem: Problem, shape: tuple[int, ...], heads: int) -> bool:
    """Whether an operand of `shape` (aligned; `heads` of its own kind) was broadcast, so that its gradient is a sum."""
    return any(n == 1 < full for n, full in zip(shape, (*problem.batch, heads), strict=False))


@functools.lru_cache(maxsize=1024)
def backward_plan(problem: Problem, device: Device, load_bytes: int = 16, o_dtype: str = "") -> Plan:
    """Plan a backward on a device that the forward's ``unsupported_reason`` has nothing against.

    Parameters
    ----------
    problem : Problem
    device : Device
    load_bytes : {16, 8, 4, 2}
        The widest access that the addresses and strides of q, k, v and do allow.
    o_dtype : str, optional
        Name of o's dtype; the input's by default.

    Returns
    -------
    Plan
        ``constants`` is the prologue that all kernels share, with the tile of the key kernel.
    """
    made = cut(problem, device)
    exact = made.head_dim == problem.head_dim and made.head_dim_v == problem.head_dim_v
    constants = {
        **backward_constants(problem, o_dtype),
        **made.keys._asdict(),
        "head_dim": made.head_dim,
        "head_dim_v": made.head_dim_v,
        "whole_columns": exact and load_bytes == 16,
        "flush_every": flush_tiles(problem.row.products, problem.n_queries * problem.group, made.keys.block_m),
        "blocks_per_sm": 1,
        "load_bytes": max(load_bytes, min(problem.dtype.itemsize, 8)),
        "atomic_dq": made.atomic,
        "chunk": made.chunk,
        "part": made.part,
    }
    return Plan(
        kernel="sm80",
        direction="backward",
        block_m=made.keys.block_m,
        block_n=made.keys.block_n,
        workers=made.keys.warps,
        smem_bytes=shared_bytes(problem, made, "keys"),
        workspace_bytes=0,
        reason=f"portable tensor-core kernel, {device.arch}",
        notes=_notes(problem, made, device, load_bytes),
        constants=tuple(constants.items()),
    )


def _notes(problem: Problem, made: Cut, device: Device, load_bytes: int) -> tuple[str, ...]:
    notes = []
    if made.atomic:
        notes.append("dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable")
    else:
        notes.append("dq by a second pass over the scores, in a fixed order")
    if shared_keys(problem, made, device.multiprocessors).parts > 1:
        notes.append("dk and dv of the last key tiles are added up likewise, by several blocks")
    if made.chunk:
        notes.append(f"rows too wide for shared memory: {made.chunk} columns at a time, scores again for {made.part}")
    if problem.bias is not None:
        notes.append("dbias by a pass of its own, in a fixed order")
    if load_bytes < 16:
        notes.append(f"addresses or strides of q, k, v, do allow only {load_bytes}-byte loads")
    return tuple(notes)
