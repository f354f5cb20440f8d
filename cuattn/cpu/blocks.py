"""Sizes of the blocks that the CPU backend works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cuattn.masks import BlockMask
from cuattn.problem import Operands, Problem

__all__ = [
    "ABREAST",
    "LANES",
    "Blocks",
    "Shape",
    "choose",
    "is_plain",
    "most_parts",
    "small_columns",
    "stack_shape",
    "sum_columns",
    "summed_keys",
]

LANES = 16  # keys whose scores are compared at once; they divide every block of keys
_UNIT = 16  # blocks are multiples of it: whole vector registers, and whole blocks of the dropout generator
_SMALL_PRODUCT = 1_000_000  # OpenBLAS multiplies matrices of at most 100 ** 3 multiplications without packing them
_COLUMNS = 6  # that the inner loop of those products takes at once, with vectors of rows
_SUMMED = 384  # keys that a product of probabilities and values may sum over, lest roundings pile up;
_SUMMED_PER_COLUMN = 12  # where values are narrow the textbook's products, with other inner loops, err less
_FIRST_CACHE = 40_000  # bytes of it that a tile of queries may take
ABREAST = 2  # row tiles of a head that read the keys that they see together
_FEWEST_KEYS = 48  # with many dimensions a product is large anyway


class _Limits(NamedTuple):
    """What the sizes of one direction may be."""

    rows: tuple[int, int]  # of a tile; the first when a tile of queries then stays in the first-level cache
    keys: int
    stack: int  # row tiles, where all of a head see the same
    turns: int  # row tiles of an item of work, where they do not
    team: int  # heads
    panel_bytes: int  # the copies of keys and of values that a thread keeps, each
    chunk_bytes: int  # of the scores of a chunk, which stay in a second-level cache


# 64 rows are what a product of transposed scores keeps in the first-level cache while it takes all columns of values.
_FORWARD = _Limits((64, 64), 128, 8, 4, 4, 20 << 20, 7 << 17)
# With 64 dimensions and 128 rows 112 keys are the most that make a small product.
_BACKWARD = _Limits((128, 64), 112, 4, 1, 4, 12 << 20, 6 << 17)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes: a tile is `rows` x `keys` scores; a chunk is `chunk` tiles side by side, handled at once."""

    rows: int
    keys: int
    stack: int  # row tiles of a head in an item of work; they go through the chunks together if all see the same
    team: int  # heads whose row tiles go through the chunks together
    chunk: int
    panel: int  # tiles whose keys and values a thread keeps a copy of; a multiple of chunk
    row_tiles: int
    key_tiles: int

    @property
    def slots(self) -> int:
        """Tiles of each head that a group of row tiles is taken through at once, where no score needs a look."""
        return -(-self.chunk // ABREAST) * ABREAST


def choose(problem: Problem, operands: Operands) -> Blocks:
    """Choose the block sizes of a problem.

    A tile makes every product of the algorithm a small one (see ``_SMALL_PRODUCT``); NumPy runs the products of
    several tiles, row tiles and heads one after the other without returning to Python, which only one thread at a time
    can run.  Nothing here depends on the number of threads, since the results do depend on this.
    """
    limits = _FORWARD if problem.direction == "forward" else _BACKWARD
    plain = is_plain(problem)
    depth = max(problem.head_dim, problem.head_dim_v) + 1
    itemsize = problem.stat_dtype.itemsize
    rows = _even(problem.n_queries, limits.rows[limits.rows[0] * depth * itemsize > _FIRST_CACHE])
    limit = min(max(_SMALL_PRODUCT // (rows * depth) // _UNIT * _UNIT, _FEWEST_KEYS), limits.keys)
    if isinstance(operands.mask, BlockMask) and limit >= 64 and operands.mask.block_n % 64 == 0:
        limit = 128 if limit == 128 and operands.mask.block_n % 128 == 0 else 64  # no tile across two blocks
    keys = _even(problem.n_keys, limit)
    row_tiles, key_tiles = (max(1, -(-n // size)) for n, size in ((problem.n_queries, rows), (problem.n_keys, keys)))
    fitting = limits.panel_bytes // (key_tiles * keys * depth * itemsize)  # heads whose keys a thread can hold
    team = 1 if plain else _team(problem, operands, limits.team, fitting)
    stack = min(limits.stack if plain else limits.turns, row_tiles)
    together = stack if plain else team
    chunk = max(1, min(key_tiles, limits.chunk_bytes // (together * rows * keys * itemsize)))
    chunk = -(-key_tiles // -(-key_tiles // chunk))
    panel = max(1, limits.panel_bytes // (keys * depth * itemsize * chunk)) * chunk
    return Blocks(rows, keys, stack, team, chunk, min(panel, -(-key_tiles // chunk) * chunk), row_tiles, key_tiles)


def _team(problem: Problem, operands: Operands, most: int, fitting: int) -> int:
    """Return how many heads, up to `most`, to compute together: those that nothing but operands tells apart."""
    mask = operands.mask
    shape = () if mask is None else mask.shape[:-2] if problem.mask == "dense" else mask.leading
    one_mask = not shape or shape[-1] == 1
    apart = problem.dropout or problem.bias is not None or operands.q.shape[:-2] != (*problem.batch, problem.heads)
    if not one_mask or apart:
        return 1
    heads, most = (problem.group, most) if problem.group > 1 else (max(1, problem.heads), max(1, min(most, fitting)))
    return -(-heads // -(-heads // most))


class Shape(NamedTuple):
    """How many row tiles, of how many heads and rows, go through the keys together."""

    heads: int
    tiles: int  # of each head
    rows: int  # of each tile


def stack_shape(problem: Problem, blocks: Blocks, heads: int, row_tile: int) -> Shape:
    """Return the shape of the stack that starts with a row tile."""
    left = problem.n_queries - row_tile * blocks.rows
    if left <= blocks.rows:
        return Shape(heads, 1, -(-left // _UNIT) * _UNIT)
    return Shape(heads, min(blocks.stack, -(-left // blocks.rows)), blocks.rows)


def small_columns(width: int, others: int) -> list[slice]:
    """Split the `width` of a product whose other two lengths multiply to `others` so that each part is small.

    Parts are multiples of 6 columns, which is what the inner loop of OpenBLAS for AVX-512 takes at once.
    """
    most = max(_COLUMNS, _SMALL_PRODUCT // others // _COLUMNS * _COLUMNS)
    parts = -(-width // most)
    step = -(-width // (max(parts, 1) * _COLUMNS)) * _COLUMNS
    return [slice(start, min(start + step, width)) for start in range(0, width, max(step, 1))]


def summed_keys(width: int, keys: int) -> int:
    """Return over how many of `keys`, a multiple of 16, one product with values of a width sums; it divides them."""
    most = min(keys, _SUMMED, max(_UNIT, _SUMMED_PER_COLUMN * width))
    return max(n for n in range(_UNIT, most + 1, _UNIT) if keys % n == 0)


def most_parts(problem: Problem, blocks: Blocks) -> int:
    """Return of how many such sums the output of a chunk of keys may consist, in a forward; and of those before it."""
    if not is_plain(problem):
        return ABREAST + blocks.slots * (blocks.keys // summed_keys(problem.head_dim_v, blocks.keys))
    counts = {blocks.chunk, blocks.key_tiles % blocks.chunk or blocks.chunk}
    lengths = [count * blocks.keys for count in counts]
    return max(n // summed_keys(problem.head_dim_v, n) for n in lengths)


def sum_columns(problem: Problem) -> int:
    """Return how many columns of ones and zeros, beside those of the values, sum up the probabilities in a forward.

    They are what the values leave free of the columns that the inner loop of OpenBLAS takes at once, so they cost
    nothing.  Where tiles may be skipped or probabilities dropped there are none: o is divided by l there, and what a
    backward finds of both agrees more closely.
    """
    return _COLUMNS - problem.head_dim_v % _COLUMNS if is_plain(problem) else 0


def is_plain(problem: Problem) -> bool:
    """Whether all row tiles see the same, and nothing but products enters the scores."""
    return problem.mask is problem.band is problem.bias is problem.softcap is None and not problem.dropout


def _even(length: int, limit: int) -> int:
    """Return the block size, a multiple of 16 up to `limit`, that splits a length into equal blocks."""
    blocks = max(1, -(-length // limit))
    return max(_UNIT, -(-length // (blocks * _UNIT)) * _UNIT)
