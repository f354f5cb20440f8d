"""When and with which tiles the kernels for compute capability 9.0 do a backward: pure functions, no CuPy.

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
from cuattn.cuda.sm80.backward import row_arrays
from cuattn.cuda.sm90 import forward
from cuattn.cuda.sm90.forward import L2_SHARE, ROW_BYTES, SLAB_COLUMNS, scaling, width_of
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

_FUSED_HEAD_DIM = 128
WARPGROUPS = 2  # consumers
_SHORT = 128
_MAX_SOFTCAP = 1024  # beyond it rows may be far: their slopes are lost with their scores (attn/bwd_workspace.cuh)
_DELTA_PARTS = 3  # bfloat16 that add up to a row's delta (kernels/attn/bwd_workspace.cuh)
_DELTA_OPERAND = 8 * ROW_BYTES  # bytes of which a row tile's parts are the first rows
_TURNS, _CAUSAL_TURNS = 16, 32  # heads at least, where key tiles take turns: measured at N 8192


class Tile(NamedTuple):
    """One kernel's tile, buffers, and what it is launched with."""

    block_m: int
    block_n: int
    stages: int
    v_stages: int  # of the row kernel
    smem_bytes: int
    row_tiles: int
    key_tiles: int
    section: int  # heads that are worked on side by side

    @property
    def counts(self) -> dict[str, int]:
        """The fields of ``Params``."""
        return {"row_tiles": self.row_tiles, "key_tiles": self.key_tiles, "section": self.section}


def _sizes(problem: Problem) -> tuple[int, int]:
    return width_of(problem.head_dim), width_of(problem.head_dim_v)


def unsupported_reason(problem: Problem, device: Device) -> str | None:
    """Say why these kernels do not take a problem, or return None; strides and addresses are another matter."""
    against = forward.unsupported_reason(problem, device)
    if against is None and problem.head_dim % 8:
        return f"it writes rows in units of 8 elements, and q has {problem.head_dim}"
    if against is None and problem.softcap is not None and problem.softcap > _MAX_SOFTCAP:
        return f"it takes softcaps up to {_MAX_SOFTCAP}, not {problem.softcap}"
    return against


def is_short(problem: Problem) -> bool:
    """Whether a problem does not even fill one tile, so that smaller ones serve it as well."""
    return problem.n_queries < _SHORT and problem.n_keys < _SHORT


def fuses_dq(problem: Problem) -> bool:
    """Whether one kernel computes everything and adds dq up in memory."""
    widest = max(_sizes(problem))
    if widest > _FUSED_HEAD_DIM:
        return False
    if widest <= 64:
        return True
    # A softcap takes registers, too, and so does walking blocks beside anything else.
    return not (
        problem.softcap is not None
        or (problem.masks == ("block",) and (problem.band is not None or problem.deterministic or problem.dropout))
    )


def splits_delta(problem: Problem) -> bool:
    """Whether tensor cores subtract delta from dP: dropout needs it apart, and blocks take the registers of V."""
    return fuses_dq(problem) and max(_sizes(problem)) > 64 and not problem.dropout and problem.masks != ("block",)


def _slabs(problem: Problem) -> tuple[int, int]:
    head_dim, head_dim_v = _sizes(problem)
    return cdiv(head_dim, SLAB_COLUMNS), cdiv(head_dim_v, SLAB_COLUMNS)


