"""The backward for compute capability 9.0: preprocess, key kernel, and what dq needs.

There are two ways.  Where dK and dV of 128 keys fit into registers, one kernel (sm90/bwd.cu) computes everything and
adds dq up in memory, key tiles taking turns where the order must be fixed; sm90/bwd_convert.cu turns the sums into
rows.  Else the same kernel with 64 keys computes dK and dV, and sm90/bwd_rows.cu computes dq.
"""

import math
from typing import NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, pad
from cuattn.cuda.constants import Constants, backward_constants
from cuattn.cuda.device import Device
from cuattn.cuda.sm80.backward import add_preprocess, broadcast_heads, row_arrays
from cuattn.cuda.sm90 import forward
from cuattn.cuda.sm90.forward import L2_SHARE, ROW_BYTES, SLAB_COLUMNS, width_of
from cuattn.cuda.sm90.tensor_map import MappedCall
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import Problem

_FUSED_HEAD_DIM = 128
_WARPGROUPS = 2  # consumers
_SHORT = 128
_MAX_SOFTCAP = 1024  # beyond it rows may be far: their slopes are lost with their scores (attn/bwd_workspace.cuh)
_DELTA_PARTS = 3  # bfloat16 that add up to a row's delta (kernels/attn/bwd_workspace.cuh)
_DELTA_OPERAND = 8 * ROW_BYTES  # bytes of which a row tile's parts are the first rows
_TURNS, _CAUSAL_TURNS = 16, 32  # heads at least, where key tiles take turns: measured at N 8192
_CONVERT_WARPS = 8


def unsupported_reason(problem: Problem, device: Device) -> str | None:
    """Say why these kernels do not take a problem, or return None; strides and addresses are another matter."""
    against = forward.unsupported_reason(problem, device)
    if against is None and problem.head_dim % 8:
        return f"it writes rows in units of 8 elements, and q has {problem.head_dim}"
    if against is None and problem.softcap is not None and problem.softcap > _MAX_SOFTCAP:
        return f"it takes softcaps up to {_MAX_SOFTCAP}, not {problem.softcap}"
    return against


class Tile(NamedTuple):
    """One kernel's tile and buffers, shared memory, and the fields of ``Params``: row_tiles, key_tiles, section."""

    block_m: int
    block_n: int
    stages: int
    v_stages: int  # of the row kernel
    shared_bytes: int
    counts: dict[str, int]


