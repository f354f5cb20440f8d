"""Which kernels, with which tiles and constants, compute a backward on a device: pure functions, no CuPy.

Three kernels may take part.  The key kernel (sm80/bwd.cu) owns dk and dv and, unless the call is deterministic, adds dq
up in memory.  The row kernel (sm80/bwd_rows.cu) computes dq in a fixed order.  The bias kernel (sm80/bwd_bias.cu)
computes dbias.
"""

import math
from collections.abc import Container
from typing import NamedTuple

import numpy as np

from cuattn.cuda.arguments import pad
from cuattn.cuda.constants import Constants, backward_constants
from cuattn.cuda.device import Device
from cuattn.cuda.sm80.forward import flush_tiles, is_heavy
from cuattn.cuda.sm80.tiles import WIDE, BackwardTile, BackwardTiles, backward_tiles
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

_MAX_ROWS = 2**31 - 1  # counted through all heads, where a kernel is told one of them
_PADDING = 32  # elements: head dimensions are rounded up to a multiple of this, so that warps can share them evenly
_WIDEST_SUMMED = 256  # head dimension up to which dq may be added up in memory
_CHUNK = 64
_PART = 256


class SharedKeys(NamedTuple):
    """The last key tiles, which would leave most multiprocessors without work: each for several blocks of the grid."""

    first: int  # number of the first of these tiles, and of the first block that has a part of one
    parts: int  # blocks to a tile
    row_tiles: int  # of each such block
    grid: int


