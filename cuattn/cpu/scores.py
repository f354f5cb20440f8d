"""Scores of some rows against a chunk of keys: scale, softcap, bias and mask; and their exponentials.

Scores are kept transposed, (row tiles, key tiles, keys, rows): the statistics of a row then run down an axis along
which NumPy reduces whole registers of rows at once.  They are in units of :data:`~cuattn.cpu.exponent.UNIT`, and
relative to one reference per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cuattn.cpu.blocks import Blocks, Shape
from cuattn.cpu.bound import longest
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.exponent import UNIT, exponential, lowest
from cuattn.cpu.heads import Team, pick, pick_team
from cuattn.cpu.sources import tile_of
from cuattn.cpu.tiles import Tiles
from cuattn.cpu.views import Chunk, Part, Veil
from cuattn.problem import Operands, Problem

__all__ = ["Rows", "Scores"]


class Rows:
    """Some rows of an operand, in the form that a product with keys or values needs.

    The first axis of everything here, the stack, counts the row tiles, of one head or of several.

    Attributes
    ----------
    plain : ndarray, (stack, 1, rows, width)
        The rows as they are, where that was asked for.
    augmented : ndarray, (stack, 1, width + 1, rows)
        The rows, transposed and scaled, above a row of what to subtract from each product.
    """

    def __init__(self, buffers: Buffers, shape: Shape, width: int, *, plain: bool) -> None:
        stack, rows = shape.heads * shape.tiles, shape.rows
        self.augmented = buffers.new(stack, 1, width + 1, rows)
        self._transposed, self._subtracted = self.augmented[:, 0, :-1], self.augmented[:, 0, -1]
        self._by_head = buffers.new(shape.heads, shape.tiles * rows, width)
        self._by_tile = stack, rows, width
        self._keep = plain
        self.plain = self._by_head.reshape(stack, 1, rows, width)

    def load(
        self,
        matrices: np.ndarray,
        factor: float = 1.0,
        empty: np.ndarray | None = None,
        weights: np.ndarray | float = 1.0,
    ) -> None:
        """Take the rows of some heads, (heads, <= tiles * rows, width); missing rows, and the `empty` ones, are 0.

        `factor` scales the transposed copy, `weights`, (heads, rows), the rows of either.
        """
        count = matrices.shape[1]
        by_row = np.asarray(weights)[..., None] if self._keep else factor
        np.multiply(matrices, by_row, out=self._by_head[:, :count], dtype=self._by_head.dtype)
        self._by_head[:, count:] = 0
        if empty is not None:
            self._by_head[:, :count][empty] = 0
        np.copyto(self._transposed, self._by_head.reshape(self._by_tile).swapaxes(1, 2))
        if self._keep and factor != 1:
            np.multiply(self._transposed, factor, out=self._transposed)
        self._subtracted.fill(0)

    def subtract(self, reference: np.ndarray) -> None:
        """Let every product with a panel's row come out smaller by `reference`, (stack, rows)."""
        np.negative(reference, out=self._subtracted)


