"""The forward for compute capability 9.0: tensor maps, a ticket, one launch."""

import math

from cuattn.cuda.call import statistics
from cuattn.cuda.sm90 import forward_plan as planner
from cuattn.cuda.sm90.tensor_map import MappedCall, View
from cuattn.plans import Plan

__all__ = ["Forward"]


class Forward(MappedCall):
    """One launch of persistent blocks."""

    def unsupported_reason(self) -> str | None:
        problem, device = self.problem, self.device
        against = planner.unsupported_reason(problem, device)
        if against is None and problem.kernel is None:
            if planner.leaves_idle(problem, device):
                against = "too few query rows fill the GPU, and the portable kernel splits the keys"
            elif planner.few_rows(problem, device):
                against = "too few query rows fill its tiles, and the portable kernel has smaller ones"
        return against or self.layout_reason("qkv")

    def prepare(self) -> Plan:
        made = planner.forward_plan(self.problem)
        self.begin(statistics(self.problem), {}, [(made.block_m, made.block_n, planner.WARPGROUP_ROWS)], counters=1)
        return made

    def launch(self, made: Plan) -> None:
        problem, counts = self.problem, planner.counts(self.problem)
        boxes = {"q": made.block_m, "k": made.block_n, "v": made.block_n}
        views = {name: self.view(name, rows) for name, rows in boxes.items()}
        # o leaves in boxes of one warpgroup's rows; an unrounded o leaves without a map, and any will do.
        views["o"] = views["q"] if problem.out_dtype != problem.dtype else self._o_view()
        self.add_mapped(
            "sm90/fwd.cu", "attention_forward", dict(made.constants), made, (made.block_m, made.block_n),
            made.smem_bytes, counts["row_tiles"] * problem.instances, views, **counts,
        )  # fmt: skip

    def _o_view(self) -> View:
        problem = self.problem
        row = problem.head_dim_v * problem.dtype.itemsize
        shape = (math.prod(problem.batch), problem.heads, problem.n_queries, problem.head_dim_v)
        strides = (problem.heads * problem.n_queries * row, problem.n_queries * row, row)
        return View(shape, strides, planner.WARPGROUP_ROWS)
