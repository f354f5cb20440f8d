"""The forward by the portable kernel: its tiles and constants, and as many parts of the key axis as fill the device."""

from cuattn.cuda import merge
from cuattn.cuda.arguments import Array, pad, row_bytes
from cuattn.cuda.call import Call
from cuattn.cuda.constants import Constants, problem_constants
from cuattn.cuda.device import COUNTERS, Device
from cuattn.cuda.params import MAX_PARTS
from cuattn.cuda.sm80.tiles import FORWARD, VALUE_COLUMNS, Tile, look_up
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem

_MAX_LENGTH = 2**30  # rows and keys are counted in 32 bits, with room for the band's arithmetic
_MAX_HEAD_DIM = 512
_MERGE_COST = 96  # rows of a warp times (16 + parts) that are merged before a second kernel would have begun
STREAMS = 4  # blocks of few rows side by side on a multiprocessor, or teams of one such block
_STREAM_KEYS = 32  # keys per tile of such a block
_STREAM_STAGES = 3
_NARROW_STREAM = 64  # columns up to which twice as many warps read side by side
_WIDEST_TEAM, _ROOM_OF_WIDE_TEAMS = 128, 200 << 10  # head dimension of a warp's 32 rows, and bytes of shared memory
_MIN_SPLIT_TILES = 4  # a part of the key axis shorter than this costs more in merging than it gains
_KB = 1024
_BLOCK = 64  # blocks of a mask are usually multiples of it
_PADDING = {"half": 32, "double": 16}  # columns: rows of a tile in shared memory are multiples of this
_SEGMENT = 128  # float32 is split into halves by segments of a row (kernels/sm80/split_f32.cuh)
# Keys (forward) or queries (backward) that are summed in registers before the sums move to memory, and the smallest
# number of them that is worth it: beyond, a sum that is rounded after every few terms loses digits.
_FLUSH = {"split": (2048, 16384), "double": (1024, 1024)}


def padded(length: int, products: str) -> int:
    """Return a head dimension as the kernel takes it: in float32 a power of two or whole segments."""
    if products == "split" and length <= _SEGMENT:
        return max(1 << (length - 1).bit_length(), 16)
    return pad(length, _PADDING.get(products, _SEGMENT))


def length_reason(problem: Problem) -> str | None:
    """Say which lengths no kernel can count, or return None."""
    for name, length in (("q", problem.n_queries), ("k", problem.n_keys)):
        if length >= _MAX_LENGTH:
            return f"{name} has {length} rows; expected fewer than 2**30 on a GPU"
    return None


def unsupported_reason(problem: Problem) -> str | None:
    """Say what of a problem the portable kernels cannot do on any device, naming the argument, or return None."""
    if problem.row.cuda is None:
        known = ", ".join(row.dtype.name for row in DTYPES.values() if row.cuda)
        return f"q has dtype {problem.dtype}; expected one of {known} on a GPU"
    if problem.head_dim > _MAX_HEAD_DIM:
        return f"q has head dimension {problem.head_dim}; expected at most {_MAX_HEAD_DIM} on a GPU"
    return length_reason(problem)


def is_heavy(problem: Problem) -> bool:
    """Whether what is done to single elements takes so many registers that a warp can only own 16 rows."""
    tested = problem.masks not in ((), ("column",))
    return tested or any(x is not None for x in (problem.bias, problem.softcap, problem.score))


def flush_tiles(products: str, length: int, block: int) -> int:
    """Return ``cfg::flush_every``: how many tiles of `block` are summed in registers at a time; 0: all `length`.

    >>> flush_tiles("double", 4096, 16), flush_tiles("double", 1024, 16)
    (64, 0)
    """
    together, least = _FLUSH.get(products, (0, 0))
    return together // block if together and length > least else 0


