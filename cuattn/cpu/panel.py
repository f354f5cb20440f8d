"""A thread's own copy of keys and values: in the precision of the sums, aligned, safe to multiply with.

The copy is what makes the products fast and simple.  Rows start cache lines; keys end with a column of ones, so
that one product subtracts a number of each row's own from all its scores; the last tile is padded with zeros; and
where a key is invisible to all rows, so that nothing may depend on what it holds, it becomes zero (0 * NaN in the
product of probabilities and values would be NaN).
"""

from __future__ import annotations

import math

import numpy as np

from cuattn.cpu.blocks import Blocks
from cuattn.cpu.bound import longest
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.heads import Team, place, place_team
from cuattn.cpu.tiles import Tiles
from cuattn.problem import Operands, Problem

__all__ = ["Panel"]


class Panel:
    """Keys and values of a range of key tiles, for a team of heads, loaded as the tiles are asked for.

    Attributes
    ----------
    keys : ndarray, (heads, tiles, blocks.keys, head_dim + 1)
        Keys and a one.  Heads that read the same keys and values have one copy.
    values : ndarray, (heads, tiles, blocks.keys, head_dim_v + counts)
        Values and, with `counts`, a one among zeros; its place goes round from key to key.  With `upright` a tile's
        keys lie side by side in memory: products with tiles that are not in the cache then take 0.8 of the time.
    reach : float
        The length of the longest key, or a little more.
    """

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        blocks: Blocks,
        tiles: Tiles,
        buffers: Buffers,
        *,
        counts: int,
        upright: bool = False,
    ) -> None:
        self._operands, self._blocks, self._tiles = operands, blocks, tiles
        self._n_keys = problem.n_keys
        self._team: Team | None = None
        self._where: list[tuple] = []
        self._held = [-1] * (blocks.panel // blocks.chunk)  # by place, which chunk is there
        self._reaches = [0.0] * len(self._held)
        self._poisoned = False  # whether any of them is
        self._present: tuple[int, ...] = ()  # what was asked for last
        self.reach = 0.0
        copies = 1 if problem.group > 1 else blocks.team
        self.keys = buffers.new(copies, blocks.panel, blocks.keys, problem.head_dim + 1)
        width = problem.head_dim_v + counts
        if upright:
            self._values = buffers.new(copies, blocks.panel, width, blocks.keys)
            self.values = self._values.swapaxes(2, 3)
        else:
            self._values = self.values = buffers.new(copies, blocks.panel, blocks.keys, width)

    def hold(self, team: Team, chunks: tuple[int, ...]) -> bool:
        """Make the keys and values of some chunks present, tile t at t % blocks.panel; return whether all fit.

        They are given by index, in ascending order.  If they do not fit nothing is loaded; one always does.
        """
        if team is self._team and chunks == self._present:
            return True
        places = len(self._held)
        if chunks[-1] - chunks[0] >= places:
            return False
        if team is not self._team:
            self._turn_to(team)
        missing = [index for index in chunks if self._held[index % places] != index]
        while missing:
            run = 1
            while run < len(missing) and missing[run] == missing[0] + run and missing[run] % places:
                run += 1
            self._load(missing[0], run)
            del missing[:run]
        self.reach = float(np.maximum.reduce([self._reaches[index % places] for index in chunks]))  # NaN stays
        self._present = chunks
        return True

    def _turn_to(self, team: Team) -> None:
        heads = team.heads[:1] if team.alike else team.heads
        where = [(place(self._operands.k, head.kv), place(self._operands.v, head.kv)) for head in heads]
        if self._poisoned or where != self._where:  # which keys are dead is a matter of the query head
            self._held = [-1] * len(self._held)
            self._poisoned = False
        self._team, self._heads, self._where = team, heads, where
        self._dead: list[np.ndarray] = []

    def run(self, heads: int, tile: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the keys and values of some neighbouring tiles are for a team of `heads`, once they are here."""
        place = tile % self._blocks.panel
        where = slice(0, min(heads, len(self.keys))), slice(place, place + count)
        return self.keys[where], self.values[where]

    def _load(self, index: int, count: int) -> None:
        """Load some neighbouring chunks, which have neighbouring places."""
        place, chunk = index % len(self._held), self._blocks.chunk
        where = slice(place * chunk, (place + count) * chunk)
        start = index * chunk * self._blocks.keys
        stop = min(start + count * chunk * self._blocks.keys, self._n_keys)
        keys, values = self.keys[: len(self._heads), where], self._values[: len(self._heads), where]
        self._copy(self._operands.k, keys, start, stop)
        self._copy(self._operands.v, self.values[: len(self._heads), where], start, stop)
        keys = keys[..., :-1]
        reach = longest(np.einsum("hijk,hijk->hij", keys, keys), keys.shape[-1])
        total = float(np.einsum("hijk,hijk->", values, values))
        self._held[place : place + count] = range(index, index + count)
        self._reaches[place : place + count] = [reach] * count
        # Not finite where something is NaN, infinite or huge; of those, the last is only slow.
        if not math.isfinite(reach + total):
            self._poisoned = True
            self._dead = self._dead or [self._tiles.dead_keys(head) for head in self._heads]
            for n, dead in enumerate(self._dead):
                tiles, keys = np.divmod(np.flatnonzero(dead[start:stop]), self._blocks.keys)
                for panel in (self.keys, self.values):
                    panel[n, where][tiles, keys] = 0

    def _copy(self, operand: np.ndarray, tiles: np.ndarray, start: int, stop: int) -> None:
        """Copy some rows of an operand, of all heads of the team, to (copies, tiles, blocks.keys, columns)."""
        rows, width = operand[place_team(operand, self._heads[0].kv, len(self._heads))], operand.shape[-1]
        whole, rest = divmod(stop - start, self._blocks.keys)
        middle = stop - rest
        tiles[:, :whole, :, :width] = rows[:, start:middle].reshape(len(rows), whole, self._blocks.keys, width)
        tiles[..., width:] = 0
        counts = tiles.shape[-1] - width
        for turn in range(counts):
            tiles[:, :, turn::counts, width + turn] = 1
        if whole < tiles.shape[1]:
            tiles[:, whole, :rest, :width] = rows[:, middle:stop]
            tiles[:, whole, rest:] = 0
            tiles[:, whole + 1 :] = 0
