"""The backward on a GPU: preprocess, key kernel, then what dq, dbias and broadcast operands need."""

import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda import arguments
from cuattn.cuda.launch import Array, Record
from cuattn.cuda.params import PARAMS
from cuattn.cuda.sm80.backward_plan import STAT_ROWS, atomic, backward_plan, kernels_of, shared_bytes, shared_keys, sums
from cuattn.cuda.sm80.forward_plan import CUDA_TYPES, pad
from cuattn.cuda.tables import MaskTables, mask_tables, table_fields, table_layout, table_slots
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["INPUTS", "plan", "record"]

INPUTS = ("q", "k", "v", "bias", "mask", "dout", "o", "l", "m")  # of every backward's record
_GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias"}
_SCRATCH = ("delta", "stat", "counters", "dq_acc", "dk_acc", "dv_acc", "dbias_acc")
_SLOTS = {
    **{f"{name}.data": name for name in (*INPUTS, *_GRADIENTS) if name != "mask"},
    **{name: name for name in _SCRATCH},
}
_SUM_AXES = 5
_SUM_PARAMS = np.dtype(
    [
        ("in", np.uint64),
        ("out", np.uint64),
        ("inner", np.int64),
        ("results", np.int64),
        ("size", np.int32, _SUM_AXES),
        ("keep", np.int32, _SUM_AXES),
    ],
    align=True,
)
_THREADS = 256  # of backward_preprocess and backward_sum
_PREPROCESS = ("elem", "acc", "o_elem", "block_m", "warps", "head_dim", "head_dim_v", "atomic_dq")


def plan(problem: Problem, operands: Operands) -> Plan:
    """Return the plan of a backward for arrays on the current device."""
    card = arguments.card(operands.q.device.id)
    arrays = [array for array in (operands.q, operands.k, operands.v, operands.do) if array is not None]
    o_dtype = "" if operands.o is None else operands.o.dtype.name
    return backward_plan(problem, card, arguments.load_bytes(*arrays), o_dtype)


def record(problem: Problem, operands: Operands) -> Record:
    """Return what a backward launches for arrays of this layout on the current device.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        CuPy arrays, with do, o, l and m; the mask may be a host mask.

    Returns
    -------
    Record
        Its results are dq, dk, dv, and dbias if there is a bias, each of its operand's (aligned) shape and dtype.

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    CompileError
    """
    made = plan(problem, operands)
    builder = _Builder(problem, operands, made, operands.q.device.id)
    if problem.head_dim_v == 0 or math.prod(problem.score_shape) == 0:
        builder.record.zero()
    else:
        builder.preprocess()
        builder.keys()
        builder.rows()
        builder.bias()
    return builder.record


class _Sum(NamedTuple):
    """A gradient that is a sum over axes along which its operand was broadcast."""

    keep: tuple[bool, ...]
    size: tuple[int, ...]
    inner: int


