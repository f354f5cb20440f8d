"""What an attention call computes, as values without arrays.

A :class:`Problem` is made once, by :func:`cuattn.problem.validate`, and every backend trusts it: nothing below
this layer checks an argument again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuattn.errors import ArgumentError

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
DTYPES = (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)

_SHARD_UNIT = 16  # a shard must start on a 16 x 16 block of the dropout generator (see cuattn.rng)


def stat_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of l, m and of every sum, for inputs or outputs of `dtype`."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32


@dataclass(frozen=True, slots=True)
class Band:
    """A diagonal band: row i sees key j when ``i + offset - left <= j <= i + offset + right``.

    ``None`` leaves that side open.  Causal attention is ``right = 0``; ``offset`` is 0 when the diagonal starts
    in the top left corner and ``n_keys - n_queries`` when it ends in the bottom right one.
    """

    left: int | None
    right: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Global indices of a problem's first element: its place in a larger, sharded problem.

    Only dropout looks at it.  The generator's batch-head index of local (batch ib, head ih) is
    ``(batch + ib) * heads + head + ih``, where ``heads`` is the head count of the whole (None: of this problem).
    """

    batch: int = 0
    head: int = 0
    row: int = 0
    key: int = 0
    heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "head", "row", "key"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"origin.{name} is {getattr(self, name)}; expected an index >= 0")
        for name in ("row", "key"):
            if getattr(self, name) % _SHARD_UNIT:
                raise ArgumentError(f"origin.{name} is {getattr(self, name)}; expected a multiple of {_SHARD_UNIT}")


@dataclass(frozen=True, slots=True)
class Problem:
    """An attention problem: shapes, dtypes and options, checked and hashable.

    ``batch`` holds the broadcast leading axes without the head axis.  Query head h reads key/value head
    ``h // group``; keys and values that broadcast over all heads have ``kv_heads = 1``.
    """

    direction: str
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
    mask: str | None = None  # None | "column" | "block" | "dense"
    bias: np.dtype | None = None  # the bias's dtype
    dropout: int = 0  # threshold T of cuattn.rng: an element is kept when its 16-bit draw is >= T
    out_dtype: np.dtype = FLOAT32
    precision: str | None = None
    deterministic: bool = False
    kernel: str | None = None
    origin: Origin = field(default_factory=Origin)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def stat_dtype(self) -> np.dtype:
        """Dtype of l, m and of every sum."""
        return stat_dtype(self.dtype)

    @property
    def dropout_scale(self) -> float:
        """What a kept probability is multiplied by, ``65536 / (65536 - T)``."""
        return 65536 / (65536 - self.dropout)

    @property
    def o_shape(self) -> tuple[int, ...]:
        """Shape of o with every leading axis and the head axis written out."""
        return (*self.batch, self.heads, self.n_queries, self.head_dim_v)

    @property
    def stat_shape(self) -> tuple[int, ...]:
        """Shape of l and m."""
        return (*self.batch, self.heads, self.n_queries)

    @property
    def score_shape(self) -> tuple[int, ...]:
        """Shape that a mask or a bias broadcasts to; never allocated."""
        return (*self.batch, self.heads, self.n_queries, self.n_keys)


class Operands(NamedTuple):
    """The arrays of a problem, aligned to ``len(batch) + 3`` axes but not yet broadcast.

    Leading axes are 1 or the problem's size; so is the head axis (of k and v: 1 or ``kv_heads``).  The last axis
    of q, k, v, do and o is contiguous; all other strides are whatever the caller's array has.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    rng: Any = None
    do: Any = None
    o: Any = None
    l: Any = None
    m: Any = None
