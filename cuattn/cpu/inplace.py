"""Keys and values where the caller has them: as good as a panel's copy where all are numbers and all tiles whole."""

from __future__ import annotations

import math

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.bound import longest
from cuattn.cpu.heads import Team, place_team
from cuattn.problem import Operands, Problem

__all__ = ["InPlace"]


class InPlace:
    """Keys and values of a team of heads, by tile, looked at chunk by chunk as they are asked for.

    Attributes
    ----------
    keys, values : ndarray, (heads | 1, tiles, blocks.keys, width)
        Views of the operands.
    reach : float
        The length of the longest key, or a little more.
    """

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks) -> None:
        self._operands, self._blocks = (operands.k, operands.v), blocks
        self._shared = problem.group > 1
        self._usable = not problem.n_keys % blocks.keys and all(_fits(x, problem.stat_dtype) for x in self._operands)
        self._team: Team | None = None
        self._reaches: dict[int, float] = {}
        self.reach = 0.0

    def hold(self, team: Team, chunks: tuple[int, ...]) -> bool:
        """Turn to a team; return whether what it may read of some chunks, given by index, can be read where it is."""
        if not self._usable:
            return False
        if team is not self._team:
            self._team, self._reaches = team, {}
            count = 1 if self._shared else len(team.heads)
            of_team = [x[place_team(x, team.heads[0].kv, count)] for x in self._operands]
            self.keys, self.values = (x.reshape(len(x), -1, self._blocks.keys, x.shape[-1]) for x in of_team)
        for index in chunks:
            if index not in self._reaches:
                self._reaches[index] = self._look(index)
        self.reach = max([self._reaches[index] for index in chunks])
        return self.reach < math.inf

    def _look(self, index: int) -> float:
        """Return how long the keys of a chunk are; not finite where a key or a value is not, or is huge."""
        tiles = slice(index * self._blocks.chunk, (index + 1) * self._blocks.chunk)
        keys, values = self.keys[:, tiles], self.values[:, tiles]
        reach = longest(np.einsum("hijk,hijk->hij", keys, keys), keys.shape[-1])
        total = float(np.einsum("hijk,hijk->", values, values))
        return reach if math.isfinite(reach + total) else math.inf


def _fits(operand: np.ndarray, dtype: np.dtype) -> bool:
    """Whether products read an operand as it is, and to the same bits as a copy of it."""
    width, step = operand.shape[-1], operand.strides[-2]
    contiguous = operand.strides[-1] == operand.itemsize and step >= width * operand.itemsize
    return operand.dtype == dtype and operand.flags.aligned and width > 1 and contiguous and not step % operand.itemsize
