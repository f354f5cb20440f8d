"""The backward on a GPU: preprocess, key kernel, then what dq, dbias and broadcast operands need."""

import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import pad
from cuattn.cuda.call import Call, gradients
from cuattn.cuda.compile import function
from cuattn.cuda.constants import Constants
from cuattn.cuda.params import BATCH_AXES
from cuattn.cuda.sequence import Array
from cuattn.cuda.sm80.backward_plan import STAT_ROWS, backward_plan, cut, is_sum, shared_bytes, shared_keys
from cuattn.cuda.sm80.forward_plan import unsupported_reason as problem_reason
from cuattn.cuda.sm80.tiles import BackwardTile
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import row_of

__all__ = ["Backward", "add_preprocess"]

_THREADS = 256  # of backward_preprocess and backward_sum
_PREPROCESS = ("elem", "acc", "o_elem", "block_m", "head_dim_v", "atomic_dq")
_SUM_AXES = BATCH_AXES + 1
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


def add_preprocess(call: Call, constants: Constants, head_dim: int, **values: Any) -> None:
    """Append the launch that computes delta and every row's statistics, and zeroes what is added up in memory.

    Parameters
    ----------
    call : Call
    constants : dict
        All that the kernel is specialised by but what follows from the arrays.
    head_dim : int
        Columns of a row of dq's accumulator.
    **values
        Fields of ``Params``.
    """
    problem = call.problem
    size, vector = problem.dtype.itemsize, call.load_bytes("do", "o")
    while vector > size and problem.head_dim_v * size % vector:
        vector //= 2
    own = {"head_dim": head_dim, "load_bytes": max(vector, size), "warps": _THREADS // 32}
    own["dlse"] = "dlse" in call.operands
    grid = (cdiv(problem.n_queries, STAT_ROWS) * problem.instances,)
    path, kernel = "util/bwd_preprocess.cu", "backward_preprocess"
    call.add(path, kernel, {**constants, **own}, grid, _THREADS // 32, **values)


class _Sum(NamedTuple):
    """A gradient that is a sum over axes along which its operand was broadcast."""

    keep: tuple[bool, ...]
    size: tuple[int, ...]
    inner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is added up."""
        return (*self.size, self.inner)


class Backward(Call):
    """Up to seven launches: preprocess, key kernel, row kernel or conversion, bias kernel, and sums."""

    def unsupported_reason(self) -> str | None:
        return problem_reason(self.problem, self.device)

    def prepare(self) -> Plan:
        problem, operands, device = self.problem, self.operands, self.device
        o_dtype = operands["o"].dtype.name if "o" in operands else ""
        made = backward_plan(problem, device, self.load_bytes("q", "k", "v", "do"), o_dtype)
        self.cut, self.constants = cut(problem, device), dict(made.constants)
        self.splits = self._bias_splits()
        self.sums = self._sums()
        self.shared = shared_keys(problem, self.cut, device.multiprocessors, self.sums)
        used = [self.cut.keys]
        used += [] if self.cut.atomic else [self.cut.rows]
        used += [self.cut.bias] if "bias" in operands else []
        tiles = [(tile.block_m, tile.block_n) for tile in used]
        self.begin(gradients(problem, operands), self._scratch(), tiles)
        return made

    def launch(self, made: Plan) -> None:
        if self.problem.head_dim_v == 0 or math.prod(self.problem.score_shape) == 0:
            self.sequence.zero()
            return
        self._preprocess()
        self._keys()
        self._rows()
        self._bias()

    def _sums(self) -> dict[str, _Sum]:
        problem, axes = self.problem, self.axes
        found = {}
        for name, heads in (("q", problem.heads), ("k", problem.kv_heads), ("v", problem.kv_heads)):
            shape = self.operands[name].shape
            if is_sum(problem, shape, heads) and not (name == "q" and self.cut.atomic):
                lead = [shape[group[-1]] if group else 1 for group in axes.groups]
                lead = [1] * (BATCH_AXES - len(lead)) + lead
                size = (*axes.size, heads)
                keep = tuple(own == full for own, full in zip((*lead, shape[-3]), size, strict=True))
                found[f"d{name}"] = _Sum(keep, size, shape[-2] * shape[-1])
        if self.splits > 1:
            keep, size = (False, *[True] * BATCH_AXES), (self.splits, *[1] * BATCH_AXES)
            found["dbias"] = _Sum(keep, size, self.operands["bias"].size)
        return found

    def _bias_splits(self) -> int:
        """Return in how many parts the heads that share a bias are dealt out, so that the device is full."""
        bias = self.operands.get("bias")
        if bias is None:
            return 1
        tile = self.cut.bias
        row_tiles = cdiv(bias.shape[-2], tile.block_m) if bias.shape[-2] > 1 else 1
        key_tiles = cdiv(bias.shape[-1], tile.block_n) if bias.shape[-1] > 1 else 1
        instances = max(math.prod(bias.shape[:-2]), 1)
        members = self.problem.instances // instances
        return max(1, min(members, cdiv(2 * self.device.multiprocessors, instances * row_tiles * key_tiles)))

    def _scratch(self) -> dict[str, Array]:
        problem, acc = self.problem, self.problem.stat_dtype
        heads, groups = problem.instances, cdiv(problem.n_queries, STAT_ROWS)
        vectors = 1 if problem.row.products == "half" else 2
        scratch = {
            "delta": Array((heads, groups * STAT_ROWS), acc),
            "stat": Array((vectors, heads, groups * STAT_ROWS), acc),
            "counters": Array((heads, groups), np.dtype(np.int32)),
        }
        if self.cut.atomic:
            rows = pad(problem.n_queries, self.cut.keys.block_m)
            scratch["dq_acc"] = Array((*self.operands["q"].shape[:-2], rows, self.cut.head_dim), acc)
        return {**scratch, **{f"{name}_acc": Array(total.shape, acc) for name, total in self.sums.items()}}

    def _add(
        self, path: str, kernel: str, grid: int, tile: BackwardTile, shared: str, extra: Constants, **values: Any
    ) -> None:
        """Append a kernel; `shared` says whose shared memory it has, `extra` its own constants."""
        constants = {**self.constants, **tile._asdict(), **extra}
        self.add(
            path, kernel, constants, (grid,), tile.warps,
            shared_bytes=shared_bytes(self.problem, self.cut, shared), tile=(tile.block_m, tile.block_n),
            row_tiles=cdiv(self.problem.n_queries, tile.block_m), key_tiles=cdiv(self.problem.n_keys, tile.block_n),
            **values,
        )  # fmt: skip

    def _preprocess(self) -> None:
        """Compute delta and the softmax statistics of every row; zero the accumulator of dq and shared dk and dv."""
        problem, tile = self.problem, self.cut.keys
        key_tiles = cdiv(problem.n_keys, tile.block_n)
        values = {"row_tiles": cdiv(problem.n_queries, tile.block_m), "key_tiles": key_tiles}
        if self.shared.parts > 1:
            head, of_head = divmod(self.shared.first, key_tiles)
            values |= {"shared_key": head * problem.n_keys + of_head * tile.block_n, "splits": self.shared.parts}
        constants = {**{name: self.constants[name] for name in _PREPROCESS}, "split_delta": False}
        add_preprocess(self, constants, self.cut.head_dim, **values)

    def _keys(self) -> None:
        """Compute dk and dv, and dq if the order of its sums does not matter."""
        problem, tile = self.problem, self.cut.keys
        extra = {"sum_dk": "dk" in self.sums, "sum_dv": "dv" in self.sums}
        if self.cut.chunk:
            tiles = cdiv(problem.n_keys, tile.block_n) * problem.kv_heads * math.prod(problem.batch)
            grid = tiles * (cdiv(self.cut.head_dim_v, self.cut.part) + cdiv(self.cut.head_dim, self.cut.part))
            extra["sum_dq"] = "dq" in self.sums
            self._add("sm80/bwd_wide.cu", "backward_wide_keys", grid, tile, "keys", extra)
        else:
            first, parts, row_tiles, grid = self.shared
            values = {"shared_tile": first, "splits": parts, "split_tiles": row_tiles}
            self._add("sm80/bwd.cu", "attention_backward", grid, tile, "keys", extra, **values)
        for name in ("dk", "dv"):
            self._sum(name)
        if self.cut.atomic:
            grid = cdiv(problem.n_queries, tile.block_m) * math.prod(self.operands["q"].shape[:-2])
            self._add("sm80/bwd_convert.cu", "backward_convert", grid, tile, "convert", {})

    def _rows(self) -> None:
        """Compute dq in a fixed order."""
        if self.cut.atomic:
            return
        tile = self.cut.rows
        grid = cdiv(self.problem.n_queries, tile.block_m) * self.problem.instances
        if self.cut.chunk:
            grid *= cdiv(self.cut.head_dim, self.cut.part)
            extra = {f"sum_{name}": name in self.sums for name in ("dk", "dv", "dq")}
            self._add("sm80/bwd_wide.cu", "backward_wide_rows", grid, tile, "rows", extra)
        else:
            self._add("sm80/bwd_rows.cu", "backward_rows", grid, tile, "rows", {"sum_dq": "dq" in self.sums})
        self._sum("dq")

    def _bias(self) -> None:
        """Compute dbias."""
        bias = self.operands.get("bias")
        if bias is None:
            return
        tile = self.cut.bias
        sum_rows, sum_keys = bias.shape[-2] == 1, bias.shape[-1] == 1
        instances = math.prod(bias.shape[:-2])
        grid = instances * self.splits
        grid *= 1 if sum_rows else cdiv(bias.shape[-2], tile.block_m)
        grid *= 1 if sum_keys else cdiv(bias.shape[-1], tile.block_n)
        extra = {"split": self.splits > 1, "sum_rows": sum_rows, "sum_keys": sum_keys, "atomic_dq": False}
        values = {"splits": self.splits, "bias_instances": instances}
        self._add("sm80/bwd_bias.cu", "backward_bias", grid, tile, "bias", extra, **values)
        self._sum("dbias")

    def _sum(self, name: str) -> None:
        """Add a gradient up over the axes that its operand was broadcast along, and round it."""
        total = self.sums.get(name)
        if total is None:
            return
        sequence, device = self.sequence, self.device
        out = sequence.results[name]
        constants = (("grad", row_of(out.dtype).cuda), ("acc", row_of(self.problem.stat_dtype).cuda))
        values = {"inner": total.inner, "results": out.size, "size": total.size, "keep": total.keep}
        kernel = function(device.number, "util/bwd_sum.cu", "backward_sum", constants)
        grid = (min(cdiv(max(out.size, 1), _THREADS), 16 * device.multiprocessors),)
        sequence.add(kernel, grid, _THREADS, _SUM_PARAMS, values, {"in": f"{name}_acc", "out": name})
