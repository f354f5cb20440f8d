"""Which kernels, with which tiles and constants, compute a backward on a card: pure functions, no CuPy.

Three kernels may take part.  The key kernel (sm80/bwd.cu) owns dk and dv and, unless the call is deterministic, adds dq
up in memory.  The row kernel (sm80/bwd_rows.cu) computes dq in a fixed order.  The bias kernel (sm80/bwd_bias.cu)
computes dbias.
"""

import functools
import math
from collections.abc import Container
from typing import NamedTuple

from cuattn.cuda.sm80.forward_plan import CUDA_TYPES, check_limits, deposit_tiles, mask_code, pad
from cuattn.cuda.sm80.tiles import Card
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = [
    "STAT_ROWS", "BackwardTile", "Kernels", "SharedKeys", "atomic", "backward_plan", "kernels_of", "shared_bytes",
    "shared_keys", "sums",
]  # fmt: skip

STAT_ROWS = 128  # kStatRows: rows that one block of backward_preprocess looks at
_KB = 1024
_MAX_ROWS = 2**31 - 1  # counted through all heads, where a kernel is told one of them
_PADDING = 32  # elements: head dimensions are rounded up to a multiple of this, so that warps can share them evenly


class BackwardTile(NamedTuple):
    """One way of cutting a backward: sizes, warps, warps along the rows of the scores, pipeline depth."""

    block_m: int
    block_n: int
    warps: int
    scores_m: int
    stages: int


class Kernels(NamedTuple):
    """Tiles of the three kernels, and the padded head dimensions."""

    keys: BackwardTile
    rows: BackwardTile
    bias: BackwardTile
    head_dim: int
    head_dim_v: int
    chunk: int = 0  # columns that come in at a time where whole rows do not fit (sm80/bwd_wide.cu), else 0
    part: int = 0  # columns of a gradient that one block then owns


class SharedKeys(NamedTuple):
    """The last key tiles, which would leave most multiprocessors without work: each for several blocks of the grid."""

    first: int  # number of the first of these tiles, and of the first block that has a part of one
    parts: int  # blocks to a tile
    row_tiles: int  # of each such block
    grid: int


