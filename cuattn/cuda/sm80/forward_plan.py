"""Which kernel, with which tiles and constants, computes a problem on a card: pure functions, no CuPy."""

import functools

import numpy as np

from cuattn.cuda.sm80.tiles import TICKETS, VALUE_COLUMNS, Card, Tile, forward_tile
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["CUDA_TYPES", "check_limits", "deposit_tiles", "forward_plan", "grid_of", "mask_code", "pad", "tile_of"]

CUDA_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
_MASK_CODES = {None: 0, "column": 1, "block": 2, "dense": 3}
_MAX_LENGTH = 2**30  # rows and keys are counted in 32 bits, with room for the band's arithmetic
_MAX_PARTS = 64
_MERGE_COST = 96  # rows of a warp times (16 + parts) that are merged before a second kernel would have begun
_STREAMS = 4  # blocks of few rows side by side on a multiprocessor, or teams of one such block
_STREAM_KEYS = 32  # keys per tile of such a block
_STREAM_STAGES = 3
_MIN_SPLIT_TILES = 4  # a part of the key axis shorter than this costs more in merging than it gains
_KB = 1024
_PADDING = {2: 32, 8: 16}  # element bytes -> elements: rows of a tile in shared memory are multiples of this
# Element bytes -> keys (forward) or queries (backward) that are summed in registers before the sums move to memory, and
# the smallest number of them that is worth it: beyond, a sum that is rounded after every few terms loses digits.
_DEPOSITS = {2: (0, 0), 4: (2048, 16384), 8: (1024, 1024)}
_SEGMENT = 128  # float32 is split into halves by segments of a row (kernels/attn/split_f32.cuh)


