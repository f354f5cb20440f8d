"""The way of row tiles through what they see under a mask, where a bound shows that no reference moves.

Every sum over tiles runs in the order of the tiles and starts anew with each: a tile that adds nothing may be missing,
and it does not matter which tiles, or row tiles, are taken at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuattn.cpu.blocks import LANES, small_columns, summed_keys
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import exponential
from cuattn.cpu.heads import Team
from cuattn.cpu.passes import Stack
from cuattn.cpu.scores import Scores
from cuattn.cpu.tiles import Tiles
from cuattn.cpu.views import Group, Part

__all__ = ["Sweep"]


class _Room(NamedTuple):
    """Where so many tiles of so many row tiles are."""

    s: np.ndarray  # (heads, row tiles, tiles, keys, rows): scores, then their exponentials
    p: np.ndarray  # the same, as many parts as products with values are made of it
    wide: np.ndarray  # the same, in long rows, which are faster to reduce
    weighed: np.ndarray  # (heads, row tiles, 1 + parts, width, rows): the output so far, and what the parts add to it


class Sweep:
    """Takes groups of row tiles of a stack, of all heads of its team, through what they see; references are 0."""

    def __init__(self, stack: Stack, tiles: Tiles, scores: Scores, dropout: Dropout | None) -> None:
        self._blocks, self._buffers, shape = stack.blocks, stack.buffers, stack.shape
        self._tiles, self._scores, self._dropout, self._ones = tiles, scores, dropout, stack.ones
        self._statistics = stack.statistics
        state = stack.q.augmented[..., :-1, :], stack.o, stack.sums, stack.highest
        self._state = tuple(x.reshape(shape.heads, shape.tiles, *x.shape[1:]) for x in state)
        summed = summed_keys(stack.width, self._blocks.keys)
        self._parts = self._blocks.keys // summed  # of a tile
        self._columns = small_columns(stack.width, summed * shape.rows)
        self._here = stack.here.reshape(shape.heads, -1, LANES * shape.rows)
        self._rooms: dict[tuple[int, int], _Room] = {}

    def __call__(self, group: Group, team: Team, row_tile: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Take a group, whose first row tile is `row_tile`, through all that it sees.

        `keys` and `values` are (heads | 1, tiles, blocks.keys, width); a tile has its place modulo their number.
        """
        q = self._state[0]
        _, places, height, width = values.shape
        keys, values = keys[: len(q), None, ..., : q.shape[-2]], values[: len(q), None]
        # A view: a tile's keys are as far apart as those of neighbouring tiles, or a tile is one part.
        values = values.reshape(*values.shape[:2], places * self._parts, height // self._parts, width).swapaxes(3, 4)
        where = slice(group.start, group.start + len(group.views))
        q, o, sums, highest = (x[:, where] for x in self._state)
        for index, part in enumerate(group.parts):
            room = self._room(len(group.views), part.count)
            for tile, slot, count in part.runs:
                place = tile % places
                np.matmul(keys[:, :, place : place + count], q, room.s[:, :, slot : slot + count])
            self._exponentiate(room, part, team, row_tile, highest, first=index == 0)
            for tile, slot, count in part.runs:
                np.matmul(self._ones, room.s[:, :, slot : slot + count], sums[:, :, tile : tile + count])
            if self._dropout is not None:
                self._dropout.zero(room.s[:, 0], self._dropout.dropped(part, team.heads[0], row_tile))
            if index:
                np.copyto(room.weighed[:, :, 0], o)
            for tile, slot, count in part.runs:
                self._weigh(values, room, tile % places, slot, count)
            np.add.reduce(room.weighed[:, :, index == 0 :], 2, None, o)

    def _weigh(self, values: np.ndarray, room: _Room, place: int, slot: int, count: int) -> None:
        """Multiply the values of neighbouring tiles by their probabilities."""
        place, slot, count = place * self._parts, slot * self._parts, count * self._parts
        p = room.p[:, :, slot : slot + count]
        for columns in self._columns:
            v = values[:, :, place : place + count, columns]
            np.matmul(v, p, room.weighed[:, :, 1 + slot : 1 + slot + count, columns])

    def _exponentiate(
        self, room: _Room, part: Part, team: Team, row_tile: int, highest: np.ndarray, *, first: bool
    ) -> None:
        """Turn products into exponentials, 0 where hidden; keep up with the highest scores, where they are wanted."""
        s, rows = room.s, room.s.shape[-1]
        veils = [
            (s[:, row, slot], self._tiles.veil(team.heads[0], row_tile + row, tile, rows, known))
            for row, tile, slot, known in part.veils
        ]
        padding = s[:, :, -1, s.shape[3] - part.padding :] if part.padding else None
        if not self._scores.bare:
            self._scores.bend(s[:, 0], part)
        if self._statistics:
            for tile, veil in veils:
                veil.lower(tile, self._scores.lowest)
            if padding is not None:
                padding.fill(self._scores.lowest)
            if first:
                np.maximum.reduce(room.wide, 2, None, highest)
            else:
                here = self._here[:, : s.shape[1]]
                np.maximum.reduce(room.wide, 2, None, here)
                np.maximum(highest, here, out=highest)
        exponential(s, s)
        for tile, veil in veils:
            veil.zero(tile)
        if padding is not None:
            padding.fill(0)

    def _room(self, row_tiles: int, count: int) -> _Room:
        room = self._rooms.get((row_tiles, count))
        if room is None:
            heads, _, width, rows = self._state[1].shape
            shape = heads, row_tiles, count
            s = self._buffers.get("s", *shape, self._blocks.keys, rows)
            p = s.reshape(heads, row_tiles, count * self._parts, -1, rows)
            wide = s.reshape(heads, row_tiles, -1, LANES * rows)
            weighed = self._buffers.get("weighed", heads, row_tiles, 1 + count * self._parts, width, rows)
            room = self._rooms[row_tiles, count] = _Room(s, p, wide, weighed)
        return room
