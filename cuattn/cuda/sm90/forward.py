"""The forward for compute capability 9.0: when and with which tiles, tensor maps, a ticket, one launch."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from cuattn.cuda.arguments import Array, pad, row_bytes, row_strides, steps_of, tile_counts
from cuattn.cuda.constants import Constants, function_of, problem_constants
from cuattn.cuda.device import COUNTERS, Device
from cuattn.cuda.sm80 import forward as portable
from cuattn.cuda.sm90 import balance, tensor_map
from cuattn.cuda.sm90.tensor_map import WARPGROUP_ROWS, MappedCall
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem, ScoreFunction
from cuattn.tracing import I, J, Node, addend, is_affine
from cuattn.tracing.graph import order

SLAB_COLUMNS, ROW_BYTES = 64, 128  # a tile lies in slabs of 64 columns

# Widths that accumulating products come in (kernels/ptx/wgmma.cuh).
_WIDTHS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
_NARROW = 32  # columns of v for which there is a product of that width
_MAX_HEAD_DIM, _ROOMY_HEAD_DIM = 256, 192  # wider tiles leave no shared memory for two masks
_LEAST_SCALE = 1e-30  # and its inverse the largest
_LIST_BYTES = 4 * (32 + 4)  # a list of key tiles
# Keys from which on it pays to begin the softmax under the warpgroup's own product, by rows of a tile.
_LONG = {128: 1024, 192: 2048, 256: 1024}
_L2_SHARE = 32 << 20  # bytes of k and v that neighbours in time share
# Rows, with those of a tile that are not there, that a key must meet before its products take longer than reading it:
# measured at d 128.
_RIDGE, _PORTABLE_RIDGE = 222, 77
_GAIN = 1.3  # what the portable kernel must promise before it is taken, unless its tiles are this much smaller:
_SMALLER = 8
_TEAMS_SMALLER = 4  # the same beside as many teams, which read keys as fast as memory delivers them


_COUNTED = 1 << 15  # key tiles of rows in parts are counted in 16 bits
_LOWER = 0.75  # of the time that a key tile takes beside 192 rows, it takes beside 128, where rows are long
_HIGHER = 1.32  # of that time, 128 keys take beside 256 rows, in tiles of 64: less a margin, 1.4 measured
_TILE_ROWS, _PACKED = 128, 0.9  # of most tiles; the share of a group's row tiles that must do for heads to be packed

_TOGETHER = {"column", "boolean", "function"}  # kinds of masks, of each of which there may be one


class Tile(NamedTuple):
    """Query rows and keys of a tile, buffers for keys (and values) and for queries, and blocks of a multiprocessor."""

    block_m: int
    block_n: int
    stages: int
    q_stages: int
    min_blocks: int = 1


# head_dim at most, head_dim_v at most -> the tile, and its keys where softcap or dropout take registers; first match
# wins.  Column and boolean masks do not change it, so that the sums of one that says causal come in causal's order.
_TILES = (
    (64, 64, Tile(192, 128, 3, 3), 128),
    (128, 128, Tile(128, 128, 2, 3), 128),
    (192, 128, Tile(128, 128, 2, 1), 128),
    (192, 192, Tile(128, 112, 2, 1), 96),
    (256, 256, Tile(128, 80, 2, 1), 64),
)
# The same where a bias comes in tiles, whose buffers are those of keys.
_BIASED_TILES = (
    (32, 32, Tile(128, 64, 2, 2, 2)),
    (64, 64, Tile(128, 128, 3, 2)),
    (128, 128, Tile(128, 128, 2, 1)),
    (192, 128, Tile(128, 64, 3, 1)),
    (256, 256, Tile(128, 64, 2, 1)),
)
_HIGH_TILE = Tile(256, 64, 4, 2)
# Where keys are few, row tiles begin and end all the time, and rows count that are not there: by columns of v, up to
# how many rows of a head which tile holds them all, or those of two blocks; None: that of longer ones.
_SHORT_TILES = {
    32: ((64, Tile(64, 64, 2, 2, 4)), (128, Tile(128, 64, 4, 2, 2)), (192, None), (256, Tile(128, 64, 4, 2, 2))),
    64: ((64, Tile(64, 64, 3, 2, 3)), (128, Tile(128, 128, 3, 3)), (192, None), (256, _HIGH_TILE)),
}
_LOW_TILE = Tile(64, 64, 3, 2, 3)  # instead of the last for few heads, and where masks hide keys from warpgroups
_ROOMY_TILE = Tile(128, 64, 4, 2)  # where registers are fewer
_MIDDLE_TILE, _MIDDLE_HEAD_DIM = Tile(192, 96, 2, 2), 96  # of plain calls, up to that many columns
_SHORT_KEYS, _SHORT_ROWS, _FEW_QUERIES = 512, 256, 32  # at most, at most; more than
_STEP = 31  # keys that a step takes as long for as for what it does once
_WIDE_TILE = Tile(256, 64, 4, 1)  # of four warpgroups, for 64 columns where nothing but such a bias takes registers
KEY_BIAS_BYTES = 16  # beside a float for each key; and a key's, in parts
HALVES_BYTES = 128  # what parts are multiplied by
_SPLIT_KEYS = 1 << 27  # key tiles are counted in fewer bits
_SPLIT_HEAD_DIM = 128
_LEAST_KEYS = 80  # of a tile that has all keys
_FEW_KEYS = 64  # of a tile where each element is looked up somewhere: more of them find no registers
MULTIPROCESSORS = 132  # of an H100 or H200
_WIDE_ROUNDS = 1.08  # time of all tiles of 256 rows, beside that of tiles of 128, up to which they are taken
_SHORT_FUNCTION, _LONG_FUNCTION = 16, 60  # operations, at most and from which on


def bias_form(problem: Problem, bias: Any = None) -> str:
    """Return how a bias comes: "tiles" or "keys" (one row for all queries) with the keys, else "rows" or "loads".

    Its layout and address decide; of one that is not there, a contiguous one's would.
    """
    mapped = problem.bias == problem.dtype
    if bias is not None:
        *_, row, column = steps_of(bias)
        if row == 0 or column == 0:
            return "rows" if row else "keys"
        mapped &= column == 1 and tensor_map.unsupported_reason(bias.data.ptr, row_strides(bias)) is None
    return "tiles" if mapped else "loads"


def is_shared(bias: Any) -> bool:
    """Whether a bias is broadcast along all batches and too large to stay in the L2 cache by itself."""
    *batch, heads, _, _ = steps_of(bias)
    size = math.prod(bias.shape[-2:]) * bias.dtype.itemsize * (bias.shape[-3] if heads else 1)
    return not any(batch) and math.prod(bias.shape) > 0 and size > _L2_SHARE


def width_of(columns: int) -> int:
    """Return the narrowest product that makes so many columns."""
    return next(width for width in _WIDTHS if columns <= width)


def sharing_cache(size: int) -> int:
    """Return how many heads, of which each reads so many bytes again and again, share the L2 cache: a power of two."""
    return 1 << (max(_L2_SHARE // size, 1).bit_length() - 1)


def unsupported_reason(problem: Problem, device: Device) -> str | None:
    """Say why these kernels do not take a problem, or return None; strides and addresses are another matter."""
    if device.arch != "sm_90":
        return f"it needs compute capability 9.0, this GPU is {device.arch}"
    if problem.row.tensor_map is None:
        known = " and ".join(row.dtype.name for row in DTYPES.values() if row.tensor_map is not None)
        return f"it takes {known}, not {problem.dtype}"
    kinds = {*problem.masks}
    if problem.masks != ("block",) and (len(kinds) < len(problem.masks) or not kinds <= _TOGETHER):
        return f"it takes a block mask alone or one mask of each other kind, not {' and '.join(problem.masks)}"
    wide = max(problem.head_dim, problem.head_dim_v) > _ROOMY_HEAD_DIM
    if {"column", "boolean"} <= kinds and (wide or problem.bias is not None):
        return f"beside a column mask it takes a boolean one without a bias, up to head dimension {_ROOMY_HEAD_DIM}"
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        return f"it takes head dimensions up to {_MAX_HEAD_DIM}, not {problem.head_dim} and {problem.head_dim_v}"
    if problem.head_dim_v % 8:
        return f"it writes rows in units of 8 elements, and v has {problem.head_dim_v}"
    if not problem.n_queries * problem.n_keys * problem.head_dim_v * problem.instances:
        return "there is nothing to compute"
    return portable.length_reason(problem)


def is_long(problem: Problem) -> bool:
    """Whether a score function reads an array anew for each element, or does much with each."""
    return problem.score is not None and (
        reads(problem.score, I | J) or len(order(problem.score.root)) > _LONG_FUNCTION
    )


def reads(score: ScoreFunction, places: int) -> bool:
    """Whether a score function reads an array at an index that depends on all of some variables."""
    return any(node.op == "load" and node.depends & places == places for node in order(score.root))


def is_walked(problem: Problem) -> bool:
    """Whether consumers look at a mask's blocks or ask its function."""
    return bool({"block", "function"} & {*problem.masks})


