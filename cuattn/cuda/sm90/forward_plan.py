"""When and with which tiles the kernel for compute capability 9.0 does a forward: pure functions, no CuPy."""

import functools
import math
from typing import NamedTuple

from cuattn.cuda.sm80.forward_plan import CUDA_TYPES, mask_code, pad, tile_of
from cuattn.cuda.sm80.tiles import Card
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["ARCH", "L2_SHARE", "UNIT", "HopperTile", "counts", "few_rows", "hopper_plan", "leaves_idle", "refusal"]

ARCH = "sm_90a"
UNIT = 64  # query rows of a warpgroup, which the bounds of column masks count in

# Widths that the second product comes in (kernels/ptx/wgmma.cuh).
_VALUE_WIDTHS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
_MAX_HEAD_DIM = 256
_SLAB_COLUMNS, _ROW_BYTES = 64, 128  # a tile lies in slabs of 64 columns
_LIST_BYTES = 4 * (32 + 4)  # a list of key tiles
# Keys from which on it pays to begin the softmax under the warpgroup's own product, by rows of a tile.
_LONG = {128: 1024, 192: 2048}
L2_SHARE = 32 << 20  # bytes of k and v that neighbours in time share
# Rows, with those of a tile that are not there, that a key must meet before its products take longer than reading it:
# measured at d 128.
_RIDGE, _PORTABLE_RIDGE = 222, 77
_GAIN = 1.3  # what the portable kernel must promise before it is taken, unless its tiles are this much smaller:
_SMALLER = 8


class HopperTile(NamedTuple):
    """Query rows and keys of a tile, and buffers for keys (and values) and for queries."""

    block_m: int
    block_n: int
    stages: int
    q_stages: int


# head_dim at most, head_dim_v at most -> the tile, and a smaller one for softcap and dropout (registers); first match
# wins.  A column mask does not change it, so that the sums of one that says causal come in causal's order.
_TILES: tuple[tuple[int, int, HopperTile, HopperTile], ...] = (
    (64, 64, HopperTile(192, 128, 3, 3), HopperTile(192, 128, 3, 3)),
    (128, 128, HopperTile(128, 128, 2, 3), HopperTile(128, 128, 2, 3)),
    (192, 128, HopperTile(128, 128, 2, 1), HopperTile(128, 128, 2, 1)),
    (192, 192, HopperTile(128, 112, 2, 1), HopperTile(128, 96, 2, 1)),
    (256, 256, HopperTile(128, 80, 2, 1), HopperTile(128, 64, 2, 1)),
)


def _sizes(problem: Problem) -> tuple[int, int]:
    head_dim_v = next(width for width in _VALUE_WIDTHS if problem.head_dim_v <= width)
    return pad(problem.head_dim, 16), head_dim_v


def _tile(problem: Problem) -> HopperTile:
    head_dim, head_dim_v = _sizes(problem)
    row = next(row for row in _TILES if head_dim <= row[0] and head_dim_v <= row[1])
    capped = problem.softcap is not None
    tile = row[3] if capped or problem.dropout else row[2]
    if tile.block_m == 192 and (capped or problem.mask == "block" or problem.out_dtype.itemsize > 2):
        tile = tile._replace(block_m=128)  # these need registers that three warpgroups do not have
    if tile.block_m == 192 and problem.dropout and (problem.mask is not None or problem.band is not None):
        tile = tile._replace(block_n=112)
    if row[0] == 128 and problem.mask == "column":
        tile = tile._replace(q_stages=2)  # the intervals of partial tiles' keys take the third one's place
    return tile


def refusal(problem: Problem, card: Card) -> str | None:
    """Say why this kernel does not take a problem, or return None.

    Strides and addresses are another matter: see :func:`cuattn.cuda.sm90.tensor_map.why_not`.
    """
    if card.arch != "sm_90":
        return f"it needs compute capability 9.0, this GPU is {card.arch}"
    if problem.dtype.name not in ("float16", "bfloat16"):
        return f"it takes float16 and bfloat16, not {problem.dtype}"
    if problem.bias is not None:
        return "it takes no bias"
    if problem.mask == "dense":
        return "it takes no boolean mask"
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        return f"it takes head dimensions up to {_MAX_HEAD_DIM}, not {problem.head_dim} and {problem.head_dim_v}"
    if problem.head_dim_v % 8:
        return f"it writes rows in units of 8 elements, and v has {problem.head_dim_v}"
    if not problem.n_queries * problem.n_keys * problem.head_dim_v * problem.heads * math.prod(problem.batch):
        return "there is nothing to compute"
    return None


