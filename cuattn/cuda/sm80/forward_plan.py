"""With which tiles and constants the portable kernel computes a forward on a device: pure functions, no CuPy."""

import functools
from typing import NamedTuple

from cuattn.cuda.arguments import pad
from cuattn.cuda.constants import forward_constants
from cuattn.cuda.device import COUNTERS, Device
from cuattn.cuda.params import MAX_PARTS
from cuattn.cuda.sm80.tiles import VALUE_COLUMNS, Tile, forward_tile
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem, row_of

__all__ = [
    "Cut",
    "Grid",
    "cut",
    "flush_tiles",
    "forward_plan",
    "grid_of",
    "length_reason",
    "tile_reason",
    "unsupported_reason",
]

_MAX_LENGTH = 2**30  # rows and keys are counted in 32 bits, with room for the band's arithmetic
_MAX_HEAD_DIM = 512
_MERGE_COST = 96  # rows of a warp times (16 + parts) that are merged before a second kernel would have begun
_STREAMS = 4  # blocks of few rows side by side on a multiprocessor, or teams of one such block
_STREAM_KEYS = 32  # keys per tile of such a block
_STREAM_STAGES = 3
_MIN_SPLIT_TILES = 4  # a part of the key axis shorter than this costs more in merging than it gains
_KB = 1024
_BLOCK = 64  # blocks of a mask are usually multiples of it
_PADDING = {"half": 32, "double": 16}  # columns: rows of a tile in shared memory are multiples of this
_SEGMENT = 128  # float32 is split into halves by segments of a row (kernels/sm80/split_f32.cuh)
# Keys (forward) or queries (backward) that are summed in registers before the sums move to memory, and the smallest
# number of them that is worth it: beyond, a sum that is rounded after every few terms loses digits.
_FLUSH = {"split": (2048, 16384), "double": (1024, 1024)}


def _padded(length: int, problem: Problem) -> int:
    """Return a head dimension as the kernel takes it: in float32 a power of two or whole segments."""
    products = problem.row.products
    if products != "split":
        return pad(length, _PADDING[products])
    if length > _SEGMENT:
        return pad(length, _SEGMENT)
    return max(1 << (length - 1).bit_length() if length else 0, 16)


def length_reason(problem: Problem) -> str | None:
    """Say which lengths no kernel can count, or return None."""
    for name, length in (("q", problem.n_queries), ("k", problem.n_keys)):
        if length >= _MAX_LENGTH:
            return f"{name} has {length} rows; expected fewer than 2**30 on a GPU"
    return None


def unsupported_reason(problem: Problem, device: Device) -> str | None:
    """Say what of a problem the portable kernels cannot do on a device, naming the argument, or return None."""
    if problem.row.cuda is None:
        known = ", ".join(row.name for row in DTYPES.values() if row.cuda)
        return f"q has dtype {problem.dtype}; expected one of {known} on a GPU"
    if problem.head_dim > _MAX_HEAD_DIM:
        return f"q has head dimension {problem.head_dim}; expected at most {_MAX_HEAD_DIM} on a GPU"
    return length_reason(problem)


class Cut(NamedTuple):
    """How a forward is cut: its tile, heads packed per row tile, and padded head dimensions."""

    tile: Tile
    pack: int
    head_dim: int
    head_dim_v: int


def tile_reason(problem: Problem, device: Device) -> str | None:
    """Say that there is no tile for a problem that :func:`unsupported_reason` has nothing against, or return None."""
    if cut(problem, device) is not None:
        return None
    return f"q has dtype {problem.dtype} and head dimension {problem.head_dim}; no kernel does that on this GPU"


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
    tested = len(problem.masks) > 1 or not set(problem.masks) <= {"column"}
    return problem.bias is not None or problem.softcap is not None or tested


def _wide(problem: Problem, head_dim: int, head_dim_v: int) -> bool:
    """Whether a float32 kernel with 32 rows per warp would not find the registers at head dimension 128."""
    ragged = problem.head_dim != head_dim or problem.head_dim_v % head_dim_v != 0
    return ragged or bool(problem.masks) or problem.precision == "tf32"


def _pack(problem: Problem, block_m: int) -> int:
    """Return how many heads share a row tile: the whole group when there are few queries, else 1."""
    if problem.masks or problem.bias is not None or problem.dropout or problem.group == 1:
        return 1
    return problem.group if problem.n_queries * problem.group <= block_m else 1


