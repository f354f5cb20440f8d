"""Sizes of the blocks that the walk works on, and the heads that go through them together."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.io_model.sizes import cdiv
from cuattn.problem import OPERATIONS, Problem

UNIT = 16  # blocks are multiples of it: whole vector registers, and whole blocks of the dropout generator
SMALL_PRODUCT = 1_000_000  # OpenBLAS multiplies matrices of at most 100 ** 3 multiplications without packing them
_SUMMED_PER_COLUMN = 12  # keys that one product with narrow values sums over; more would err more than the textbook
_FEWEST_KEYS = 48  # with many dimensions a product is large anyway
_ROWS = 64  # of a tile: what a product of transposed scores keeps in the first-level cache while it takes all columns
_KEYS = 128
_MASKED_KEYS = 64  # under a mask, of which smaller tiles leave less to visit in vain
_ABREAST = 8  # row tiles, of any heads, that go through the keys together
_HEADS_MASKED = 8  # that do under a mask
_HEADS_SUMMED = 4  # of a backward: more would leave no second thread sums of its own
_FEW = 3  # heads for which taller tiles under a mask save more calls than they visit in vain
_SCORE_BYTES = 1 << 21  # of the scores at a time, which stay in the caches of a core
_COPIED_BYTES = 24 << 20  # of the copies of keys and values that a thread keeps


class Blocks(NamedTuple):
    """Block sizes: a tile is `rows` x `keys` scores."""

    rows: int
    keys: int
    heads: int  # that go through the keys together
    stack: int  # row tiles of each head that do
    step: int  # key tiles of each head and row tile that are taken at a time, whatever is visible
    held: int  # key tiles of each head that a thread keeps a copy of, where it cannot read the operand
    row_tiles: int
    key_tiles: int


def choose(problem: Problem, masks: Sequence[Any]) -> Blocks:
    """Choose the block sizes of a problem.

    A tile makes every product of the algorithm a small one (see ``SMALL_PRODUCT``); NumPy runs the products of several
    tiles and heads one after the other without returning to Python, which only one thread at a time can run.
    Nothing here depends on the number of threads, since the results do depend on this.
    """
    depth, itemsize = max(problem.head_dim, problem.head_dim_v), problem.stat_dtype.itemsize
    heads = problem.group if problem.group > 1 else problem.heads
    masked = _HEADS_SUMMED if OPERATIONS[problem.operation].replays else _HEADS_MASKED
    heads = cdiv(heads, cdiv(heads, masked if masks else _ABREAST))
    if any(mask.leading and mask.leading[-1] > 1 for mask in masks):  # only operands may tell heads apart
        heads = 1
    rows = even(problem.n_queries, 2 * _ROWS if masks and heads < _FEW else _ROWS)
    limit = max(SMALL_PRODUCT // (rows * depth) // UNIT * UNIT, _FEWEST_KEYS)
    limit = min(limit, max(UNIT, _SUMMED_PER_COLUMN * problem.head_dim_v // UNIT * UNIT))
    keys = even(problem.n_keys, min(limit, _MASKED_KEYS if masks else _KEYS))
    row_tiles, key_tiles = cdiv(problem.n_queries, rows), cdiv(problem.n_keys, keys)
    stack = 1
    if not (masks or problem.bias is not None or problem.dropout):
        if problem.group == 1 and row_tiles >= heads:
            heads = 1  # row tiles that read the same keys, as these then stay in the cache
        if heads == 1 or problem.group > 1:
            stack = min(row_tiles, _ABREAST // heads)
    step = max(1, _SCORE_BYTES // (heads * stack * rows * keys * itemsize))
    step = cdiv(key_tiles, cdiv(key_tiles, step))
    held = _COPIED_BYTES // (heads * keys * (problem.head_dim + problem.head_dim_v) * itemsize)
    held = min(key_tiles, max(1, held // step) * step)
    return Blocks(rows, keys, heads, stack, step, held, row_tiles, key_tiles)


def even(length: int, limit: int) -> int:
    """Return the block size, a multiple of 16 up to `limit`, that splits a length > 0 into equal blocks."""
    return cdiv(length, cdiv(length, limit) * UNIT) * UNIT


class HeadGroup(NamedTuple):
    """Neighbouring query heads of one batch element, under one mask."""

    batch: tuple[int, ...]
    start: int  # the first query head
    stop: int
    shared: int  # heads that read the same key/value head; beyond 1 those of a group read a single one

    @property
    def kv_start(self) -> int:
        """The first key/value head."""
        return self.start // self.shared

    @property
    def count(self) -> int:
        """How many heads these are."""
        return self.stop - self.start

    def of_queries(self, array: ndarray, *more: slice) -> ndarray:
        """Return the part of an array of axes (*batch, heads, ...) that belongs to the heads, (heads | 1, ...)."""
        return array[place_of(array, (*self.batch, slice(self.start, self.stop), *more))]

    def of_keys(self, array: ndarray, *more: slice) -> ndarray:
        """Return the part of an array of axes (*batch, kv_heads, ...) that the heads read, (heads | 1, ...)."""
        kv_heads = slice(self.kv_start, (self.stop - 1) // self.shared + 1)
        return array[place_of(array, (*self.batch, kv_heads, *more))]


def place_of(array: ndarray, index: tuple[int | slice, ...]) -> tuple[int | slice, ...]:
    """Return an index into the first axes of an array for one whose axes of length 1 broadcast."""
    return tuple([
        part if n > 1 else slice(None) if isinstance(part, slice) else 0
        for part, n in zip(index, array.shape, strict=False)
    ])  # fmt: skip


def head_groups(problem: Problem, size: int) -> Iterable[list[HeadGroup]]:
    """Yield, in C order, lists of up to `size` heads each; heads of different lists read different keys and values."""
    some = problem.group if problem.group > 1 else problem.heads  # which are cut alike
    for *batch, index in np.ndindex(*problem.batch, problem.heads // some):
        first, last = index * some, (index + 1) * some
        starts = range(first, last, size)
        groups = [HeadGroup(tuple(batch), start, min(start + size, last), problem.group) for start in starts]
        yield from [groups] if problem.group > 1 else ([group] for group in groups)