def leaves_idle(problem: Problem, card: Card) -> bool:
    """Whether most of the card would have no query rows; splitting the keys, as the portable kernel does, then wins."""
    return 2 * counts(problem)["row_tiles"] * problem.heads * math.prod(problem.batch) < card.multiprocessors


def few_rows(problem: Problem, card: Card) -> bool:
    """Whether the portable kernel would sooner be done, because this one mostly multiplies rows that are not there.

    Both read a key once from device memory, for all heads that share it.  This kernel's tiles have 128 rows or more of
    one head, the portable kernel's 16 or more, of the whole group where it can pack them.
    """
    tile, pack, *_ = tile_of(problem, card)
    own = problem.group * pad(problem.n_queries, _tile(problem).block_m)
    portable = problem.group // pack * pad(problem.n_queries * pack, tile.block_m)
    return own >= _SMALLER * portable or own / _RIDGE > _GAIN * max(portable / _PORTABLE_RIDGE, 1)


def counts(problem: Problem) -> dict[str, int]:
    """Return the counts that a forward is launched with: row_tiles, key_tiles, section."""
    tile = _tile(problem)
    total = problem.heads * math.prod(problem.batch)
    section = problem.group
    if problem.mask is not None or (problem.band is not None and problem.band.right is not None):
        bytes_per_head = problem.n_keys * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        heads = max(L2_SHARE // bytes_per_head, 1)
        section *= 1 << (heads.bit_length() - 1)
    return {
        "row_tiles": -(-problem.n_queries // tile.block_m),
        "key_tiles": -(-problem.n_keys // tile.block_n),
        "section": max(min(section, total), 1),
    }


def _shared_bytes(problem: Problem, tile: HopperTile) -> int:
    """Bytes of shared memory, as kernels/sm90/layout.cuh lays it out."""
    slabs, slabs_v = (-(-size // _SLAB_COLUMNS) for size in _sizes(problem))
    queries = slabs * tile.block_m * _ROW_BYTES
    if problem.out_dtype.itemsize == 2:
        queries = max(queries, slabs_v * tile.block_m * _ROW_BYTES)
    stage = (slabs + slabs_v) * tile.block_n * _ROW_BYTES
    intervals = 16 * tile.block_n if problem.mask == "column" else 0
    tiles = tile.q_stages * queries + tile.stages * (stage + intervals)
    barriers = 8 * (2 * tile.q_stages + 4 * tile.stages + 4)
    mail = 16 * tile.q_stages + _LIST_BYTES + 4 * tile.stages + 12
    return -(-(tiles + barriers) // 16) * 16 + mail


@functools.lru_cache(maxsize=1024)
def hopper_plan(problem: Problem) -> Plan:
    """Plan a forward that :func:`refusal` has nothing against; ``constants`` is the prologue of kernels/sm90/fwd.cu."""
    tile = _tile(problem)
    head_dim, head_dim_v = _sizes(problem)
    band = problem.band
    prescaled = problem.softcap is not None or problem.scale == 0
    constants = {
        "elem": CUDA_TYPES[problem.dtype.name],
        "acc": "float",
        "out": CUDA_TYPES[problem.out_dtype.name],
        "bias_elem": "float",
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "stages": tile.stages,
        "q_stages": tile.q_stages,
        "overlap": problem.n_keys >= _LONG[tile.block_m] and not problem.dropout,
        "dropout": problem.dropout,
        "runs": False,
        "softcap": problem.softcap is not None,
        "prescaled": prescaled,
        "negate": problem.scale < 0 and not prescaled,
        "band_left": band is not None and band.left is not None,
        "band_right": band is not None and band.right is not None,
        "mask": mask_code(problem),
    }
    return Plan(
        kernel="sm90",
        direction="forward",
        block_m=tile.block_m,
        block_n=tile.block_n,
        workers=4 * (tile.block_m // 64 + 1),
        smem_bytes=_shared_bytes(problem, tile),
        workspace_bytes=0,
        reason="bulk tensor copies and warpgroup products, sm_90a",
        constants=tuple(constants.items()),
    )