def cut(problem: Problem, device: Device) -> Cut | None:
    """Return how a forward is cut on a device; None where no tile fits."""
    products = problem.row.products
    head_dim = _padded(problem.head_dim, problem)
    head_dim_v = _padded(min(problem.head_dim_v, VALUE_COLUMNS[products]), problem)
    tile = forward_tile(device.shared_bytes, products, max(head_dim, head_dim_v))
    if tile is None:
        return None
    if "block" in problem.masks and products == "half" and tile.block_n % _BLOCK:
        whole = tile._replace(block_n=_BLOCK)  # then no tile is partial
        fits = _shared_bytes(problem, whole, head_dim, head_dim_v) <= device.shared_bytes - _KB
        tile = whole if fits else tile
    pack = _pack(problem, tile.block_m)
    tile = _row_tile(problem, tile, pack)
    if tile.stages > 2 and 2 * _shared_bytes(problem, tile, head_dim, head_dim_v) > device.shared_bytes:
        tile = tile._replace(stages=2)
    return Cut(_registers(problem, tile, head_dim, head_dim_v), pack, head_dim, head_dim_v)


def _registers(problem: Problem, tile: Tile, head_dim: int, head_dim_v: int) -> Tile:
    """Give warps 16 rows each where more would not find the registers."""
    if tile.block_m <= 16 * tile.warps:
        return tile
    products, widest = problem.row.products, max(head_dim, head_dim_v)
    if products == "split" and (_heavy(problem) or (widest > 64 and _wide(problem, head_dim, head_dim_v))):
        return tile._replace(block_m=16 * tile.warps)
    if products == "half" and _heavy(problem) and widest >= 64:
        return tile._replace(warps=tile.block_m // 16, min_blocks=1)
    return tile


class Grid(NamedTuple):
    """What a forward is launched with: blocks of one part of the key axis, chunks of v's columns, and counts."""

    blocks: int
    chunks: int
    teams: int
    shared_bytes: int
    row_tiles: int
    key_tiles: int
    splits: int  # parts of the key axis, and the key tiles of each team in one
    split_tiles: int
    section: int  # heads that are worked on side by side
    merges: bool  # whether the last block of a row tile merges the parts

    @property
    def counts(self) -> dict[str, int]:
        """The fields of ``Params``."""
        return {name: getattr(self, name) for name in ("row_tiles", "key_tiles", "splits", "split_tiles", "section")}


def grid_of(problem: Problem, made: Cut, device: Device) -> Grid:
    """Return what a forward that is cut in this way is launched with."""
    tile = made.tile
    row_tiles, key_tiles = cdiv(problem.n_queries * made.pack, tile.block_m), cdiv(problem.n_keys, tile.block_n)
    heads = problem.instances // made.pack
    blocks = heads * row_tiles
    teams = _teams(problem, made, device, blocks, key_tiles)
    shared = _shared_bytes(problem, tile, made.head_dim, made.head_dim_v, teams)
    splits, split_tiles = _splits(problem, made, device, blocks, key_tiles, shared, teams)
    rows = min(problem.n_queries * made.pack, tile.block_m)
    merge_cost = cdiv(rows, tile.warps * teams) * (16 + splits)  # there are few rows, and it saves a launch
    section = 1
    if "column" in problem.masks or problem.band is not None:
        columns = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        kv_bytes = problem.n_keys * columns / problem.group * made.pack
        section = max(min(int(device.l2_bytes // 2 // max(kv_bytes, 1)), heads), 1)
    return Grid(
        blocks,
        max(cdiv(problem.head_dim_v, made.head_dim_v), 1),
        teams,
        shared,
        row_tiles,
        key_tiles,
        splits,
        split_tiles,
        section,
        merges=splits > 1 and blocks <= COUNTERS and merge_cost <= _MERGE_COST,
    )


def _teams(problem: Problem, made: Cut, device: Device, blocks: int, key_tiles: int) -> int:
    """Return how many warps of a block divide the keys among them: enough that few blocks keep the memory busy."""
    tile = made.tile
    if problem.row.products != "half" or tile.warps > 1 or problem.head_dim_v > made.head_dim_v:
        return 1
    teams = _STREAMS
    while teams > 1 and (
        blocks * teams > _STREAMS * device.multiprocessors
        or key_tiles < 2 * _MIN_SPLIT_TILES * teams
        or _shared_bytes(problem, tile, made.head_dim, made.head_dim_v, teams) > device.shared_bytes - _KB
    ):
        teams //= 2
    return teams


def _splits(
    problem: Problem, made: Cut, device: Device, blocks: int, key_tiles: int, shared: int, teams: int
) -> tuple[int, int]:
    """Return the parts of the key axis among blocks, and the key tiles of each team, so that few rows fill a device."""
    side_by_side = max(made.tile.min_blocks, min(_STREAMS, (device.shared_bytes + _KB) // (shared + _KB)))
    slots = device.multiprocessors * side_by_side
    short = key_tiles < 2 * _MIN_SPLIT_TILES * teams
    if blocks == 0 or 2 * blocks > slots or short or problem.head_dim_v > made.head_dim_v:
        return 1, cdiv(key_tiles, teams)
    parts = min(slots // blocks, key_tiles // (_MIN_SPLIT_TILES * teams), MAX_PARTS)
    split_tiles = cdiv(key_tiles, parts * teams)
    return cdiv(key_tiles, split_tiles * teams), split_tiles


def flush_tiles(products: str, length: int, block: int) -> int:
    """Return ``cfg::flush_every``: how many tiles of `block` are summed in registers at a time; 0: all `length`.

    >>> flush_tiles("double", 4096, 16), flush_tiles("double", 1024, 16)
    (64, 0)
    """
    together, least = _FLUSH.get(products, (0, 0))
    return together // block if together and length > least else 0


def _shared_bytes(problem: Problem, tile: Tile, head_dim: int, head_dim_v: int, teams: int = 1) -> int:
    products, size = problem.row.products, problem.dtype.itemsize

    def row_bytes(columns: int) -> int:
        exponents = 4 * cdiv(columns, _SEGMENT) if products == "split" else 0
        return columns * size + exponents

    key = row_bytes(head_dim) + row_bytes(head_dim_v) + (16 if "column" in problem.masks else 0)
    flushes = flush_tiles(products, problem.n_keys, tile.block_n)
    maxima = problem.stat_dtype.itemsize * tile.block_m if flushes else 0
    return tile.block_m * row_bytes(head_dim) + teams * tile.stages * tile.block_n * key + maxima


@functools.lru_cache(maxsize=1024)
def forward_plan(problem: Problem, device: Device, load_bytes: int = 16) -> Plan:
    """Plan a forward on a device that :func:`unsupported_reason` has nothing against.

    Parameters
    ----------
    problem : Problem
    device : Device
    load_bytes : {16, 8, 4, 2}
        The widest access that the addresses and strides of q, k and v allow.

    Returns
    -------
    Plan
        ``constants`` is the prologue of kernels/sm80/fwd.cu.
    """
    made = cut(problem, device)
    grid = grid_of(problem, made, device)
    tile, columns = made.tile, problem.head_dim_v
    constants = {
        **forward_constants(problem),
        **tile._asdict(),
        "head_dim": made.head_dim,
        "head_dim_v": made.head_dim_v,
        "exact": problem.head_dim == made.head_dim and columns > 0 and columns % made.head_dim_v == 0,
        "teams": grid.teams,
        "load_bytes": max(load_bytes, min(problem.dtype.itemsize, 8)),
        "pack": made.pack,
        "split": grid.splits > 1,
        "merges": grid.merges,
        "flush_every": flush_tiles(problem.row.products, problem.n_keys, tile.block_n),
    }
    if grid.splits > 1 and not grid.merges:
        constants |= {"out": row_of(problem.stat_dtype).cuda, "statistics": True}  # of parts
    return Plan(
        kernel="sm80",
        direction="forward",
        block_m=tile.block_m,
        block_n=tile.block_n,
        workers=tile.warps * grid.teams,
        smem_bytes=grid.shared_bytes,
        workspace_bytes=0,
        reason=f"portable tensor-core kernel, {device.arch}",
        notes=_notes(grid, made.pack, load_bytes),
        constants=tuple(constants.items()),
    )


def _notes(grid: Grid, pack: int, load_bytes: int) -> tuple[str, ...]:
    notes = []
    if grid.splits > 1:
        merged = "by the last block to finish one" if grid.merges else "afterwards"
        notes.append(f"keys in {grid.splits} parts, merged {merged}: too few query rows to fill the GPU")
    if pack > 1:
        notes.append(f"{pack} query heads share a tile and its keys")
    if load_bytes < 16:
        notes.append(f"addresses or strides of q, k, v allow only {load_bytes}-byte loads")
    return tuple(notes)