def _section(problem: Problem, row: int, rows: int, heads: int) -> int:
    """Return how many heads are worked on side by side.

    Where the order of the tiles matters, their `rows` of `row` bytes share the L2 cache; where key tiles take turns,
    the more heads, the fewer of one head wait for each other.
    """
    together = 1
    if problem.masks or problem.band is not None:
        together = 1 << (max(L2_SHARE // (rows * row), 1).bit_length() - 1)
    if problem.deterministic and fuses_dq(problem):
        together = max(together, _CAUSAL_TURNS if not problem.masks and problem.band is not None else _TURNS)
    return max(min(together, heads * math.prod(problem.batch)), 1)


def key_tile(problem: Problem) -> Tile:
    """Return the tile of sm90/bwd.cu; shared memory as kernels/sm90/bwd_layout.cuh lays it out."""
    slabs, slabs_v = _slabs(problem)
    one = fuses_dq(problem)
    block_m, block_n, stages = 64, 128 if one else 64, 2
    crowded = problem.softcap is not None or (problem.masks == ("block",) and problem.dropout)  # registers are
    if one and max(slabs, slabs_v) == 1 and not crowded:
        block_m = 128
    if one:
        keys = 2 * slabs + slabs_v
        handed = 4 * block_m * SLAB_COLUMNS * slabs  # dq
        gradients = 2 * WARPGROUPS * block_m * ROW_BYTES
    else:
        keys = 2 * max(slabs, slabs_v)
        handed = 2 * 4 * 64 * block_m  # P
        gradients = 0
    rows = (slabs + slabs_v) * block_m * ROW_BYTES + 4 * block_m
    split = splits_delta(problem)
    rows += _DELTA_OPERAND if split else 4 * block_m
    draws = block_m * block_n // 8 if problem.dropout else 0
    barriers = 8 * ((6 if one else 4) + 4 * stages + 6 + 2 + (3 * stages if draws else 0))
    tiles = keys * block_n * ROW_BYTES + stages * rows + gradients + handed + draws
    work, steps, mail, walk, heads, dq_places = (3 if one else 2) * 16, 16 * stages, 32, 48, 24, 40
    draw_places = 16 * stages if draws else 0
    smem_bytes = pad(tiles + barriers, 16) + work + draw_places + steps + mail + walk + heads + dq_places
    smem_bytes = pad(smem_bytes, _DELTA_OPERAND) if split else smem_bytes
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + (4 * problem.head_dim if one else 0)
    section = _section(problem, row, problem.n_queries * problem.group, problem.kv_heads)
    return Tile(block_m, block_n, stages, 0, smem_bytes, *_tiles(problem, block_m, block_n), section)


def row_tile(problem: Problem) -> Tile:
    """Return the tile of sm90/bwd_rows.cu; shared memory as kernels/sm90/bwd_rows_layout.cuh lays it out."""
    slabs, slabs_v = _slabs(problem)
    wide = max(slabs, slabs_v) > 2
    masked = bool(problem.masks) and wide
    block_m, block_n, stages = 128, 32 if masked else 64, 2
    v_stages = 1 if wide and not masked else 2
    rows = (slabs + slabs_v) * block_m * ROW_BYTES + 2 * 4 * block_m
    keys = (stages * slabs + v_stages * slabs_v) * block_n * ROW_BYTES
    barriers = 8 * (2 + 2 * stages + 2 * v_stages + 2)
    work, place, mail, steps = 16, 40, 24, 4 * stages
    smem_bytes = pad(rows + keys + barriers, 16) + work + place + mail + steps
    row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    section = _section(problem, row, problem.n_keys, problem.heads)
    return Tile(block_m, block_n, stages, v_stages, smem_bytes, *_tiles(problem, block_m, block_n), section)


def _tiles(problem: Problem, block_m: int, block_n: int) -> tuple[int, int]:
    return cdiv(problem.n_queries, block_m), cdiv(problem.n_keys, block_n)


def accumulator_columns(problem: Problem) -> int:
    """Columns of a row of dq's accumulator: whole slabs."""
    return pad(problem.head_dim, SLAB_COLUMNS)


def scratch(problem: Problem, dq_instances: int) -> dict[str, Array]:
    """Return the scratch memory by name; `dq_instances` counts the different (N, d) matrices of q."""
    found = row_arrays(problem)
    if splits_delta(problem):
        found["delta"] = Array((*found["delta"].shape, _DELTA_PARTS), np.dtype(np.uint16))
    found["ticket"] = Array((2,), np.dtype(np.int32))
    if fuses_dq(problem):
        tile = key_tile(problem)
        if problem.deterministic:
            found["turns"] = Array((dq_instances, tile.row_tiles), np.dtype(np.int32))
        rows = tile.row_tiles * tile.block_m
        found["dq_acc"] = Array((dq_instances, rows, accumulator_columns(problem)), problem.stat_dtype)
    return found


def constants_of(problem: Problem, o_dtype: np.dtype | None = None) -> Constants:
    """Return the prologue of kernels/sm90/bwd.cu; `o_dtype` is o's, by default the inputs'."""
    tile, (head_dim, head_dim_v) = key_tile(problem), _sizes(problem)
    return {
        **backward_constants(problem, o_dtype),
        **scaling(problem),
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "stages": tile.stages,
        "deterministic": problem.deterministic,
        "split_delta": splits_delta(problem),
    }


def note_of(problem: Problem) -> str:
    """Return how dq is made."""
    if not fuses_dq(problem):
        return "dq by a second pass over the scores, in a fixed order"
    if problem.deterministic:
        return "key tiles take turns to add to dq, in a fixed order"
    return "dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable"
