"""The backward for compute capability 9.0: preprocess, key kernel, and what dq needs."""

import math

from cuattn.cuda.call import gradients
from cuattn.cuda.constants import Constants
from cuattn.cuda.sm80.backward import add_preprocess
from cuattn.cuda.sm80.backward_plan import is_sum
from cuattn.cuda.sm90 import backward_plan as planner
from cuattn.cuda.sm90.forward_plan import WARPGROUP_ROWS
from cuattn.cuda.sm90.tensor_map import MappedCall
from cuattn.plans import Plan

__all__ = ["Backward"]

_PREPROCESS = ("elem", "acc", "o_elem", "block_m", "head_dim_v", "split_delta")
_CONVERT = (
    "elem", "acc", "grad", "head_dim", "head_dim_v", "block_m", "block_n", "stages", "band_left", "band_right", "mask",
    "dropout", "split_delta",
)  # fmt: skip
_CONVERT_WARPS = 8


class Backward(MappedCall):
    """Three launches, of which the last makes dq: from its sums, or anew from the scores."""

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = planner.unsupported_reason(problem, self.device)
        if against is None and problem.kernel is None and planner.is_short(problem):
            against = "rows and keys are fewer than its tiles have"
        return against or self._sum_reason() or self.layout_reason(("q", "k", "v", "do"))

    def _sum_reason(self) -> str | None:
        problem = self.problem
        heads = {"k": problem.kv_heads, "v": problem.kv_heads}
        if problem.deterministic or not planner.fuses_dq(problem):
            heads["q"] = problem.heads
        for name, count in heads.items():
            if is_sum(problem, self.operands[name].shape, count):
                return f"the gradient of {name} is a sum over axes along which it was broadcast"
        return None

    def prepare(self) -> Plan:
        problem, operands = self.problem, self.operands
        self.key_tile = planner.key_tile(problem)
        self.tiles = [self.key_tile] + ([] if planner.fuses_dq(problem) else [planner.row_tile(problem)])
        self.dq_instances = math.prod(operands["q"].shape[:-2])
        scratch = planner.scratch(problem, self.dq_instances)
        self.begin(gradients(problem, operands), scratch, [(tile.block_m, tile.block_n) for tile in self.tiles])
        return planner.backward_plan(problem, operands["o"].dtype.name if "o" in operands else "")

    def launch(self, made: Plan) -> None:
        constants: Constants = dict(made.constants)
        self._preprocess(constants)
        self._keys(made, constants)
        if planner.fuses_dq(self.problem):
            self._convert(constants)
        else:
            self._rows(made, constants)

    def _add(
        self, path: str, kernel: str, constants: Constants, made: Plan, tile: planner.Tile, blocks: int, *more: str
    ) -> None:
        """Append a persistent kernel that reads q, k, v and do and writes the gradients `more`."""
        boxes = {"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "do": tile.block_m}
        views = {name: self.view(name, rows) for name, rows in boxes.items()}
        for name in more:  # unrounded gradients leave without a map, and any will do
            rounded = self.arrays[name].dtype == self.problem.dtype
            views[name] = self.view(name if rounded else name[1:], WARPGROUP_ROWS)
        size = tile.block_m, tile.block_n
        self.add_mapped(path, kernel, constants, made, size, tile.smem_bytes, blocks, views, **tile.counts)

    def _preprocess(self, constants: Constants) -> None:
        """Compute delta and the softmax statistics of every row, and zero the accumulator of dq."""
        own = {**{name: constants[name] for name in _PREPROCESS}, "atomic_dq": planner.fuses_dq(self.problem)}
        add_preprocess(self, own, planner.accumulator_columns(self.problem), **self.key_tile.counts)

    def _keys(self, made: Plan, constants: Constants) -> None:
        """Compute dk and dv, and add up dq if that is done in memory."""
        tile = self.key_tile
        blocks = tile.key_tiles * self.problem.kv_heads * math.prod(self.problem.batch)
        self._add("sm90/bwd.cu", "attention_backward", constants, made, tile, blocks, "dk", "dv")

    def _convert(self, constants: Constants) -> None:
        """Turn the sums into rows of dq."""
        own, tile = {name: constants[name] for name in _CONVERT}, self.key_tile
        grid = (tile.row_tiles * self.dq_instances,)
        self.add("sm90/bwd_convert.cu", "backward_convert", own, grid, _CONVERT_WARPS, **tile.counts)

    def _rows(self, made: Plan, constants: Constants) -> None:
        """Compute dq in a fixed order."""
        tile = self.tiles[1]
        own = {**constants, "block_m": tile.block_m, "block_n": tile.block_n, "v_stages": tile.v_stages}
        blocks = tile.row_tiles * self.problem.instances
        self._add("sm90/bwd_rows.cu", "backward_rows", own, made, tile, blocks, "dq")
