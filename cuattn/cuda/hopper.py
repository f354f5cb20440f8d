"""The forward for compute capability 9.0: tensor maps, a ticket, one launch."""

import functools
import math
from typing import Any, NamedTuple

from cuattn.cuda import launch
from cuattn.cuda.hopper_plan import ARCH, counts, hopper_plan, leaves_idle, refusal
from cuattn.cuda.params import BATCH_AXES, PARAMS
from cuattn.cuda.tables import mask_pointers, mask_tables, table_fields, table_layout
from cuattn.cuda.tensormap import describe, why_not
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["find", "run"]

_MAX_RECORDS = 1024
_SLOTS = ("q.data", "k.data", "v.data", "o.data", "l.data", "m.data", "counters")
_MASK_SLOTS = ("mask.data", "table.cols", "table.bounds", "table.order", "table.alive")


class _View(NamedTuple):
    """How one operand looks to the copy engine."""

    shape: tuple[int, int, int, int]  # batch, head, row, column
    strides: tuple[int, int, int]  # bytes
    box_rows: int


class _Record(NamedTuple):
    """Everything about a kind of call that does not change from one to the next."""

    plan: Plan
    function: Any
    struct: launch.Struct
    grid: tuple[int]
    block: tuple[int]
    views: tuple[_View, ...]  # q, k, v, o


_records: dict[tuple, tuple[Problem, _Record | str]] = {}


def find(problem: Problem, operands: Operands) -> _Record | str:
    """Return what :func:`run` needs for a call on the current device, or why this kernel does not take it."""
    q, k, v, _, mask = operands[:5]
    layout = None
    if problem.mask in ("column", "block"):
        layout = mask.leading, getattr(mask, "block_m", 0), getattr(mask, "block_n", 0)
    alignment = (q.data.ptr | k.data.ptr | v.data.ptr) & 15
    key = (id(problem), q.device.id, q.shape, q.strides, k.shape, k.strides, v.shape, v.strides, alignment, layout)
    known = _records.get(key)
    if known is None:
        # The problem is held so that its id, which is part of the key, stays its own.
        known = problem, _reason_against(problem, operands) or _make_record(problem, operands, q.device.id)
        if len(_records) >= _MAX_RECORDS:
            _records.clear()
        _records[key] = known
    return known[1]


def _reason_against(problem: Problem, operands: Operands) -> str | None:
    card = launch.card(operands.q.device.id)
    against = refusal(problem, card)
    if against is None and problem.kernel is None and leaves_idle(problem, card):
        against = "too few query rows fill the card, and the portable kernel splits the keys"
    if against is not None:
        return against
    try:
        axes = _axes(problem, operands)
    except UnsupportedError as error:
        return str(error)
    if math.prod(axes.size[:-1]) > 1:
        return f"its tensor maps have one leading axis, and the strides of q, k, v keep those of {problem.batch} apart"
    for name, array in zip("qkv", operands[:3], strict=True):
        strides = tuple(stride for size, stride in zip(array.shape[:-1], array.strides[:-1], strict=True) if size > 1)
        unfit = why_not(array.data.ptr, strides)
        if unfit is None and array.shape[-2] > 1 and array.strides[-2] == 0:
            unfit = "its rows are one row, repeated"
        if unfit is not None:
            return f"the copy engine cannot read {name}: {unfit}"
    return None


