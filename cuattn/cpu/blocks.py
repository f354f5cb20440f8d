"""Sizes of the blocks that the CPU backend works on."""

from __future__ import annotations

from dataclasses import dataclass

from cuattn.masks import BlockMask
from cuattn.problem import Problem

__all__ = ["Blocks", "choose", "is_plain", "stack_shape"]

_UNIT = 16  # blocks are multiples of it: whole vector registers, and whole blocks of the dropout generator
_SMALL_PRODUCT = 1_000_000  # OpenBLAS multiplies matrices of at most 100 ** 3 multiplications without packing them
_ROWS = 128  # more rows than this evict a block of queries from the first-level cache
_KEYS = 112  # with 64 dimensions and 128 rows the most that make a small product
_STACK = 4  # row tiles that share the keys and values of a chunk while those are in the cache
_CHUNK_BYTES = 1 << 20  # scores of a chunk: they and what they are multiplied with stay in a second-level cache
_PANEL_BYTES = 1 << 23  # the copies of keys and of values that a thread keeps, each


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes: a tile is `rows` x `keys` scores; a chunk is `chunk` tiles side by side, handled at once."""

    rows: int
    keys: int
    stack: int  # row tiles that go through the chunks together
    chunk: int
    panel: int  # tiles whose keys and values a thread keeps a copy of; a multiple of chunk
    row_tiles: int
    key_tiles: int


def choose(problem: Problem, mask: object = None) -> Blocks:
    """Choose the block sizes of a problem.

    A tile makes every product of the algorithm a small one (see ``_SMALL_PRODUCT``); NumPy runs the products of a
    chunk one after the other without returning to Python.
    """
    depth = max(problem.head_dim, problem.head_dim_v) + 1
    rows = _even(problem.n_queries, _ROWS if depth <= 160 else _ROWS // 2)
    limit = max(_UNIT, _SMALL_PRODUCT // (rows * depth) // _UNIT * _UNIT)
    limit = min(limit, _KEYS)
    if isinstance(mask, BlockMask) and limit >= 64 and mask.block_n % 64 == 0:
        limit = 64  # a tile across two blocks would need an element-wise test
    keys = _even(problem.n_keys, limit)
    key_tiles = max(1, -(-problem.n_keys // keys))
    itemsize = problem.stat_dtype.itemsize
    row_tiles = max(1, -(-problem.n_queries // rows))
    stack = min(_STACK, row_tiles) if is_plain(problem) else 1
    chunk = max(1, min(key_tiles, _CHUNK_BYTES // (stack * rows * keys * itemsize)))
    chunk = -(-key_tiles // -(-key_tiles // chunk))
    panel = max(1, _PANEL_BYTES // (keys * depth * itemsize * chunk)) * chunk
    return Blocks(rows, keys, stack, chunk, min(panel, -(-key_tiles // chunk) * chunk), row_tiles, key_tiles)


def stack_shape(problem: Problem, blocks: Blocks, row_tile: int) -> tuple[int, int]:
    """Return how many row tiles, of how many rows, go through the keys together from `row_tile` on."""
    left = problem.n_queries - row_tile * blocks.rows
    if left <= blocks.rows:
        return 1, -(-left // _UNIT) * _UNIT
    return min(blocks.stack, -(-left // blocks.rows)), blocks.rows


def is_plain(problem: Problem) -> bool:
    """Whether all row tiles see the same, and nothing but products enters the scores."""
    return problem.mask is problem.band is problem.bias is problem.softcap is None and not problem.dropout


def _even(length: int, limit: int) -> int:
    """Return the block size, a multiple of 16 up to `limit`, that splits a length into equal blocks."""
    blocks = max(1, -(-length // limit))
    return max(_UNIT, -(-length // (blocks * _UNIT)) * _UNIT)