class Scores:
    """Turns products of queries and keys into scores, and scores into exponentials, for some row tiles at a time."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks, tiles: Tiles, buffers: Buffers) -> None:
        self._problem, self._operands, self._blocks = problem, operands, blocks
        self._tiles, self._buffers = tiles, buffers
        self._cap = problem.softcap
        self._factor = problem.scale * UNIT if self._cap is None else problem.scale / self._cap
        self.lowest = lowest(problem.stat_dtype)
        self._veils: Sequence[tuple[int, Veil]] = ()  # by slot, of the last completed chunk
        self._padding = 0  # keys, at its end
        self._hiding = False  # whether what is hidden in it is -inf
        self._longest = 0.0  # length of a scaled query
        self._dead: Sequence[tuple[slice, np.ndarray]] = ()  # what a bias of -inf hides, by slots
        self.bare = self._cap is None and operands.bias is None  # nothing but products enters the scores

    def load(self, team: Team, rows: slice, q: Rows, empty: np.ndarray | None = None) -> None:
        """Load the queries of a stack, with the `empty` rows as 0."""
        queries = pick_team(self._operands.q, team)[:, rows]
        if self.bare:  # first, as it reads the rows in their order: the transposed copy then finds them in the cache
            squares = np.vecdot(queries, queries, dtype=self._problem.stat_dtype)
            if empty is not None:
                squares = np.where(empty, 0, squares)
            self._longest = longest(squares, queries.shape[2]) * abs(self._factor)
        q.load(queries, self._factor, empty)

    def begin(self, team: Team, row_tile: int, q: np.ndarray) -> None:
        """Turn to row tiles, of which `row_tile` is the first and `q` the augmented queries; their references are 0."""
        self._head, self._row_tile = team.heads[0], row_tile
        self._reference, self._subtracted = None, q[:, 0, -1]
        self.farthest = 0.0

    def subtract(self, reference: np.ndarray) -> None:
        """Take the following scores relative to `reference`, (members, rows)."""
        self.farthest = float(np.maximum.reduce(np.abs(reference), None))
        if self._cap is None:
            np.negative(reference, self._subtracted)  # inside the product, for nothing
        else:
            self._reference = reference

    def span(self, reach: float) -> float:
        """Return how far from 0 a score can be, before its reference, with keys of a length up to `reach`.

        Cauchy and Schwarz tell; not finite where they cannot.
        """
        if self._operands.bias is not None:
            return math.inf
        return self._longest * reach if self._cap is None else self._cap * UNIT

    def normal(self, reach: float) -> bool:
        """Whether all visible scores are sure to have exponentials that are normal numbers."""
        return self.span(reach) + self.farthest <= -self.lowest

    def complete(self, s: np.ndarray, chunk: Chunk, *, hide: bool = True) -> None:
        """Make scores of the products with a chunk of keys, (stack, chunk.count, keys, rows); hidden ones are -inf.

        Without `hide` they are what they are, until they are exponentials.
        """
        if chunk.simple and self.bare:
            self._veils, self._padding = (), 0
            return
        self._padding, self._hiding = chunk.padding, hide
        rows = s.shape[-1]
        self._veils = [
            (slot, self._tiles.veil(self._head, self._row_tile, tile, rows, known))
            for (tile, slot), known in zip(chunk.partial, chunk.veils, strict=True)
        ]
        if not self.bare:
            self.bend(s, chunk)
        if hide:
            for slot, veil in self._veils:
                veil.hide(s[:, slot])
            if chunk.padding:
                s[:, -1, -chunk.padding :].fill(-np.inf)

    def bend(self, s: np.ndarray, chunk: Chunk | Part) -> None:
        """Apply the softcap and the bias to products, (members, chunk.count, keys, rows)."""
        if self._cap is not None:
            self._tanh = np.tanh(s, out=self._buffers.get("tanh", *s.shape))
            np.multiply(self._tanh, s.dtype.type(self._cap * UNIT), out=s)
            if self._reference is not None:
                s -= self._reference[:, None, None]
        if self._operands.bias is not None:
            bias = pick(self._operands.bias, self._head.query)
            self._dead = []
            for run in chunk.runs:
                self._add_bias(bias, s, *run)

    def differentiate_softcap(self, ds: np.ndarray) -> None:
        """Turn the derivatives of the last completed scores into those of the products that went into the cap."""
        if self._cap is not None:
            slope = np.multiply(self._tanh, self._tanh, self._tanh)
            ds *= np.subtract(1, slope, slope)

    def zero_hidden(self, array: np.ndarray) -> None:
        """Set the elements of an array, (..., members, tiles, keys, rows), that the last completed scores hide to 0."""
        for slot, veil in self._veils:
            veil.zero(array[..., slot, :, :])
        if self._padding:
            array[..., -1, -self._padding :, :].fill(0)
        for slots, hidden in self._dead:
            np.copyto(_corner(array[0, slots], hidden.shape), 0, where=hidden)

    def exponentiate(self, s: np.ndarray, reach: float) -> None:
        """Replace completed scores by their exponentials; hidden ones become 0.  `reach` is the panel's."""
        if not self.normal(reach):
            np.maximum(s, self.lowest, out=s)  # what is less may be a subnormal number, or is -inf: both are slow
        elif self._hiding:
            self.zero_hidden(s)
        exponential(s, s)
        self.zero_hidden(s)

    def _add_bias(self, bias: np.ndarray, s: np.ndarray, tile: int, slot: int, count: int) -> None:
        bias = tile_of(bias, self._blocks, self._row_tile, tile, count).T
        scaled = np.multiply(bias, s.dtype.type(UNIT), out=self._buffers.get("bias", *bias.shape), dtype=s.dtype)
        keys = min(count * self._blocks.keys, self._problem.n_keys - tile * self._blocks.keys)
        rows = min(self._blocks.rows, self._problem.n_queries - self._row_tile * self._blocks.rows)
        target = _corner(s[0, slot : slot + count], (keys, rows))
        target += scaled
        if np.minimum.reduce(scaled, axis=None) == -np.inf:  # hidden even where the score itself is NaN
            hidden = np.broadcast_to(scaled == -np.inf, (keys, rows))
            np.copyto(target, -np.inf, where=hidden)
            self._dead.append((slice(slot, slot + count), hidden))


def _corner(tiles: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the first keys and rows of neighbouring tiles, (tiles, keys, rows)."""
    return tiles.reshape(-1, tiles.shape[-1])[: shape[0], : shape[1]]
