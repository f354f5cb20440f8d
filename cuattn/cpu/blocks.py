"""Sizes of the blocks that the CPU backend works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cuattn.masks import BlockMask
from cuattn.problem import Operands, Problem

__all__ = ["Blocks", "Shape", "choose", "is_plain", "stack_shape"]

_UNIT = 16  # blocks are multiples of it: whole vector registers, and whole blocks of the dropout generator
_SMALL_PRODUCT = 1_000_000  # OpenBLAS multiplies matrices of at most 100 ** 3 multiplications without packing them
_ROWS = 128, 64  # of a tile; the first when a tile of queries then stays in the first-level cache
_FIRST_CACHE = 40_000  # bytes of it that a tile of queries may take
_KEYS = 112  # with 64 dimensions and 128 rows the most that make a small product
_STACK = 4  # row tiles, or heads, that are computed together
_FEWEST_KEYS = 48  # with many dimensions a product is large anyway
_CHUNK_BYTES = 3 << 19  # scores of a chunk, and their products with values, stay in a second-level cache
_PANEL_BYTES = 12 << 20  # the copies of keys and of values that a thread keeps, each


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes: a tile is `rows` x `keys` scores; a chunk is `chunk` tiles side by side, handled at once."""

    rows: int
    keys: int
    stack: int  # row tiles of a head that go through the chunks together
    team: int  # heads whose row tiles go through the chunks together; stack or team is 1
    chunk: int
    panel: int  # tiles whose keys and values a thread keeps a copy of; a multiple of chunk
    row_tiles: int
    key_tiles: int


def choose(problem: Problem, operands: Operands) -> Blocks:
    """Choose the block sizes of a problem.

    A tile makes every product of the algorithm a small one (see ``_SMALL_PRODUCT``); NumPy runs the products of
    several tiles, row tiles and heads one after the other without returning to Python, which only one thread at a time
    can run.  Nothing here depends on the number of threads, since the results do depend on this.
    """
    depth = max(problem.head_dim, problem.head_dim_v) + 1
    itemsize = problem.stat_dtype.itemsize
    rows = _even(problem.n_queries, _ROWS[_ROWS[0] * depth * itemsize > _FIRST_CACHE])
    limit = min(max(_SMALL_PRODUCT // (rows * depth) // _UNIT * _UNIT, _FEWEST_KEYS), _KEYS)
    if isinstance(operands.mask, BlockMask) and limit >= 64 and operands.mask.block_n % 64 == 0:
        limit = 64  # a tile across two blocks would need an element-wise test
    keys = _even(problem.n_keys, limit)
    row_tiles, key_tiles = (max(1, -(-n // size)) for n, size in ((problem.n_queries, rows), (problem.n_keys, keys)))
    stack = min(_STACK, row_tiles) if is_plain(problem) else 1
    fitting = _PANEL_BYTES // (key_tiles * keys * depth * itemsize)  # heads whose keys a thread can hold
    team = _team(problem, operands, fitting) if stack == 1 else 1
    chunk = max(1, min(key_tiles, _CHUNK_BYTES // (stack * team * rows * (keys + problem.head_dim_v) * itemsize)))
    chunk = -(-key_tiles // -(-key_tiles // chunk))
    panel = max(1, _PANEL_BYTES // (keys * depth * itemsize * chunk)) * chunk
    return Blocks(rows, keys, stack, team, chunk, min(panel, -(-key_tiles // chunk) * chunk), row_tiles, key_tiles)


def _team(problem: Problem, operands: Operands, fitting: int) -> int:
    """Return how many heads to compute together: those that one mask covers and nothing else tells apart."""
    mask = operands.mask
    shape = () if mask is None else mask.shape[:-2] if problem.mask == "dense" else mask.leading
    one_mask = not shape or shape[-1] == 1
    apart = problem.dropout or problem.bias is not None or operands.q.shape[:-2] != (*problem.batch, problem.heads)
    if not one_mask or apart:
        return 1
    if problem.group > 1:
        return min(_STACK, problem.group)
    return max(1, min(_STACK, problem.heads, fitting))


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


def is_plain(problem: Problem) -> bool:
    """Whether all row tiles see the same, and nothing but products enters the scores."""
    return problem.mask is problem.band is problem.bias is problem.softcap is None and not problem.dropout


def _even(length: int, limit: int) -> int:
    """Return the block size, a multiple of 16 up to `limit`, that splits a length into equal blocks."""
    blocks = max(1, -(-length // limit))
    return max(_UNIT, -(-length // (blocks * _UNIT)) * _UNIT)
