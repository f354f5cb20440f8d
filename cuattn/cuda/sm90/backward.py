"""The backward for compute capability 9.0: preprocess, key kernel, and what dq needs."""

import math
from typing import Any

from cuattn.cuda import arguments
from cuattn.cuda.launch import Array, Record
from cuattn.cuda.params import PARAMS
from cuattn.cuda.sm80.backward import INPUTS
from cuattn.cuda.sm80.backward_plan import STAT_ROWS, sums
from cuattn.cuda.sm90 import backward_plan as planner
from cuattn.cuda.sm90.backward_plan import Kernel
from cuattn.cuda.sm90.forward_plan import ARCH
from cuattn.cuda.sm90.tensor_map import unreadable, view_of
from cuattn.cuda.tables import mask_tables, table_fields, table_layout, table_slots
from cuattn.errors import UnsupportedError
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["plan", "reason_against", "record"]

_RESULTS = {"dq": "q", "dk": "k", "dv": "v"}
_SLOTS = {
    **{f"{name}.data": name for name in ("q", "k", "v", "dout", "o", "l", "m", *_RESULTS)},
    **{name: name for name in ("delta", "stat", "counters", "turns", "dq_acc")},
    "ticket": "tickets",
}
_PREPROCESS = ("elem", "acc", "o_elem", "block_m", "head_dim_v", "split_delta")
_CONVERT = (
    "elem", "head_dim", "head_dim_v", "block_m", "block_n", "stages", "band_left", "band_right", "mask", "dropout",
    "split_delta",
)  # fmt: skip
_THREADS = 256  # of backward_preprocess and backward_convert
_STORE_ROWS = 64  # of gradients leave at a time: one warpgroup's


def _arrays(operands: Operands) -> dict[str, Any]:
    """Return the arrays of a call by name; one that is only planned has q, k and v."""
    names = "q", "k", "v", "dout", "o", "l", "m"
    arrays = *operands[:3], operands.do, operands.o, operands.l, operands.m
    return {name: array for name, array in zip(names, arrays, strict=True) if array is not None}