class Cut:
    """How a backward is cut.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Padded head dimensions.
    columns : int
        Of a row of dq's accumulator: whole slabs.
    fused : bool
        One kernel computes everything and adds dq up in memory.
    split_delta : bool
        Tensor cores subtract delta from dP: dropout needs it apart, and blocks take the registers of V.
    keys, rows : Tile
        Of sm90/bwd.cu and sm90/bwd_rows.cu.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, blocks = problem, problem.masks == ("block",)
        self.head_dim, self.head_dim_v = width_of(problem.head_dim), width_of(problem.head_dim_v)
        self.columns = pad(problem.head_dim, SLAB_COLUMNS)
        widest = max(self.head_dim, self.head_dim_v)
        # A softcap takes registers, too, and so does walking blocks beside anything else.
        beside = problem.band is not None or problem.deterministic or problem.dropout
        crowded = problem.softcap is not None or (blocks and beside)
        self.fused = widest <= 64 or (widest <= _FUSED_HEAD_DIM and not crowded)
        self.split_delta = self.fused and widest > 64 and not problem.dropout and not blocks
        self._slabs = cdiv(self.head_dim, SLAB_COLUMNS), cdiv(self.head_dim_v, SLAB_COLUMNS)
        self._row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        self.keys, self.rows = self._key_tile(), self._row_tile()

    def _counts(self, block_m: int, block_n: int, row: int, rows: int, heads: int) -> dict[str, int]:
        """Return the numbers of tiles, and how many heads are worked on side by side.

        Where the order of the tiles matters, their `rows` of `row` bytes share the L2 cache; where key tiles take
        turns, the more heads, the fewer of one head wait for each other.
        """
        problem, together = self.problem, 1
        if problem.masks or problem.band is not None:
            together = 1 << (max(L2_SHARE // (rows * row), 1).bit_length() - 1)
        if problem.deterministic and self.fused:
            together = max(together, _CAUSAL_TURNS if not problem.masks and problem.band is not None else _TURNS)
        section = max(min(together, heads * math.prod(problem.batch)), 1)
        tiles = cdiv(problem.n_queries, block_m), cdiv(problem.n_keys, block_n)
        return {"row_tiles": tiles[0], "key_tiles": tiles[1], "section": section}

    def _key_tile(self) -> Tile:
        """Return the tile of sm90/bwd.cu; shared memory as kernels/sm90/bwd_layout.cuh lays it out."""
        problem, (slabs, slabs_v), one = self.problem, self._slabs, self.fused
        block_m, block_n, stages = 64, 128 if one else 64, 2
        crowded = problem.softcap is not None or (problem.masks == ("block",) and problem.dropout)  # registers are
        if one and max(slabs, slabs_v) == 1 and not crowded:
            block_m = 128
        keys = 2 * slabs + slabs_v if one else 2 * max(slabs, slabs_v)
        handed = 4 * block_m * SLAB_COLUMNS * slabs if one else 2 * 4 * 64 * block_m  # dq, or P
        gradients = 2 * _WARPGROUPS * block_m * ROW_BYTES if one else 0
        rows = (slabs + slabs_v) * block_m * ROW_BYTES + 4 * block_m
        rows += _DELTA_OPERAND if self.split_delta else 4 * block_m
        draws = block_m * block_n // 8 if problem.dropout else 0
        barriers = 8 * ((6 if one else 4) + 4 * stages + 6 + 2 + (3 * stages if draws else 0))
        tiles = keys * block_n * ROW_BYTES + stages * rows + gradients + handed + draws
        work, steps, mail, walk, heads, dq_places = (3 if one else 2) * 16, 16 * stages, 32, 48, 24, 40
        draw_places = 16 * stages if draws else 0
        size = pad(tiles + barriers, 16) + work + draw_places + steps + mail + walk + heads + dq_places
        size = pad(size, _DELTA_OPERAND) if self.split_delta else size
        row = self._row + (4 * problem.head_dim if one else 0)
        counts = self._counts(block_m, block_n, row, problem.n_queries * problem.group, problem.kv_heads)
        return Tile(block_m, block_n, stages, 0, size, counts)

    def _row_tile(self) -> Tile:
        """Return the tile of sm90/bwd_rows.cu; shared memory as kernels/sm90/bwd_rows_layout.cuh lays it out."""
        problem, (slabs, slabs_v) = self.problem, self._slabs
        wide = max(slabs, slabs_v) > 2
        masked = bool(problem.masks) and wide
        block_m, block_n, stages = 128, 32 if masked else 64, 2
        v_stages = 1 if wide and not masked else 2
        rows = (slabs + slabs_v) * block_m * ROW_BYTES + 2 * 4 * block_m
        keys = (stages * slabs + v_stages * slabs_v) * block_n * ROW_BYTES
        barriers = 8 * (2 + 2 * stages + 2 * v_stages + 2)
        work, place, mail, steps = 16, 40, 24, 4 * stages
        size = pad(rows + keys + barriers, 16) + work + place + mail + steps
        counts = self._counts(block_m, block_n, self._row, problem.n_keys, problem.heads)
        return Tile(block_m, block_n, stages, v_stages, size, counts)

    def scratch(self, dq_instances: int) -> dict[str, Array]:
        """Return the scratch memory by name; `dq_instances` counts the different (N, d) matrices of q."""
        found, row_tiles = row_arrays(self.problem), self.keys.counts["row_tiles"]
        if self.split_delta:
            found["delta"] = Array((*found["delta"].shape, _DELTA_PARTS), np.dtype(np.uint16))
        int32 = found["counters"].dtype
        found["ticket"] = Array((2,), int32)
        if self.fused:
            if self.problem.deterministic:
                found["turns"] = Array((dq_instances, row_tiles), int32)
            rows = row_tiles * self.keys.block_m
            found["dq_acc"] = Array((dq_instances, rows, self.columns), self.problem.stat_dtype)
        return found

    @property
    def constants(self) -> Constants:
        """The prologue of kernels/sm90/bwd.cu."""
        return {
            **backward_constants(self.problem),
            **forward.scaling(self.problem),
            **{name: getattr(self, name) for name in ("head_dim", "head_dim_v", "split_delta")},
            **{name: getattr(self.keys, name) for name in ("block_m", "block_n", "stages")},
            "deterministic": self.problem.deterministic,
        }

    @property
    def note(self) -> str:
        """How dq is made."""
        if not self.fused:
            return "dq by a second pass over the scores, in a fixed order"
        if self.problem.deterministic:
            return "key tiles take turns to add to dq, in a fixed order"
        return "dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable"


class Backward(MappedCall):
    """Three launches, of which the last makes dq: from its sums, or anew from the scores."""

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = unsupported_reason(problem, self.device)
        if against is None and problem.kernel is None and max(problem.n_queries, problem.n_keys) < _SHORT:
            against = "rows and keys are fewer than its tiles have"
        return against or self._sum_reason() or self.layout_reason(("q", "k", "v", "do"))

    def _sum_reason(self) -> str | None:
        problem = self.problem
        for name in broadcast_heads(problem, self.operands):
            if name != "q" or problem.deterministic or not Cut(problem).fused:
                return f"the gradient of {name} is a sum over axes along which it was broadcast"
        return None

    def prepare(self) -> Plan:
        problem, operands, cut = self.problem, self.operands, Cut(self.problem)
        keys, rows, dq_instances = cut.keys, cut.rows, math.prod(operands["q"].shape[:-2])
        constants = {**cut.constants, "atomic_dq": cut.fused}
        self.begin(cut.scratch(dq_instances))
        add_preprocess(self, constants, cut.columns, keys.counts)
        warps = 4 * (_WARPGROUPS + 1)
        drawing = 4 * bool(problem.dropout and cut.fused)
        blocks = keys.counts["key_tiles"] * problem.kv_heads * math.prod(problem.batch)
        self._add("bwd", "attention_backward", constants, blocks, warps + drawing, keys, "dk", "dv")
        if cut.fused:
            launched = "sm90/bwd_convert.cu", "backward_convert", constants, (keys.counts["row_tiles"] * dq_instances,)
            self.add(*launched, _CONVERT_WARPS, keys.counts)
        else:
            own = {**constants, "block_m": rows.block_m, "block_n": rows.block_n, "v_stages": rows.v_stages}
            blocks = rows.counts["row_tiles"] * problem.instances
            self._add("bwd_rows", "backward_rows", own, blocks, warps, rows, "dq")
        return self.planned(keys, warps + drawing, keys.shared_bytes, cut.constants, cut.note)

    def _add(
        self, path: str, kernel: str, constants: Constants, blocks: int, warps: int, tile: Tile, *written: str
    ) -> None:
        """Append a persistent kernel that reads q, k, v and do and writes gradients."""
        launched = f"sm90/{path}.cu", kernel, constants, self.persistent(blocks), warps, tile.counts, tile[:2]
        maps = self.mapped(tile, ("q", "k", "v", "do"), {name: name[1:] for name in written})
        self.add(*launched, shared_bytes=tile.shared_bytes, **maps)
