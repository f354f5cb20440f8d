"""The backward for compute capability 9.0: preprocess, key kernel, and what dq needs."""

import dataclasses
import math
from typing import Any

from cuattn.cuda.call import Call, gradients
from cuattn.cuda.constants import Constants
from cuattn.cuda.device import device_of
from cuattn.cuda.sequence import LaunchSequence
from cuattn.cuda.sm80.backward import add_preprocess
from cuattn.cuda.sm80.backward_plan import is_sum
from cuattn.cuda.sm90 import backward_plan as planner
from cuattn.cuda.sm90.forward_plan import ARCH, WARPGROUP_ROWS
from cuattn.cuda.sm90.tensor_map import layout_reason, view_of
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["launch_sequence", "plan", "unsupported_reason"]

_PREPROCESS = ("elem", "acc", "o_elem", "block_m", "head_dim_v", "split_delta")
_CONVERT = (
    "elem", "acc", "grad", "head_dim", "head_dim_v", "block_m", "block_n", "stages", "band_left", "band_right", "mask",
    "dropout", "split_delta",
)  # fmt: skip
_CONVERT_WARPS = 8


def unsupported_reason(problem: Problem, operands: dict[str, Any], masks: tuple) -> str | None:
    """Say why these kernels do not take a call, or return None."""
    against = planner.unsupported_reason(problem, device_of(operands["q"].device.id))
    if against is None and problem.kernel is None and planner.is_short(problem):
        against = "rows and keys are fewer than its tiles have"
    return against or _sum_reason(problem, operands) or layout_reason(problem, operands, masks, ("q", "k", "v", "do"))


def _sum_reason(problem: Problem, operands: dict[str, Any]) -> str | None:
    heads = {"k": problem.kv_heads, "v": problem.kv_heads}
    if problem.deterministic or not planner.fuses_dq(problem):
        heads["q"] = problem.heads
    for name, count in heads.items():
        if is_sum(problem, operands[name].shape, count):
            return f"the gradient of {name} is a sum over axes along which it was broadcast"
    return None


def plan(problem: Problem, operands: dict[str, Any], masks: tuple) -> Plan:
    """Return the plan of a backward."""
    builder = _Builder(problem, operands, masks)
    return dataclasses.replace(builder.plan, workspace_bytes=builder.call.sequence.workspace_bytes)


def launch_sequence(problem: Problem, operands: dict[str, Any], masks: tuple) -> LaunchSequence:
    """Return what a backward launches for arrays of this layout."""
    builder = _Builder(problem, operands, masks)
    builder.preprocess()
    builder.keys()
    if planner.fuses_dq(problem):
        builder.convert()
    else:
        builder.rows()
    return builder.call.sequence


class _Builder:
    """Adds the launches of a backward to its call, in order."""

    def __init__(self, problem: Problem, operands: dict[str, Any], masks: tuple) -> None:
        self.problem, self.call = problem, Call(problem, operands, masks)
        self.plan = planner.backward_plan(problem, operands["o"].dtype.name if "o" in operands else "")
        self.constants: Constants = dict(self.plan.constants)
        self.key_tile = planner.key_tile(problem)
        self.tiles = [self.key_tile] + ([] if planner.fuses_dq(problem) else [planner.row_tile(problem)])
        self.dq_instances = math.prod(operands["q"].shape[:-2])
        scratch = planner.scratch(problem, self.dq_instances)
        tiles = [(tile.block_m, tile.block_n) for tile in self.tiles]
        self.call.begin(gradients(problem, operands), scratch, tiles)

    def _add(
        self, path: str, kernel: str, constants: Constants, tile: planner.Tile, grid: int, boxes: dict[str, int]
    ) -> None:
        """Append a persistent kernel with a map of each named array, in boxes of so many rows."""
        call, rank = self.call, len(self.problem.batch)
        # Unrounded gradients leave without a map, and any will do.
        sources = {name: name[1:] for name in ("dq", "dk", "dv") if call.arrays[name].dtype != self.problem.dtype}
        arrays = {name: call.arrays[sources.get(name, name)] for name in boxes}
        views = [(name, view_of(arrays[name], call.axes, rank, rows)) for name, rows in boxes.items()]
        call.add(
            path, kernel, constants, (min(grid, call.device.multiprocessors),), self.plan.workers,
            shared_bytes=tile.smem_bytes, tile=(tile.block_m, tile.block_n), arch=ARCH,
            maps=[(name, view.mapper(self.problem.row)) for name, view in views], **tile.counts,
        )  # fmt: skip

    def preprocess(self) -> None:
        """Compute delta and the softmax statistics of every row, and zero the accumulator of dq."""
        constants = {name: self.constants[name] for name in _PREPROCESS}
        constants["atomic_dq"] = planner.fuses_dq(self.problem)
        add_preprocess(self.call, constants, planner.accumulator_columns(self.problem), **self.key_tile.counts)

    def keys(self) -> None:
        """Compute dk and dv, and add up dq if that is done in memory."""
        tile = self.key_tile
        rows, keys = tile.block_m, tile.block_n
        boxes = {"q": rows, "k": keys, "v": keys, "do": rows, "dk": WARPGROUP_ROWS, "dv": WARPGROUP_ROWS}
        grid = tile.key_tiles * self.problem.kv_heads * math.prod(self.problem.batch)
        self._add("sm90/bwd.cu", "attention_backward", self.constants, tile, grid, boxes)

    def convert(self) -> None:
        """Turn the sums into rows of dq."""
        constants, tile = {name: self.constants[name] for name in _CONVERT}, self.key_tile
        grid = (tile.row_tiles * self.dq_instances,)
        self.call.add("sm90/bwd_convert.cu", "backward_convert", constants, grid, _CONVERT_WARPS, **tile.counts)

    def rows(self) -> None:
        """Compute dq in a fixed order."""
        tile = self.tiles[1]
        own = {"block_m": tile.block_m, "block_n": tile.block_n, "v_stages": tile.v_stages}
        rows, keys = tile.block_m, tile.block_n
        boxes = {"q": rows, "k": keys, "v": keys, "do": rows, "dq": WARPGROUP_ROWS}
        grid = tile.row_tiles * self.problem.instances
        self._add("sm90/bwd_rows.cu", "backward_rows", {**self.constants, **own}, tile, grid, boxes)