def reason_against(problem: Problem, operands: Operands) -> str | None:
    """Say why these kernels do not take a call for arrays on the current device, or return None."""
    against = planner.refusal(problem, arguments.card(operands.q.device.id))
    if against is None and problem.kernel is None and planner.short(problem):
        against = "rows and keys are fewer than its tiles have"
    if against is not None:
        return against
    summed = {"k": problem.kv_heads, "v": problem.kv_heads}
    if problem.deterministic or not planner.whole(problem):
        summed["q"] = problem.heads
    arrays = _arrays(operands)
    for name, heads in summed.items():
        if sums(problem, arrays[name].shape, heads):
            return f"the gradient of {name} is a sum over axes along which it was broadcast"
    try:
        axes = arguments.merged_axes(problem, arrays.values(), table_layout(problem, operands.mask))
    except UnsupportedError as error:
        return str(error)
    if math.prod(axes.size[:-1]) > 1:
        return f"its tensor maps have one leading axis, and the strides of its arrays keep {problem.batch} apart"
    for name in ("q", "k", "v", "dout"):
        unfit = unreadable(arrays[name]) if name in arrays else None
        if unfit is not None:
            return f"the copy engine cannot read {'do' if name == 'dout' else name}: {unfit}"
    return None


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a backward that :func:`reason_against` has nothing against."""
    return planner.plan(problem, "" if operands.o is None else operands.o.dtype.name)


def record(problem: Problem, operands: Operands) -> Record:
    """Return what a backward that :func:`reason_against` has nothing against launches; see ``backward.record``."""
    builder = _Builder(problem, operands, plan(problem, operands))
    builder.preprocess()
    builder.keys()
    if planner.whole(problem):
        builder.convert()
    else:
        builder.rows()
    return builder.record


class _Builder:
    """Adds the launches of a backward to its record, in order."""

    def __init__(self, problem: Problem, operands: Operands, made: Plan) -> None:
        self.problem, self.operands, self.made = problem, operands, made
        self.device = operands.q.device.id
        self.whole = planner.whole(problem)
        self.kernels = [planner.key_kernel(problem)] + ([] if self.whole else [planner.row_kernel(problem)])
        self.arrays = _arrays(operands)
        self.layout = table_layout(problem, operands.mask)
        self.axes = arguments.merged_axes(problem, self.arrays.values(), self.layout)
        self.results = {name: Array(self.arrays[of].shape, self.arrays[of].dtype) for name, of in _RESULTS.items()}
        self.fields = arguments.problem_fields(problem, self.axes)
        for name, array in {**self.arrays, **self.results}.items():
            self.fields.update(arguments.operand_fields(name, array, self.axes, len(problem.batch)))
        mask, tables = operands.mask, []
        if mask is not None:
            tables = [mask_tables(problem, mask, self.device, k.block_m, k.block_n) for k in self.kernels]
        self.dq_instances = math.prod(operands.q.shape[:-2])
        self.record = Record(INPUTS, self.results, planner.scratch(problem, self.dq_instances), tables)

    def _add(
        self, path: str, kernel: str, constants: dict[str, object], tile: Kernel, grid: int, maps: dict[str, int]
    ) -> None:
        """Append a kernel that takes ``Params``, and a map of each named array with boxes of so many rows.

        Those that take maps are Hopper's own, persistent, and read the mask's tables.
        """
        problem = self.problem
        fields = {**self.fields, "row_tiles": tile.row_tiles, "key_tiles": tile.key_tiles, "section": tile.section}
        slots, shared, threads, arch = dict(_SLOTS), 0, _THREADS, None
        if maps:
            grid = min(grid, arguments.card(self.device).multiprocessors)
            shared, threads, arch = tile.smem_bytes, 32 * self.made.workers, ARCH
            if problem.mask is not None:
                fields.update(table_fields(problem, self.operands.mask, self.layout, self.axes, tile.block_n))
                slots |= table_slots(self.kernels.index(tile))
        known = {**self.arrays, **self.results}
        views = [(name, view_of(known[name], self.axes, len(problem.batch), rows)) for name, rows in maps.items()]
        described = [(name, view.mapper(problem.dtype.name)) for name, view in views]
        function = arguments.function(self.device, path, kernel, tuple(constants.items()), shared, arch)
        random = problem.dropout > 0
        self.record.add(
            function, (grid,), threads, PARAMS, fields, slots, shared_bytes=shared, maps=described, random=random
        )

    def preprocess(self) -> None:
        """Compute delta and the softmax statistics of every row, and zero the accumulator of dq."""
        problem, size = self.problem, self.problem.dtype.itemsize
        vector = arguments.load_bytes(self.operands.do, self.operands.o)
        while vector > size and problem.head_dim_v * size % vector:
            vector //= 2
        constants = {name: value for name, value in self.made.constants if name in _PREPROCESS}
        columns = planner.accumulator_columns(problem)
        constants.update(warps=_THREADS // 32, head_dim=columns, atomic_dq=self.whole, load_bytes=vector)
        grid = -(-problem.n_queries // STAT_ROWS) * problem.heads * math.prod(problem.batch)
        self._add("util/bwd_preprocess.cu", "backward_preprocess", constants, self.kernels[0], grid, {})

    def keys(self) -> None:
        """Compute dk and dv, and add up dq if that is done in memory."""
        problem, tile = self.problem, self.kernels[0]
        constants = {**dict(self.made.constants), "sum_dk": False, "sum_dv": False}
        rows, keys = tile.block_m, tile.block_n
        maps = {"q": rows, "k": keys, "v": keys, "dout": rows, "dk": _STORE_ROWS, "dv": _STORE_ROWS}
        grid = tile.key_tiles * problem.kv_heads * math.prod(problem.batch)
        self._add("sm90/bwd.cu", "attention_backward", constants, tile, grid, maps)

    def convert(self) -> None:
        """Turn the sums into rows of dq."""
        constants = {name: value for name, value in self.made.constants if name in _CONVERT}
        tile = self.kernels[0]
        grid = tile.row_tiles * self.dq_instances
        self._add("sm90/bwd_convert.cu", "backward_convert", constants, tile, grid, {})

    def rows(self) -> None:
        """Compute dq in a fixed order."""
        problem, tile = self.problem, self.kernels[1]
        own = {"block_m": tile.block_m, "block_n": tile.block_n, "v_stages": tile.v_stages}
        maps = {"q": tile.block_m, "k": tile.block_n, "v": tile.block_n, "dout": tile.block_m, "dq": _STORE_ROWS}
        grid = tile.row_tiles * problem.heads * math.prod(problem.batch)
        self._add("sm90/bwd_rows.cu", "backward_rows", {**dict(self.made.constants), **own}, tile, grid, maps)
