"""The forward on a GPU by the portable kernel, and by as many parts of the key axis as fill the device."""

from cuattn.cuda import merge
from cuattn.cuda.call import Call, statistics
from cuattn.cuda.sequence import Array
from cuattn.cuda.sm80 import forward_plan as planner
from cuattn.plans import Plan

__all__ = ["Forward"]

_PARTS = {"o": "o_part", "l": "l_part", "m": "m_part"}


class Forward(Call):
    """One launch or, where parts of the key axis are not merged by their last blocks, two."""

    def unsupported_reason(self) -> str | None:
        problem, device = self.problem, self.device
        return planner.unsupported_reason(problem, device) or planner.tile_reason(problem, device)

    def prepare(self) -> Plan:
        problem, device = self.problem, self.device
        made = planner.forward_plan(problem, device, self.load_bytes(*"qkv"))
        self.grid = grid = planner.grid_of(problem, planner.cut(problem, device), device)
        scratch = {}
        if grid.splits > 1:
            whole = statistics(problem, problem.stat_dtype)
            scratch = {_PARTS[name]: Array((grid.splits, *one.shape), one.dtype) for name, one in whole.items()}
        tile = made.block_m, made.block_n
        self.begin(statistics(problem), scratch, [tile], grid.blocks if grid.merges else 0)
        return made

    def launch(self, made: Plan) -> None:
        grid = self.grid
        if grid.blocks == 0:
            return
        self.add(
            "sm80/fwd.cu", "attention_forward", dict(made.constants), (grid.blocks, grid.splits, grid.chunks),
            made.workers, shared_bytes=made.smem_bytes, tile=(made.block_m, made.block_n),
            # An empty v has no address, and copies of nothing must name one.
            aliases={} if self.operands["v"].size else {"v": "k"}, **grid.counts,
        )  # fmt: skip
        if grid.splits > 1 and not grid.merges:
            merge.add(self.sequence, grid.splits, stacked=tuple(_PARTS.values()), dtype=self.problem.stat_dtype)
