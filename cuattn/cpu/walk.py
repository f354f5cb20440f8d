"""What the forward and the backward walk share: a call's arrays, keys and values by tile, scores by tile.

Scores are kept transposed, (members, key tiles, keys, rows), where members are row tiles of one or several heads: the
statistics of a row then run down an axis along which NumPy reduces whole registers of rows at once.
"""

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import WINDOW, add_bias, is_for_blas, longest_of, transposed
from cuattn.cpu.blocks import HeadGroup, choose, head_groups
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.score import Scores, Stretch, Values
from cuattn.cpu.softcap import Softcap
from cuattn.cpu.task import Task
from cuattn.cpu.tiles import Part, Visibility
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

END = -1  # what an item of a backward adds to when it ends, in place of a step
Arrays = Mapping[str, ndarray]


class Item(NamedTuple):
    """A stack of row tiles of some heads, and what they see."""

    group: HeadGroup
    rows: slice  # that exist
    parts: tuple[Part, ...]
    turns: list[AbstractContextManager]  # of a backward, at sums that it shares: part by part, and at the end


class Tiles(Task):
    """A call by tiles, and what all threads know of them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        problem, masks = self.problem, self.masks
        self.blocks = choose(problem, masks)
        groups = list(head_groups(problem, self.blocks.heads))
        instances = max([math.prod(mask.leading) for mask in masks], default=1)
        self.visibility = Visibility(problem, masks, self.blocks, again=sum(map(len, groups)) > instances)
        # What adds to common sums is handed out in one order.
        self._groups = [[group for some in groups for group in some]] if self.shares else groups
        self._stacks = cdiv(self.blocks.row_tiles, self.blocks.stack)
        self.sizes = [len(some) * self._stacks for some in self._groups]
        self._max_norms: dict[Hashable, float] = {}

    def item(self, index: int, n: int) -> Item:
        """Return an item of work; to be called for one after the other of those with the same first index."""
        heads, stack = divmod(n, self._stacks)
        group, size = self._groups[index][heads], self.blocks.stack * self.blocks.rows
        parts = self.visibility.parts((*group.batch, group.start), stack * self.blocks.stack)
        rows = slice(stack * size, min((stack + 1) * size, self.problem.n_queries))
        turns = []
        if self.replays:
            line = () if self.shares else (*group.batch, group.kv_start)
            turns = [self.turns.take((line, step)) for step in (*(part.index for part in parts), END)]
        return Item(group, rows, parts, turns)

    def max_norm(self, name: str, group: HeadGroup) -> float:
        """Return the length of the longest of "k", "v", "tk" or "tv" of some heads; not finite where one is not.

        Where there are none it is 0.
        """
        if name not in self.operands:
            return 0.0
        key = (name, *group.batch, group.kv_start)
        if key not in self._max_norms:
            self._max_norms[key] = longest_of(group.of_keys(self.operands[name]), self.problem.stat_dtype)
        return self._max_norms[key]


class Walk:
    """The part of a thread's work that makes scores.

    Keys and values are read where the caller has them, if products can, else from a thread's own copy, which is
    padded with zeros; it holds tile t at place t % blocks.held.

    Attributes
    ----------
    tiles : dict of str to ndarray, (heads | 1, places, blocks.keys, width)
        Of k, v and their tangents, in the precision of the sums.

    Parameters
    ----------
    task : Tiles
    widths : dict of str to int
        Of buffers: elements of each row.
    """

    def __init__(self, task: Tiles, widths: dict[str, int]) -> None:
        self.task, self.problem, self.blocks, self.dtype = task, task.problem, task.blocks, task.problem.stat_dtype
        blocks, problem = self.blocks, self.problem
        widths |= {"s": blocks.step * blocks.keys, "q": problem.head_dim, "q transposed": problem.head_dim}
        if problem.softcap is not None:
            widths["tanh"] = widths["s"]
            if problem.moves:
                widths["slope"] = widths["s"]
        self._of_keys = [name for name in ("k", "v", "tk", "tv") if name in task.operands]
        sizes = {name: blocks.heads * blocks.stack * blocks.rows * width for name, width in widths.items()}
        self._in_place = reads_in_place(problem, task.operands, blocks.keys)
        if not self._in_place:
            keys = (1 if problem.group > 1 else blocks.heads) * blocks.held * blocks.keys
            sizes |= {name: keys * task.operands[name].shape[-1] for name in self._of_keys}
        self.buffers = Buffers(self.dtype, sizes)
        self.cap = None if problem.softcap is None else Softcap(problem.softcap, self.buffers)
        self.slopes: list[Values] = []  # derivatives of the score function, by run of the part
        self.moved: list[Values] = []  # and their tangents
        self._heads: tuple | None = None

    def turn_to(self, item: Item) -> None:
        """Turn to an item: to its row tiles, and to the keys and values of its heads."""
        self.item, group, self.count = item, item.group, item.rows.stop - item.rows.start
        self.members = group.count * cdiv(self.count, self.blocks.rows)
        if self.task.score is not None and item.parts:
            self._stretch = self._stretch_of(item, self.task.score)
        if self._heads == (group.batch, group.kv_start):
            return
        self._heads, self._held = (group.batch, group.kv_start), {}
        self._sources = {name: group.of_keys(self.task.operands[name]) for name in self._of_keys}
        self.tiles = {
            name: x.reshape(len(x), self.blocks.key_tiles, self.blocks.keys, x.shape[-1])
            if self._in_place
            else self.buffers.get(name, len(x), self.blocks.held, self.blocks.keys, x.shape[-1])
            for name, x in self._sources.items()
        }

    def _stretch_of(self, item: Item, score: Scores) -> Stretch:
        """Return the score function for what an item sees."""
        group, size, rows = item.group, self.blocks.keys, self.members // item.group.count * self.blocks.rows
        batch = np.ravel_multi_index(group.batch, self.problem.batch) if group.batch else 0
        first, last = item.parts[0].runs[0], item.parts[-1].runs[-1]
        keys = slice(first.first * size, (last.first + last.slots.stop - last.slots.start) * size)
        return score.of(batch, np.arange(group.start, group.stop), slice(item.rows.start, item.rows.start + rows), keys)

    def _hold(self, index: int) -> None:
        """See to it that the keys and values of a step are there: algorithm 2, line 7."""
        place = index * self.blocks.step % self.blocks.held
        if not (self._in_place or self._held.get(place) == index):
            self._load(index, place)
            self._held[place] = index

    def _load(self, index: int, place: int) -> None:
        held, first, size = (n * self.blocks.keys for n in (self.blocks.held, place, self.blocks.step))
        for name, source in self._sources.items():
            tiles = self.tiles[name]
            there = source[:, index * size : (index + 1) * size]
            copy = tiles.reshape(len(tiles), held, tiles.shape[-1])[:, first : first + size]
            copy[:, : there.shape[1]] = there
            copy[:, there.shape[1] :] = 0

    def bounded(self, longest_q: float) -> bool:
        """Whether all scores of the item are within the window around 0, given the longest of the scaled queries.

        Cauchy and Schwarz give such a bound; it is not finite where something is not.
        """
        largest = longest_q * self.task.max_norm("k", self.item.group)
        if self.problem.softcap is not None and largest < math.inf:
            largest = self.problem.softcap
        if self.task.score is not None:
            largest += self.task.score.largest
        if "bias" in self.task.operands:
            bias = self.item.group.of_queries(self.task.operands["bias"], self.item.rows)
            largest += max(float(bias.max()), -float(bias.min()))
        return largest <= WINDOW

    def by_run(self, part: Part, name: str) -> Iterator[tuple[slice, ndarray]]:
        """Yield slots of a part, and the keys or values, "k", "v" or their tangents, that belong there."""
        tiles = self.tiles[name]
        for first, slots, _ in part.runs:
            place = first % tiles.shape[1]
            yield slots, tiles[:, place : place + slots.stop - slots.start]

    def load(self, name: str, matrices: ndarray, factors: Any, empty: ndarray | None = None) -> tuple[ndarray, ndarray]:
        """Return rows, (heads | 1, count, width), times `factors`, also transposed; missing and `empty` rows are 0."""
        upright = self.buffers.get(name, self.members, self.blocks.rows, matrices.shape[-1])
        flat = self.by_head(upright)
        np.multiply(matrices, factors, out=flat[:, : self.count], dtype=flat.dtype, casting="unsafe")
        flat[:, self.count :] = 0
        if empty is not None:
            flat[:, : self.count][empty] = 0
        transposed = self.buffers.get(f"{name} transposed", self.members, matrices.shape[-1], self.blocks.rows)
        np.copyto(transposed, upright.swapaxes(1, 2))
        return upright, transposed

    def by_head(self, array: ndarray) -> ndarray:
        """Return an array of axes (members, rows, ...) with axes (heads, rows, ...)."""
        tiles = cdiv(self.count, self.blocks.rows)
        return array.reshape(self.members // tiles, tiles * self.blocks.rows, *array.shape[2:])

    def make_scores(self, part: Part, q: ndarray, *, careful: bool) -> tuple[ndarray, list[tuple[ndarray, ndarray]]]:
        """Return the scores of a part, and the tiles of them that hide something with the bits of what they show.

        q is (members, width, rows), scaled.  Algorithms 2 and 4, lines 10 and 11: what is hidden is not yet.
        """
        self._hold(part.index)
        s = self.by_keys("s", part, "k", q)
        if self.cap is not None:
            self.cap(s)
        if self.task.score is not None:
            self.slopes = [self._stretch(tiles, first) for tiles, first in self.by_head_and_run(part, s)]
            careful = True  # whatever the function's values are
        if "bias" in self.task.operands:
            for tile, bias in self.bias_of(self.task.operands["bias"], part, s):
                add_bias(tile, transposed(bias.swapaxes(1, 2)), careful=careful)
        if careful:  # lest rows that do not exist, and see everything, lead NaN to the sums over rows
            by_head = s.reshape(self.item.group.count, -1, *s.shape[1:])
            by_head[:, -1, ..., (self.count - 1) % self.blocks.rows + 1 :] = -np.inf
        masks = [(slots, *shown()) for slots, shown in part.masks]
        return s, [(s[:, slots, keys], bits) for slots, keys, bits in masks]

    def make_tangents(self, part: Part, q: ndarray, tq: ndarray | None) -> ndarray:
        """Return the tangents of the scores of a part, which were made last; q and its tangent are those of the scores.

        Of a backward, `moved` are then those of a score function.
        """
        t = self.sum_by_keys("t", part, [("k", tq), ("tk", q)])
        if self.cap is not None:
            self.cap.move(t)
        tiles = self.by_head_and_run(part, t)
        self.moved = [self._stretch.move(tile, values) for (tile, _), values in zip(tiles, self.slopes, strict=False)]
        if "tbias" in self.task.operands:
            for tile, tbias in self.bias_of(self.task.operands["tbias"], part, t):
                tile += transposed(tbias.swapaxes(1, 2))
        return t

    def sum_by_keys(self, out: str, part: Part, terms: list[tuple[str, ndarray | None]]) -> ndarray:
        """Return the sum of such products as `by_keys` returns, of what there is; the buffer "u" is overwritten."""
        there = [(name, rows) for name, rows in terms if name in self.tiles and rows is not None]
        if not there:
            total = self.buffers.get(out, self.members, part.count, self.blocks.keys, self.blocks.rows)
            total.fill(0)
            return total
        total = self.by_keys(out, part, *there[0])
        for name, rows in there[1:]:
            total += self.by_keys("u", part, name, rows)
        return total

    def by_keys(self, out: str, part: Part, name: str, rows: ndarray) -> ndarray:
        """Return the products of keys or values, "k", "v" or their tangents, of a part with rows, in a buffer."""
        s = self.buffers.get(out, len(rows), part.count, self.blocks.keys, self.blocks.rows)
        for slots, x in self.by_run(part, name):
            np.matmul(x, rows[:, None], s[:, slots])
        return s

    def by_head_and_run(self, part: Part, s: ndarray) -> Iterator[tuple[ndarray, int]]:
        """Yield a part's neighbouring tiles, (heads, row tiles, key tiles, keys, rows), and the first of their keys."""
        by_head = s.reshape(self.item.group.count, -1, *s.shape[1:])
        for first, slots, _ in part.runs:
            yield by_head[:, :, slots], first * self.blocks.keys

    def bias_of(self, bias: ndarray, part: Part, s: ndarray) -> Iterator[tuple[ndarray, ndarray]]:
        """Yield elements of scores, (heads, keys, rows), and those of a bias (each axis may be 1) for them."""
        for _, slots, keys in part.runs:
            tile = s[:, slots].reshape(len(s), -1, s.shape[-1])[:, : keys.stop - keys.start, : self.count]
            yield tile, self.item.group.of_queries(bias, self.item.rows, keys).swapaxes(1, 2)

    def dropped(self, part: Part) -> Iterator[tuple[tuple, ndarray]]:
        """Yield which elements dropout takes from a part: an index of tiles of it, and bool (keys, rows) of these."""
        for _, slots, keys in part.runs:
            for head in range(self.item.group.count):
                kept = self.task.dropout.kept(self.item.group.batch, self.item.group.start + head, self.item.rows, keys)
                yield (head, slots), ~kept.T

    @staticmethod
    def drop(array: ndarray, dropped: Iterator[tuple[tuple, ndarray]]) -> None:
        """Set the dropped elements of an array of a part's shape to 0."""
        for index, which in dropped:
            tiles = array[index].reshape(-1, array.shape[-1])
            np.copyto(tiles[: len(which), : which.shape[1]], 0, where=which)


def reads_in_place(problem: Problem, operands: Arrays, keys: int) -> bool:
    """Whether products read keys and values in blocks of `keys` as they are, to the same bits as a copy of them."""
    return not problem.n_keys % keys and all(
        x.dtype == problem.stat_dtype and x.shape[-1] > 1 and is_for_blas(x)
        for x in (operands[name] for name in ("k", "v", "tk", "tv") if name in operands)
    )