class Cut:
    """How a forward is cut on a device, and what it is launched with.

    Attributes
    ----------
    tile : Tile or None
        None where no tile fits; nothing else is known then.
    pack : int
        Heads packed per row tile.
    head_dim, head_dim_v, chunks : int
        Padded head dimensions, and parts of v's columns.
    blocks, row_tiles, key_tiles : int
        Blocks of one part of the key axis, and tiles.
    teams, splits, split_tiles : int
        Warps of a block that divide the keys among them, parts of the key axis, and the key tiles of each team in one.
    merges : bool
        Whether the last block of a row tile merges the parts.
    section : int
        Heads that are worked on side by side.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem, self.device, self.products = problem, device, problem.row.products
        self.head_dim = padded(problem.head_dim, self.products)
        self.head_dim_v = padded(min(problem.head_dim_v, VALUE_COLUMNS[self.products]), self.products)
        self.chunks = max(cdiv(problem.head_dim_v, self.head_dim_v), 1)
        self._widest = max(self.head_dim, self.head_dim_v)
        self._ragged = problem.head_dim != self.head_dim or problem.head_dim_v % self.head_dim_v != 0
        self.tile = tile = look_up(FORWARD, device.shared_bytes, self.products, self._widest)
        if tile is None:
            return
        if "block" in problem.masks and self.products == "half" and tile.block_n % _BLOCK:
            whole = tile._replace(block_n=_BLOCK)  # then no tile is partial
            tile = whole if self._shared_bytes(whole) <= device.shared_bytes - _KB else tile
        alone = problem.masks or problem.bias is not None or problem.dropout
        self.pack = 1 if alone or problem.n_queries * problem.group > tile.block_m else problem.group
        tile = self._row_tile(tile)
        if tile.stages > 2 and 2 * self._shared_bytes(tile) > device.shared_bytes:
            tile = tile._replace(stages=2)
        self.tile = tile = self._registers(tile)
        rows, heads = problem.n_queries * self.pack, problem.instances // self.pack
        self.row_tiles, self.key_tiles = cdiv(rows, tile.block_m), cdiv(problem.n_keys, tile.block_n)
        self.blocks = heads * self.row_tiles
        self.teams = self._teams(tile)
        self.shared_bytes = self._shared_bytes(tile, self.teams)
        self.splits, self.split_tiles = self._splits(tile)
        merge_cost = cdiv(min(rows, tile.block_m), tile.warps * self.teams) * (16 + self.splits)
        # There are few rows, and it saves a launch.
        self.merges = self.splits > 1 and self.blocks <= COUNTERS and merge_cost <= _MERGE_COST
        self.section = 1
        if "column" in problem.masks or problem.band is not None:
            kv_bytes = problem.n_keys * row_bytes(problem) / problem.group * self.pack
            self.section = max(min(int(device.l2_bytes // 2 // max(kv_bytes, 1)), heads), 1)

    def _row_tile(self, tile: Tile) -> Tile:
        """Shrink the row tile to what few queries fill: 16 rows per warp then, and more blocks side by side."""
        rows = self.problem.n_queries * self.pack
        block_m = next((size for size in (16, 32) if rows <= size), 64)
        if rows > tile.block_m // 2 or block_m >= tile.block_m:
            return tile
        # Such a block streams keys and values; a deeper pipeline keeps the memory busy, and small tiles many warps.
        many = self.problem.n_keys >= 2 * _MIN_SPLIT_TILES * tile.block_n
        block_n = min(tile.block_n, _STREAM_KEYS) if many else tile.block_n
        tile = Tile(block_m, block_n, block_m // 16, stages=max(tile.stages, _STREAM_STAGES), min_blocks=1)
        if block_m == 32 and many and self._takes_wide_teams:
            return tile._replace(warps=1)
        return tile

    @property
    def _takes_wide_teams(self) -> bool:
        """Whether warps of 32 rows find registers, and as many teams of them as read at the memory's rate find room."""
        problem = self.problem
        changed = problem.masks or problem.dropout or is_heavy(problem)
        small = self.products == "half" and self._widest <= _WIDEST_TEAM and not changed
        return small and self.device.shared_bytes >= _ROOM_OF_WIDE_TEAMS

    def _registers(self, tile: Tile) -> Tile:
        """Give warps 16 rows each where more would not find the registers."""
        if tile.block_m <= 16 * tile.warps:
            return tile
        problem, heavy = self.problem, is_heavy(self.problem)
        crowded = self._ragged or problem.masks or problem.precision == "tf32"
        if self.products == "split" and (heavy or (self._widest > 64 and crowded)):
            return tile._replace(block_m=16 * tile.warps)
        if self.products == "half" and heavy and self._widest >= 64:
            return tile._replace(warps=tile.block_m // 16, min_blocks=1)
        return tile

    def _teams(self, tile: Tile) -> int:
        """Return how many warps of a block divide the keys among them: so many that few blocks keep the memory busy."""
        if self.products != "half" or tile.warps > 1 or self.chunks > 1:
            return 1
        device, teams = self.device, STREAMS
        streams = STREAMS * (1 + (self._widest <= _NARROW_STREAM))
        while teams > 1 and (
            self.blocks * teams > streams * device.multiprocessors
            or self.key_tiles < 2 * _MIN_SPLIT_TILES * teams
            or self._shared_bytes(tile, teams) > device.shared_bytes - _KB
        ):
            teams //= 2
        return teams

    def _splits(self, tile: Tile) -> tuple[int, int]:
        """Return the parts of the key axis among blocks, and the key tiles of each team."""
        device, key_tiles, teams = self.device, self.key_tiles, self.teams
        side_by_side = max(tile.min_blocks, min(STREAMS, (device.shared_bytes + _KB) // (self.shared_bytes + _KB)))
        slots = device.multiprocessors * side_by_side
        short = key_tiles < 2 * _MIN_SPLIT_TILES * teams
        if self.blocks == 0 or 2 * self.blocks > slots or short or self.chunks > 1:
            return 1, cdiv(key_tiles, teams)
        parts = min(slots // self.blocks, key_tiles // (_MIN_SPLIT_TILES * teams), MAX_PARTS)
        split_tiles = cdiv(key_tiles, parts * teams)
        return cdiv(key_tiles, split_tiles * teams), split_tiles

    def _shared_bytes(self, tile: Tile, teams: int = 1) -> int:
        problem, exponents = self.problem, 4 if self.products == "split" else 0
        row, row_v = (
            columns * problem.dtype.itemsize + exponents * cdiv(columns, _SEGMENT)
            for columns in (self.head_dim, self.head_dim_v)
        )
        key = row + row_v + (16 if "column" in problem.masks else 0)
        flushes = flush_tiles(self.products, problem.n_keys, tile.block_n)
        maxima = problem.stat_dtype.itemsize * tile.block_m if flushes else 0
        return tile.block_m * row + teams * tile.stages * tile.block_n * key + maxima

    def constants(self, load_bytes: int) -> Constants:
        """Return the prologue of kernels/sm80/fwd.cu; for `load_bytes` see :func:`cuattn.cuda.arguments.load_bytes`."""
        problem, tile = self.problem, self.tile
        constants = {
            **problem_constants(problem),
            **tile._asdict(),
            **{name: getattr(self, name) for name in ("head_dim", "head_dim_v", "teams", "pack", "merges")},
            "exact": not self._ragged and problem.head_dim_v > 0,
            "load_bytes": max(load_bytes, min(problem.dtype.itemsize, 8)),
            "split": self.splits > 1,
            "flush_every": flush_tiles(self.products, problem.n_keys, tile.block_n),
        }
        if self.splits > 1 and not self.merges:
            constants |= {"out": DTYPES[problem.stat_dtype].cuda, "statistics": True}  # of parts
        return constants

    def notes(self, load_bytes: int) -> list[str]:
        """Return what is worth knowing of the plan."""
        merged = "by the last block to finish one" if self.merges else "afterwards"
        notes = {
            f"keys in {self.splits} parts, merged {merged}: too few query rows to fill the GPU": self.splits > 1,
            f"{self.pack} query heads share a tile and its keys": self.pack > 1,
            f"addresses or strides of q, k, v allow only {load_bytes}-byte loads": load_bytes < 16,
        }
        return [note for note, holds in notes.items() if holds]


class Forward(Call):
    """One launch or, where parts of the key axis are not merged by their last blocks, two."""

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = unsupported_reason(problem)
        if against is None and Cut(problem, self.device).tile is None:
            head_dim = problem.head_dim
            return f"q has dtype {problem.dtype} and head dimension {head_dim}; no kernel does that on this GPU"
        return against

    def prepare(self) -> Plan:
        problem, cut, load_bytes = self.problem, Cut(self.problem, self.device), self.load_bytes(*"qkv")
        stat, scratch = problem.stat_dtype, {}
        if cut.splits > 1:
            shapes = {"o": problem.o_shape, "l": problem.stat_shape, "m": problem.stat_shape}
            scratch = {f"{name}_part": Array((cut.splits, *shape), stat) for name, shape in shapes.items()}
        self.begin(scratch, cut.blocks if cut.merges else 0)
        constants, tile, warps = cut.constants(load_bytes), cut.tile[:2], cut.tile.warps * cut.teams
        if cut.blocks:
            counts = {
                name: getattr(cut, name) for name in ("row_tiles", "key_tiles", "splits", "split_tiles", "section")
            }
            grid = (cut.blocks, cut.splits, cut.chunks)
            launched = "sm80/fwd.cu", "attention_forward", constants, grid, warps, counts, tile
            self.add(*launched, shared_bytes=cut.shared_bytes)
            if cut.splits > 1 and not cut.merges:
                merge.add(
                    self.sequence, problem.o_shape, (stat, problem.out_dtype, stat), ["_part"], stacked=cut.splits
                )
        return self.planned("sm80/fwd.cu", tile, warps, cut.shared_bytes, constants, *cut.notes(load_bytes))
