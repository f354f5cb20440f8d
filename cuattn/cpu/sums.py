"""Gradients that are sums over several heads or row tiles: of keys, values, broadcast queries and a bias."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.heads import Head, Team, pick, place, place_team
from cuattn.cpu.turns import Turns
from cuattn.cpu.views import Chunk
from cuattn.problem import Operands, Problem

__all__ = ["BiasSum", "KeySums", "RowSum", "Share", "Spare", "shares_of"]


class KeySum:
    """The gradient of the keys or of the values that a team reads, by key tile.

    The first axis of everything here, the shares, counts the slices of the operand: one for each head, or for all.
    """

    def __init__(self, total: np.ndarray, blocks: Blocks, turns: Turns) -> None:
        self.total = total
        starts = range(0, blocks.key_tiles, blocks.chunk)
        self._chunks = [total[:, start : start + blocks.chunk] for start in starts]
        self._turns, self._issued, self._passed = turns, [0] * len(starts), [0] * len(starts)

    def issue(self, chunks: list[Chunk]) -> list[int]:
        """Return the turns of an item at the chunks that it sees; for one item after the other."""
        numbers = []
        for chunk in chunks:
            numbers.append(self._issued[chunk.index])
            self._issued[chunk.index] += 1
        return numbers

    def add(self, chunk: Chunk, number: int, part: np.ndarray) -> None:
        """Add (shares, chunk.count, keys, width) when all earlier items have."""
        self._turns.wait(self._passed, chunk.index, number)
        if number == 0:
            self._chunks[chunk.index].fill(0)
        for tile, slot, count in chunk.runs:
            target = self.total[:, tile : tile + count]
            np.add(target, part[:, slot : slot + count], target)
        self._turns.give(self._passed, chunk.index)

    def add_whole(self, index: int, number: int, part: np.ndarray) -> None:
        """Do the same for the chunk with an index, of which all tiles are visible."""
        self._turns.wait(self._passed, index, number)
        total = self._chunks[index]
        if number == 0:
            np.copyto(total, part)
        else:
            np.add(total, part, total)
        self._turns.give(self._passed, index)

    def finish(self) -> np.ndarray:
        """Return the sum, as (shares, keys, width), when all items have added: 0 where none did."""
        for chunk, issued in zip(self._chunks, self._issued, strict=True):
            if not issued:
                chunk.fill(0)
        shares, tiles, keys, width = self.total.shape
        return self.total.reshape(shares, tiles * keys, width)


class Share(NamedTuple):
    """What an item adds to a sum: its turns at the chunks that it sees."""

    sum: KeySum
    turns: list[int]


class Spare:
    """Arrays of finished sums, for the next ones: new memory would cost its first touch again."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, ...], list[np.ndarray]] = {}  # by shape

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised array."""
        arrays = self._arrays.setdefault(shape, [])
        return arrays.pop() if arrays else np.empty(shape, dtype)

    def give(self, array: np.ndarray) -> None:
        """Take an array back."""
        self._arrays[array.shape].append(array)


def shares_of(operand: np.ndarray, problem: Problem, heads: int) -> int:
    """Return how many slices of the keys or of the values a team of heads reads."""
    return 1 if problem.group > 1 or operand.shape[-3] == 1 else heads


class KeySums:
    """The sums of a group of teams: they come into being with its first item and leave with its last."""

    def __init__(
        self, problem: Problem, operands: Operands, blocks: Blocks, turns: Turns, group: list[Team], spare: Spare
    ) -> None:
        self._spare = spare
        self._operands = operands.k, operands.v
        self._sums: list[dict[tuple[int, ...], KeySum]] = [{}, {}]  # by where the first slice is
        for operand, sums in zip(self._operands, self._sums, strict=True):
            for team in group:
                where = place(operand, team.heads[0].kv)
                if where not in sums:
                    shares = shares_of(operand, problem, len(team.heads))
                    shape = shares, blocks.key_tiles, blocks.keys, operand.shape[-1]
                    sums[where] = KeySum(spare.take(shape, problem.stat_dtype), blocks, turns)

    def shares(self, team: Team, chunks: list[Chunk]) -> tuple[Share, Share]:
        """Return the shares in dk and in dv of an item, which is the next that adds."""
        parts = [
            sums[place(operand, team.heads[0].kv)] for operand, sums in zip(self._operands, self._sums, strict=True)
        ]
        return tuple([Share(part, part.issue(chunks)) for part in parts])

    def write(self, dk: np.ndarray, dv: np.ndarray, scale: float) -> None:
        """Round the finished sums into the gradients; dk times `scale`."""
        for result, sums, factor in zip((dk, dv), self._sums, (scale, 1), strict=True):
            for where, part in sums.items():
                total = part.finish()[:, : result.shape[-2]]
                target = result[place_team(result, where, len(total))]
                np.multiply(total, total.dtype.type(factor), out=target, casting="unsafe")
                self._spare.give(part.total)


def _ranks(array: np.ndarray, groups: list[list[Team]]) -> dict[int, int]:
    """Return, by head index, how many heads before it, in the order of the work, share its slice of an array."""
    counts: dict[tuple[int, ...], int] = {}
    result = {}
    for head in (head for group in groups for team in group for head in team.heads):
        where = place(array, head.query)
        result[head.index] = counts[where] = counts.get(where, -1) + 1
    return result


class RowSum:
    """A gradient whose slices get one term per row tile from every head that shares them (a broadcast operand)."""

    def __init__(
        self, like: np.ndarray, dtype: np.dtype, blocks: Blocks, turns: Turns, groups: list[list[Team]]
    ) -> None:
        self.total = np.zeros(like.shape, dtype)
        self._blocks, self._turns = blocks, turns
        self._ranks = _ranks(like, groups)
        self._by_tile = like.shape[-2] > 1
        counters = blocks.row_tiles if self._by_tile else 1
        self._passed = {
            place(like, head.query): [0] * counters for group in groups for team in group for head in team.heads
        }

    def rows(self, head: Head, row_tile: int, count: int) -> np.ndarray:
        """Return what `count` rows of a head add to, (count | 1, ...)."""
        start = row_tile * self._blocks.rows
        return pick(self.total, head.query)[slice(start, start + count) if self._by_tile else slice(None)]

    def wait(self, head: Head, row_tile: int) -> None:
        """Wait until all heads before this one have added their rows of this tile."""
        index, number = (row_tile, self._ranks[head.index]) if self._by_tile else (0, self._number(head, row_tile))
        self._turns.wait(self._passed[place(self.total, head.query)], index, number)

    def give(self, head: Head, row_tile: int) -> None:
        """Let the next head add."""
        self._turns.give(self._passed[place(self.total, head.query)], row_tile if self._by_tile else 0)

    def _number(self, head: Head, row_tile: int) -> int:
        return self._ranks[head.index] * self._blocks.row_tiles + row_tile


class BiasSum:
    """The gradient of a bias, from the derivatives of the scores, by tile."""

    def __init__(
        self, problem: Problem, bias: np.ndarray, blocks: Blocks, turns: Turns, groups: list[list[Team]]
    ) -> None:
        self._problem, self._blocks, self._dtype = problem, blocks, bias.dtype
        self._whole = bias.shape[-2] > 1 and bias.shape[-1] > 1
        # What is summed over rows or keys is small, and sums many terms that nearly cancel.
        self._sum = RowSum(bias, problem.stat_dtype if self._whole else np.dtype(np.float64), blocks, turns, groups)

    def open(self, head: Head, row_tile: int) -> np.ndarray:
        """Return what :meth:`add` adds the derivatives of a row tile to."""
        rows = self._sum.rows(head, row_tile, self._rows_of(row_tile))
        if not self._whole:
            return np.zeros_like(rows)
        self._sum.wait(head, row_tile)
        return rows

    def _rows_of(self, row_tile: int) -> int:
        return min(self._blocks.rows, self._problem.n_queries - row_tile * self._blocks.rows)

    def add(self, target: np.ndarray, row_tile: int, chunk: Chunk, ds: np.ndarray) -> None:
        """Add the derivatives of a chunk of scores, (chunk.count, keys, rows)."""
        keys, n_keys, rows = self._blocks.keys, self._problem.n_keys, self._rows_of(row_tile)
        for tile, slot, count in chunk.runs:
            start, stop = tile * keys, min((tile + count) * keys, n_keys)
            part = ds[slot : slot + count].reshape(-1, ds.shape[-1])[: stop - start, :rows].T
            for axis in (0, 1):
                if target.shape[axis] == 1:
                    part = part.sum(axis=axis, keepdims=True)
            target[:, slice(start, stop) if target.shape[1] > 1 else slice(None)] += part

    def close(self, target: np.ndarray, head: Head, row_tile: int) -> None:
        """Finish a row tile."""
        if not self._whole:
            self._sum.wait(head, row_tile)
            rows = self._sum.rows(head, row_tile, len(target))
            rows += target
        self._sum.give(head, row_tile)

    def result(self) -> np.ndarray:
        """Return the finished gradient, rounded to the bias's dtype."""
        return self._sum.total.astype(self._dtype, copy=False)
