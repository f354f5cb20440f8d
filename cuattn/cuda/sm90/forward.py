"""The forward for compute capability 9.0: tensor maps, a ticket, one arguments."""

import math

from cuattn.cuda import arguments
from cuattn.cuda.launch import Record
from cuattn.cuda.merge import result_arrays
from cuattn.cuda.params import PARAMS
from cuattn.cuda.sm80.forward import INPUTS
from cuattn.cuda.sm90.forward_plan import ARCH, UNIT, counts, few_rows, hopper_plan, leaves_idle, refusal
from cuattn.cuda.sm90.tensor_map import View, unreadable, view_of
from cuattn.cuda.tables import mask_tables, table_fields, table_layout, table_slots
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["plan", "reason_against", "record"]


def reason_against(problem: Problem, operands: Operands) -> str | None:
    """Say why this kernel does not take a call for arrays on the current device, or return None."""
    card = arguments.card(operands.q.device.id)
    against = refusal(problem, card)
    if against is None and problem.kernel is None:
        if leaves_idle(problem, card):
            against = "too few query rows fill the card, and the portable kernel splits the keys"
        elif few_rows(problem, card):
            against = "too few query rows fill its tiles, and the portable kernel has smaller ones"
    if against is not None:
        return against
    try:
        axes = arguments.merged_axes(problem, operands[:3], table_layout(problem, operands.mask))
    except UnsupportedError as error:
        return str(error)
    if math.prod(axes.size[:-1]) > 1:
        return f"its tensor maps have one leading axis, and the strides of q, k, v keep those of {problem.batch} apart"
    for name, array in zip("qkv", operands[:3], strict=True):
        unfit = unreadable(array)
        if unfit is not None:
            return f"the copy engine cannot read {name}: {unfit}"
    return None


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a forward that :func:`reason_against` has nothing against."""
    return hopper_plan(problem)


def record(problem: Problem, operands: Operands) -> Record:
    """Return what a forward that :func:`reason_against` has nothing against launches; see ``forward.record``."""
    made, tiles = hopper_plan(problem), counts(problem)
    device = operands.q.device.id
    results = result_arrays(problem.o_shape, problem.out_dtype, problem.stat_dtype)
    layout = table_layout(problem, operands.mask)
    axes = arguments.merged_axes(problem, operands[:3], layout)
    values = {**arguments.problem_fields(problem, axes), **tiles}
    for name, array in {**dict(zip("qkv", operands[:3], strict=True)), **results}.items():
        values.update(arguments.operand_fields(name, array, axes, len(problem.batch)))
    tables = []
    if operands.mask is not None:
        values.update(table_fields(problem, operands.mask, layout, axes, made.block_n))
        tables.append(mask_tables(problem, operands.mask, device, made.block_m, made.block_n, UNIT))
    found = Record(INPUTS, results, {}, tables, tickets=1)
    slots = {**{f"{name}.data": name for name in "qkvolm"}, "counters": "ticket", **table_slots(0)}
    views = _views(problem, operands, made, axes)
    maps = [(name, view.mapper(problem.dtype.name)) for name, view in zip("qkvo", views, strict=True)]
    kernel = arguments.function(device, "sm90/fwd.cu", "attention_forward", made.constants, made.smem_bytes, ARCH)
    blocks = tiles["row_tiles"] * problem.heads * math.prod(problem.batch)
    grid = (min(blocks, arguments.card(device).multiprocessors),)
    shared, random = made.smem_bytes, problem.dropout > 0
    found.add(kernel, grid, 32 * made.workers, PARAMS, values, slots, shared_bytes=shared, maps=maps, random=random)
    return found


def _views(problem: Problem, operands: Operands, made: Plan, axes: arguments.Axes) -> tuple[View, ...]:
    boxes = made.block_m, made.block_n, made.block_n
    rank = len(problem.batch)
    views = [view_of(array, axes, rank, rows) for array, rows in zip(operands[:3], boxes, strict=True)]
    # o leaves in boxes of one warpgroup's rows; a float32 o leaves without a map, and any will do.
    if problem.out_dtype.itemsize > 2:
        return (*views, views[0])
    row = 2 * problem.head_dim_v
    shape = (math.prod(problem.batch), problem.heads, problem.n_queries, problem.head_dim_v)
    return (*views, View(shape, (problem.heads * problem.n_queries * row, problem.n_queries * row, row), 64))
