"""The backward on a GPU: preprocess, key kernel, then what dq, dbias and broadcast operands need."""

import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda import launch
from cuattn.cuda.backward_plan import STAT_ROWS, Kernels, atomic, backward_plan, kernels_of, shared_bytes, sums
from cuattn.cuda.params import PARAMS
from cuattn.cuda.plan import CUDA_TYPES, pad
from cuattn.cuda.tables import Tables, mask_pointers, mask_tables, table_fields, table_layout
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["backward", "plan"]

_ARRAYS = ("q", "k", "v", "o", "l", "m", "dout", "dq", "dk", "dv", "bias", "dbias")
_SCRATCH = ("delta", "stat", "counters", "dq_acc", "dk_acc", "dv_acc", "dbias_acc")
_SLOTS = (
    *(f"{name}.data" for name in _ARRAYS), *_SCRATCH,
    "mask.data", "table.cols", "table.bounds", "table.order", "table.alive",
)  # fmt: skip
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
    card = launch.card(operands.q.device.id)
    arrays = [array for array in (operands.q, operands.k, operands.v, operands.do) if array is not None]
    o_dtype = "" if operands.o is None else operands.o.dtype.name
    return backward_plan(problem, card, launch.load_bytes(*arrays), o_dtype)


def backward(problem: Problem, operands: Operands) -> tuple[Any, Any, Any, Any]:
    """Compute the gradients of attention for arrays on the current device, on CuPy's current stream.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        CuPy arrays, with do, o, l and m; the mask may be a host mask, which is copied once and kept.

    Returns
    -------
    dq, dk, dv : cupy.ndarray
        Each of its operand's (aligned) shape and dtype.
    dbias : cupy.ndarray or None
        Likewise; None without a bias.

    Raises
    ------
    UnsupportedError
        Naming the argument that no kernel can take.
    CompileError
    """
    import cupy

    made = plan(problem, operands)
    call = _Call(problem, operands, made, cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream())
    if problem.head_dim_v == 0 or math.prod(problem.score_shape) == 0:
        for gradient in call.gradients.values():
            gradient.fill(0)
    else:
        call.preprocess()
        call.keys()
        call.rows()
        call.bias()
    return tuple(call.gradients.get(name) for name in ("dq", "dk", "dv", "dbias"))


class _Sum(NamedTuple):
    """A gradient that is a sum over axes along which its operand was broadcast."""

    keep: tuple[bool, ...]
    size: tuple[int, ...]
    inner: int


