"""The backward for compute capability 9.0: preprocess, key kernel, and what dq needs."""

import math

from cuattn.cuda.call import gradients
from cuattn.cuda.constants import Constants
from cuattn.cuda.sm80.backward import add_preprocess, is_sum
from cuattn.cuda.sm90 import backward_plan as planner
from cuattn.cuda.sm90.forward import REASON, WARPGROUP_ROWS
from cuattn.cuda.sm90.tensor_map import MappedCall
from cuattn.plans import Plan

CONVERT = (
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
        problem, operands, tile = self.problem, self.operands, planner.key_tile(self.problem)
        fused, dq_instances = planner.fuses_dq(problem), math.prod(operands["q"].shape[:-2])
        constants = planner.constants_of(problem, getattr(operands.get("o"), "dtype", None))
        self.begin(gradients(problem, operands), planner.scratch(problem, dq_instances))
        columns = planner.accumulator_columns(problem)
        add_preprocess(self, {**constants, "atomic_dq": fused}, columns, tile.counts)
        warps = 4 * (planner.WARPGROUPS + 1)
        extra = 4 * bool(problem.dropout and fused)  # warps that draw
        blocks = tile.key_tiles * problem.kv_heads * math.prod(problem.batch)
        self._add("bwd", "attention_backward", constants, blocks, warps + extra, tile, "dk", "dv")
        if fused:
            own = {name: constants[name] for name in CONVERT}
            launched = "sm90/bwd_convert.cu", "backward_convert", own, tile.row_tiles * dq_instances
            self.add(*launched, _CONVERT_WARPS, tile.counts)
        else:
            rows = planner.row_tile(problem)
            own = {**constants, "block_m": rows.block_m, "block_n": rows.block_n, "v_stages": rows.v_stages}
            self._add("bwd_rows", "backward_rows", own, rows.row_tiles * problem.instances, warps, rows, "dq")
        size = tile.block_m, tile.block_n, warps + extra, tile.smem_bytes
        return self.planned(*size, REASON, [planner.note_of(problem)], constants)

    def _add(
        self, path: str, kernel: str, constants: Constants, blocks: int, warps: int, tile: planner.Tile, *more: str
    ) -> None:
        """Append a persistent kernel that reads q, k, v and do and writes the gradients `more`."""
        boxes = {"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "do": tile.block_m}
        views = {name: self.view(name, rows) for name, rows in boxes.items()}
        for name in more:  # unrounded gradients leave without a map, and any will do
            rounded = self.arrays[name].dtype == self.problem.dtype
            views[name] = self.view(name if rounded else name[1:], WARPGROUP_ROWS)
        launched = f"sm90/{path}.cu", kernel, constants, blocks, warps, tile.counts
        self.add_mapped(*launched, tile=tile[:2], views=views, shared_bytes=tile.smem_bytes)
