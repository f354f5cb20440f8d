"""The forward walk: online softmax over the visible tiles.

Every sum over tiles runs in the order of the tiles, one tile after the other, and what is decided for a row depends on
its own scores alone.  So a tile that contributes nothing may be skipped or visited, and it does not matter which heads
are taken at once: the bits of the result are the same.

A score's tangent counts as far as it differs from the row's mean, which is the tangent of lse.  So it is taken relative
to a centre, the mean over the keys so far: where the centre moves, what was weighed relative to the old one is moved by
as many times the sum of values.  Otherwise tangents that are large and nearly constant along a row would cancel.
"""

import numpy as np
from numpy import ndarray

from cuattn.cpu.arithmetic import (
    WINDOW,
    exponential,
    exponentiate,
    hide,
    highest,
    is_finite,
    longest_of,
    lowest,
    product,
    relative,
    statistics_of,
    summed,
    wider,
)
from cuattn.cpu.blocks import UNIT
from cuattn.cpu.tiles import Part
from cuattn.cpu.walk import Item, Tiles, Walk


class ForwardWalk(Walk):
    """Computes items of work in one thread: algorithm 2, with the loops exchanged, perhaps along tangents."""

    def __init__(self, task: Tiles) -> None:
        width, tiles, d = task.problem.head_dim_v, task.blocks.step + 1, task.problem.head_dim
        widths = {"o": width, "weighed": tiles * width, "halves": max(UNIT, tiles * task.blocks.keys // 3)}
        if task.along:
            widths |= {"to": width, "tq": d, "tq transposed": d}
            widths |= dict.fromkeys("tu" if task.problem.moves else "", task.blocks.step * task.blocks.keys)
        super().__init__(task, widths)
        self._ones = np.ones((1, self.blocks.keys), self.dtype)

    def __call__(self, item: Item) -> None:
        """Compute an item; again, with care for what is hidden, if something is not a finite number."""
        self.turn_to(item)
        self._load_rows()
        self._attend(careful=False)
        if not is_finite(*self._outputs.values(), self._l, self._centre):
            self._attend(careful=True)
        self._finish()

    def _load_rows(self) -> None:
        rows = {
            name: self.load(name, self.item.group.of_queries(x, self.item.rows), self.task.factor)
            for name, x in self.task.operands.items()
            if name in ("q", "tq")
        }
        upright, self._q = rows["q"]
        _, self._tq = rows.get("tq", (None, None))
        self._bounded = self.bounded(longest_of(upright))

    def _attend(self, *, careful: bool) -> None:
        """Take the row tiles through the tiles that they see."""
        shape = self.members, self.blocks.rows, self.problem.head_dim_v
        self._outputs = {name: self.buffers.get(name, *shape) for name in ("o", "to") if name in self.task.results}
        for total in self._outputs.values():
            total.fill(0)
        self._l = np.zeros(shape[:2], wider(self.dtype))
        self._reference, self._centre = np.zeros((2, *shape[:2]), self.dtype)
        self._m = np.full_like(self._reference, -np.inf)
        for part in self.item.parts:
            self._advance(part, careful=careful)

    def _advance(self, part: Part, *, careful: bool) -> None:
        """Take the row tiles through a part of their tiles: algorithm 2, lines 10 to 16."""
        p = self._exponentials(part, careful=careful)  # lines 10 to 13
        adds = "bias" in self.task.operands or self.task.score is not None
        self._l += self._sum(p, level=adds or self.task.along)
        tp = self._centred(part, p, careful=careful) if self.problem.moves else None
        dropped = [] if self.task.dropout is None else list(self.dropped(part))
        for weights in (p,) if tp is None else (p, tp):
            self.drop(weights, dropped)  # line 14
        for name, weights, values in (("o", p, "v"), ("to", tp, "v"), ("to", p, "tv")):
            if weights is not None and name in self._outputs and values in self.tiles:
                self._weigh(self._outputs[name], weights, part, values, careful=careful)  # lines 15 and 16

    def _centred(self, part: Part, p: ndarray, *, careful: bool) -> ndarray:
        """Return weights times the scores' tangents relative to the centre, which is moved to the mean so far."""
        t = self.make_tangents(part, self._q, self._tq)
        if careful:
            t[p == 0] = 0
        if self._centre.any():
            t -= self._centre[:, None, None]
        delta = self._sum(np.multiply(p, t, self.buffers.get("u", *p.shape)), level=False)
        delta /= np.where(self._l == 0, 1, self._l).astype(self.dtype)
        self._centre += delta
        self._outputs["to"] -= delta[..., None] * self._outputs["o"]
        t -= delta[:, None, None]
        t *= p
        return t

    def _exponentials(self, part: Part, *, careful: bool) -> ndarray:
        """Return the exponentials of a part's scores, to which statistics and sums are adapted."""
        s, masks = self.make_scores(part, self._q, careful=careful)  # line 10
        if self._bounded:  # all scores are within the window, so references stay 0
            if self.problem.statistics:
                for tile, shown in masks:
                    hide(tile, shown, lowest(s.dtype))
                np.maximum(self._m, self._highest(s), out=self._m)
            exponentiate(s)
            for tile, shown in masks:
                hide(tile, shown)
        else:
            for tile, shown in masks:
                hide(tile, shown, -np.inf)  # line 11
            self._follow(s)  # lines 12 and 13
            relative(s)
        return s

    def _sum(self, p: ndarray, *, level: bool) -> ndarray:
        """Return the sums of a part's weights, tile after tile.

        Where something adds to scores, they may be equal at any `level`: then they are summed so that this takes no
        digit, in a wider type.  Equal products of queries and keys are 0 but for keys that are all the same; along
        tangents, where it takes next to no time, these are not left out either.
        """
        if level:
            return np.add.reduce(summed(p, self.buffers.get("halves", p.size // 3)), 1)
        return np.add.reduce(np.matmul(self._ones, p)[:, :, 0], 1)

    def _weigh(self, total: ndarray, p: ndarray, part: Part, name: str, *, careful: bool) -> None:
        """Add values, "v" or "tv", times weights to a sum, tile after tile."""
        weighed = self.buffers.get("weighed", len(p), 1 + part.count, *total.shape[1:])
        for slots, v in self.by_run(part, name):
            product(p[:, slots].swapaxes(2, 3), v, weighed[:, 1:][:, slots], careful=careful)
        weighed[:, 0] = total
        np.add.reduce(weighed, 1, None, total)

    def _follow(self, s: ndarray) -> None:
        """Move the references of the rows whose highest score has left the window, and take s relative to them."""
        m, reference = self._m, self._reference
        seen = m > -np.inf
        np.maximum(m, self._highest(s), out=m)
        away = (m > reference + WINDOW) | (~seen & (m < reference - WINDOW) & (m > -np.inf))
        if away.any():
            moved = np.where(away, m, reference)
            shrink = np.where(seen, exponential(reference - moved), 0)
            self._l *= shrink
            for total in self._outputs.values():
                total *= shrink[..., None]
            reference[...] = moved
        if reference.any():
            s -= reference[:, None, None]

    def _highest(self, s: ndarray) -> ndarray:
        """Return the highest score of each row of (members, tiles, keys, rows)."""
        some = np.maximum.reduce(s.reshape(len(s), -1, UNIT, s.shape[-1]), 1)
        return highest(some, self.buffers.get("halves", some.size))

    def _finish(self) -> None:
        """Write the results of an item: algorithm 2, lines 15 and 16, once for all."""
        below = np.where(self._l == 0, 1, self._l / self.problem.dropout_scale).astype(self.dtype)
        for name, total in self._outputs.items():
            self._write(name, total, below)
        if self.problem.statistics:
            for name, values in statistics_of(self._l, self._m, self._reference).items():
                self._write(name, values)
        if self.task.along:
            self._write("tlse", self._centre)

    def _write(self, name: str, values: ndarray, below: ndarray | None = None) -> None:
        """Write a result of the rows that exist, divided by what is `below`."""
        target = self.item.group.of_queries(self.task.results[name], self.item.rows)
        values = self.by_head(values)[:, : self.count]
        if below is None:
            target[...] = values
        else:
            np.divide(values, self.by_head(below)[:, : self.count, None], out=target, casting="unsafe")