def splits_bias(problem: Problem) -> bool:
    """Return whether tensor cores add a bias of keys, in parts: both directions, or neither."""
    return _is_roomy(problem) and problem.n_keys < _SPLIT_KEYS and problem.score is None


def split_score(problem: Problem) -> Node | None:
    """Return what a score function adds, if tensor cores add it to keys: in both directions, or neither."""
    root, plain = function_of(problem), problem.bias is None and not problem.dropout and _is_roomy(problem)
    added = addend(root) if root is not None and plain and not is_long(problem) else None
    return added if added is not None and (not added.depends & I or is_affine(added)) else None


def _is_roomy(problem: Problem) -> bool:
    widest = max(problem.head_dim, problem.head_dim_v)
    roomy = widest <= _SPLIT_HEAD_DIM and "block" not in problem.masks and problem.softcap is None
    return roomy and _is_scalable(problem) and (not problem.dropout or widest <= SLAB_COLUMNS)


def _is_scalable(problem: Problem) -> bool:
    return _LEAST_SCALE <= abs(problem.scale) <= 1 / _LEAST_SCALE


def scaling(problem: Problem, split_bias: bool = False, score: Node | None = None) -> Constants:
    """Return the constants that say how scores are scaled: before their maximum where the scale would spoil it.

    Of kernels in which tensor cores add a bias of keys, or what a score function adds (:func:`split_score`).
    """
    added = None if split_bias else problem.bias, None if score else problem.score
    natural = any(x is not None for x in (problem.softcap, *added))
    prescaled = natural or not _is_scalable(problem)
    negate = problem.scale < 0 and not prescaled
    by_row = score is not None and bool(score.depends & I)
    split = {"split_bias": split_bias, "split_score": score is not None, "row_offsets": by_row}
    return {"prescaled": prescaled, "negate": negate, **split}


