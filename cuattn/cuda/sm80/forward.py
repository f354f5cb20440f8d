"""The forward on a GPU by the portable kernel, and by as many parts of the key axis as fill the device."""

import dataclasses
from typing import Any

from cuattn.cuda import merge
from cuattn.cuda.call import Call, statistics
from cuattn.cuda.device import device_of
from cuattn.cuda.sequence import Array, LaunchSequence
from cuattn.cuda.sm80 import forward_plan as planner
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["launch_sequence", "plan", "unsupported_reason"]

_PARTS = {"o": "o_part", "l": "l_part", "m": "m_part"}


def unsupported_reason(problem: Problem, operands: dict[str, Any], masks: tuple) -> str | None:
    """Say why the portable forward does not take a call, or return None."""
    device = device_of(operands["q"].device.id)
    return planner.unsupported_reason(problem, device) or planner.tile_reason(problem, device)


def plan(problem: Problem, operands: dict[str, Any], masks: tuple) -> Plan:
    """Return the plan of a forward."""
    made, _, call = _prepared(problem, operands, masks)
    return dataclasses.replace(made, workspace_bytes=call.sequence.workspace_bytes)


def _prepared(problem: Problem, operands: dict[str, Any], masks: tuple) -> tuple[Plan, planner.Grid, Call]:
    call = Call(problem, operands, masks)
    device = call.device
    made = planner.forward_plan(problem, device, call.load_bytes(*"qkv"))
    grid = planner.grid_of(problem, planner.cut(problem, device), device)
    scratch = {}
    if grid.splits > 1:
        whole = statistics(problem, problem.stat_dtype)
        scratch = {_PARTS[name]: Array((grid.splits, *one.shape), one.dtype) for name, one in whole.items()}
    counters = grid.blocks if grid.merges else 0
    tile = made.block_m, made.block_n
    call.begin(statistics(problem), scratch, [tile], counters)
    return made, grid, call


def launch_sequence(problem: Problem, operands: dict[str, Any], masks: tuple) -> LaunchSequence:
    """Return what a forward launches for arrays of this layout."""
    made, grid, call = _prepared(problem, operands, masks)
    if grid.blocks == 0:
        return call.sequence
    call.add(
        "sm80/fwd.cu", "attention_forward", dict(made.constants), (grid.blocks, grid.splits, grid.chunks), made.workers,
        shared_bytes=made.smem_bytes, tile=(made.block_m, made.block_n),
        aliases={} if operands["v"].size else {"v": "k"},  # an empty v has no address, and copies must name one
        **grid.counts,
    )  # fmt: skip
    if grid.splits > 1 and not grid.merges:
        merge.add(call.sequence, grid.splits, stacked=tuple(_PARTS.values()), dtype=problem.stat_dtype)
    return call.sequence
