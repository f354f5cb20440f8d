"""What an attention call computes, as values without arrays.

A :class:`Problem` is made once, by :func:`cuattn.problem.check`, and every backend trusts it: nothing below this layer
checks an argument again.  It is hashable and says all that a plan depends on.  Where a shard stands in the whole is no
part of it: :class:`Place` is an argument of each launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cuattn.problem.dtypes import DTYPES, FLOAT32, Dtype
from cuattn.rng import LEVELS

if TYPE_CHECKING:
    from cuattn.tracing import Facts, Node


@dataclass(frozen=True, slots=True)
class Band:
    """A diagonal band: row i sees key j when ``i + offset - left <= j <= i + offset + right``.

    ``None`` leaves that side open.  Causal attention is ``right = 0``; ``offset`` is 0 when the diagonal starts
    in the top left corner and ``n_keys - n_queries`` when it ends in the bottom right one.  Of a part of a larger
    problem it is 0: there, where the diagonal begins is the :class:`Place`'s to say, by `bottom_right`.
    """

    left: int | None
    right: int | None
    offset: int
    bottom_right: bool = field(default=False, compare=False)


class Place(NamedTuple):
    """Where a call's first element stands in the whole problem, as a backend needs it.

    Attributes
    ----------
    batch, head, heads : int
        Dropout's index of local (batch ib, head ih) is ``(batch + ib) * heads + head + ih``.
    row, key : int
        Global index of the first row and key.
    shift : int
        What is added to the band's offset.
    row_blocks, key_blocks : int32 ndarray | None
        Of parts of several runs: global index of the first of every 16 local rows or keys, with dropout, or of each
        row or key, for a score function without dropout; None: they follow `row` or `key`.
    """

    batch: int
    head: int
    heads: int
    row: int = 0
    key: int = 0
    shift: int = 0
    row_blocks: Any = None
    key_blocks: Any = None


class ScoreFunction(NamedTuple):
    """What is done to each score before the bias is added: a graph, and what is known of what it reads.

    Attributes
    ----------
    root : Node
        The score, of s, b, h, i, j (global indices), of arrays and of numbers by slot.
    facts : Facts
        Layouts of the arrays, the operands "score0", "score1", ...; kinds of the numbers; limits of b, h, i, j.
    learned : tuple of int
        Slots of the arrays of which a backward returns the gradients.
    tangents : tuple of (int, int)
        Slots of the arrays that have a tangent, and of this, which is an operand like them.
    """

    root: Node
    facts: Facts
    learned: tuple[int, ...] = ()
    tangents: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def has(name: str) -> bool:
        """Return whether an operand, or a gradient, belongs to a score function, and has axes of its own.

        >>> ScoreFunction.has("score0"), ScoreFunction.has("dscore0"), ScoreFunction.has("bias")
        (True, True, False)
        """
        return "score" in name

    @property
    def names(self) -> list[str]:
        """Names of its arrays among the operands, by slot."""
        return self.names_of(self.facts.arrays)

    @staticmethod
    def names_of(arrays: Sequence[Any]) -> list[str]:
        """Return the names among the operands of arrays by slot.

        >>> ScoreFunction.names_of("ab")
        ['score0', 'score1']
        """
        return [f"score{slot}" for slot in range(len(arrays))]


@dataclass(frozen=True, slots=True)
class Problem:
    """An attention problem: shapes, dtypes and options, checked and hashable.

    ``batch`` holds the broadcast leading axes without the head axis.  Query head h reads key/value head
    ``h // group``; keys and values that broadcast over all heads have ``kv_heads = 1``.  `rank` is the highest of q, k
    and v, and o's; backends see every axis written out.
    """

    operation: str
    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    head_dim_v: int
    dtype: np.dtype
    scale: float
    softcap: float | None = None
    band: Band | None = None
    masks: tuple[str, ...] = ()  # kinds of the masks, which combine by AND
    bias: np.dtype | None = None  # the bias's dtype
    dropout: int = 0  # threshold T of cuattn.rng: an element is kept when its 16-bit draw is >= T
    out_dtype: np.dtype = FLOAT32  # of o, or of the gradients
    statistics: bool = True  # False: l and m are not asked for
    precision: str | None = None
    deterministic: bool = False
    kernel: str | None = None
    sm_margin: int = 0  # multiprocessors of a GPU that are left to others
    runs: bool = False  # dropout or a score function over parts of several runs: a place has row_blocks or key_blocks
    placed: bool = False  # a part of a larger problem: where its band lies is told in each call
    twin: bool = False  # of a problem with a boolean mask, whose bits it gives
    score: ScoreFunction | None = None
    tangents: tuple[str, ...] = ()  # operands of q, k, v, bias and do that have a tangent
    rank: int = field(default=3, compare=False)

    @property
    def row(self) -> Dtype:
        """The dtype's row."""
        return DTYPES[self.dtype]

    @property
    def learned(self) -> tuple[int, ...]:
        """Slots of the arrays of a score function of which a backward returns the gradients."""
        return () if self.score is None else self.score.learned

    @property
    def moves(self) -> bool:
        """Whether scores have a tangent."""
        of_score = self.score is not None and self.score.tangents
        return bool(of_score) or not {"q", "k", "bias"}.isdisjoint(self.tangents)

    @property
    def group(self) -> int:
        """Query heads per key/value head, 1 where there are no heads."""
        return max(self.heads // max(self.kv_heads, 1), 1)

    @property
    def instances(self) -> int:
        """Number of score matrices: all heads of all leading axes."""
        return math.prod(self.batch) * self.heads

    @property
    def stat_dtype(self) -> np.dtype:
        """Dtype of l, m and of every sum."""
        return self.row.stat

    @property
    def dropout_scale(self) -> float:
        """What a kept probability is multiplied by, ``65536 / (65536 - T)``."""
        return LEVELS / (LEVELS - self.dropout)

    @property
    def leading(self) -> tuple[int, ...]:
        """Leading axes of o as the caller sees them: none at rank 2, else batch and heads."""
        return () if self.rank == 2 else (*self.batch, self.heads)

    @property
    def o_shape(self) -> tuple[int, ...]:
        """Shape of o with every leading axis and the head axis written out."""
        return (*self.stat_shape, self.head_dim_v)

    @property
    def stat_shape(self) -> tuple[int, ...]:
        """Shape of l and m."""
        return (*self.batch, self.heads, self.n_queries)

    @property
    def place(self) -> Place:
        """The place of a call that is the whole problem."""
        return Place(0, 0, self.heads)

    def grad_dtype(self, dtype: np.dtype) -> np.dtype:
        """Dtype of the gradient of an operand: its own, unless out_dtype asks for unrounded gradients."""
        return dtype if self.out_dtype == self.dtype else self.out_dtype