def leaves_scores(problem: Problem) -> bool:
    """Whether nothing is done to single elements of what rows see: there is at most a band."""
    changed = problem.bias is not None or problem.softcap is not None or problem.score is not None
    return not (problem.masks or changed or problem.dropout)


class Cut:
    """How a forward is cut.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Padded head dimensions.
    tile : Tile
    bias_form : str
        See :func:`bias_form`; empty without a bias.
    split_bias : bool
        Tensor cores add it (:func:`splits_bias`).
    split_score : Node or None
        They add it to keys (:func:`split_score`).
    counts : dict of str to int
        Fields of ``Params``: row_tiles, key_tiles, section.
    """

    def __init__(self, problem: Problem, bias: Any = None) -> None:
        self.problem = problem
        self.bias_form = "" if problem.bias is None else bias_form(problem, bias)
        self.split_bias = self.bias_form == "keys" and splits_bias(problem)
        self.split_score = split_score(problem)
        self.head_dim, self.head_dim_v = pad(problem.head_dim, 16), width_of(problem.head_dim_v)
        if problem.head_dim_v <= _NARROW:
            self.head_dim_v = _NARROW
        self.tile = tile = self._tile()
        section = problem.group
        if problem.masks or (problem.band is not None and problem.band.right is not None):
            section *= sharing_cache(problem.n_keys * row_bytes(problem))
        self._shares_bias = self.bias_form == "tiles" and bias is not None and is_shared(bias)
        if self._shares_bias:
            section = min(math.prod(problem.batch), sharing_cache(problem.n_keys * row_bytes(problem)))
        self.counts = {**tile_counts(problem, tile), "section": min(section, problem.instances)}
        self.splits = self.split_tiles = 1
        self.whole = 0  # row tiles before those in parts

    def _tile(self) -> Tile:
        problem, described = self.problem, self._is_described
        if self.bias_form == "tiles":
            return self._biased_tile()
        widest, _, tile, few = next(row for row in _TILES if self.head_dim <= row[0] and self.head_dim_v <= row[1])
        short = self._short_tile(widest)
        if short is not None:
            return short
        if self.bias_form == "loads" or is_long(problem) or self._is_full():
            tile = tile._replace(block_n=_FEW_KEYS, stages=max(tile.stages, 3) if widest <= 128 else tile.stages)
        elif problem.softcap is not None or problem.dropout or (described and self.bias_form):
            tile = tile._replace(block_n=few)
        if tile.block_m == 192 and self._is_crowded():
            tile = tile._replace(block_m=128)  # these need registers that three warpgroups do not have
        if tile.block_m == 192 and problem.dropout and (problem.masks or problem.band is not None):
            tile = tile._replace(block_n=112)
        plain = not self.bias_form and problem.softcap is None
        if widest == 128 and tile.block_n == 128 and problem.n_keys <= _SHORT_KEYS and plain:
            tile = tile._replace(block_n=min((128, 96), key=self._clocks))
        if widest == SLAB_COLUMNS and problem.n_keys <= tile.block_n:
            tile = tile._replace(block_n=min(tile.block_n, max(pad(problem.n_keys, 16), _LEAST_KEYS)))
        if widest == 128 and (described or self._splits):
            tile = tile._replace(q_stages=2)  # what keys come with takes the third one's place
        return tile

    def _short_tile(self, widest: int) -> Tile | None:
        """Return a tile for few keys, if there is a better one than for many; masks do not change its keys."""
        problem, rows = self.problem, self.problem.n_queries
        if self.bias_form or problem.score is not None or rows <= _FEW_QUERIES:
            return None
        masked = bool(problem.masks) or problem.band is not None
        if widest == 128 and max(self.head_dim, self.head_dim_v) <= _MIDDLE_HEAD_DIM and problem.n_keys < _LONG[128]:
            return None if masked or problem.dropout or self._is_crowded() else _MIDDLE_TILE
        if widest > SLAB_COLUMNS or problem.n_keys > _SHORT_KEYS:
            return None
        tiles = _SHORT_TILES[max(self.head_dim_v, _NARROW)]
        tile = next((tile for most, tile in tiles if rows <= most), None)
        if tile is None or tile.block_n == 128:
            return tile
        beside = len(problem.masks) + 2 * bool(problem.dropout)  # what takes registers
        if "block" in problem.masks or beside > 3:
            return _ROOMY_TILE
        few = 2 * problem.instances <= MULTIPROCESSORS  # of which each has a row tile of its own then
        return _LOW_TILE if (masked or few) and tile.block_m == 256 else tile

    def _clocks(self, block_n: int) -> float:
        """Return how long a row's key tiles take, beside those of other sizes."""
        return cdiv(self.problem.n_keys, block_n) * (_STEP + block_n)

    @property
    def _splits(self) -> bool:
        return self.split_bias or self.split_score is not None

    @property
    def _is_described(self) -> bool:
        """Whether partial tiles' keys come with what they say of their rows, which takes room."""
        return bool({"column", "boolean"} & {*self.problem.masks})

    def _is_full(self) -> bool:
        """Whether an array read by keys, a bias of keys and dropout's numbers leave no registers for more keys."""
        problem = self.problem
        return bool(problem.score is not None and self.bias_form and problem.dropout and reads(problem.score, J))

    def _is_crowded(self) -> bool:
        """Whether three warpgroups have no registers for what is done to single elements."""
        problem, score = self.problem, self.problem.score
        if score is not None:
            short = (len(order(score.root)) <= _SHORT_FUNCTION and not reads(score, J)) or self.split_score is not None
            if not short or addend(score.root) is None or problem.masks or problem.dropout:
                return True
        biased = bool(self.bias_form) and (not self.split_bias or problem.dropout or self._is_described)
        changed = problem.softcap is not None or biased or problem.out_dtype != problem.dtype
        return changed or is_walked(problem)

    def _biased_tile(self) -> Tile:
        problem = self.problem
        # Two blocks, or four warpgroups, do not share the registers that these take.
        alone = problem.dropout or is_walked(problem) or problem.score is not None
        rows = _BIASED_TILES[1 if alone else 0 :]
        tile = next(row[2] for row in rows if self.head_dim <= row[0] and self.head_dim_v <= row[1])
        if tile == _BIASED_TILES[1][2] and not alone and self._fills_rows:
            return _WIDE_TILE
        if self._is_described:
            tile = tile._replace(block_n=min(tile.block_n, 112), stages=2)
        return tile._replace(block_n=_FEW_KEYS) if is_long(problem) else tile

    @property
    def _fills_rows(self) -> bool:
        """Whether four warpgroups have the registers, and fill rows and multiprocessors as two do."""
        problem = self.problem
        masked = problem.masks or problem.band is not None or problem.softcap is not None
        long = _LONG[256] <= problem.n_keys < _SPLIT_KEYS
        if masked or not long or self.head_dim != SLAB_COLUMNS or problem.out_dtype != problem.dtype:
            return False
        wide, narrow = (cdiv(problem.n_queries, rows) * problem.instances for rows in (256, 128))
        rounds = 2 * cdiv(wide, MULTIPROCESSORS), cdiv(narrow, MULTIPROCESSORS)
        return rounds[0] <= _WIDE_ROUNDS * rounds[1]

    @property
    def blocks(self) -> int:
        """Row tiles of all heads."""
        return self.counts["row_tiles"] * self.problem.instances

    @property
    def scratch(self) -> tuple[dict[str, Array], int]:
        """What parts of row tiles leave for the last one, and how many counters tell which that is."""
        if self.splits == 1:
            return {}, 0
        threads = (self._warpgroups, self.splits, 32 * 4)
        shapes = {"o_part": (*threads, self.head_dim_v // 2), "l_part": (*threads, 4)}
        return {name: Array(shape, self.problem.stat_dtype) for name, shape in shapes.items()}, self._warpgroups

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, as kernels/sm90/fwd_layout.cuh lays it out."""
        problem, (block_m, block_n, stages, q_stages, _) = self.problem, self.tile
        slabs, slabs_v = cdiv(self.head_dim, SLAB_COLUMNS), cdiv(self.head_dim_v, SLAB_COLUMNS)
        rounded = problem.out_dtype == problem.dtype
        queries = (max(slabs, slabs_v) if rounded else slabs) * block_m * ROW_BYTES
        boolean = "boolean" in problem.masks
        masks = block_n * (16 * ("column" in problem.masks) + boolean * block_m // 8)  # intervals, and bits
        tiled = cdiv(block_n, SLAB_COLUMNS) * block_m * ROW_BYTES
        bias = {"tiles": tiled, "keys": 4 * block_n + KEY_BIAS_BYTES}.get(self.bias_form, 0)
        bias = 2 * KEY_BIAS_BYTES * block_n if self._splits else bias
        tiles = q_stages * queries + stages * ((slabs + slabs_v) * block_n * ROW_BYTES + masks + bias)
        tiles += HALVES_BYTES * self._splits
        barriers = 8 * (2 * q_stages + 4 * stages + 4)
        mail = 16 * q_stages + _LIST_BYTES + 4 * boolean + 4 * stages + 12
        mail += 24 * (bool(self.bias_form) or self.split_score is not None)
        mail += 8 * stages * (1 + cdiv(block_n, 32)) * self.split_bias
        size = pad(tiles + barriers, 16) + mail
        return pad(size, 16) + 16 * q_stages if self.splits > 1 else size

    def divide(self, multiprocessors: int) -> None:
        """Choose lower tiles, and divide long rows' keys into parts, where so many multiprocessors are done sooner."""
        problem = self.problem
        # What tensor cores add changes no scores that threads have.
        changed = replace(problem, bias=None, score=None) if self._splits else problem
        if not leaves_scores(changed) or problem.twin or self._is_window:
            return
        if (problem.n_keys <= _SHORT_KEYS and problem.n_queries <= _SHORT_ROWS) or self.tile == _MIDDLE_TILE:
            return  # which are chosen already
        if problem.out_dtype != problem.dtype:  # what is not rounded sums in the same order
            rounded = copy(self)
            rounded.problem = replace(problem, out_dtype=problem.dtype)
            rounded.tile = rounded._tile()
            rounded.divide(multiprocessors)
            self.tile = _ROOMY_TILE if rounded.tile == _HIGH_TILE else self.tile
        chosen, time = self.tile, math.inf
        for tile, cost in self._heights():
            counted = tile._replace(block_n=self.tile.block_n)
            lengths, slots = self._row_lengths(counted), multiprocessors * tile.min_blocks
            found = balance.divide(lengths, self.problem.instances, slots, self._may_divide(tile, lengths, slots))
            if cost * found.time < balance.GAIN * time:
                chosen, time, (_, self.splits, self.split_tiles, self.whole) = tile, cost * found.time, found
        self.tile, self.counts = chosen, self.counts | tile_counts(problem, chosen)
        if self.splits > 1:
            self.counts |= {"splits": self.splits, "split_tiles": self.split_tiles, "shared_tile": self.whole}

    @property
    def _is_window(self) -> bool:
        """Whether rows may end elsewhere than at their last key or the diagonal, or no plan knows where."""
        problem, band = self.problem, self.problem.band
        return band is not None and (band.left is not None or band.right is None or problem.placed)

    def _heights(self) -> Iterator[tuple[Tile, float]]:
        """Yield tiles of other heights, and what so many keys as one of the first has cost beside one of its steps."""
        problem = self.problem
        yield self.tile, 1.0
        if self.tile.block_m != 192:
            return
        if problem.n_keys >= _LONG[128]:
            yield self.tile._replace(block_m=128), _LOWER
        if problem.band is None and problem.n_keys >= _SHORT_KEYS and self.head_dim_v > _NARROW:
            yield _HIGH_TILE, _HIGHER

    def _may_divide(self, tile: Tile, lengths: Sequence[int], slots: int) -> bool:
        problem, rows = self.problem, len(lengths) * self.problem.instances
        fits = problem.head_dim_v <= _SPLIT_HEAD_DIM and cdiv(problem.n_keys, tile.block_n) < _COUNTED
        fits = fits and problem.n_keys > _SHORT_KEYS and tile != _HIGH_TILE and not self._splits
        if lengths[0] == lengths[-1] and rows >= slots:  # only the last round is divided
            return fits and max(self.head_dim, self.head_dim_v) > SLAB_COLUMNS
        return fits and rows * tile.block_m // WARPGROUP_ROWS < COUNTERS and tile.min_blocks == 1

    @property
    def work(self) -> int:
        """Row tiles of all heads, and parts of them."""
        return self.blocks + (self.blocks - self.whole) * (self.splits - 1)

    @property
    def _warpgroups(self) -> int:
        """Row tiles of warpgroups that are in parts."""
        return (self.blocks - self.whole) * self.tile.block_m // WARPGROUP_ROWS

    def _row_lengths(self, tile: Tile) -> list[int]:
        """Return how many key tiles each row tile of a head sees, the longest first."""
        problem, (block_m, block_n, *_), band = self.problem, tile, self.problem.band
        rows = range(problem.n_queries, 0, -block_m)  # where they end
        if band is None or band.right is None:
            return [cdiv(problem.n_keys, block_n)] * len(rows)
        beyond = band.right + band.offset
        return [max(cdiv(min(end + beyond, problem.n_keys), block_n), 1) for end in rows]

    def slow_reason(self, device: Device) -> str | None:
        """Say why the portable kernel would sooner be done, or return None.

        It splits the keys where most of a GPU would have no query rows.  Else both read a key once from device memory,
        for all heads that share it, but this kernel mostly multiplies rows that are not there if they are few: its
        tiles have 128 rows or more of one head, the portable kernel's 16 or more, of the whole group where it can pack
        them.
        """
        problem = self.problem
        ordinary = cdiv(problem.n_queries, min(max(self.tile.block_m, 128), 192)) * problem.instances  # row tiles
        if 2 * ordinary * self.splits < device.multiprocessors:
            return "too few query rows fill the GPU, and the portable kernel splits the keys"
        other = portable.Cut(problem, device)
        own = problem.group * pad(problem.n_queries, self.tile.block_m)
        theirs = problem.group // other.pack * pad(problem.n_queries * other.pack, other.tile.block_m)
        smaller = _TEAMS_SMALLER if other.teams == portable.STREAMS else _SMALLER
        if own >= smaller * theirs or own / _RIDGE > _GAIN * max(theirs / _PORTABLE_RIDGE, 1):
            return "too few query rows fill its tiles, and the portable kernel has smaller ones"
        return None

    @property
    def _is_long(self) -> bool:
        return self.problem.n_keys >= _LONG.get(self.tile.block_m, math.inf) and not self.problem.dropout

    @property
    def _meets_corners(self) -> bool:
        """Whether keys end with the row alone, and all that a row tile sees but its first key tile is whole."""
        problem, (block_m, block_n, *_), band = self.problem, self.tile, self.problem.band
        if band is None or band.left is not None or band.right is None or block_m != block_n or problem.placed:
            return False
        return leaves_scores(problem) and (band.right + band.offset) % block_n == 0

    @property
    def notes(self) -> list[str]:
        """What is worth knowing of the plan."""
        if self.splits == 1:
            return []
        most = self.split_tiles * self.tile.block_n
        return [
            f"keys of a row in parts of at most {most}, {self.splits} at most, merged by the last block to finish one"
        ]

    @property
    def path(self) -> str:
        """The kernel's file."""
        return "sm90/fwd_bias.cu" if self.bias_form == "tiles" else "sm90/fwd.cu"

    @property
    def constants(self) -> Constants:
        """The prologue of the kernel."""
        problem, tile = self.problem, self.tile
        return {
            **problem_constants(problem),
            **tile._asdict(),
            **scaling(problem, self.split_bias, self.split_score),
            "reads_keys": problem.score is not None and (problem.runs or reads(problem.score, J)),
            "bias_shared": self._shares_bias,
            **{f"bias_{form}": self.bias_form == form for form in ("tiles", "keys", "rows")},
            "head_dim": self.head_dim,
            "head_dim_v": self.head_dim_v,
            "overlap": self._is_long,
            "diagonal": self._is_long and self._meets_corners,
            "split": self.splits > 1,
            "whole_rows": self.splits == 1 or self.whole > 0,
            "some_absent": -problem.n_queries % tile.block_m >= WARPGROUP_ROWS,
        }


class Rows(NamedTuple):
    """An array's look with some of its axes joined."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    data: Any
    device: Any


def pack(problem: Problem, operands: Mapping[str, Any]) -> tuple[Problem, Mapping[str, Any]]:
    """Return a call whose rows are those of all heads that share keys, where these lie one after another and are few.

    Results lie in memory as the call's own do.
    """
    q, group, n_queries = operands["q"], problem.group, problem.n_queries
    *leading, head, row, column = q.strides
    if "o" in operands:  # which need not lie so
        return problem, operands
    gains = pad(group * n_queries, _TILE_ROWS) < _PACKED * group * pad(n_queries, _TILE_ROWS)
    if n_queries == 1:
        row = head
    if not gains or problem.band is not None or not leaves_scores(problem) or row <= 0 or head != n_queries * row:
        return problem, operands
    shape = (*problem.batch, problem.kv_heads, group * n_queries, problem.head_dim)
    joined = Rows(shape, (*leading, group * n_queries * row, row, column), q.dtype, q.data, q.device)
    return replace(problem, heads=problem.kv_heads, n_queries=group * n_queries), {**operands, "q": joined}


class Forward(MappedCall):
    """One launch of persistent blocks."""

    def __init__(self, problem: Problem, operands: Mapping[str, Any], masks: Sequence[Any]) -> None:
        self.group = problem.group
        if problem.operation == "forward":
            problem, operands = pack(problem, operands)
        super().__init__(problem, operands, masks)

    lays_results = True
    cut_class = Cut
    problem_reason = staticmethod(unsupported_reason)

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = self.problem_reason(problem, self.device)
        if against is None and problem.kernel is None:
            against = self._cut.slow_reason(self.device)
        return against or self.layout_reason()

    @functools.cached_property
    def _cut(self) -> Cut:
        cut = self.cut_class(self.problem, self.operands.get("bias"))
        cut.divide(self.device.multiprocessors)
        return cut

    def prepare(self) -> Plan:
        cut = self._cut
        tile, constants, size = cut.tile[:2], cut.constants, cut.shared_bytes
        scratch, counters = cut.scratch
        self.begin(scratch, 1 + counters)
        warps = 4 * (tile[0] // WARPGROUP_ROWS + 1)
        launched = cut.path, "attention_forward", constants, cut.work, warps, cut.counts, (*tile, WARPGROUP_ROWS)
        beside = {"bias": "bias"} if cut.bias_form == "tiles" else {}
        self.add_mapped(*launched, size, ("o",), beside, cut.tile.min_blocks)
        notes = cut.notes
        if self.problem.group < self.group:
            notes = [*notes, f"{self.group} query heads share a tile and its keys"]
        return self.planned(cut.path, tile, warps, size, constants, *notes)