class Cut:
    """How a backward is cut on a device.

    Attributes
    ----------
    keys, rows, bias : BackwardTile
        The tiles of its three kernels.
    head_dim, head_dim_v : int
        Padded head dimensions.
    atomic : bool
        The key kernel adds dq up in memory, in no fixed order; if not, the row kernel computes it.
    chunk, part : int
        Columns that come in at a time where whole rows do not fit (sm80/bwd_wide.cu), and columns of a gradient that
        one block then owns; else 0.
    flush_every : int
        See :func:`flush_tiles`.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem, self.device, self.products = problem, device, problem.row.products
        self.head_dim, self.head_dim_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
        self.chunk = self.part = 0
        widest = max(self.head_dim, self.head_dim_v)
        tiles = backward_tiles(device.shared_bytes, self.products, widest)
        if tiles is None:
            tiles = BackwardTiles(*4 * (WIDE[self.products],))
            self.chunk, self.part = _CHUNK, pad(cdiv(widest, cdiv(widest, _PART)), _CHUNK)
            self.head_dim, self.head_dim_v = pad(problem.head_dim, _CHUNK), pad(problem.head_dim_v, _CHUNK)
        narrow = bool(problem.masks) and problem.dropout > 0 and widest <= 64
        self.keys, self.rows, self.bias = tiles.heavy if is_heavy(problem) or narrow else tiles.keys, *tiles[2:]
        while not self.chunk and not all(_divides(tile, self.head_dim) for tile in (self.keys, self.rows)):
            self.head_dim += _PADDING
        summed = max(self.head_dim, self.head_dim_v) <= _WIDEST_SUMMED
        self.atomic = summed and not problem.deterministic and not self.chunk
        self.row_tiles, self.key_tiles = tile_counts(problem, self.keys)
        self.flush_every = flush_tiles(self.products, problem.n_queries * problem.group, self.keys.block_m)

    def shared_bytes(self, kernel: str) -> int:
        """Return the shared memory of a block of a kernel ("keys", "rows", "bias", "convert"), as its layout has it."""
        size, acc = self.problem.dtype.itemsize, self.problem.stat_dtype.itemsize
        padding, numbers = (32 if self.products == "double" else 16), (2 if self.products == "half" else 3)
        tile = self.keys if kernel == "convert" else getattr(self, kernel)
        block_m, block_n = tile.block_m, tile.block_n
        if kernel == "convert":
            return block_m * (self.head_dim * size + padding)
        width = (self.head_dim + self.head_dim_v) * size + 2 * padding  # of a row of q and do, or k and v
        unit = 4 / 16 if self.products == "split" else 0  # a float for 16 rows or keys
        scores = block_m * (block_n * size + padding) + int(block_m * block_n / 16 * unit)
        rows = block_m * (width + numbers * acc) + int(2 * block_m * unit)
        keys = block_n * width + int(2 * block_n * unit)
        exchange = block_m * block_n * acc if self._paired(tile) else 0
        if self.chunk:
            rows, both = block_m * numbers * acc, block_m + block_n
            keys = 2 * (both * (self.chunk * size + padding) + int(both * unit))
            if kernel != "bias":
                return keys + rows + scores
        if kernel == "keys":
            exchange = exchange if self.problem.softcap is not None else 0
            return keys + tile.stages * (rows + scores) + scores + exchange
        if kernel == "rows":
            return rows + tile.stages * keys + scores + exchange
        return max(rows + keys + exchange, block_m * (block_n + 1) * acc)

    def _paired(self, tile: BackwardTile) -> bool:
        """Whether half of the warps compute scores and the others dp (sm80/bwd_layout.cuh)."""
        warps = tile.scores_m * min(tile.warps // tile.scores_m, tile.block_n // 16)
        return self.products == "double" and 2 * warps == tile.warps

    def shared_keys(self, sums: Container[str] = ()) -> SharedKeys:
        """Return which blocks of the key kernel share their key tiles (float64, dq in no fixed order; else none).

        Where all tiles take the same time and blocks have a multiprocessor each, the tiles of the last round are dealt
        out to all multiprocessors.  Their sums have to be short, since such blocks do not add to memory after
        cfg::flush_every.  `sums` names gradients that are sums over broadcast axes.
        """
        problem, multiprocessors = self.problem, self.device.multiprocessors
        tiles = self.key_tiles * problem.kv_heads * math.prod(problem.batch)
        none = SharedKeys(tiles, 1, self.row_tiles, tiles)
        in_turns = self._paired(self.keys) and self.keys.stages == 2 and self.atomic
        last = tiles % multiprocessors
        if not in_turns or not self.flush_every or not last or tiles < multiprocessors:
            return none
        if problem.masks or problem.band is not None or "dk" in sums or "dv" in sums:
            return none
        each = cdiv(self.row_tiles, multiprocessors // last)
        parts = cdiv(self.row_tiles, each)
        if parts == 1 or tiles * self.keys.block_n > _MAX_ROWS or each * problem.group > self.flush_every:
            return none
        return SharedKeys(tiles - last, parts, each, tiles + last * (parts - 1))

    def constants(self, load_bytes: int = 16, o_dtype: np.dtype | None = None) -> Constants:
        """Return the prologue that all kernels share, with the tile of the key kernel.

        Parameters
        ----------
        load_bytes : {16, 8, 4, 2}
            The widest access that the addresses and strides of q, k, v and do allow.
        o_dtype : dtype, optional
            Of o; the input's by default.
        """
        problem = self.problem
        exact = (self.head_dim, self.head_dim_v) == (problem.head_dim, problem.head_dim_v)
        return {
            **backward_constants(problem, o_dtype),
            **self.keys._asdict(),
            **{name: getattr(self, name) for name in ("head_dim", "head_dim_v", "flush_every", "chunk", "part")},
            "whole_columns": exact and load_bytes == 16,
            "blocks_per_sm": 1,
            "load_bytes": max(load_bytes, min(problem.dtype.itemsize, 8)),
            "atomic_dq": self.atomic,
        }

    def notes(self, load_bytes: int = 16) -> list[str]:
        """Return what is worth knowing of the plan."""
        in_order = "dq by a second pass over the scores, in a fixed order"
        summed = "dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable"
        wide = f"rows too wide for shared memory: {self.chunk} columns at a time, scores again for {self.part}"
        notes = {
            summed if self.atomic else in_order: True,
            "dk and dv of the last key tiles are added up likewise, by several blocks": self.shared_keys().parts > 1,
            wide: self.chunk > 0,
            "dbias by a pass of its own, in a fixed order": self.problem.bias is not None,
            f"addresses or strides of q, k, v, do allow only {load_bytes}-byte loads": load_bytes < 16,
        }
        return [note for note, holds in notes.items() if holds]


def tile_counts(problem: Problem, tile: BackwardTile) -> tuple[int, int]:
    """Return the numbers of row tiles and of key tiles."""
    return cdiv(problem.n_queries, tile.block_m), cdiv(problem.n_keys, tile.block_n)


def _divides(tile: BackwardTile, head_dim: int) -> bool:
    """Whether the warps can share dq's tile in blocks of 16 x 16 (square_partition in sm80/bwd_layout.cuh)."""
    along_rows = [m for m in (1, 2, 4, 8) if tile.warps % m == 0 and tile.block_m % (16 * m) == 0]
    return any(head_dim % (16 * tile.warps // m) == 0 for m in along_rows)


def _padded(width: int) -> int:
    return pad(width, _PADDING if width <= 128 else 64 if width <= 256 else 256)
