"""What a call is to all threads: its arrays, and its items of work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy import ndarray

from cuattn.cpu.dropout import Dropout
from cuattn.cpu.score import Scores
from cuattn.cpu.threads import Turns
from cuattn.problem import OPERATIONS, Problem

Arrays = Mapping[str, ndarray]


@dataclass(eq=False)
class Task:
    """A call: what is to be computed of what.

    Parameters
    ----------
    problem : Problem
    operands : dict of ndarray
    masks : sequence of Mask
        The problem's band among them.
    dropout : Dropout or None
    results : dict of ndarray
        o and, if they are wanted, l and m, to write to; or what a backward's dq, dk, dv and dbias are added to.
    shares : bool
        Whether a gradient gets terms from several batch elements or heads; then all items add to sums in one order.
    score : Scores or None
        The score function.

    Attributes
    ----------
    sizes : list of int
        Of the groups of its items of work, which a worker is handed by ``item(group, n)``.
    replays : bool
        Whether gradients are computed, from a forward's statistics.
    along : bool
        Whether derivatives along tangents are, beside.
    factor : float
        Of queries, which makes their products with keys scores, or what the cap is put on.
    """

    problem: Problem
    operands: Arrays
    masks: Sequence[Any]
    dropout: Dropout | None
    results: Arrays
    shares: bool
    score: Scores | None = None
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns()
        self.replays = OPERATIONS[self.problem.operation].replays
        self.along = self.problem.operation not in ("forward", "backward")
        self.factor = self.problem.scale / (self.problem.softcap or 1)
