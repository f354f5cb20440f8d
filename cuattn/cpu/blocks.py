"""Sizes of the blocks that the walk works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

__all__ = ["UNIT", "Blocks", "choose"]

UNIT = 16  # blocks are multiples of it: whole vector registers, and whole blocks of the dropout generator
_SMALL_PRODUCT = 1_000_000  # OpenBLAS multiplies matrices of at most 100 ** 3 multiplications without packing them
_SUMMED_PER_COLUMN = 12  # keys that one product with narrow values sums over; more would err more than the textbook
_FIRST_CACHE = 40_000  # bytes of it that a tile of queries may take
_FEWEST_KEYS = 48  # with many dimensions a product is large anyway
_HEADS = 4  # that go through the keys together under a mask: more would leave no second thread its own
_ABREAST = 2  # row tiles of a head that do, where they see the same


class _Limits(NamedTuple):
    """What the sizes of one operation may be."""

    rows: tuple[int, int]  # of a tile; the first when a tile of queries then stays in the first-level cache
    keys: int
    passing: int  # row tiles, of any heads, that go through the keys together without a mask
    turns: int  # row tiles of a head in an item of work under a mask
    score_bytes: int  # of the scores at a time, which stay in a second-level cache
    packed_bytes: int  # of the copies of keys and values that a thread keeps


# 64 rows are what a product of transposed scores keeps in the first-level cache while it takes all columns of values.
_FORWARD = _Limits((64, 64), 128, 8, 4, 1 << 20, 32 << 20)
# With 64 dimensions and 128 rows 112 keys are the most that make a small product.
_BACKWARD = _Limits((128, 64), 112, 4, 1, 6 << 17, 24 << 20)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes: a tile is `rows` x `keys` scores."""

    rows: int
    keys: int
    heads: int  # that go through the keys together
    stack: int  # row tiles of each head in an item of work
    abreast: int  # of these, how many go through the keys together, if they see the same
    room: int  # tiles, of all heads and row tiles, whose scores are held at a time
    step: int  # key tiles of each head and row tile that are taken at a time, where their bounds are fixed
    held: int  # key tiles of each head that a thread keeps a copy of, where it cannot read the operand
    row_tiles: int
    key_tiles: int


def choose(problem: Problem, operands: dict[str, np.ndarray], masks: Sequence[Any]) -> Blocks:
    """Choose the block sizes of a problem.

    A tile makes every product of the algorithm a small one (see ``_SMALL_PRODUCT``); NumPy runs the products of several
    tiles, row tiles and heads one after the other without returning to Python, which only one thread at a time can run.
    Nothing here depends on the number of threads, since the results do depend on this.
    """
    limits = _FORWARD if problem.operation == "forward" else _BACKWARD
    depth, itemsize = max(problem.head_dim, problem.head_dim_v), problem.stat_dtype.itemsize
    rows = even(problem.n_queries, limits.rows[limits.rows[0] * depth * itemsize > _FIRST_CACHE])
    limit = min(max(_SMALL_PRODUCT // (rows * depth) // UNIT * UNIT, _FEWEST_KEYS), limits.keys)
    limit = min(limit, max(UNIT, _SUMMED_PER_COLUMN * problem.head_dim_v // UNIT * UNIT))
    keys = even(problem.n_keys, _dividing(limit, masks))
    row_tiles, key_tiles = cdiv(problem.n_queries, rows), cdiv(problem.n_keys, keys)
    uniform = not masks
    stack = min(limits.passing if uniform else limits.turns, row_tiles)
    heads = _heads(problem, operands, masks, max(1, limits.passing // stack) if uniform else _HEADS)
    room = max(1, limits.score_bytes // (rows * keys * itemsize))
    abreast = stack if uniform else min(stack, _ABREAST)
    step = max(1, min(key_tiles, room // (heads * abreast)))
    step = cdiv(key_tiles, cdiv(key_tiles, step))
    held = limits.packed_bytes // (heads * keys * (problem.head_dim + problem.head_dim_v) * itemsize)
    held = min(key_tiles, max(1, held // step) * step)
    return Blocks(rows, keys, heads, stack, abreast, room, step, held, row_tiles, key_tiles)


def _dividing(limit: int, masks: Sequence[Any]) -> int:
    """Return the most keys of a tile that keep it within a block of the masks, where that costs little."""
    for mask in masks:
        block = getattr(mask, "block_n", 0)
        if limit >= 64 and block and block % 64 == 0:
            limit = 128 if limit == 128 and block % 128 == 0 else 64
    return limit


def _heads(problem: Problem, operands: dict[str, np.ndarray], masks: Sequence[Any], most: int) -> int:
    """Return how many heads, up to `most`, to compute together: those that only operands tell apart."""
    if any(mask.leading and mask.leading[-1] > 1 for mask in masks):
        return 1
    heads = problem.group if problem.group > 1 else max(1, problem.heads)
    return cdiv(heads, cdiv(heads, most))


def even(length: int, limit: int) -> int:
    """Return the block size, a multiple of 16 up to `limit`, that splits a length > 0 into equal blocks."""
    return max(UNIT, cdiv(length, cdiv(length, limit) * UNIT) * UNIT)
