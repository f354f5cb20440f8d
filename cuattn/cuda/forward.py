"""The forward on a GPU: a launch record per kind of call, filled with this call's pointers."""

import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda import launch
from cuattn.cuda.merge import merge_parts
from cuattn.cuda.params import PARAMS
from cuattn.cuda.plan import forward_plan, grid_of
from cuattn.cuda.tables import mask_pointers, mask_tables, table_fields, table_layout
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["forward", "plan"]

_MAX_RECORDS = 1024
_SLOTS = ("q.data", "k.data", "v.data", "o.data", "l.data", "m.data")
_PART_SLOTS = ("o_part", "l_part", "m_part")
_MASK_SLOTS = ("mask.data", "table.cols", "table.bounds", "table.order", "table.alive")


class _Record(NamedTuple):
    """Everything about a kind of call that does not change from one to the next."""

    problem: Problem  # held so that its id, which is part of the key, stays its own
    plan: Plan
    function: Any
    struct: launch.Struct
    grid: tuple[int, int, int]
    block: tuple[int]
    splits: int
    part_offsets: Any  # (3, splits): bytes from the first part's o, l, m to each part's
    rows: int
    results: tuple  # shape and dtype of o, and of l and m


_records: dict[tuple, _Record] = {}


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a forward for arrays on the current device."""
    device = operands.q.device.id
    return forward_plan(problem, launch.card(device), launch.load_bytes(operands.q, operands.k, operands.v))


def forward(problem: Problem, operands: Operands) -> tuple[Any, Any, Any]:
    """Compute attention for arrays on the current device, on CuPy's current stream.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        CuPy arrays; the mask may be a host mask, which is copied once and kept.

    Returns
    -------
    o : cupy.ndarray, (*batch, heads, n_queries, head_dim_v), problem.out_dtype
    l, m : cupy.ndarray, (*batch, heads, n_queries), float32 | float64

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    CompileError
    """
    import cupy

    q, k, v = operands.q, operands.k, operands.v
    device = cupy.cuda.runtime.getDevice()
    stream = cupy.cuda.get_current_stream()
    record = _record(problem, operands, device)
    splits = record.splits
    if splits == 1:
        (o_shape, o_dtype), (stat_shape, stat) = record.results
        new = cupy.ndarray
        o, l, m, parts = new(o_shape, o_dtype), new(stat_shape, stat), new(stat_shape, stat), ()
    else:
        o, l, m, *parts = _results(problem, splits, stream.is_capturing())
    if record.rows == 0:
        return o, l, m
    # An empty v has no address, and copies of nothing must still name one.
    pointers = [q.data.ptr, k.data.ptr, v.data.ptr or k.data.ptr, o.data.ptr, l.data.ptr, m.data.ptr]
    pointers += [part.data.ptr for part in parts]
    if operands.bias is not None:
        pointers.append(operands.bias.data.ptr)
    if operands.mask is not None:
        tables = mask_tables(problem, operands.mask, device, record.plan.block_m, record.plan.block_n)
        pointers += mask_pointers(operands.mask, tables)
    words = record.struct.fill(pointers)
    held = launch.put_random(words, operands.rng) if problem.dropout else None
    record.function(record.grid, record.block, (record.struct.seal(words),), record.plan.smem_bytes, stream)
    del held
    if splits > 1:
        firsts = np.array([part.data.ptr for part in parts], np.uint64)
        merge_parts(device, firsts[:, None] + record.part_offsets, parts[0].dtype, o, l, m, stream)
    return o, l, m


def _results(problem: Problem, splits: int, together: bool) -> list[Any]:
    """Allocate o, l, m and their parts over split keys.

    `together` takes all of it from one piece of memory: a captured graph goes on using the parts for as long as
    its results live, so they must live as long.
    """
    import cupy

    stat = problem.stat_dtype
    wanted = [(problem.o_shape, problem.out_dtype), *2 * [(problem.stat_shape, stat)]]
    wanted += [((splits, *problem.o_shape), stat), *2 * [((splits, *problem.stat_shape), stat)]]
    if not together:
        return [cupy.empty(shape, dtype) for shape, dtype in wanted]
    sizes = [-(-math.prod(shape) * dtype.itemsize // 256) * 256 for shape, dtype in wanted]
    memory = cupy.cuda.alloc(sum(sizes))
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    return [cupy.ndarray(shape, dtype, memory + at) for (shape, dtype), at in zip(wanted, starts, strict=True)]


def _layout(array: Any) -> tuple:
    return (array.shape, array.strides)


def _mask_layout(problem: Problem, mask: Any) -> tuple:
    if problem.mask == "dense":
        return _layout(mask)
    return mask.leading if problem.mask == "column" else (mask.block_m, mask.block_n, mask.leading)


def _record(problem: Problem, operands: Operands, device: int) -> _Record:
    q, k, v, bias, mask = operands[:5]
    key = (
        id(problem), device, q.strides, k.shape, k.strides, v.shape, v.strides, q.shape,
        (q.data.ptr | k.data.ptr | v.data.ptr) & 15,
        None if bias is None else _layout(bias),
        None if mask is None else _mask_layout(problem, mask),
    )  # fmt: skip
    record = _records.get(key)
    if record is None:
        record = _make_record(problem, operands, device)
        if len(_records) >= _MAX_RECORDS:
            _records.clear()
        _records[key] = record
    return record


def _make_record(problem: Problem, operands: Operands, device: int) -> _Record:
    card = launch.card(device)
    made = plan(problem, operands)
    counts = grid_of(problem, made, card)
    values = _values(problem, operands, made, counts)
    constants = dict(made.constants)
    blocks = counts["row_tiles"] * math.prod(problem.batch) * (problem.heads // constants["pack"])
    kernel = None
    if blocks:
        kernel = launch.function(device, "sm80/fwd.cu", "attention_forward", made.constants, made.smem_bytes)
    grid = (blocks, counts["splits"], counts["chunks"])
    rows, stat = math.prod(problem.stat_shape), problem.stat_dtype.itemsize
    steps = np.array([[rows * problem.head_dim_v * stat], [rows * stat], [rows * stat]], np.uint64)
    offsets = steps * np.arange(counts["splits"], dtype=np.uint64)
    slots = _SLOTS + (_PART_SLOTS if counts["splits"] > 1 else ())
    slots += ("bias.data",) if operands.bias is not None else ()
    slots += _MASK_SLOTS if operands.mask is not None else ()
    struct = launch.Struct(PARAMS, values, slots)
    results = (problem.o_shape, problem.out_dtype), (problem.stat_shape, problem.stat_dtype)
    return _Record(problem, made, kernel, struct, grid, (32 * made.workers,), counts["splits"], offsets, rows, results)


def _values(problem: Problem, operands: Operands, made: Plan, counts: dict[str, int]) -> dict[str, Any]:
    """Return every field of ``Params`` that a kind of call fixes."""
    arrays = {"q": operands.q, "k": operands.k, "v": operands.v}
    if operands.bias is not None:
        arrays["bias"] = operands.bias
    if problem.mask == "dense":
        arrays["mask"] = operands.mask
    rank = len(problem.batch)
    layouts = [(array.shape[:rank], array.strides[:rank]) for array in arrays.values()]
    tables = table_layout(problem, operands.mask)
    if tables is not None:
        layouts.append((tables[0][:rank], tables[1][:rank]))
    axes = launch.collapse(problem.batch, tuple(layouts))
    values: dict[str, Any] = {}
    for name, array in arrays.items():
        values.update(launch.operand_fields(name, array, axes))
    if tables is not None:
        values.update(table_fields(problem, operands.mask, tables, axes, made.block_n))
    values.update(launch.band_fields(problem))
    values.update(launch.random_fields(problem))
    values.update({name: counts[name] for name in ("row_tiles", "key_tiles", "section", "splits", "split_tiles")})
    values.update(
        scale=problem.scale, softcap=problem.softcap or 0.0, dropout_scale=problem.dropout_scale,
        batch_size=axes.size, batch=math.prod(problem.batch), heads=problem.heads, kv_heads=problem.kv_heads,
        group=problem.group, n_queries=problem.n_queries, n_keys=problem.n_keys,
        head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
    )  # fmt: skip
    return values