class _Builder:
    """Adds the launches of a backward to its record, in order."""

    def __init__(self, problem: Problem, operands: Operands, made: Plan, device: int) -> None:
        self.problem, self.operands, self.device = problem, operands, device
        self.kernels = kernels_of(problem, arguments.card(device))
        self.constants = dict(made.constants)
        self.atomic = atomic(problem, self.kernels)
        named = zip(INPUTS, (*operands[:5], operands.do, *operands[7:]), strict=True)
        self.arrays = {name: array for name, array in named if array is not None and name != "mask"}
        self.layout = table_layout(problem, operands.mask)
        masks = {"mask": operands.mask} if problem.mask == "dense" else {}
        self.axes = arguments.merged_axes(problem, {**self.arrays, **masks}.values(), self.layout)
        self.splits = self._bias_splits()
        self.sums = self._sums()
        self.shared = shared_keys(problem, self.kernels, arguments.card(device).multiprocessors, self.sums)
        self.results = {
            name: Array(self.arrays[of].shape, self.arrays[of].dtype)
            for name, of in _GRADIENTS.items()
            if of in self.arrays
        }
        self.fields = arguments.problem_fields(problem, self.axes)
        for name, array in {**self.arrays, **masks, **self.results}.items():
            self.fields.update(arguments.operand_fields(name, array, self.axes, len(problem.batch)))
        self.tables = self._tables()
        self.record = Record(INPUTS, self.results, self._scratch(), list(self.tables.values()))

    def _sums(self) -> dict[str, _Sum]:
        problem = self.problem
        found = {}
        for name, heads in (("q", problem.heads), ("k", problem.kv_heads), ("v", problem.kv_heads)):
            array = self.arrays[name]
            if sums(problem, array.shape, heads) and not (name == "q" and self.atomic):
                lead = [array.shape[group[-1]] if group else 1 for group in self.axes.groups]
                lead = [1] * (_SUM_AXES - 1 - len(lead)) + lead
                size = (*self.axes.size, heads)
                keep = tuple(own == full for own, full in zip((*lead, array.shape[-3]), size, strict=True))
                found[f"d{name}"] = _Sum(keep, size, array.shape[-2] * array.shape[-1])
        if self.splits > 1:
            ones = _SUM_AXES - 1
            found["dbias"] = _Sum((False, *[True] * ones), (self.splits, *[1] * ones), self.operands.bias.size)
        return found

    def _bias_splits(self) -> int:
        """Return in how many parts the heads that share a bias are dealt out, so that the card is full."""
        problem, bias = self.problem, self.operands.bias
        if bias is None:
            return 1
        tile = self.kernels.bias
        row_tiles = -(-bias.shape[-2] // tile.block_m) if bias.shape[-2] > 1 else 1
        key_tiles = -(-bias.shape[-1] // tile.block_n) if bias.shape[-1] > 1 else 1
        instances = max(math.prod(bias.shape[:-2]), 1)
        members = math.prod(problem.batch) * problem.heads // instances
        wanted = 2 * arguments.card(self.device).multiprocessors
        return max(1, min(members, -(-wanted // (instances * row_tiles * key_tiles))))

    def _scratch(self) -> dict[str, Array]:
        problem, acc = self.problem, self.problem.stat_dtype
        heads = math.prod(problem.batch) * problem.heads
        groups = -(-problem.n_queries // STAT_ROWS)
        vectors = 1 if problem.dtype.itemsize == 2 else 2
        scratch = {
            "delta": Array((heads, groups * STAT_ROWS), acc),
            "stat": Array((vectors, heads, groups * STAT_ROWS), acc),
            "counters": Array((heads, groups), np.dtype(np.int32)),
        }
        if self.atomic:
            rows = pad(problem.n_queries, self.kernels.keys.block_m)
            scratch["dq_acc"] = Array((*self.arrays["q"].shape[:-2], rows, self.kernels.head_dim), acc)
        for name, total in self.sums.items():
            scratch[f"{name}_acc"] = Array((*total.size, total.inner), acc)
        return scratch

    def _tables(self) -> dict[tuple[int, int], MaskTables]:
        """Return the mask's tables for each tile that reads them."""
        mask = self.operands.mask
        if mask is None:
            return {}
        kernels = self.kernels
        tiles = [kernels.keys] + ([] if self.atomic else [kernels.rows])
        tiles += [] if self.operands.bias is None else [kernels.bias]
        if self.problem.mask != "column":
            tiles = tiles[:1]  # the tables of the other masks are the same for all tiles
        sizes = {(tile.block_m, tile.block_n) for tile in tiles}
        return {size: mask_tables(self.problem, mask, self.device, *size) for size in sorted(sizes)}

    def _add(
        self,
        path: str,
        kernel: str,
        grid: int,
        tile: Any,
        shared: int,
        extra: dict[str, Any],
        only: Any = None,
        **values: Any,
    ) -> None:
        """Append a kernel that takes ``Params``; its constants are the shared ones (or `only` those) and `extra`."""
        problem = self.problem
        constants = {**self.constants, **tile._asdict()}
        constants = {**({name: constants[name] for name in only} if only else constants), **extra}
        row_tiles, key_tiles = -(-problem.n_queries // tile.block_m), -(-problem.n_keys // tile.block_n)
        fields = {**self.fields, "row_tiles": row_tiles, "key_tiles": key_tiles, **values}
        slots = dict(_SLOTS)
        if self.tables and not only:
            fields.update(table_fields(problem, self.operands.mask, self.layout, self.axes, tile.block_n))
            sizes = list(self.tables)
            slots |= table_slots(sizes.index((tile.block_m, tile.block_n)) if problem.mask == "column" else 0)
        function = arguments.function(self.device, path, kernel, tuple(constants.items()), shared)
        random = problem.dropout > 0
        self.record.add(function, (grid,), 32 * tile.warps, PARAMS, fields, slots, shared_bytes=shared, random=random)

    def _tiles(self, length: int, block: int, heads: int) -> int:
        return -(-length // block) * heads * math.prod(self.problem.batch)

    def preprocess(self) -> None:
        """Compute delta and the softmax statistics of every row; zero the accumulator of dq and shared dk and dv."""
        problem = self.problem
        tile = self.kernels.keys._replace(warps=_THREADS // 32)
        size = problem.dtype.itemsize
        vector = arguments.load_bytes(self.operands.do, self.operands.o)
        while vector > size and problem.head_dim_v * size % vector:
            vector //= 2
        extra = {"load_bytes": max(vector, size), "split_delta": False}
        grid = self._tiles(problem.n_queries, STAT_ROWS, problem.heads)
        values = {}
        if self.shared.parts > 1:
            head, of_head = divmod(self.shared.first, -(-problem.n_keys // tile.block_n))
            values = {"shared_key": head * problem.n_keys + of_head * tile.block_n, "splits": self.shared.parts}
        self._add("util/bwd_preprocess.cu", "backward_preprocess", grid, tile, 0, extra, only=_PREPROCESS, **values)

    def keys(self) -> None:
        """Compute dk and dv, and dq if the order of its sums does not matter."""
        problem, tile = self.problem, self.kernels.keys
        grid = self._tiles(problem.n_keys, tile.block_n, problem.kv_heads)
        extra = {"sum_dk": "dk" in self.sums, "sum_dv": "dv" in self.sums}
        shared = shared_bytes(problem, self.kernels, "keys")
        if self.kernels.chunk:
            grid *= self._parts(self.kernels.head_dim_v) + self._parts(self.kernels.head_dim)
            extra["sum_dq"] = "dq" in self.sums
            self._add("sm80/bwd_wide.cu", "backward_wide_keys", grid, tile, shared, extra)
        else:
            first, parts, row_tiles, grid = self.shared
            values = {"shared_tile": first, "splits": parts, "split_tiles": row_tiles}
            self._add("sm80/bwd.cu", "attention_backward", grid, tile, shared, extra, **values)
        for name in ("dk", "dv"):
            self._sum(name)
        if self.atomic:
            shape = self.arrays["q"].shape
            grid = -(-problem.n_queries // tile.block_m) * math.prod(shape[:-2])
            shared = shared_bytes(problem, self.kernels, "convert")
            self._add("util/bwd_convert.cu", "backward_convert", grid, tile, shared, {})

    def rows(self) -> None:
        """Compute dq in a fixed order."""
        if self.atomic:
            return
        tile = self.kernels.rows
        grid = self._tiles(self.problem.n_queries, tile.block_m, self.problem.heads)
        shared = shared_bytes(self.problem, self.kernels, "rows")
        if self.kernels.chunk:
            grid *= self._parts(self.kernels.head_dim)
            extra = {f"sum_{name}": name in self.sums for name in ("dk", "dv", "dq")}
            self._add("sm80/bwd_wide.cu", "backward_wide_rows", grid, tile, shared, extra)
        else:
            self._add("sm80/bwd_rows.cu", "backward_rows", grid, tile, shared, {"sum_dq": "dq" in self.sums})
        self._sum("dq")

    def _parts(self, columns: int) -> int:
        """Return into how many blocks the wide kernels divide the columns of a gradient."""
        return -(-columns // self.kernels.part)

    def bias(self) -> None:
        """Compute dbias."""
        bias = self.operands.bias
        if bias is None:
            return
        tile = self.kernels.bias
        sum_rows, sum_keys = bias.shape[-2] == 1, bias.shape[-1] == 1
        instances = math.prod(bias.shape[:-2])
        grid = instances * self.splits
        grid *= 1 if sum_rows else -(-bias.shape[-2] // tile.block_m)
        grid *= 1 if sum_keys else -(-bias.shape[-1] // tile.block_n)
        extra = {"split": self.splits > 1, "sum_rows": sum_rows, "sum_keys": sum_keys, "atomic_dq": False}
        shared = shared_bytes(self.problem, self.kernels, "bias")
        values = {"splits": self.splits, "bias_instances": instances}
        self._add("sm80/bwd_bias.cu", "backward_bias", grid, tile, shared, extra, **values)
        self._sum("dbias")

    def _sum(self, name: str) -> None:
        """Add a gradient up over the axes that its operand was broadcast along, and round it."""
        total = self.sums.get(name)
        if total is None:
            return
        out = self.results[name]
        size = math.prod(out.shape)
        constants = (("grad", CUDA_TYPES[out.dtype.name]), ("acc", CUDA_TYPES[self.problem.stat_dtype.name]))
        values = {"inner": total.inner, "results": size, "size": total.size, "keep": total.keep}
        function = arguments.function(self.device, "util/bwd_sum.cu", "backward_sum", constants)
        grid = min(pad(size, _THREADS) // _THREADS, 16 * arguments.card(self.device).multiprocessors)
        self.record.add(function, (grid,), _THREADS, _SUM_PARAMS, values, {"in": f"{name}_acc", "out": name})
