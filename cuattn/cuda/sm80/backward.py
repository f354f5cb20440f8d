"""The backward on a GPU: preprocess, key kernel, then what dq, dbias and broadcast operands need.

Three kernels may take part.  The key kernel (sm80/bwd.cu) owns dk and dv and, unless the call is deterministic, adds dq
up in memory.  The row kernel (sm80/bwd_rows.cu) computes dq in a fixed order.  The bias kernel (sm80/bwd_bias.cu)
computes dbias.
"""

import math
from collections.abc import Container
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, Axes, pad, tile_counts
from cuattn.cuda.call import Call
from cuattn.cuda.constants import Constants, is_sloped, problem_constants
from cuattn.cuda.device import Device
from cuattn.cuda.params import BATCH_AXES, SUM_PARAMS
from cuattn.cuda.sm80 import score_gradients
from cuattn.cuda.sm80.forward import flush_tiles, is_heavy, unsupported_reason
from cuattn.cuda.sm80.score_gradients import ScoreGradients
from cuattn.cuda.sm80.tiles import BACKWARD, WIDE, BackwardTile, look_up
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem

_MAX_ROWS = 2**31 - 1  # counted through all heads, where a kernel is told one of them
_PADDING = 32  # elements: head dimensions are rounded up to a multiple of this, so that warps can share them evenly
_WIDEST_SUMMED = 256  # head dimension up to which dq may be added up in memory
_CHUNK = 64
_PART = 256
STAT_ROWS = 128  # kStatRows: rows that one block of backward_preprocess looks at
_THREADS = 256  # of backward_preprocess and backward_sum
_WIDEST = 16  # bytes of an access
# What backward_preprocess needs to know of Hopper's kernels alone.
PREPROCESS_DEFAULTS = {"split_delta": False, "dbias": 0, "in_parts": False, "deterministic": False}


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
        tiles = look_up(BACKWARD, device.shared_bytes, self.products, widest)
        if tiles is None:
            tiles = WIDE[self.products]
            self.chunk, self.part = _CHUNK, pad(cdiv(widest, cdiv(widest, _PART)), _CHUNK)
            self.head_dim, self.head_dim_v = pad(problem.head_dim, _CHUNK), pad(problem.head_dim_v, _CHUNK)
        # Dropout takes registers beside a mask; in float32 dk and dv depend on the tile, which must be every mask's.
        narrow = bool(problem.masks) and widest <= 64 and (problem.dropout > 0 or self.products == "split")
        # What a function only adds takes no register from one product to the next.
        adds = problem.score is not None and not (is_sloped(problem) or problem.masks or problem.dropout)
        alone = replace(problem, score=None) if adds and self.products == "half" else problem
        self.keys, self.rows, self.bias = (
            tiles.heavy if is_heavy(alone) or narrow else tiles.keys,
            tiles.rows,
            tiles.bias,
        )
        if tiles.few is not None and problem.n_queries <= tiles.few.block_m and problem.n_keys <= tiles.few.block_n:
            self.keys = tiles.few
        if not self.chunk:
            self.head_dim = pad(self.head_dim, max(map(_columns_shared, (self.keys, self.rows))))
        summed = max(self.head_dim, self.head_dim_v) <= _WIDEST_SUMMED
        self.atomic = summed and not problem.deterministic and not self.chunk
        self.row_tiles, self.key_tiles = tile_counts(problem, self.keys).values()
        self.flush_every = flush_tiles(self.products, problem.n_queries * problem.group, self.keys.block_m)

    def shared_bytes(self, kernel: str) -> int:
        """Return the shared memory of a block of a kernel ("keys", "rows", "bias", "convert"), as its layout has it."""
        size, acc = self.problem.dtype.itemsize, self.problem.stat_dtype.itemsize
        padding, numbers = (32 if self.products == "double" else 16), (2 if self.products == "half" else 3)
        if kernel == "convert":
            return self.keys.block_m * (self.head_dim * size + padding)
        tile: BackwardTile = getattr(self, kernel)
        block_m, block_n, stages = tile.block_m, tile.block_n, tile.stages
        unit = 4 / 16 if self.products == "split" else 0  # a float for 16 rows or keys
        width = (self.head_dim + self.head_dim_v) * size + 2 * (padding + unit)  # of a row of q and do, or k and v
        rows, keys = block_m * (width + numbers * acc), block_n * width
        scores = block_m * (block_n * (size + unit / 16) + padding)
        # How many tiles of rows, of keys and of scores a block holds.
        held = {"keys": (stages, 1, stages + 1), "rows": (1, stages, 1), "bias": (1, 1, 0)}[kernel]
        if self.chunk:
            rows, keys = block_m * numbers * acc, 2 * (block_m + block_n) * (self.chunk * size + padding + unit)
            held = 1, 1, min(held[2], 1)
        exchanged = self._paired(tile) and (kernel != "keys" or is_sloped(self.problem))
        total = int(held[0] * rows + held[1] * keys + held[2] * scores) + exchanged * block_m * block_n * acc
        return max(total, block_m * (block_n + 1) * acc) if kernel == "bias" else total

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
        tiles = self.key_tiles * problem.instances // problem.group
        last = tiles % multiprocessors
        in_turns = self._paired(self.keys) and self.keys.stages == 2 and self.atomic
        alike = not (problem.masks or problem.band is not None or "dk" in sums or "dv" in sums)
        if in_turns and alike and self.flush_every and last and tiles > multiprocessors:
            each = cdiv(self.row_tiles, multiprocessors // last)
            parts = cdiv(self.row_tiles, each)
            if parts > 1 and tiles * self.keys.block_n <= _MAX_ROWS and each * problem.group <= self.flush_every:
                return SharedKeys(tiles - last, parts, each, tiles + last * (parts - 1))
        return SharedKeys(tiles, 1, self.row_tiles, tiles)

    def constants(self, load_bytes: int = 16) -> Constants:
        """Return the prologue that all kernels share, with the tile of the key kernel.

        Parameters
        ----------
        load_bytes : {16, 8, 4, 2}
            The widest access that the addresses and strides of q, k, v and do allow.
        """
        problem = self.problem
        exact = (self.head_dim, self.head_dim_v) == (problem.head_dim, problem.head_dim_v)
        return {
            **problem_constants(problem),
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


def _columns_shared(tile: BackwardTile) -> int:
    """Return what dq's columns must be a multiple of for the warps to share its tile in blocks of 16 x 16.

    As many warps as can lie along the rows (square_partition in sm80/bwd_layout.cuh).
    """
    return 16 * tile.warps // math.gcd(tile.warps, tile.block_m // 16)


def _padded(width: int) -> int:
    return pad(width, _PADDING if width <= 128 else 64 if width <= 256 else 256)


def add_preprocess(call: Call, constants: Constants, head_dim: int, values: dict[str, int]) -> None:
    """Append the launch that computes delta and every row's statistics, and zeroes what is added up in memory.

    Parameters
    ----------
    call : Call
    constants : dict
        Those of the kernels that follow.
    head_dim : int
        Columns of a row of dq's accumulator.
    values : dict of str to int
        Fields of ``Params``.
    """
    problem, o = call.problem, call.operands.get("o")
    size = problem.dtype.itemsize
    vector = math.gcd(call.load_bytes("do", "o"), problem.head_dim_v * size)
    constants = {
        **PREPROCESS_DEFAULTS, **constants, "head_dim": head_dim, "load_bytes": max(vector, size),
        "o_elem": DTYPES[problem.dtype if o is None else o.dtype].cuda, "dlse": "dlse" in call.operands,
    }  # fmt: skip
    blocks = cdiv(problem.n_queries, STAT_ROWS) * problem.instances
    few = size == 2 and vector == _WIDEST and blocks <= 2 * call.device.multiprocessors
    warps = _THREADS // 32 * (1 + few)  # each block then has more loads under way
    constants |= {"warps": warps}
    call.add("util/bwd_preprocess.cu", "backward_preprocess", constants, (blocks,), warps, values)


def row_arrays(problem: Problem, vectors: int = 1) -> dict[str, Array]:
    """Return what the preprocess kernel writes of every row; `vectors` numbers make its statistics."""
    heads, groups = problem.instances, cdiv(problem.n_queries, STAT_ROWS)
    delta = Array((heads, groups * STAT_ROWS), problem.stat_dtype)
    counters = Array((heads, groups), np.dtype(np.int32))
    return {"delta": delta, "stat": Array((vectors, *delta.shape), delta.dtype), "counters": counters}


def broadcast_heads(call: Call) -> dict[str, int]:
    """Return which of q, k, v were broadcast, so that their gradients are sums, with the heads of their kind."""
    problem = call.problem
    heads = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads}
    return {name: n for name, n in heads.items() if call.operands[name].shape[:-2] != (*problem.batch, n)}


Sum = dict[str, Any]
"""Fields of what kernels/util/bwd_sum.cu takes: which axes stay, the lengths of all, and what lies behind them."""


def sum_over(axes: Axes, shape: tuple[int, ...], heads: int) -> Sum:
    """Return the sum over the leading axes along which an operand of that shape was broadcast to so many heads."""
    own, size = (*axes.pick(shape, 1), shape[-3]), (*axes.size, heads)
    keep = tuple(n > 1 or full == 1 for n, full in zip(own, size, strict=True))  # n: of one of merged axes
    return {"keep": keep, "size": size, "inner": shape[-2] * shape[-1]}


def sum_of_parts(parts: int, size: int) -> Sum:
    """Return the sum of so many parts, each of which has the size of the result."""
    return {"keep": (False, *[True] * BATCH_AXES), "size": (parts, *[1] * BATCH_AXES), "inner": size}


def sum_array(problem: Problem, total: Sum) -> Array:
    """Return the scratch memory that a sum is taken of."""
    return Array((*total["size"], total["inner"]), problem.stat_dtype)


def add_sum(call: Call, name: str, total: Sum, acc: np.dtype | None = None) -> None:
    """Append the launch that adds a gradient up, from scratch memory with its name and "_acc", and rounds it.

    `acc` is the dtype of that memory; by default that of all sums.
    """
    out = call.arrays[name]
    if not out.size:
        return
    constants = {"grad": DTYPES[out.dtype].cuda, "acc": DTYPES[acc or call.problem.stat_dtype].cuda}
    grid = (min(cdiv(out.size, _THREADS), 16 * call.device.multiprocessors),)
    launched = "util/bwd_sum.cu", "backward_sum", constants, grid, _THREADS
    call.sequence.add(*launched, SUM_PARAMS, {**total, "results": out.size}, {"in": f"{name}_acc", "out": name})


class BiasTiles(NamedTuple):
    """Tiles of a bias, each summed by a block over all heads that read it, or by several that share the heads."""

    instances: int
    count: int
    splits: int

    @classmethod
    def of(cls, call: Call, block_m: int, block_n: int) -> "BiasTiles":
        """Return those of a call's bias."""
        *lead, rows, keys = call.operands["bias"].shape
        instances = math.prod(lead)
        count = max(instances * cdiv(rows, block_m) * cdiv(keys, block_n), 1)
        members = call.problem.instances // max(instances, 1)
        return cls(instances, count, max(1, min(members, cdiv(2 * call.device.multiprocessors, count))))

    @property
    def grid(self) -> tuple[int]:
        """Blocks."""
        return (self.count * self.splits,)

    @property
    def fields(self) -> dict[str, int]:
        """Fields of ``Params``."""
        return {"splits": self.splits, "bias_instances": self.instances}


def summed_axes(call: Call) -> Constants:
    """Return what kernels are told of the axes along which a bias was broadcast."""
    *_, rows, keys = call.operands["bias"].shape
    return {"sum_rows": rows == 1, "sum_keys": keys == 1}


class BiasPass:
    """dbias by launches of their own, behind those that leave delta, whole, and the rows' statistics.

    Attributes
    ----------
    scratch : dict of str to Array
        The parts of a sum, where the heads that share a bias are dealt out to several blocks.
    """

    def __init__(self, call: Call, cut: Cut) -> None:
        self._call, self._cut = call, cut
        self._tiles = BiasTiles.of(call, *cut.bias[:2])
        self._sum = sum_of_parts(self._tiles.splits, call.operands["bias"].size)
        self.scratch = {"dbias_acc": sum_array(call.problem, self._sum)} if self._tiles.splits > 1 else {}

    def add(self, constants: Constants) -> None:
        """Append the launches; `constants` are those of the portable kernels."""
        call, tile, tiles = self._call, self._cut.bias, self._tiles
        own = {**tile._asdict(), "split": tiles.splits > 1, **summed_axes(call), "atomic_dq": False}
        values = {**tile_counts(call.problem, tile), **tiles.fields}
        launched = "sm80/bwd_bias.cu", "backward_bias", {**constants, **own}, tiles.grid, tile.warps, values
        call.add(*launched, tile[:2], shared_bytes=self._cut.shared_bytes("bias"))
        if tiles.splits > 1:
            add_sum(call, "dbias", self._sum)


class Backward(Call):
    """Up to seven launches: preprocess, key kernel, row kernel or conversion, bias kernel, and sums."""

    def unsupported_reason(self) -> str | None:
        return unsupported_reason(self.problem) or score_gradients.unsupported_reason(self.problem)

    def prepare(self) -> Plan:
        problem, load_bytes = self.problem, self.load_bytes("q", "k", "v", "do")
        self.cut = cut = Cut(problem, self.device)
        bias = BiasPass(self, cut) if "bias" in self.operands else None
        self.sums = self._sums()
        self.constants = cut.constants(load_bytes) | {f"sum_d{name}": f"d{name}" in self.sums for name in "qkv"}
        scratch = row_arrays(problem, 1 if problem.row.products == "half" else 2)
        if cut.atomic:
            rows = pad(problem.n_queries, cut.keys.block_m)
            scratch["dq_acc"] = Array((*self.operands["q"].shape[:-2], rows, cut.head_dim), problem.stat_dtype)
        for name, total in self.sums.items():
            scratch[f"{name}_acc"] = sum_array(problem, total)
        by_score = ScoreGradients(problem, cut.bias) if problem.learned else None
        for passed in (bias, by_score):
            scratch |= passed.scratch if passed else {}
        self.begin(scratch)
        if self.has_gradients:
            self._keys()
            self._rows()
            if bias:
                bias.add(self.constants)
            if by_score:
                by_score.add(self, self.constants, cut.shared_bytes("bias"))
        notes = cut.notes(load_bytes) + (by_score.notes if by_score else [])
        return self.planned("sm80/bwd.cu", cut.keys, cut.keys.warps, cut.shared_bytes("keys"), self.constants, *notes)

    def _sums(self) -> dict[str, Sum]:
        """Return the gradients that are sums over axes along which operands were broadcast: fields of the kernel."""
        axes, found = self.axes, {}
        for name, heads in broadcast_heads(self).items():
            if name != "q" or not self.cut.atomic:
                found[f"d{name}"] = sum_over(axes, self.operands[name].shape, heads)
        return found

    def _add(self, path: str, kernel: str, blocks: int, which: str, **values: int) -> None:
        """Append a kernel that has the tile and the shared memory of `which`."""
        tile = self.cut.keys if which == "convert" else getattr(self.cut, which)
        constants = {**self.constants, **tile._asdict()}
        launched = f"sm80/{path}.cu", kernel, constants, (blocks,), tile.warps, tile_counts(self.problem, tile) | values
        self.add(*launched, tile[:2], shared_bytes=self.cut.shared_bytes(which))

    def _keys(self) -> None:
        """Compute rows' delta and statistics, then dk and dv, and dq if the order of its sums does not matter."""
        problem, cut = self.problem, self.cut
        first, parts, row_tiles, blocks = cut.shared_keys(self.sums)
        values = tile_counts(problem, cut.keys)
        if parts > 1:
            head, of_head = divmod(first, cut.key_tiles)
            values |= {"shared_key": head * problem.n_keys + of_head * cut.keys.block_n, "splits": parts}
        add_preprocess(self, self.constants, cut.head_dim, values)
        if cut.chunk:
            blocks *= cdiv(cut.head_dim_v, cut.part) + cdiv(cut.head_dim, cut.part)
            self._add("bwd_wide", "backward_wide_keys", blocks, "keys")
        else:
            shared = {"shared_tile": first, "splits": parts, "split_tiles": row_tiles}
            self._add("bwd", "attention_backward", blocks, "keys", **shared)
        self._sum("dk")
        self._sum("dv")

    def _rows(self) -> None:
        """Compute dq in a fixed order, or round its sums."""
        cut = self.cut
        blocks = cdiv(self.problem.n_queries, cut.rows.block_m) * self.problem.instances
        if cut.atomic:
            blocks = cut.row_tiles * math.prod(self.operands["q"].shape[:-2])
            self._add("bwd_convert", "backward_convert", blocks, "convert")
        elif cut.chunk:
            self._add("bwd_wide", "backward_wide_rows", blocks * cdiv(cut.head_dim, cut.part), "rows")
        else:
            self._add("bwd_rows", "backward_rows", blocks, "rows")
        self._sum("dq")

    def _sum(self, name: str) -> None:
        """Add a gradient up over the axes that its operand was broadcast along, and round it."""
        if name in self.sums:
            add_sum(self, name, self.sums[name])