class _Call:
    """One backward: its arrays, its scratch memory and the launches in order."""

    def __init__(self, problem: Problem, operands: Operands, made: Plan, device: int, stream: Any) -> None:
        self.problem, self.operands, self.device, self.stream = problem, operands, device, stream
        self.kernels: Kernels = kernels_of(problem, launch.card(device))
        self.constants = dict(made.constants)
        self.atomic = atomic(problem, self.kernels)
        self.arrays = {name: getattr(operands, name) for name in ("q", "k", "v", "o", "l", "m")}
        self.arrays["dout"] = operands.do
        if operands.bias is not None:
            self.arrays["bias"] = operands.bias
        self.tables: dict[Any, Tables | None] = {}
        self.axes = self._axes()
        self.splits = self._bias_splits()
        self.sums = self._sums()
        self.gradients, self.scratch = self._allocate()

    def _axes(self) -> launch.Axes:
        rank = len(self.problem.batch)
        layouts = [(array.shape[:rank], array.strides[:rank]) for array in self.arrays.values()]
        if self.problem.mask == "dense":
            mask = self.operands.mask
            layouts.append((mask.shape[:rank], mask.strides[:rank]))
        tables = table_layout(self.problem, self.operands.mask)
        if tables is not None:
            layouts.append((tables[0][:rank], tables[1][:rank]))
        return launch.collapse(self.problem.batch, tuple(layouts))

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
        wanted = 2 * launch.card(self.device).multiprocessors
        return max(1, min(members, -(-wanted // (instances * row_tiles * key_tiles))))

    def _allocate(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate gradients and scratch.

        In a capture all of it is one piece of memory: the graph goes on using the scratch for as long as its
        results live.
        """
        import cupy

        problem, acc = self.problem, self.problem.stat_dtype
        heads = math.prod(problem.batch) * problem.heads
        groups = -(-problem.n_queries // STAT_ROWS)
        vectors = 1 if problem.dtype.itemsize == 2 else 2
        named = (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dbias", "bias"))
        wanted = {name: (self.arrays[of].shape, self.arrays[of].dtype) for name, of in named if of in self.arrays}
        wanted["delta"] = ((heads, groups * STAT_ROWS), acc)
        wanted["stat"] = ((vectors, heads, groups * STAT_ROWS), acc)
        wanted["counters"] = ((heads, groups), np.dtype(np.int32))
        if self.atomic:
            tiles = -(-problem.n_queries // self.kernels.keys.block_m)
            shape = (*self.arrays["q"].shape[:-2], tiles * self.kernels.keys.block_m, self.kernels.head_dim)
            wanted["dq_acc"] = (shape, acc)
        for name, total in self.sums.items():
            wanted[f"{name}_acc"] = ((*total.size, total.inner), acc)
        if not self.stream.is_capturing():
            made = {name: cupy.empty(shape, dtype) for name, (shape, dtype) in wanted.items()}
        else:
            sizes = [-(-math.prod(shape) * dtype.itemsize // 256) * 256 for shape, dtype in wanted.values()]
            memory = cupy.cuda.alloc(sum(sizes))
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            made = {
                name: cupy.ndarray(shape, dtype, memory + at)
                for (name, (shape, dtype)), at in zip(wanted.items(), starts, strict=True)
            }
        gradients = {name: made.pop(name) for name, _ in named if name in made}
        return gradients, made

    def _launch(
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
        """Launch one kernel that takes ``Params``; its constants are the shared ones (or `only` those) and `extra`."""
        problem, operands = self.problem, self.operands
        constants = {**self.constants, **tile._asdict()}
        constants = {**({name: constants[name] for name in only} if only else constants), **extra}
        arrays = {**self.arrays, **self.gradients}
        fields: dict[str, Any] = {}
        for name, array in arrays.items():
            fields.update(launch.operand_fields(name, _rank4(array, len(problem.batch)), self.axes))
        tables = None if only else self._tables(tile)
        if tables is not None:
            if problem.mask == "dense":
                fields.update(launch.operand_fields("mask", operands.mask, self.axes))
            layout = table_layout(problem, operands.mask)
            fields.update(table_fields(problem, operands.mask, layout, self.axes, tile.block_n))
        fields.update(launch.band_fields(problem))
        fields.update(launch.random_fields(problem))
        fields.update(
            scale=problem.scale, softcap=problem.softcap or 0.0, dropout_scale=problem.dropout_scale,
            batch_size=self.axes.size, batch=math.prod(problem.batch), heads=problem.heads, kv_heads=problem.kv_heads,
            group=problem.group, n_queries=problem.n_queries, n_keys=problem.n_keys,
            head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
            row_tiles=-(-problem.n_queries // tile.block_m), key_tiles=-(-problem.n_keys // tile.block_n), **values,
        )  # fmt: skip
        struct = launch.Struct(PARAMS, fields, _SLOTS)
        pointers = [arrays[name].data.ptr if name in arrays else 0 for name in _ARRAYS]
        pointers += [self.scratch[name].data.ptr if name in self.scratch else 0 for name in _SCRATCH]
        words = struct.fill(pointers + mask_pointers(operands.mask, tables))
        held = launch.put_random(words, operands.rng) if problem.dropout else None
        function = launch.function(self.device, path, kernel, tuple(constants.items()), shared)
        function((grid,), (32 * tile.warps,), (struct.seal(words),), shared, self.stream)
        del held

    def _tables(self, tile: Any) -> Tables | None:
        """Return the mask's tables for one kernel's tile; a boolean mask's, made anew in every call, serve all."""
        key = None if self.problem.mask == "dense" else (tile.block_m, tile.block_n)
        if key not in self.tables:
            self.tables[key] = mask_tables(self.problem, self.operands.mask, self.device, tile.block_m, tile.block_n)
        return self.tables[key]

    def _tiles(self, length: int, block: int, heads: int) -> int:
        return -(-length // block) * heads * math.prod(self.problem.batch)

    def preprocess(self) -> None:
        """Compute delta and the softmax statistics of every row, and zero the accumulator of dq."""
        problem = self.problem
        tile = self.kernels.keys._replace(warps=_THREADS // 32)
        size = problem.dtype.itemsize
        vector = launch.load_bytes(self.operands.do, self.operands.o)
        while vector > size and problem.head_dim_v * size % vector:
            vector //= 2
        extra = {"load_bytes": max(vector, size)}
        grid = self._tiles(problem.n_queries, STAT_ROWS, problem.heads)
        self._launch("util/bwd_preprocess.cu", "backward_preprocess", grid, tile, 0, extra, only=_PREPROCESS)

    def keys(self) -> None:
        """Compute dk and dv, and dq if the order of its sums does not matter."""
        problem, tile = self.problem, self.kernels.keys
        grid = self._tiles(problem.n_keys, tile.block_n, problem.kv_heads)
        extra = {"sum_dk": "dk" in self.sums, "sum_dv": "dv" in self.sums}
        shared = shared_bytes(problem, self.kernels, "keys")
        self._launch("sm80/bwd.cu", "attention_backward", grid, tile, shared, extra)
        for name in ("dk", "dv"):
            self._sum(name)
        if self.atomic:
            shape = self.arrays["q"].shape
            grid = -(-problem.n_queries // tile.block_m) * math.prod(shape[:-2])
            shared = shared_bytes(problem, self.kernels, "convert")
            self._launch("util/bwd_convert.cu", "backward_convert", grid, tile, shared, {})

    def rows(self) -> None:
        """Compute dq in a fixed order."""
        if self.atomic:
            return
        tile = self.kernels.rows
        grid = self._tiles(self.problem.n_queries, tile.block_m, self.problem.heads)
        shared = shared_bytes(self.problem, self.kernels, "rows")
        self._launch("sm80/bwd_rows.cu", "backward_rows", grid, tile, shared, {"sum_dq": "dq" in self.sums})
        self._sum("dq")

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
        values = {"splits": self.splits, "section": instances}
        self._launch("sm80/bwd_bias.cu", "backward_bias", grid, tile, shared, extra, **values)
        self._sum("dbias")

    def _sum(self, name: str) -> None:
        """Add a gradient up over the axes that its operand was broadcast along, and round it."""
        total = self.sums.get(name)
        if total is None:
            return
        out = self.gradients[name]
        constants = (("elem", CUDA_TYPES[out.dtype.name]), ("acc", CUDA_TYPES[self.problem.stat_dtype.name]))
        values = {"inner": total.inner, "results": out.size, "size": total.size, "keep": total.keep}
        struct = launch.Struct(_SUM_PARAMS, values, ("in", "out"))
        words = struct.fill([self.scratch[f"{name}_acc"].data.ptr, out.data.ptr])
        function = launch.function(self.device, "util/bwd_sum.cu", "backward_sum", constants)
        grid = min(pad(out.size, _THREADS) // _THREADS, 16 * launch.card(self.device).multiprocessors)
        function((grid,), (_THREADS,), (struct.seal(words),), 0, self.stream)


def _rank4(array: Any, batch_axes: int) -> Any:
    """Give l and m, which have no columns, a last axis of length 1."""
    return array[..., None] if array.ndim == batch_axes + 2 else array