def run(record: _Record, problem: Problem, operands: Operands) -> tuple[Any, Any, Any]:
    """Compute attention on the current device, on CuPy's current stream; see :func:`cuattn.cuda.forward.forward`."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    stream = cupy.cuda.get_current_stream()
    stat = problem.stat_shape, problem.stat_dtype
    o, l, m = cupy.ndarray(problem.o_shape, problem.out_dtype), cupy.ndarray(*stat), cupy.ndarray(*stat)
    pointers = [array.data.ptr for array in (*operands[:3], o, l, m)]
    # A captured graph may be replayed beside other work of this stream, so it counts its tiles elsewhere.
    ticket = cupy.zeros(1, "u4") if stream.is_capturing() else _ticket(device, stream.ptr)
    pointers.append(ticket.data.ptr)
    if operands.mask is not None:
        tables = mask_tables(problem, operands.mask, device, record.plan.block_m, record.plan.block_n)
        pointers += mask_pointers(operands.mask, tables)
    words = record.struct.fill(pointers)
    held = launch.put_random(words, operands.rng) if problem.dropout else None
    maps = [describe(pointer, problem.dtype.name, *view) for pointer, view in zip(pointers, record.views, strict=False)]
    record.function(record.grid, record.block, (record.struct.seal(words), *maps), record.plan.smem_bytes, stream)
    del held
    return o, l, m


@functools.lru_cache(maxsize=256)
def _ticket(device: int, stream: int) -> Any:
    """Return the counter of a stream; each launch leaves it at 0."""
    import cupy

    return cupy.zeros(1, "u4")


def _axes(problem: Problem, operands: Operands) -> launch.Axes:
    rank = len(problem.batch)
    layouts = [(array.shape[:rank], array.strides[:rank]) for array in operands[:3]]
    tables = table_layout(problem, operands.mask)
    if tables is not None:
        layouts.append((tables[0][:rank], tables[1][:rank]))
    return launch.collapse(problem.batch, tuple(layouts))


def _make_record(problem: Problem, operands: Operands, device: int) -> _Record:
    made = hopper_plan(problem)
    tiles = counts(problem)
    axes = _axes(problem, operands)
    values: dict[str, Any] = {}
    for name, array in zip("qkv", operands[:3], strict=True):
        values.update(launch.operand_fields(name, array, axes))
    values.update(_result_fields(problem))
    tables = table_layout(problem, operands.mask)
    if tables is not None:
        values.update(table_fields(problem, operands.mask, tables, axes, made.block_n))
    values.update(launch.band_fields(problem))
    values.update(launch.random_fields(problem))
    values.update(tiles)
    batch = math.prod(problem.batch)
    values.update(
        scale=problem.scale, softcap=problem.softcap or 0.0, dropout_scale=problem.dropout_scale,
        batch_size=axes.size, batch=batch, heads=problem.heads, kv_heads=problem.kv_heads, group=problem.group,
        n_queries=problem.n_queries, n_keys=problem.n_keys,
        head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
    )  # fmt: skip
    function = launch.function(device, "sm90/fwd.cu", "attention_forward", made.constants, made.smem_bytes, ARCH)
    blocks = min(tiles["row_tiles"] * problem.heads * batch, launch.card(device).multiprocessors)
    slots = _SLOTS + (_MASK_SLOTS if operands.mask is not None else ())
    struct = launch.Struct(PARAMS, values, slots)
    views = _views(problem, operands, made, axes)
    return _Record(made, function, struct, (blocks,), (32 * made.workers,), views)


def _result_fields(problem: Problem) -> dict[str, Any]:
    """Return the fields of o, l and m, which are contiguous over (batch, heads, rows, columns)."""
    rows, columns = problem.n_queries, problem.head_dim_v
    values: dict[str, Any] = {}
    for name, row in (("o", columns), ("l", 1), ("m", 1)):
        head = rows * row
        values[f"{name}.batch"] = (0,) * (BATCH_AXES - 1) + (problem.heads * head,)
        values[f"{name}.head"] = head
        values[f"{name}.row"] = row
    return values


def _views(problem: Problem, operands: Operands, made: Plan, axes: launch.Axes) -> tuple[_View, ...]:
    boxes = made.block_m, made.block_n, made.block_n
    views = []
    for array, box_rows in zip(operands[:3], boxes, strict=True):
        rank = len(problem.batch)
        size = array.dtype.itemsize
        batch = size * axes.strides(array.shape[:rank], array.strides[:rank], size)[-1]
        head, row = array.strides[rank:-1]
        heads, rows, columns = array.shape[rank:]
        shape = (axes.size[-1] if batch else 1, heads if head else 1, rows, columns)
        views.append(_View(shape, (batch, head, row), box_rows))
    # o leaves in boxes of one warpgroup's rows; a float32 o leaves without a map, and any will do.
    if problem.out_dtype.itemsize > 2:
        return (*views, views[0])
    row = 2 * problem.head_dim_v
    shape = (math.prod(problem.batch), problem.heads, problem.n_queries, problem.head_dim_v)
    return (*views, _View(shape, (problem.heads * problem.n_queries * row, problem.n_queries * row, row), 64))
