"""Keys and values by tile: where the caller has them, if products can read them there, else a thread's own copy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.buffers import Buffers, Shapes
from cuattn.cpu.heads import HeadGroup
from cuattn.cpu.tiles import Part
from cuattn.problem import Problem

__all__ = ["PackedKV", "reads_in_place"]


class PackedKV:
    """Keys and values of some heads, in the precision of the sums.

    A copy holds tile t at place t % blocks.held; it is padded with zeros.

    Attributes
    ----------
    keys, values : ndarray, (heads | 1, 1, places, blocks.keys, width)
        The second axis is there for row tiles.
    """

    def __init__(self, problem: Problem, operands: Mapping[str, np.ndarray], blocks: Blocks, buffers: Buffers) -> None:
        self._operands, self._blocks = (operands["k"], operands["v"]), blocks
        self._in_place = reads_in_place(problem, operands, blocks)
        self._group: HeadGroup | None = None
        self._buffers, self._held = buffers, np.full(blocks.held, -1)
        self._n_keys = problem.n_keys

    @staticmethod
    def shapes(problem: Problem, operands: Mapping[str, np.ndarray], blocks: Blocks) -> Shapes:
        """Return the shapes of the buffers that are needed."""
        if reads_in_place(problem, operands, blocks):
            return {}
        heads = 1 if problem.group > 1 else blocks.heads
        size = heads, blocks.held, blocks.keys
        return {"keys": (*size, problem.head_dim), "values": (*size, problem.head_dim_v)}

    def turn_to(self, group: HeadGroup) -> None:
        """Turn to other heads."""
        if group[:1] + group[3:] == (self._group and self._group[:1] + self._group[3:]):
            return
        self._group = group
        self._sources = [group.of_keys(x) for x in self._operands]
        if self._in_place:
            tiles = [
                x.reshape(len(x), 1, self._blocks.key_tiles, self._blocks.keys, x.shape[-1]) for x in self._sources
            ]
        else:
            self._held.fill(-1)
            tiles = [
                self._buffers.get(name, len(x), 1, self._blocks.held, self._blocks.keys, x.shape[-1])
                for name, x in zip(("keys", "values"), self._sources, strict=True)
            ]
        self.keys, self.values = tiles

    def hold(self, part: Part) -> None:
        """See to it that the tiles of a part are there: algorithm 2, line 7."""
        if self._in_place:
            return
        for first, _, count in part.runs:
            place = first % self._blocks.held
            wanted = np.arange(first, first + count)
            if not np.array_equal(self._held[place : place + count], wanted):
                self._load(first, count, place)
                self._held[place : place + count] = wanted

    def _load(self, first: int, count: int, place: int) -> None:
        size = self._blocks.keys
        start, stop = first * size, min((first + count) * size, self._n_keys)
        for source, tiles in zip(self._sources, (self.keys, self.values), strict=True):
            for matrix, copy in zip(source, tiles[:, 0, place : place + count], strict=True):
                rows = copy.reshape(count * size, copy.shape[-1])
                rows[: stop - start] = matrix[start:stop]
                rows[stop - start :] = 0


def reads_in_place(problem: Problem, operands: Mapping[str, np.ndarray], blocks: Blocks) -> bool:
    """Whether products read keys and values as they are, to the same bits as a copy of them."""
    return not problem.n_keys % blocks.keys and all(
        x.dtype == problem.stat_dtype
        and x.flags.aligned
        and x.shape[-1] > 1
        and x.strides[-1] == x.itemsize
        and x.strides[-2] >= x.shape[-1] * x.itemsize
        and not x.strides[-2] % x.itemsize
        for x in (operands["k"], operands["v"])
    )
