"""The forward walk: online softmax over the visible tiles.

Every sum over tiles runs in the order of the tiles, one tile after the other, and what is decided for a row depends on
its own scores alone.  So a tile that contributes nothing may be skipped or visited, and it does not matter which heads
are taken at once: the bits of the result are the same.
"""

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    WINDOW,
    exponential,
    exponentiate,
    fold,
    hide,
    is_finite,
    longest_of,
    lowest,
    product,
    relative,
)
from cuattn.cpu.tiles import Part
from cuattn.cpu.walk import Item, Tiles, Walk


class ForwardWalk(Walk):
    """Computes items of work in one thread: algorithm 2, with the loops exchanged."""

    def __init__(self, task: Tiles) -> None:
        columns = task.problem.head_dim_v + 1
        super().__init__(task, {"o": columns, "weighed": (task.blocks.step + 1) * columns})
        self._statistics = task.problem.statistics
        self._lowest = lowest(self.dtype)
        self._ones = np.ones((1, self.blocks.keys), self.dtype)

    def __call__(self, item: Item) -> None:
        """Compute an item; again, with care for what is hidden, if something is not a finite number."""
        self.turn_to(item)
        queries = item.group.of_queries(self.task.operands["q"], item.rows)
        upright, self._q = self.load("q", queries, self.task.factor)
        self._bounded = self.bounded(longest_of(upright))
        self._attend(careful=False)
        if not is_finite(self._o):
            self._attend(careful=True)
        self._finish()

    def _attend(self, *, careful: bool) -> None:
        """Take the row tiles through the tiles that they see."""
        self._o = self.buffers.get("o", self.members, self.problem.head_dim_v + 1, self.blocks.rows)
        self._o.fill(0)
        self._reference = np.zeros((self.members, self.blocks.rows), self.dtype)
        self._m = np.full_like(self._reference, -np.inf)
        for part in self.item.parts:
            self._advance(part, careful=careful)

    def _advance(self, part: Part, *, careful: bool) -> None:
        """Take the row tiles through a part of their tiles: algorithm 2, lines 10 to 16."""
        s, masks = self.make_scores(part, self._q, careful=careful)  # line 10
        if self._bounded:  # all scores are within the window, so references stay 0
            if self._statistics:
                for tile, shown in masks:
                    hide(tile, shown, self._lowest)
                np.maximum(self._m, fold(np.maximum, s.reshape(len(s), -1, s.shape[-1])), out=self._m)
            exponentiate(s)
            for tile, shown in masks:
                hide(tile, shown)
        else:
            for tile, shown in masks:
                hide(tile, shown, -np.inf)  # line 11
            self._follow(s)  # lines 12 and 13
            relative(s)
        weighed = self.buffers.get("weighed", len(s), 1 + part.count, *self._o.shape[1:])
        np.copyto(weighed[:, 0], self._o)
        np.matmul(self._ones, s, weighed[:, 1:, -1:])
        if self.task.dropout is not None:
            self.drop(s, self.dropped(part))  # line 14
        products = weighed[:, 1:, :-1].swapaxes(2, 3)
        for slots, v in self.by_run(part, self.values):
            product(s[:, slots].swapaxes(2, 3), v, products[:, slots], careful=careful)
        np.add.reduce(weighed, 1, None, self._o)  # lines 15 and 16

    def _follow(self, s: ndarray) -> None:
        """Move the references of the rows whose highest score has left the window, and take s relative to them."""
        m, reference = self._m, self._reference
        seen = m > -np.inf
        np.maximum(m, fold(np.maximum, s.reshape(len(s), -1, s.shape[-1])), out=m)
        away = (m > reference + WINDOW) | (~seen & (m < reference - WINDOW) & (m > -np.inf))
        if away.any():
            moved = np.where(away, m, reference)
            self._o *= np.where(seen, exponential(reference - moved), 0)[:, None]
            reference[...] = moved
        if reference.any():
            s -= reference[:, None, None]

    def _finish(self) -> None:
        """Write the results of an item: algorithm 2, lines 15 and 16, once for all."""
        total = self._o[:, -1]
        below = np.where(total == 0, 1, total)
        below *= below.dtype.type(1 / self.problem.dropout_scale)
        weighed = self._o[:, :-1]
        np.divide(weighed, below[:, None], out=weighed)
        results = {"o": weighed.swapaxes(1, 2)}
        if self._statistics:
            self._m[total == 0] = -np.inf
            relative_to = exponential(np.where(total == 0, 0, self._m - self._reference))
            results |= {"l": total / relative_to, "m": self._m}
        for name, values in results.items():
            target = self.item.group.of_queries(self.task.results[name], self.item.rows)
            target[...] = self.by_head(values)[:, : self.count]
