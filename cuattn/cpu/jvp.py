"""The forward walk with tangents: o, l, m and the derivatives of o and lse along tangents, in one pass over the keys.

A score's tangent counts as far as it differs from the row's mean, which is the tangent of lse.  So it is taken relative
to a centre, the mean over the keys so far: where the centre moves, what was weighed relative to the old one is moved by
as many times the sum of values.  Otherwise tangents that are large and nearly constant along a row would cancel.
"""

import numpy as np
from numpy import ndarray

from cuattn.cpu.forward import ForwardWalk
from cuattn.cpu.tiles import Part
from cuattn.cpu.walk import Tiles


class JvpWalk(ForwardWalk):
    """Computes items of work in one thread."""

    def __init__(self, task: Tiles) -> None:
        blocks, widths = task.blocks, {"to": task.problem.head_dim_v}
        if task.problem.moves:
            widths |= dict.fromkeys("tu", blocks.step * blocks.keys)
        if "tq" in task.operands:
            widths |= dict.fromkeys(("tq", "tq transposed"), task.problem.head_dim)
        super().__init__(task, **widths)

    def _load_rows(self) -> None:
        super()._load_rows()
        self._tq, tangent = None, self.task.operands.get("tq")
        if tangent is not None:
            _, self._tq = self.load("tq", self.item.group.of_queries(tangent, self.item.rows), self.task.factor)

    def _totals(self) -> list[ndarray]:
        return [*super()._totals(), self._to, self._centre]

    def _attend(self, *, careful: bool) -> None:
        self._to, self._centre = self._total("to"), np.zeros((self.members, self.blocks.rows), self.dtype)
        super()._attend(careful=careful)

    def _shrink(self, factor: ndarray) -> None:
        super()._shrink(factor)
        self._to *= factor[..., None]

    def _advance(self, part: Part, *, careful: bool) -> None:
        p = self._exponentials(part, careful=careful)
        self._sum(self._l, p)
        tp = self._centred(part, p, careful=careful) if self.problem.moves else None
        if self.task.dropout is not None:
            dropped = list(self.dropped(part))
            for weights in (p,) if tp is None else (p, tp):
                self.drop(weights, dropped)
        self._weigh(self._o, p, part, "v", careful=careful)
        if tp is not None:
            self._weigh(self._to, tp, part, "v", careful=careful)
        if "tv" in self.tiles:
            self._weigh(self._to, p, part, "tv", careful=careful)

    def _centred(self, part: Part, p: ndarray, *, careful: bool) -> ndarray:
        """Return weights times the scores' tangents relative to the centre, which is moved to the mean so far."""
        t = self.make_tangents(part, self._q, self._tq)
        if careful:
            t[p == 0] = 0
        if self._centre.any():
            t -= self._centre[:, None, None]
        delta = np.zeros_like(self._l)
        self._sum(delta, np.multiply(p, t, self.buffers.get("u", *p.shape)))
        delta /= np.where(self._l == 0, 1, self._l)
        self._centre += delta
        self._to -= delta[..., None] * self._o
        t -= delta[:, None, None]
        t *= p
        return t

    def _finish(self) -> None:
        super()._finish()
        self._write("tlse", self._centre)
        self._write("to", self._to, self._below)
