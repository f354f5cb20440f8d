"""Origin: where a shard stands in the whole problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from typing import Any

import numpy as np

from cuattn.errors import ArgumentError, DtypeError, as_integer, shown
from cuattn.masks.runs import indices
from cuattn.problem.model import Place, Problem
from cuattn.rng import BLOCK

Runs = tuple[tuple[int, int], ...]
"""Pieces of an axis, ``((local_start, global_start), ...)``; each reaches to the next one's local start."""

_LIMIT = 2**31
_COUNTER_LIMIT = 2**32  # the generator's counter words have 32 bits


@dataclass(frozen=True)
class Origin:
    """Global indices of a call's first element: its place in a larger problem that is computed in parts.

    Causality, windows, dropout and functions then use global indices; masks and bias are the call's own, already cut,
    and what functions read is the whole's.

    Parameters
    ----------
    batch, head : int, default 0
        Flat leading index and query head of the first element.
    row, key : int or runs, default 0
        Global index of the first row and key; for a part of several pieces, ``((local_start, global_start), ...)`` in
        ascending order of both, the first at local 0.
    heads : int, optional
        Query heads of the whole problem; needed when `head` > 0, by default the call's own.
    n_queries, n_keys : int, optional
        Lengths of the whole problem, which "bottom_right" needs.

    Raises
    ------
    DtypeError, ArgumentError
        When a field is no integer or no runs, negative or not ascending.

    See Also
    --------
    merge : Combines parts over disjoint keys.
    cuattn.distributed : Gives parts their places by itself.

    Notes
    -----
    With dropout every local and global start is a multiple of 16.

    Examples
    --------
    Two shards of the keys, merged, are the whole causal problem:

    >>> import numpy as np, cuattn
    >>> x = np.random.default_rng(0).standard_normal((64, 8), np.float32)
    >>> shards = [(x[key : key + 32], cuattn.Origin(key=key)) for key in (0, 32)]
    >>> parts = [cuattn.forward(x, k, k, is_causal=True, origin=origin) for k, origin in shards]
    >>> bool(np.allclose(cuattn.merge(*parts).o, cuattn.attention(x, x, x, is_causal=True), atol=1e-6))
    True
    """

    batch: int = 0
    head: int = 0
    row: int | Runs = 0
    key: int | Runs = 0
    heads: int | None = None
    n_queries: int | None = None
    n_keys: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value, name = getattr(self, item.name), f"origin.{item.name}"
            if value is not None or item.default is not None:
                check = _check_runs if item.name in ("row", "key") else _index
                object.__setattr__(self, item.name, check(name, value))
        if self.head and self.heads is None:
            raise ArgumentError(f"origin.head is {self.head} without origin.heads; expected the whole problem's heads")

    @property
    def has_runs(self) -> bool:
        """Whether rows or keys are several pieces."""
        return isinstance(self.row, tuple) or isinstance(self.key, tuple)


def _index(name: str, value: Any) -> int:
    number = as_integer(value)
    if number is None:
        raise DtypeError(f"{name} is {shown(value)}; expected an integer >= 0")
    if not 0 <= number < _LIMIT:
        raise ArgumentError(f"{name} is {shown(number)}; expected an index >= 0 and < 2**31")
    return number


def _check_runs(name: str, value: Any) -> int | Runs:
    if not isinstance(value, (tuple, list)):
        return _index(name, value)

    def refuse(expected: str) -> ArgumentError:
        return ArgumentError(f"{name} is {shown(value)}; expected {expected}")

    if not value or not all(isinstance(run, (tuple, list)) and len(run) == 2 for run in value):
        raise refuse("an integer, or runs ((local_start, global_start), ...)")
    runs = tuple([(_index(name, local), _index(name, at)) for local, at in value])
    if runs[0][0] != 0:
        raise refuse("the first run at local index 0")
    if any(b <= a or next_start < start + b - a for (a, start), (b, next_start) in pairwise(runs)):
        raise refuse("runs that ascend and do not overlap")
    return runs[0][1] if len(runs) == 1 else runs


def pieces(name: str, start: int | Runs, length: int) -> Runs:
    """Return the global (start, stop) of each piece of a part of `length` rows or keys.

    >>> pieces("row", ((0, 4), (2, 10)), 4)
    ((4, 6), (10, 12))
    """
    runs = ((0, start),) if isinstance(start, int) else start
    if runs[-1][0] > length:
        raise ArgumentError(f"origin.{name} is {shown(start)}; expected local starts of at most {length}")
    ends = (*(first for first, _ in runs[1:]), length)
    return tuple((at, at + end - first) for (first, at), end in zip(runs, ends, strict=True))


def place_of(problem: Problem, origin: Origin | None) -> Place:
    """Return a call's place, checked against its problem; without an origin the call is the whole problem."""
    place = problem.place if origin is None else _part(problem, origin)
    if problem.dropout and (total := (place.batch + math.prod(problem.batch)) * place.heads) > _COUNTER_LIMIT:
        raise ArgumentError(f"dropout_p needs batch x heads indices up to {total}; expected at most {_COUNTER_LIMIT}")
    return place


def _part(problem: Problem, origin: Origin) -> Place:
    heads = problem.heads if origin.heads is None else origin.heads
    if origin.head + problem.heads > heads:
        raise ArgumentError(
            f"origin.head is {origin.head} with {problem.heads} heads; expected at most origin.heads = {heads} in all"
        )
    row, row_blocks = _axis(problem, "row", origin.row, problem.n_queries, origin.n_queries)
    key, key_blocks = _axis(problem, "key", origin.key, problem.n_keys, origin.n_keys)
    shift = 0
    if problem.band is not None:
        shift = row - key + (whole_offset(origin) if problem.band.bottom_right else 0)
    return Place(origin.batch, origin.head, heads, row, key, shift, row_blocks, key_blocks)


def whole_offset(origin: Origin) -> int:
    """Return by how much the diagonal of the whole problem is shifted when it ends in the bottom right corner."""
    if origin.n_queries is None or origin.n_keys is None:
        raise ArgumentError(
            "is_causal or window is aligned 'bottom_right' and origin lacks n_queries or n_keys; expected the "
            "lengths of the whole problem"
        )
    return origin.n_keys - origin.n_queries


def _axis(problem: Problem, name: str, start: Any, length: int, whole: int | None) -> tuple[int, Any]:
    """Return where a part's rows or keys begin, checked; of several pieces 0 and, if asked for, where blocks are."""
    runs, given = pieces(name, start, length), f"origin.{name} is {shown(start)}"
    *edges, end = chain(*runs)
    limit = _LIMIT - 1 if whole is None else whole
    if end > limit:
        raise ArgumentError(f"{given}, which ends at {end}; expected an end of at most {limit}")
    if problem.dropout and any(edge % BLOCK for edge in edges):
        raise ArgumentError(f"{given}; expected multiples of {BLOCK} with dropout_p > 0")
    if len(runs) == 1:
        return start, None
    return 0, indices(runs, BLOCK if problem.dropout else 1).astype(np.int32) if problem.runs else None
