"""The attention matrices of a problem and the slices of the operands that each one reads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuattn.problem import Operands, Problem

__all__ = ["Head", "Team", "all_heads", "pick", "pick_team", "place", "place_team", "team_groups"]


class Head(NamedTuple):
    """One attention matrix: a query head of one batch element."""

    index: int  # flat, C order over (*batch, heads)
    query: tuple[int, ...]  # index into axes (*batch, heads)
    kv: tuple[int, ...]  # index into axes (*batch, kv_heads)


class Team(NamedTuple):
    """Heads that are computed together: neighbours in one batch element, under one mask."""

    heads: tuple[Head, ...]
    alike: bool  # whether they read the same keys and values


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


def place_team(array: np.ndarray, where: tuple[int, ...], count: int) -> tuple[int | slice, ...]:
    """Return the index of the slices that belong to `count` neighbouring heads, the first at `where`."""
    *batch, head = place(array, where)
    return (*batch, slice(head, head + (count if array.shape[len(batch)] > 1 else 1)))


def pick_team(array: np.ndarray, team: Team) -> np.ndarray:
    """Return the slices of an array that belong to the query heads of a team, (heads | 1, ...)."""
    return array[place_team(array, team.heads[0].query, len(team.heads))]


def team_groups(problem: Problem, operands: Operands, size: int) -> list[list[Team]]:
    """Make teams of up to `size` heads, and group them so that no two groups read the same keys or values.

    Threads prefer to stay within a group: they then copy its keys and values once, and in the backward pass
    no other thread adds to the same gradients.  Groups, teams and heads are in C order.
    """
    shared = [
        n > 1 and 1 in (k, v)
        for n, k, v in zip((*problem.batch, problem.kv_heads), operands.k.shape, operands.v.shape, strict=False)
    ]
    alike = problem.group > 1
    groups: dict[tuple[int, ...], dict[tuple[int, ...], list[Head]]] = {}
    for head in all_heads(problem):
        *batch, kv = head.kv
        within = head.query[-1] % problem.group if alike else head.query[-1]
        team = (*batch, kv if alike else 0, within // size)
        where = (*batch, kv if alike else kv // size)
        key = tuple(0 if together else i for i, together in zip(where, shared, strict=True))
        groups.setdefault(key, {}).setdefault(team, []).append(head)
    return [[Team(tuple(heads), alike) for heads in teams.values()] for teams in groups.values()]