def pad(length: int, unit: int) -> int:
    """Round up to a multiple of `unit`, at least one of them.

    >>> pad(80, 32), pad(0, 32)
    (96, 32)
    """
    return max(-(-length // unit), 1) * unit


def _padded(length: int, size: int) -> int:
    """Return a head dimension as the kernel takes it: in float32 a power of two or whole segments."""
    if size != 4 or length > _SEGMENT:
        return pad(length, _PADDING.get(size, _SEGMENT))
    return max(1 << (length - 1).bit_length() if length else 0, 16)


def mask_code(problem: Problem) -> int:
    """Return ``cfg::mask``."""
    return _MASK_CODES[problem.mask]


def check_limits(problem: Problem) -> None:
    """Raise UnsupportedError, naming the argument, for what the portable kernels cannot do."""
    if problem.kernel not in (None, "sm80"):
        raise UnsupportedError(f"kernel is {problem.kernel!r}; expected None or 'sm80' for this problem on this GPU")
    if problem.head_dim > 512:
        raise UnsupportedError(f"q has head dimension {problem.head_dim}; expected at most 512 on a GPU")
    for name, length in (("q", problem.n_queries), ("k", problem.n_keys)):
        if length >= _MAX_LENGTH:
            raise UnsupportedError(f"{name} has {length} rows; expected fewer than 2**30 on a GPU")


def _row_tile(problem: Problem, tile: Tile, pack: int) -> Tile:
    """Shrink the row tile to what few queries fill: 16 rows per warp then, and more blocks side by side."""
    rows = problem.n_queries * pack
    if rows > tile.block_m // 2:
        return tile
    block_m = next(size for size in (16, 32, 64) if rows <= size or size == 64)
    if block_m >= tile.block_m:
        return tile
    # Such a block streams keys and values; a deeper pipeline keeps the memory busy, and small tiles many warps.
    many = problem.n_keys >= 2 * _MIN_SPLIT_TILES * tile.block_n
    block_n = min(tile.block_n, _STREAM_KEYS) if many else tile.block_n
    return Tile(block_m, block_n, block_m // 16, stages=max(tile.stages, _STREAM_STAGES), min_blocks=1)


def _heavy(problem: Problem) -> bool:
    """Whether testing elements takes so many registers that a warp can only own 16 rows."""
    return problem.bias is not None or problem.softcap is not None or problem.mask in ("block", "dense")


def _wide(problem: Problem, head_dim: int, head_dim_v: int) -> bool:
    """Whether a float32 kernel with 32 rows per warp would not find the registers at head dimension 128."""
    ragged = problem.head_dim != head_dim or problem.head_dim_v % head_dim_v != 0
    return ragged or problem.mask == "column" or problem.precision == "tf32"


def _pack(problem: Problem, block_m: int) -> int:
    """Return how many heads share a row tile: the whole group when there are few queries, else 1."""
    if problem.mask is not None or problem.bias is not None or problem.dropout or problem.group == 1:
        return 1
    return problem.group if problem.n_queries * problem.group <= block_m else 1


def tile_of(problem: Problem, card: Card) -> tuple[Tile, int, int, int]:
    """Return the forward's tile, heads packed per row tile, and padded head_dim and head_dim_v."""
    size = problem.dtype.itemsize
    head_dim = _padded(problem.head_dim, size)
    head_dim_v = _padded(min(problem.head_dim_v, VALUE_COLUMNS[size]), size)
    tile = forward_tile(card.shared_bytes, size, max(head_dim, head_dim_v))
    if tile is None:
        raise UnsupportedError(
            f"q has dtype {problem.dtype} and head dimension {problem.head_dim}; no kernel does that on this GPU"
        )
    if problem.mask == "block" and size == 2 and tile.block_n % 64:
        tile = tile._replace(block_n=64)  # blocks are usually multiples of 64, and then no tile is partial
    pack = _pack(problem, tile.block_m)
    tile = _row_tile(problem, tile, pack)
    if tile.stages > 2 and 2 * _shared_bytes(problem, tile, head_dim, head_dim_v) > card.shared_bytes:
        tile = tile._replace(stages=2)
    if tile.block_m > 16 * tile.warps:
        if size == 4 and (_heavy(problem) or (max(head_dim, head_dim_v) > 64 and _wide(problem, head_dim, head_dim_v))):
            tile = tile._replace(block_m=16 * tile.warps)
        elif size == 2 and _heavy(problem) and max(head_dim, head_dim_v) >= 64:
            tile = tile._replace(warps=tile.block_m // 16, min_blocks=1)
    return tile, pack, head_dim, head_dim_v


def _blocks(problem: Problem, tile: Tile, pack: int) -> int:
    """Return the blocks of one part of the key axis."""
    row_tiles = -(-problem.n_queries * pack // tile.block_m)
    return int(np.prod(problem.batch, dtype=np.int64)) * (problem.heads // pack) * row_tiles


def _teams(problem: Problem, tile: Tile, card: Card, pack: int, head_dim: int, head_dim_v: int) -> int:
    """Return how many warps of a block divide the keys among them: enough that few blocks keep the memory busy."""
    key_tiles = -(-problem.n_keys // tile.block_n)
    if problem.dtype.itemsize != 2 or tile.warps > 1 or problem.head_dim_v > head_dim_v:
        return 1
    teams = _STREAMS
    while teams > 1 and (
        _blocks(problem, tile, pack) * teams > _STREAMS * card.multiprocessors
        or key_tiles < 2 * _MIN_SPLIT_TILES * teams
        or _shared_bytes(problem, tile, head_dim, head_dim_v, teams) > card.shared_bytes - _KB
    ):
        teams //= 2
    return teams


def _splits(
    problem: Problem, tile: Tile, card: Card, pack: int, shared_bytes: int, head_dim_v: int, teams: int
) -> tuple[int, int]:
    """Return the parts of the key axis among blocks, and the key tiles of each team, so that few rows fill the card."""
    key_tiles = -(-problem.n_keys // tile.block_n)
    blocks = _blocks(problem, tile, pack)
    per_multiprocessor = max(tile.min_blocks, min(_STREAMS, (card.shared_bytes + _KB) // (shared_bytes + _KB)))
    slots = card.multiprocessors * per_multiprocessor
    if blocks == 0 or 2 * blocks > slots or key_tiles < 2 * _MIN_SPLIT_TILES * teams or problem.head_dim_v > head_dim_v:
        return 1, -(-key_tiles // teams)
    parts = min(slots // blocks, key_tiles // (_MIN_SPLIT_TILES * teams), _MAX_PARTS)
    split_tiles = -(-key_tiles // (parts * teams))
    return -(-key_tiles // (split_tiles * teams)), split_tiles


def _merges(problem: Problem, tile: Tile, pack: int, teams: int, splits: int) -> bool:
    """Whether the last block of a row tile merges the parts: there are few, and it saves a arguments."""
    rows = min(problem.n_queries * pack, tile.block_m)
    row_tiles = _blocks(problem, tile, pack)
    warp_rows = -(-rows // (tile.warps * teams))
    return splits > 1 and row_tiles <= TICKETS and warp_rows * (16 + splits) <= _MERGE_COST


def deposit_tiles(size: int, length: int, block: int) -> int:
    """Return ``cfg::flush_every``: how many tiles of `block` are summed in registers at a time; 0: all `length`.

    >>> deposit_tiles(8, 4096, 16), deposit_tiles(8, 1024, 16)
    (64, 0)
    """
    together, least = _DEPOSITS[size]
    return together // block if together and length > least else 0


def _shared_bytes(problem: Problem, tile: Tile, head_dim: int, head_dim_v: int, teams: int = 1) -> int:
    size = problem.dtype.itemsize

    def row_bytes(columns: int) -> int:
        exponents = 4 * -(-columns // _SEGMENT) if size == 4 else 0
        return columns * size + exponents

    key = row_bytes(head_dim) + row_bytes(head_dim_v) + (16 if problem.mask == "column" else 0)
    deposits = deposit_tiles(size, problem.n_keys, tile.block_n)
    maxima = problem.stat_dtype.itemsize * tile.block_m if deposits else 0
    return tile.block_m * row_bytes(head_dim) + teams * tile.stages * tile.block_n * key + maxima


@functools.lru_cache(maxsize=1024)
def forward_plan(problem: Problem, card: Card, load_bytes: int = 16) -> Plan:
    """Plan a forward on a card.

    Parameters
    ----------
    problem : Problem
    card : Card
    load_bytes : {16, 8, 4, 2}
        The widest access that the addresses and strides of q, k and v allow.

    Returns
    -------
    Plan
        ``constants`` is the prologue of kernels/sm80/fwd.cu.

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    """
    check_limits(problem)
    tile, pack, head_dim, head_dim_v = tile_of(problem, card)
    teams = _teams(problem, tile, card, pack, head_dim, head_dim_v)
    shared = _shared_bytes(problem, tile, head_dim, head_dim_v, teams)
    splits, _ = _splits(problem, tile, card, pack, shared, head_dim_v, teams)
    merges = _merges(problem, tile, pack, teams, splits)
    size = problem.dtype.itemsize
    acc = CUDA_TYPES[problem.stat_dtype.name]
    out = problem.stat_dtype if splits > 1 and not merges else problem.out_dtype
    band = problem.band
    constants = {
        "elem": CUDA_TYPES[problem.dtype.name],
        "acc": acc,
        "out": CUDA_TYPES[out.name],
        "bias_elem": acc if problem.bias is None else CUDA_TYPES[problem.bias.name],
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "exact": problem.head_dim == head_dim and problem.head_dim_v > 0 and problem.head_dim_v % head_dim_v == 0,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "warps": tile.warps,
        "teams": teams,
        "stages": tile.stages,
        "min_blocks": tile.min_blocks,
        "load_bytes": max(load_bytes, min(size, 8)),
        "pack": pack,
        "dropout": problem.dropout,
        "runs": False,
        "statistics": True,
        "bias": problem.bias is not None,
        "softcap": problem.softcap is not None,
        "prescaled": problem.bias is not None or problem.softcap is not None or not problem.scale > 0,
        "band_left": band is not None and band.left is not None,
        "band_right": band is not None and band.right is not None,
        "mask": mask_code(problem),
        "split": splits > 1,
        "merges": merges,
        "flush_every": deposit_tiles(size, problem.n_keys, tile.block_n),
        "tf32": problem.precision == "tf32",
    }
    rows = int(np.prod(problem.stat_shape, dtype=np.int64))
    stat = problem.stat_dtype.itemsize
    return Plan(
        kernel="sm80",
        direction="forward",
        block_m=tile.block_m,
        block_n=tile.block_n,
        workers=tile.warps * teams,
        smem_bytes=shared,
        workspace_bytes=splits * rows * (problem.head_dim_v + 2) * stat if splits > 1 else 0,
        reason=f"portable tensor-core kernel, {card.arch}",
        notes=_notes(splits, merges, pack, load_bytes),
        constants=tuple(constants.items()),
    )


def _notes(splits: int, merges: bool, pack: int, load_bytes: int) -> tuple[str, ...]:
    notes = []
    if splits > 1:
        merged = "by the last block to finish one" if merges else "afterwards"
        notes.append(f"keys in {splits} parts, merged {merged}: too few query rows to fill the card")
    if pack > 1:
        notes.append(f"{pack} query heads share a tile and its keys")
    if load_bytes < 16:
        notes.append(f"addresses or strides of q, k, v allow only {load_bytes}-byte loads")
    return tuple(notes)


def grid_of(problem: Problem, plan: Plan, card: Card) -> dict[str, int]:
    """Return the counts that a forward is launched with: row_tiles, key_tiles, splits, split_tiles, section, chunks."""
    tile, pack, _, head_dim_v = tile_of(problem, card)
    teams = plan.workers // tile.warps
    splits, split_tiles = _splits(problem, tile, card, pack, plan.smem_bytes, head_dim_v, teams)
    ordered = problem.mask == "column" or problem.band is not None
    kv_bytes = problem.n_keys * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize / problem.group * pack
    section = max(int(card.l2_bytes // 2 // max(kv_bytes, 1)), 1) if ordered else 1
    total = int(np.prod(problem.batch, dtype=np.int64)) * (problem.heads // pack)
    return {
        "row_tiles": -(-problem.n_queries * pack // tile.block_m),
        "key_tiles": -(-problem.n_keys // tile.block_n),
        "splits": splits,
        "split_tiles": split_tiles,
        "section": max(min(section, total), 1),
        "chunks": max(-(-problem.head_dim_v // head_dim_v), 1),
    }
