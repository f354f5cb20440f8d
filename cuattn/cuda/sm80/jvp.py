"""The forward along tangents by the portable kernel, and what all kernels along tangents share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import layout_fields, pad, steps_of, tile_counts
from cuattn.cuda.call import Call, Own
from cuattn.cuda.constants import Constants, problem_constants
from cuattn.cuda.params import TANGENTS
from cuattn.cuda.sm80.forward import padded, unsupported_reason
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem

_FLOAT64 = np.dtype(np.float64)
_PADDING = {2: 32, 4: 16, 8: 16}  # columns, by bytes of an element: rows of a tile are multiples of this
_COLUMNS = {2: 128, 4: 128, 8: 64}  # that a block sums at most: two sums of each are in registers
_EXPONENT = {4: 1}  # columns that a row's exponent takes
_SPLIT_COLUMNS, _SPLIT_KEYS = 128, 16384  # of float32 by pairs of halves: longer sums lose digits
_STATIC_BYTES = 2048  # of shared memory, about, beside the tiles
_TOGETHER = 2  # blocks meant to share a multiprocessor, where their tiles fit


class Tile(NamedTuple):
    """Warps of a block, each of 16 rows of the owner; rows of the streamed side; tiles of that in flight."""

    warps: int
    streamed: int
    stages: int


class Cut(NamedTuple):
    """The tile of a launch, its shared memory, and the columns that a block sums."""

    tile: Tile
    shared_bytes: int
    columns: int
    sharers: int = 1

    def constants(self, keys_own: bool = False) -> Constants:
        """Return what a kernel is told of it."""
        warps, streamed, stages = self.tile
        owned = 16 * warps // self.sharers
        sides = (streamed, owned) if keys_own else (owned, streamed)
        block = dict(zip(("block_m", "block_n"), sides, strict=True))
        return {**block, "warps": warps, "stages": stages, "columns": self.columns, "sharers": self.sharers}


_SHARED = Tile(8, 16, 1)  # of float64, where two warps have the same rows
_TILES = {
    2: (Tile(4, 64, 2), Tile(4, 32, 2), Tile(4, 32, 1), Tile(2, 32, 1), Tile(2, 16, 1), Tile(1, 16, 1)),
    4: (Tile(8, 32, 2), Tile(8, 32, 1), Tile(8, 16, 2), Tile(4, 32, 1), Tile(4, 16, 1), Tile(2, 16, 1), Tile(1, 16, 1)),
    8: (Tile(4, 16, 2), Tile(4, 16, 1), Tile(2, 16, 1), Tile(1, 16, 1)),
}


def is_split(problem: Problem) -> bool:
    """Return whether float32 is computed of pairs of halves, three products for one."""
    widths = problem.head_dim, problem.head_dim_v
    short = problem.operation == "jvp" and problem.n_keys <= _SPLIT_KEYS
    return problem.row.products == "split" and short and min(widths) > 0 and max(widths) <= _SPLIT_COLUMNS


class Widths:
    """What tiles are made of.

    Attributes
    ----------
    arithmetic : numpy.dtype
        Of tiles: float32 is computed in float64, unless it is split into halves.
    head_dim, head_dim_v : int
        Padded.
    """

    def __init__(self, problem: Problem) -> None:
        self._sums = 2 if problem.operation == "backward_jvp" else 1  # a gradient beside its tangent
        own = problem.row.products == "half" or is_split(problem)
        self.arithmetic = problem.dtype if own else _FLOAT64
        self.size = self.arithmetic.itemsize
        products = {2: "half", 4: "split", 8: "double"}[self.size]
        self.head_dim, self.head_dim_v = (padded(x, products) for x in (problem.head_dim, problem.head_dim_v))

    def chunk(self, width: int) -> int:
        """Return how many columns of so many one block sums."""
        return pad(cdiv(width, cdiv(width, _COLUMNS[self.size] // self._sums)), _PADDING[self.size])

    def whole(self, width: int) -> int:
        """Return a width rounded up to whole parts that blocks sum."""
        return pad(width, self.chunk(width))

    def tile(self, of_owner: int, of_stream: int, available: int, most: int = 64) -> tuple[Tile, int] | None:
        """Return a tile of at most so many streamed rows and its shared memory; None if there is none.

        Given are the columns of all arrays of either side.
        """
        found = [
            (tile, (16 * tile.warps * of_owner + tile.stages * tile.streamed * of_stream) * self.size)
            for tile in _TILES[self.size]
            if tile.streamed <= most
        ]
        large = [(tile, shared) for tile, shared in found if tile.warps == found[0][0].warps and self.size != 4]
        limits = (large, available // _TOGETHER), (found, available)
        fits = (pair for some, limit in limits for pair in some if pair[1] <= limit - _STATIC_BYTES)
        return next(fits, None)


class TangentCall(Call):
    """What calls along tangents have in common."""

    widths: Widths

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.widths = Widths(self.problem)

    @property
    def arithmetic(self) -> np.dtype:
        """Of score functions."""
        return _FLOAT64 if self.widths.size == 8 else np.dtype(np.float32)

    def has(self, *names: str) -> int:
        """Return how many of the operands there are."""
        return sum(name in self.operands for name in names)

    def base_constants(self) -> Constants:
        """Return what all kernels are told."""
        problem, widths = self.problem, self.widths
        arrays = [name for name in ("q", "k", "v", "tq", "tk", "tv", "do", "tdo") if self.has(name)]
        return {
            **problem_constants(problem),
            "elem": DTYPES[widths.arithmetic].cuda,
            "acc": "double" if widths.size == 8 else "float",
            "source": problem.row.cuda,
            "stat": DTYPES[problem.stat_dtype].cuda,
            "bias_elem": DTYPES[problem.bias or problem.stat_dtype].cuda,
            "head_dim": widths.head_dim,
            "head_dim_v": widths.head_dim_v,
            "load_bytes": max(self.load_bytes(*arrays), min(problem.dtype.itemsize, 8)),
            "moves": problem.moves,
            "min_blocks": _TOGETHER if widths.size == 2 else 1,
            **{name: self.has(name) > 0 for name in ("tq", "tk", "tv", "tbias", "tdo")},
        }

    def tangents(self, names: Iterable[str], renamed: dict[str, str] | None = None) -> tuple[dict[str, Any], Own]:
        """Return the fields of ``Tangents`` for arrays, and what takes their addresses."""
        fields, slots, rank = {}, {}, len(self.problem.batch)
        for name in names:
            if name in self.arrays:
                fields |= layout_fields(name, steps_of(self.arrays[name]), self.axes, rank)
                slots[f"{name}.data"] = self.addressed(name)
        return fields, Own(TANGENTS, slots | (renamed or {}))


class Jvp(TangentCall):
    """One launch."""

    def _cut(self) -> Cut | None:
        widths = self.widths
        if shared := self._shared_cut():
            return shared
        columns = widths.chunk(widths.head_dim_v)
        more = _EXPONENT.get(widths.size, 0)
        of_stream = (widths.head_dim + more) * (1 + self.has("tk")) + (columns + more) * (1 + self.has("tv"))
        of_owner = (widths.head_dim + more) * (1 + self.has("tq"))
        most = (64 if columns <= 64 else 32) // (1 + (widths.size == 4))
        found = widths.tile(of_owner, of_stream, self.device.shared_bytes, most)
        return found and Cut(*found, columns)

    def _shared_cut(self) -> Cut | None:
        """Return how two warps share rows, where float64 has columns for two and memory for that."""
        widths, (warps, keys, stages) = self.widths, _SHARED
        columns = pad(widths.head_dim_v, 2 * _PADDING[8])
        if widths.size < 8 or not _COLUMNS[8] < columns <= 2 * _COLUMNS[8]:
            return None
        of_owner = widths.head_dim * (1 + self.has("tq"))
        of_stream = widths.head_dim * (1 + self.has("tk")) + columns * (1 + self.has("tv"))
        size = (8 * warps * of_owner + stages * keys * of_stream + 16 * warps * keys) * widths.size  # and what is told
        return Cut(_SHARED, size, columns, 2) if size <= self.device.shared_bytes - _STATIC_BYTES else None

    def unsupported_reason(self) -> str | None:
        against = unsupported_reason(self.problem)
        return against or (too_wide(self.problem) if self._cut() is None else None)

    def prepare(self) -> Plan:
        problem, cut = self.problem, self._cut()
        assert cut is not None
        self.begin({}, arithmetic=self.arithmetic)
        constants = self.base_constants() | cut.constants()
        block = constants["block_m"], constants["block_n"]
        counts = tile_counts(problem, block)
        fields, own = self.tangents(("tq", "tk", "tv", "tbias", "to", "tlse"))
        grid = counts["row_tiles"] * problem.instances, cdiv(max(problem.head_dim_v, 1), cut.columns)
        if grid[0]:
            launched = "sm80/jvp.cu", "attention_jvp", constants, grid, cut.tile.warps, counts | fields, block
            self.add(*launched, own=own, shared_bytes=cut.shared_bytes)
        return self.planned("sm80/jvp.cu", block, cut.tile.warps, cut.shared_bytes, constants, *notes(problem))


def too_wide(problem: Problem) -> str:
    """Say that no tile is narrow enough."""
    return (
        f"q has dtype {problem.dtype} and head dimensions {problem.head_dim}, {problem.head_dim_v}; no kernel along "
        "tangents does that on this GPU"
    )


def notes(problem: Problem) -> list[str]:
    """Return what is worth knowing of a plan."""
    if problem.row.products != "split":
        return []
    return ["float32 products are three of halves" if is_split(problem) else "float32 is computed in float64"]
