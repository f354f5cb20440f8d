"""Heads that are computed together, and the parts of the operands that they read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from cuattn.problem import Problem

__all__ = ["HeadGroup", "head_groups", "place_of", "shares_sums"]


class HeadGroup(NamedTuple):
    """Neighbouring query heads of one batch element, under one mask."""

    batch: tuple[int, ...]
    start: int  # the first query head
    stop: int
    kv_start: int  # the first key/value head; heads of a group of them read a single one
    kv_stop: int

    @property
    def count(self) -> int:
        """How many heads these are."""
        return self.stop - self.start

    @property
    def first(self) -> tuple[int, ...]:
        """Index of the first head into axes (*batch, heads)."""
        return (*self.batch, self.start)

    def of_queries(self, array: np.ndarray) -> np.ndarray:
        """Return the slices of an array of axes (*batch, heads, ...) that belong to the heads, (heads | 1, ...)."""
        return array[place_of(array, self.batch, self.start, self.stop)]

    def of_keys(self, array: np.ndarray) -> np.ndarray:
        """Return the slices of an array of axes (*batch, kv_heads, ...) that the heads read, (heads | 1, ...)."""
        return array[place_of(array, self.batch, self.kv_start, self.kv_stop)]


def place_of(array: np.ndarray, batch: tuple[int, ...], start: int, stop: int) -> tuple[int | slice, ...]:
    """Return the index of some neighbouring heads in an array whose axes (*batch, heads) broadcast."""
    index = tuple(i if n > 1 else 0 for i, n in zip(batch, array.shape, strict=False))
    return (*index, slice(start, stop) if array.shape[len(batch)] > 1 else slice(0, 1))


def shares_sums(problem: Problem, operands: Mapping[str, np.ndarray]) -> bool:
    """Whether a gradient gets terms from several batch elements or key/value heads, as its operand is broadcast."""
    heads = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads, "bias": problem.heads}
    return any(
        operands[name].shape[:-2] != (*problem.batch, count) for name, count in heads.items() if name in operands
    )


def head_groups(problem: Problem, size: int) -> Iterable[list[HeadGroup]]:
    """Yield, in C order, lists of up to `size` heads each; heads of different lists read different keys and values."""
    for batch in np.ndindex(*problem.batch):
        if problem.group == 1:
            for start in range(0, problem.heads, size):
                stop = min(start + size, problem.heads)
                yield [HeadGroup(batch, start, stop, start, stop)]
            continue
        for kv in range(problem.kv_heads):
            first, end = kv * problem.group, (kv + 1) * problem.group
            starts = range(first, end, size)
            yield [HeadGroup(batch, start, min(start + size, end), kv, kv + 1) for start in starts]
