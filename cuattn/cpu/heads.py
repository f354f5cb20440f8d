"""The attention matrices of a problem and the slices of the operands that each one reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuattn.problem import Operands, Problem

__all__ = ["Head", "all_heads", "head_groups", "pick", "place"]


class Head(NamedTuple):
    """One attention matrix: a query head of one batch element."""

    index: int  # flat, C order over (*batch, heads)
    query: tuple[int, ...]  # index into axes (*batch, heads)
    kv: tuple[int, ...]  # index into axes (*batch, kv_heads)


def all_heads(problem: Problem) -> list[Head]:
    """List the attention matrices of a problem in C order."""
    return [
        Head(index, where, (*where[:-1], where[-1] // problem.group))
        for index, where in enumerate(np.ndindex(*problem.batch, problem.heads))
    ]


def place(array: np.ndarray, where: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of a slice of an array whose leading axes broadcast."""
    return tuple(i if n != 1 else 0 for i, n in zip(where, array.shape, strict=False))


def pick(array: np.ndarray, where: tuple[int, ...]) -> np.ndarray:
    """Return the slice of an array, whose leading axes broadcast, that belongs to an index into them."""
    return array[place(array, where)]


def head_groups(problem: Problem, operands: Operands) -> list[list[Head]]:
    """Group the heads so that no two groups read the same keys or values; groups and heads in C order.

    Threads prefer to stay within a group: they then copy its keys and values once, and in the backward pass
    no other thread adds to the same gradients.
    """
    shared = [
        size > 1 and 1 in (k, v)
        for size, k, v in zip((*problem.batch, problem.kv_heads), operands.k.shape, operands.v.shape, strict=False)
    ]
    groups: dict[tuple[int, ...], list[Head]] = {}
    for head in all_heads(problem):
        key = tuple(0 if together else i for i, together in zip(head.kv, shared, strict=True))
        groups.setdefault(key, []).append(head)
    return list(groups.values())