_T = BackwardTile
# (shared memory per block at least, element bytes, head dimension at most) -> tiles of the key kernel, the key kernel
# with a heavy mask or score function, the row kernel, the bias kernel; first match wins.
_TILES: tuple[tuple[int, int, int, tuple[_T, _T, _T, _T]], ...] = (
    # 227 KB: sm_90, sm_100, sm_103
    (200 * _KB, 2, 64, (_T(128, 128, 8, 2, 2), _T(64, 128, 8, 2, 2), _T(128, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (200 * _KB, 2, 128, (_T(64, 128, 8, 2, 2), _T(64, 64, 8, 4, 2), _T(128, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (200 * _KB, 2, 192, (_T(64, 64, 8, 4, 2), _T(32, 64, 8, 2, 2), _T(64, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (200 * _KB, 2, 256, (_T(64, 64, 8, 4, 2), _T(32, 64, 8, 2, 1), _T(64, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (200 * _KB, 2, 512, (_T(32, 32, 8, 2, 2), _T(32, 32, 8, 2, 2), _T(64, 32, 8, 4, 1), _T(64, 32, 8, 4, 1))),
    # 163 KB: sm_80, sm_87
    (160 * _KB, 2, 64, (_T(64, 128, 8, 2, 2), _T(64, 128, 8, 2, 2), _T(128, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (160 * _KB, 2, 96, (_T(64, 128, 8, 2, 2), _T(64, 64, 8, 4, 2), _T(128, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (160 * _KB, 2, 128, (_T(64, 128, 8, 2, 1), _T(64, 64, 8, 4, 2), _T(128, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (160 * _KB, 2, 256, (_T(64, 64, 8, 4, 1), _T(32, 64, 8, 2, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1))),
    # 99 KB: sm_86, sm_89, sm_120
    (0, 2, 64, (_T(64, 128, 8, 2, 1), _T(64, 128, 8, 2, 1), _T(128, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (0, 2, 128, (_T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1))),
    (0, 2, 256, (_T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1))),
    # float32
    (200 * _KB, 4, 64, (_T(64, 128, 8, 2, 1), _T(64, 64, 8, 4, 2), _T(64, 64, 8, 4, 2), _T(64, 64, 8, 4, 1))),
    (200 * _KB, 4, 128, (_T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1))),
    (160 * _KB, 4, 64, (_T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1))),
    (160 * _KB, 4, 128, (_T(32, 64, 8, 2, 1), _T(32, 64, 8, 2, 1), _T(32, 64, 8, 2, 1), _T(32, 64, 8, 2, 1))),
    (160 * _KB, 4, 256, (_T(32, 32, 8, 2, 1), _T(32, 32, 8, 2, 1), _T(32, 32, 8, 2, 1), _T(32, 32, 8, 2, 1))),
    (0, 4, 64, (_T(32, 64, 8, 2, 1), _T(32, 64, 8, 2, 1), _T(64, 64, 8, 4, 1), _T(64, 64, 8, 4, 1))),
    (0, 4, 128, (_T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1))),
    # float64
    (0, 8, 64, (_T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1))),
    (200 * _KB, 8, 128, (_T(16, 64, 8, 1, 2), _T(16, 64, 8, 1, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1))),
    (160 * _KB, 8, 128, (_T(32, 32, 8, 2, 1), _T(32, 32, 8, 2, 1), _T(32, 32, 4, 2, 1), _T(32, 32, 4, 2, 1))),
    (200 * _KB, 8, 256, (_T(16, 32, 8, 1, 1), _T(16, 32, 8, 1, 1), _T(16, 32, 8, 1, 1), _T(16, 32, 8, 1, 1))),
)

# Element bytes -> tile of all kernels where rows are too wide for those above; it fits every card.
_WIDE = {2: _T(64, 64, 8, 4, 2), 4: _T(64, 64, 8, 4, 2), 8: _T(32, 32, 4, 2, 2)}
_CHUNK = 64
_PART = 256


def _heavy(problem: Problem, widest: int) -> bool:
    """Whether masks and scores take so many registers that the key kernel needs a smaller tile."""
    if problem.softcap is not None or problem.mask in ("dense", "block") or problem.bias is not None:
        return True
    return problem.mask is not None and problem.dropout > 0 and widest <= 64


def kernels_of(problem: Problem, card: Card) -> Kernels:
    """Return the tiles for a problem on a card."""
    head_dim, head_dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
    widest = max(head_dim, head_dim_v)
    for shared, size, limit, (keys, heavy, rows, bias) in _TILES:
        if card.shared_bytes >= shared and problem.dtype.itemsize == size and widest <= limit:
            keys = heavy if _heavy(problem, widest) else keys
            while not (_divides(keys, head_dim) and _divides(rows, head_dim)):
                head_dim += _PADDING
            return Kernels(keys, rows, bias, head_dim, head_dim_v)
    tile = _WIDE[problem.dtype.itemsize]
    parts = -(-widest // _PART)
    part = pad(-(-widest // parts), _CHUNK)
    return Kernels(tile, tile, tile, pad(problem.head_dim, _CHUNK), pad(problem.head_dim_v, _CHUNK), _CHUNK, part)


def _divides(tile: BackwardTile, head_dim: int) -> bool:
    """Whether the warps can share dq's tile in blocks of 16 x 16 (square_partition in sm80/bwd_layout.cuh)."""
    along_rows = [m for m in (1, 2, 4, 8) if tile.warps % m == 0 and tile.block_m % (16 * m) == 0]
    return any(head_dim % (16 * tile.warps // m) == 0 for m in along_rows)


def _padded(width: int) -> int:
    unit = _PADDING if width <= 128 else 64 if width <= 256 else 256
    return pad(width, unit)


def atomic(problem: Problem, kernels: Kernels) -> bool:
    """Whether the key kernel adds dq up in memory, in no fixed order; if not, the row kernel computes it."""
    return not problem.deterministic and not kernels.chunk and max(kernels.head_dim, kernels.head_dim_v) <= 256


def shared_bytes(problem: Problem, kernels: Kernels, kernel: str) -> int:
    """Return the shared memory of one block of a kernel ("keys", "rows", "bias", "convert"), as its layout has it."""
    size, acc = problem.dtype.itemsize, problem.stat_dtype.itemsize
    padding, numbers = (32 if size == 8 else 16), (2 if size == 2 else 3)
    tile = kernels.keys if kernel == "convert" else getattr(kernels, kernel)
    width = (kernels.head_dim + kernels.head_dim_v) * size + 2 * padding  # of a row of q and do, or k and v
    unit = 4 / 16 if size == 4 else 0  # a float for 16 rows or keys
    scores = tile.block_m * (tile.block_n * size + padding) + int(tile.block_m * tile.block_n / 16 * unit)
    rows = tile.block_m * (width + numbers * acc) + int(2 * tile.block_m * unit)
    keys = tile.block_n * width + int(2 * tile.block_n * unit)
    exchange = tile.block_m * tile.block_n * acc if _paired(tile, size) else 0
    if kernels.chunk:
        row = kernels.chunk * size + padding
        rows = tile.block_m * numbers * acc
        keys = 2 * ((tile.block_m + tile.block_n) * row + int((tile.block_m + tile.block_n) * unit))
    if kernel == "convert":
        return tile.block_m * (kernels.head_dim * size + padding)
    if kernels.chunk and kernel != "bias":
        return keys + rows + scores
    if kernel == "keys":
        exchange = exchange if problem.softcap is not None else 0
        return keys + tile.stages * (rows + scores) + scores + exchange
    if kernel == "rows":
        return rows + tile.stages * keys + scores + exchange
    return max(rows + keys + exchange, tile.block_m * (tile.block_n + 1) * acc)


def _paired(tile: BackwardTile, size: int) -> bool:
    """Whether half of the warps compute scores and the others dp (sm80/bwd_layout.cuh)."""
    warps = tile.scores_m * min(tile.warps // tile.scores_m, tile.block_n // 16)
    return size == 8 and 2 * warps == tile.warps


def shared_keys(problem: Problem, kernels: Kernels, multiprocessors: int, sums: Container[str] = ()) -> SharedKeys:
    """Return which blocks of the key kernel share their key tiles (float64, dq in no fixed order; else none).

    Where all tiles take the same time and blocks have a multiprocessor each, the tiles of the last round are dealt out
    to all multiprocessors.  Their sums have to be short, since such blocks do not add to memory after cfg::flush_every.
    `sums` names gradients that are sums over broadcast axes.
    """
    tile, size = kernels.keys, problem.dtype.itemsize
    tiles = -(-problem.n_keys // tile.block_n) * problem.kv_heads * math.prod(problem.batch)
    row_tiles = -(-problem.n_queries // tile.block_m)
    none = SharedKeys(tiles, 1, row_tiles, tiles)
    in_turns = _paired(tile, size) and tile.stages == 2 and atomic(problem, kernels)
    deposits = deposit_tiles(size, problem.n_queries * problem.group, tile.block_m)
    last = tiles % multiprocessors
    if not in_turns or not deposits or not last or tiles < multiprocessors:
        return none
    if problem.mask is not None or problem.band is not None or "dk" in sums or "dv" in sums:
        return none
    each = -(-row_tiles // (multiprocessors // last))
    parts = -(-row_tiles // each)
    if parts == 1 or tiles * tile.block_n > _MAX_ROWS or each * problem.group > deposits:
        return none
    return SharedKeys(tiles - last, parts, each, tiles + last * (parts - 1))


def sums(problem: Problem, shape: tuple[int, ...], heads: int) -> bool:
    """Whether an operand of `shape` (aligned; `heads` of its own kind) was broadcast, so that its gradient is a sum."""
    return any(n == 1 < full for n, full in zip(shape, (*problem.batch, heads), strict=False))


@functools.lru_cache(maxsize=1024)
def backward_plan(problem: Problem, card: Card, load_bytes: int = 16, o_dtype: str = "") -> Plan:
    """Plan a backward on a card.

    Parameters
    ----------
    problem : Problem
    card : Card
    load_bytes : {16, 8, 4, 2}
        The widest access that the addresses and strides of q, k, v and do allow.
    o_dtype : str, optional
        Name of o's dtype; the input's by default.

    Returns
    -------
    Plan
        ``constants`` is the prologue that all kernels share, with the tile of the key kernel.

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    """
    check_limits(problem)
    kernels = kernels_of(problem, card)
    band, acc = problem.band, CUDA_TYPES[problem.stat_dtype.name]
    exact = kernels.head_dim == problem.head_dim and kernels.head_dim_v == problem.head_dim_v
    constants = {
        "elem": CUDA_TYPES[problem.dtype.name],
        "acc": acc,
        "o_elem": CUDA_TYPES[o_dtype or problem.dtype.name],
        "bias_elem": acc if problem.bias is None else CUDA_TYPES[problem.bias.name],
        "grad": CUDA_TYPES[problem.dtype.name],
        "bias_grad": acc if problem.bias is None else CUDA_TYPES[problem.bias.name],
        "head_dim": kernels.head_dim,
        "head_dim_v": kernels.head_dim_v,
        "whole_columns": exact and load_bytes == 16,
        **kernels.keys._asdict(),
        "flush_every": deposit_tiles(problem.dtype.itemsize, problem.n_queries * problem.group, kernels.keys.block_m),
        "blocks_per_sm": 1,
        "load_bytes": max(load_bytes, min(problem.dtype.itemsize, 8)),
        "dropout": problem.dropout,
        "runs": False,
        "bias": problem.bias is not None,
        "softcap": problem.softcap is not None,
        "tf32": problem.precision == "tf32",
        "prescaled": problem.bias is not None or problem.softcap is not None or not problem.scale > 0,
        "band_left": band is not None and band.left is not None,
        "band_right": band is not None and band.right is not None,
        "mask": mask_code(problem),
        "atomic_dq": atomic(problem, kernels),
        "chunk": kernels.chunk,
        "part": kernels.part,
    }
    return Plan(
        kernel="sm80",
        direction="backward",
        block_m=kernels.keys.block_m,
        block_n=kernels.keys.block_n,
        workers=kernels.keys.warps,
        smem_bytes=shared_bytes(problem, kernels, "keys"),
        workspace_bytes=_workspace_bytes(problem, kernels),
        reason=f"portable tensor-core kernel, {card.arch}",
        notes=_notes(problem, kernels, card, load_bytes),
        constants=tuple(constants.items()),
    )


def _workspace_bytes(problem: Problem, kernels: Kernels) -> int:
    heads = math.prod(problem.batch) * problem.heads
    rows = heads * pad(problem.n_queries, STAT_ROWS)
    vectors = 2 if problem.dtype.itemsize == 2 else 3
    total = rows * vectors * problem.stat_dtype.itemsize + 4 * rows // STAT_ROWS
    if atomic(problem, kernels):
        padded = pad(problem.n_queries, kernels.keys.block_m)
        total += heads * padded * kernels.head_dim * problem.stat_dtype.itemsize
    return total


def _notes(problem: Problem, kernels: Kernels, card: Card, load_bytes: int) -> tuple[str, ...]:
    notes = []
    if atomic(problem, kernels):
        notes.append("dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable")
    else:
        notes.append("dq by a second pass over the scores, in a fixed order")
    if shared_keys(problem, kernels, card.multiprocessors).parts > 1:
        notes.append("dk and dv of the last key tiles are added up likewise, by several blocks")
    if kernels.chunk:
        notes.append(
            f"rows too wide for shared memory: {kernels.chunk} columns at a time, scores again for {kernels.part}"
        )
    if problem.bias is not None:
        notes.append("dbias by a pass of its own, in a fixed order")
    if load_bytes < 16:
        notes.append(f"addresses or strides of q, k, v, do allow only {load_bytes}-byte loads")
    return tuple(notes)
