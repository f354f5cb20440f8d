"""What the forward and the backward walk share: a call's arrays, scores by tile, sums over tiles.

Scores are kept transposed, (heads, row tiles, key tiles, keys, rows): the statistics of a row then run down an axis
along which NumPy reduces whole registers of rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.buffers import Buffers, Shapes
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import WINDOW, longest
from cuattn.cpu.heads import HeadGroup
from cuattn.cpu.packed import PackedKV
from cuattn.cpu.tiles import Part, RowGroup, TileMask, Visibility
from cuattn.problem import Problem

__all__ = ["LANES", "Item", "Rows", "Task", "Walk", "differentiate_softcap", "longest_of", "selecting_product"]

LANES = 16  # keys whose scores are compared at once; they divide every block of keys


class Item(NamedTuple):
    """A stack of row tiles of some heads, and what they see."""

    group: HeadGroup
    row_tile: int  # the first
    row_groups: tuple[RowGroup, ...]
    line: tuple[int, ...] = ()  # of a backward: which items it shares sums with
    numbers: tuple[int, ...] = ()  # and its turns at them: part by part, and at the end


class Task:
    """A call: its problem, its arrays, and what all threads know of them."""

    def __init__(
        self, problem: Problem, operands: Mapping[str, np.ndarray], masks: Sequence[Any], dropout: Dropout | None,
        blocks: Blocks,
    ) -> None:  # fmt: skip
        self.problem, self.operands, self.dropout, self.blocks = problem, operands, dropout, blocks
        self.visibility = Visibility(problem, masks, blocks)
        self.factor = problem.scale / (problem.softcap or 1)
        self._max_norms: dict[tuple, float] = {}

    def max_norm(self, name: str, group: HeadGroup) -> float:
        """Return the length of the longest key or value, "k" or "v", of some heads; not finite where one is not."""
        where = (name, *group.batch, group.kv_start)
        if where not in self._max_norms:
            self._max_norms[where] = longest_of(group.of_keys(self.operands[name]), self.problem.stat_dtype)
        return self._max_norms[where]

    def bounded(self, product: float) -> bool:
        """Whether all scores are within the window around 0, given a bound of the products of scaled queries and keys.

        Cauchy and Schwarz give such a bound; it is not finite where something is not.
        """
        cap = self.problem.softcap
        largest = product if cap is None else cap if product < math.inf else math.inf
        return largest + self._largest_bias <= WINDOW

    @cached_property
    def _largest_bias(self) -> float:
        bias = self.operands.get("bias")
        return 0.0 if bias is None else max(float(bias.max()), -float(bias.min()))


def longest_of(vectors: np.ndarray, dtype: np.dtype | None = None) -> float:
    """Return the length of the longest of some vectors, or a little more."""
    if not vectors.size:
        return 0.0
    # Of another dtype einsum converts a little at a time.
    squares = np.einsum("...i,...i->...", vectors, vectors, dtype=dtype, casting="unsafe")
    return longest(squares, vectors.shape[-1])


class Rows:
    """Rows of q or do of a stack, as products need them: transposed and, where asked for, also as they are.

    Attributes
    ----------
    upright : ndarray, (heads, row tiles, rows, width)
    transposed : ndarray, (heads, row tiles, width, rows)
    """

    def __init__(self, buffers: Buffers, name: str, heads: int, tiles: int, rows: int, width: int) -> None:
        self.upright = buffers.get(name, heads, tiles, rows, width)
        self.transposed = buffers.get(f"{name} transposed", heads, tiles, width, rows)

    @staticmethod
    def shapes(name: str, blocks: Blocks, width: int) -> Shapes:
        """Return the shapes of the buffers that are needed."""
        members = blocks.heads * blocks.stack
        return {name: (members, blocks.rows, width), f"{name} transposed": (members, width, blocks.rows)}

    def load(self, matrices: np.ndarray, factors: Any, empty: np.ndarray | None = None) -> None:
        """Take rows of some heads, (heads | 1, count, width), times `factors`; missing and `empty` rows become 0."""
        heads, tiles, rows, width = self.upright.shape
        flat = self.upright.reshape(heads, tiles * rows, width)
        count = matrices.shape[1]
        np.multiply(matrices, factors, out=flat[:, :count], dtype=flat.dtype, casting="unsafe")
        flat[:, count:] = 0
        if empty is not None:
            flat[:, :count][empty] = 0
        np.copyto(self.transposed, self.upright.swapaxes(2, 3))


class Walk:
    """The part of a thread's work that makes scores."""

    def __init__(self, task: Task, shapes: Shapes) -> None:
        self.task, self.problem, self.blocks = task, task.problem, task.blocks
        self.buffers = Buffers(task.problem.stat_dtype, shapes)
        self.kv = PackedKV(task.problem, task.operands, task.blocks, self.buffers)

    @staticmethod
    def shapes(problem: Problem, operands: Mapping[str, np.ndarray], blocks: Blocks) -> Shapes:
        """Return the shapes of the buffers that every walk needs."""
        scores = max(blocks.room, blocks.heads * blocks.abreast), blocks.keys, blocks.rows
        tanh = {} if problem.softcap is None else {"tanh": scores}
        return {"s": scores, **tanh, **PackedKV.shapes(problem, operands, blocks)}

    def rows_of(self, item: Item) -> slice:
        """Return the rows of an item that exist."""
        start = item.row_tile * self.blocks.rows
        tiles = sum(group.count for group in item.row_groups)
        return slice(start, min(start + tiles * self.blocks.rows, self.problem.n_queries))

    def make_scores(
        self, item: Item, row_group: RowGroup, part: Part, q: np.ndarray, *, careful: bool
    ) -> tuple[np.ndarray, list[tuple[np.ndarray, TileMask]]]:
        """Return the scores of a part, and the tiles of them that hide something with what they hide.

        q is (heads, row tiles, width, rows), scaled.  Algorithms 2 and 4, lines 10 and 11: what is hidden is not yet.
        """
        heads, tiles, _, rows = q.shape
        s = self.buffers.get("s", heads, tiles, part.count, self.blocks.keys, rows)
        self.kv.hold(part)
        for first, slot, count in part.runs:
            place = first % self.kv.keys.shape[2]
            np.matmul(self.kv.keys[:, :, place : place + count], q[:, :, None], s[:, :, slot : slot + count])
        if self.problem.softcap is not None:
            self.tanh = np.tanh(s, out=self.buffers.get("tanh", *s.shape))
            np.multiply(self.tanh, self.problem.softcap, out=s)
        if "bias" in self.task.operands:
            for tile, bias in self.bias_of(item.group.of_queries(self.task.operands["bias"]), item, row_group, part, s):
                tile += bias
                if careful:  # hidden even where the score itself is NaN
                    np.copyto(tile, -np.inf, where=bias == -np.inf)
        if careful:  # lest rows that do not exist, and see everything, lead NaN to the sums over rows
            there = self.problem.n_queries - (item.row_tile + row_group.start + tiles - 1) * rows
            s[:, -1, ..., there:] = -np.inf
        return s, [(s[:, row, slot], mask()) for row, slot, mask in part.masks]

    def bias_of(
        self, bias: np.ndarray, item: Item, row_group: RowGroup, part: Part, s: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield elements of scores, (heads, keys, rows), and those of a bias (each axis may be 1) for them."""
        for row, (first, slot, count) in ((row, run) for row in range(row_group.count) for run in part.runs):
            start = (item.row_tile + row_group.start + row) * self.blocks.rows
            rows = slice(start, min(start + self.blocks.rows, self.problem.n_queries))
            keys = slice(first * self.blocks.keys, min((first + count) * self.blocks.keys, self.problem.n_keys))
            tile = s[:, row, slot : slot + count].reshape(len(s), -1, s.shape[-1])
            tile = tile[:, : keys.stop - keys.start, : rows.stop - rows.start]
            wide, tall = bias.shape[2] > 1, bias.shape[1] > 1
            yield tile, bias[:, rows if tall else slice(None), keys if wide else slice(None)].swapaxes(1, 2)

    def dropped(self, item: Item, row_group: RowGroup, part: Part) -> Iterator[tuple[tuple, np.ndarray]]:
        """Yield which elements dropout takes from a part: an index of tiles of it, and bool (keys, rows) of these."""
        size = self.blocks
        for row, (first, slot, count) in ((row, run) for row in range(row_group.count) for run in part.runs):
            tile = item.row_tile + row_group.start + row
            rows = slice(tile * size.rows, min((tile + 1) * size.rows, self.problem.n_queries))
            keys = slice(first * size.keys, min((first + count) * size.keys, self.problem.n_keys))
            for head in range(item.group.count):
                kept = self.task.dropout.kept(item.group.batch, item.group.start + head, rows, keys)
                yield (head, row, slice(slot, slot + count)), ~kept.T

    @staticmethod
    def drop(array: np.ndarray, dropped: Iterable[tuple[tuple, np.ndarray]]) -> None:
        """Set the dropped elements of an array of a part's shape to 0."""
        for index, which in dropped:
            tiles = array[index].reshape(-1, array.shape[-1])
            np.copyto(tiles[: len(which), : which.shape[1]], 0, where=which)


def differentiate_softcap(ds: np.ndarray, tanh: np.ndarray, softcap: float, *, careful: bool) -> None:
    """Turn derivatives by scores into those by the products that went into the cap; overwrites its tanh."""
    np.multiply(tanh, tanh, tanh)
    np.subtract(1, tanh, tanh)
    if careful:
        tanh[np.isnan(tanh)] = 0  # where ds is 0, as what is hidden, or NaN
    ds *= np.multiply(tanh, softcap, tanh)


def selecting_product(weights: np.ndarray, data: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Compute weights @ data, where a weight of 0 takes nothing: not NaN, either, of infinite data or of NaN."""
    bad = ~np.isfinite(data)
    np.matmul(weights, np.where(bad, 0, data), out=out)
    if bad.any():
        signs = np.sign(weights)
        count = np.matmul(np.abs(signs), bad.astype(out.dtype))
        net = np.matmul(signs, np.where(bad & ~np.isnan(data), np.sign(data), 0))
        out += np.where(count == 0, 0, np.where(np.abs(net) == count, np.copysign(np.inf, net), np.nan))
    return out
