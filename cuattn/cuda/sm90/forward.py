"""The forward for compute capability 9.0: tensor maps, a ticket, one launch."""

import dataclasses
import math
from typing import Any

from cuattn.cuda.call import Call, statistics
from cuattn.cuda.device import device_of
from cuattn.cuda.sequence import LaunchSequence
from cuattn.cuda.sm90 import forward_plan as planner
from cuattn.cuda.sm90.tensor_map import View, layout_reason, view_of
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["launch_sequence", "plan", "unsupported_reason"]


def unsupported_reason(problem: Problem, operands: dict[str, Any], masks: tuple) -> str | None:
    """Say why this kernel does not take a call, or return None."""
    device = device_of(operands["q"].device.id)
    against = planner.unsupported_reason(problem, device)
    if against is None and problem.kernel is None:
        if planner.leaves_idle(problem, device):
            against = "too few query rows fill the GPU, and the portable kernel splits the keys"
        elif planner.few_rows(problem, device):
            against = "too few query rows fill its tiles, and the portable kernel has smaller ones"
    return against or layout_reason(problem, operands, masks, read="qkv")


def plan(problem: Problem, operands: dict[str, Any], masks: tuple) -> Plan:
    """Return the plan of a forward."""
    call = _begun(problem, operands, masks)
    return dataclasses.replace(planner.forward_plan(problem), workspace_bytes=call.sequence.workspace_bytes)


def _begun(problem: Problem, operands: dict[str, Any], masks: tuple) -> Call:
    made, call = planner.forward_plan(problem), Call(problem, operands, masks)
    tile = made.block_m, made.block_n, planner.WARPGROUP_ROWS
    call.begin(statistics(problem), {}, [tile], counters=1)
    return call


def launch_sequence(problem: Problem, operands: dict[str, Any], masks: tuple) -> LaunchSequence:
    """Return what a forward launches for arrays of this layout."""
    made, call = planner.forward_plan(problem), _begun(problem, operands, masks)
    boxes = {"q": made.block_m, "k": made.block_n, "v": made.block_n}
    views = {name: view_of(operands[name], call.axes, len(problem.batch), rows) for name, rows in boxes.items()}
    # o leaves in boxes of one warpgroup's rows; an unrounded o leaves without a map, and any will do.
    views["o"] = views["q"] if problem.out_dtype != problem.dtype else _o_view(problem)
    counts = planner.counts(problem)
    blocks = counts["row_tiles"] * problem.instances
    call.add(
        "sm90/fwd.cu", "attention_forward", dict(made.constants), (min(blocks, call.device.multiprocessors),),
        made.workers, shared_bytes=made.smem_bytes, tile=(made.block_m, made.block_n), arch=planner.ARCH,
        maps=[(name, view.mapper(problem.row)) for name, view in views.items()], **counts,
    )  # fmt: skip
    return call.sequence


def _o_view(problem: Problem) -> View:
    row = problem.head_dim_v * problem.dtype.itemsize
    shape = (math.prod(problem.batch), problem.heads, problem.n_queries, problem.head_dim_v)
    strides = (problem.heads * problem.n_queries * row, problem.n_queries * row, row)
    return View(shape, strides, planner.WARPGROUP_ROWS)
