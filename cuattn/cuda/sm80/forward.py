"""The forward on a GPU by the portable kernel, and by as many parts of the key axis as fill the card."""

import math
from typing import Any

from cuattn.cuda import arguments
from cuattn.cuda.launch import Array, Record
from cuattn.cuda.merge import add_merge, result_arrays
from cuattn.cuda.params import PARAMS
from cuattn.cuda.sm80.forward_plan import forward_plan, grid_of
from cuattn.cuda.tables import mask_tables, table_fields, table_layout, table_slots
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["INPUTS", "plan", "record"]

INPUTS = ("q", "k", "v", "bias", "mask")  # of every forward's record
_PARTS = ("o_part", "l_part", "m_part")


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a forward for arrays on the current device."""
    card = arguments.card(operands.q.device.id)
    return forward_plan(problem, card, arguments.load_bytes(operands.q, operands.k, operands.v))


def record(problem: Problem, operands: Operands) -> Record:
    """Return what a forward launches for arrays of this layout on the current device.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        CuPy arrays; the mask may be a host mask.

    Returns
    -------
    Record
        Its results are o (problem.out_dtype), l and m, over (*batch, heads).

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    CompileError
    """
    device = operands.q.device.id
    card, made = arguments.card(device), plan(problem, operands)
    counts = grid_of(problem, made, card)
    splits, stat = counts["splits"], problem.stat_dtype
    results = result_arrays(problem.o_shape, problem.out_dtype, stat)
    scratch, tables = {}, []
    if splits > 1:
        whole = result_arrays(problem.o_shape, stat, stat).values()
        scratch = {name: Array((splits, *one.shape), stat) for name, one in zip(_PARTS, whole, strict=True)}
    if operands.mask is not None:
        tables.append(mask_tables(problem, operands.mask, device, made.block_m, made.block_n))
    constants = dict(made.constants)
    blocks = counts["row_tiles"] * math.prod(problem.batch) * (problem.heads // constants["pack"])
    found = Record(INPUTS, results, scratch, tables, tickets=blocks if constants["merges"] else 0)
    if blocks == 0:
        return found
    kernel = arguments.function(device, "sm80/fwd.cu", "attention_forward", made.constants, made.smem_bytes)
    slots = {
        "q.data": "q", "k.data": "k",
        "v.data": "v" if operands.v.size else "k",  # an empty v has no address, and copies of nothing must name one
        "bias.data": "bias", **{f"{name}.data": name for name in "olm"}, **{name: name for name in _PARTS},
        "counters": "ticket",
    }  # fmt: skip
    slots |= table_slots(0)
    values, grid = _values(problem, operands, made, counts), (blocks, splits, counts["chunks"])
    shared, random = made.smem_bytes, problem.dropout > 0
    found.add(kernel, grid, 32 * made.workers, PARAMS, values, slots, shared_bytes=shared, random=random)
    if splits > 1 and not constants["merges"]:
        add_merge(found, device, splits, problem.o_shape, (stat, problem.out_dtype, stat), stacked=_PARTS)
    return found


def _values(problem: Problem, operands: Operands, made: Plan, counts: dict[str, int]) -> dict[str, Any]:
    """Return every field of ``Params`` that a kind of call fixes."""
    arrays = {"q": operands.q, "k": operands.k, "v": operands.v}
    if operands.bias is not None:
        arrays["bias"] = operands.bias
    if problem.mask == "dense":
        arrays["mask"] = operands.mask
    tables = table_layout(problem, operands.mask)
    axes = arguments.merged_axes(problem, arrays.values(), tables)
    values = arguments.problem_fields(problem, axes)
    for name, array in arrays.items():
        values.update(arguments.operand_fields(name, array, axes, len(problem.batch)))
    if tables is not None:
        values.update(table_fields(problem, operands.mask, tables, axes, made.block_n))
    values.update({name: counts[name] for name in ("row_tiles", "key_tiles", "section", "splits", "split_tiles")})
    return values
