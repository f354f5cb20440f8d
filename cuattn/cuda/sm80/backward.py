"""The backward on a GPU: preprocess, key kernel, then what dq, dbias and broadcast operands need."""

import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, pad
from cuattn.cuda.call import Call, gradients
from cuattn.cuda.constants import Constants
from cuattn.cuda.params import BATCH_AXES
from cuattn.cuda.sm80.backward_plan import Cut, tile_counts
from cuattn.cuda.sm80.forward import unsupported_reason
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import Problem, row_of

STAT_ROWS = 128  # kStatRows: rows that one block of backward_preprocess looks at
_THREADS = 256  # of backward_preprocess and backward_sum
PREPROCESS = ("elem", "acc", "o_elem", "block_m", "head_dim_v", "atomic_dq", "split_delta")
_SUM_PARAMS = np.dtype(
    [
        ("in", np.uint64),
        ("out", np.uint64),
        ("inner", np.int64),
        ("results", np.int64),
        ("size", np.int32, BATCH_AXES + 1),
        ("keep", np.int32, BATCH_AXES + 1),
    ],
    align=True,
)


def add_preprocess(call: Call, constants: Constants, head_dim: int, values: dict[str, int]) -> None:
    """Append the launch that computes delta and every row's statistics, and zeroes what is added up in memory.

    Parameters
    ----------
    call : Call
    constants : dict
        Among them all that the kernel is specialised by but what follows from the arrays.
    head_dim : int
        Columns of a row of dq's accumulator.
    values : dict of str to int
        Fields of ``Params``.
    """
    problem = call.problem
    size, vector = problem.dtype.itemsize, call.load_bytes("do", "o")
    while vector > size and problem.head_dim_v * size % vector:
        vector //= 2
    own = {**{name: constants[name] for name in PREPROCESS}, "head_dim": head_dim, "load_bytes": max(vector, size)}
    own |= {"warps": _THREADS // 32, "dlse": "dlse" in call.operands}
    blocks = cdiv(problem.n_queries, STAT_ROWS) * problem.instances
    call.add("util/bwd_preprocess.cu", "backward_preprocess", own, blocks, _THREADS // 32, values)


def row_arrays(problem: Problem, vectors: int = 1) -> dict[str, Array]:
    """Return what the preprocess kernel writes of every row; `vectors` numbers make its statistics."""
    heads, groups = problem.instances, cdiv(problem.n_queries, STAT_ROWS)
    delta = Array((heads, groups * STAT_ROWS), problem.stat_dtype)
    counters = Array((heads, groups), np.dtype(np.int32))
    return {"delta": delta, "stat": Array((vectors, *delta.shape), delta.dtype), "counters": counters}


def is_sum(problem: Problem, shape: tuple[int, ...], heads: int) -> bool:
    """Whether an operand of `shape` (aligned; `heads` of its own kind) was broadcast, so that its gradient is a sum."""
    return any(n == 1 < full for n, full in zip(shape, (*problem.batch, heads), strict=False))


class _Sum(NamedTuple):
    """A gradient that is a sum over axes along which its operand was broadcast."""

    keep: tuple[bool, ...]
    size: tuple[int, ...]
    inner: int


class Backward(Call):
    """Up to seven launches: preprocess, key kernel, row kernel or conversion, bias kernel, and sums."""

    family = "sm80"

    def unsupported_reason(self) -> str | None:
        return unsupported_reason(self.problem)

    def prepare(self) -> Plan:
        problem, operands = self.problem, self.operands
        load_bytes = self.load_bytes("q", "k", "v", "do")
        self.cut = cut = Cut(problem, self.device)
        self.constants = cut.constants(load_bytes, getattr(operands.get("o"), "dtype", None))
        self._deal_out_bias()
        self.sums = self._sums()
        scratch = row_arrays(problem, 1 if problem.row.products == "half" else 2)
        if cut.atomic:
            rows = pad(problem.n_queries, cut.keys.block_m)
            scratch["dq_acc"] = Array((*operands["q"].shape[:-2], rows, cut.head_dim), problem.stat_dtype)
        for name, total in self.sums.items():
            scratch[f"{name}_acc"] = Array((*total.size, total.inner), problem.stat_dtype)
        self.begin(gradients(problem, operands), scratch)
        if problem.head_dim_v and math.prod(problem.score_shape):
            self._keys()
            self._rows()
            if "bias" in operands:
                self._bias()
        reason = f"portable tensor-core kernel, {self.device.arch}"
        shape = cut.keys.block_m, cut.keys.block_n, cut.keys.warps, cut.shared_bytes("keys")
        return self.planned(*shape, reason, cut.notes(load_bytes), self.constants)

    def _sums(self) -> dict[str, _Sum]:
        problem, axes = self.problem, self.axes
        found = {}
        for name, heads in (("q", problem.heads), ("k", problem.kv_heads), ("v", problem.kv_heads)):
            shape = self.operands[name].shape
            if is_sum(problem, shape, heads) and not (name == "q" and self.cut.atomic):
                size = (*axes.size, heads)
                own = (*axes.pick(shape, 1), shape[-3])
                keep = tuple(n == full for n, full in zip(own, size, strict=True))
                found[f"d{name}"] = _Sum(keep, size, shape[-2] * shape[-1])
        if self.splits > 1:
            keep, size = (False, *[True] * BATCH_AXES), (self.splits, *[1] * BATCH_AXES)
            found["dbias"] = _Sum(keep, size, self.operands["bias"].size)
        return found

    def _deal_out_bias(self) -> None:
        """Say in how many parts the heads that share a bias are dealt out, so that the device is full."""
        self.splits = 1
        if "bias" in self.operands:
            *lead, rows, keys = self.operands["bias"].shape
            tile, self.bias_instances = self.cut.bias, math.prod(lead)
            self.bias_tiles = max(self.bias_instances * cdiv(rows, tile.block_m) * cdiv(keys, tile.block_n), 1)
            members = self.problem.instances // max(self.bias_instances, 1)
            self.splits = max(1, min(members, cdiv(2 * self.device.multiprocessors, self.bias_tiles)))

    def _add(self, path: str, kernel: str, blocks: int, which: str, extra: Constants, values: dict[str, int]) -> None:
        """Append a kernel that has the tile and the shared memory of `which`, and `extra` constants of its own."""
        tile = self.cut.keys if which == "convert" else getattr(self.cut, which)
        constants = {**self.constants, **tile._asdict(), **extra}
        counts = dict(zip(("row_tiles", "key_tiles"), tile_counts(self.problem, tile), strict=True))
        launched = f"sm80/{path}.cu", kernel, constants, blocks, tile.warps, counts | values
        self.add(*launched, tile[:2], shared_bytes=self.cut.shared_bytes(which))

    def _sum_flags(self, *names: str) -> dict[str, object]:
        return {f"sum_{name}": name in self.sums for name in names}

    def _keys(self) -> None:
        """Compute rows' delta and statistics, then dk and dv, and dq if the order of its sums does not matter."""
        problem, cut = self.problem, self.cut
        first, parts, row_tiles, blocks = cut.shared_keys(self.sums)
        values = {"row_tiles": cut.row_tiles, "key_tiles": cut.key_tiles}
        if parts > 1:
            head, of_head = divmod(first, cut.key_tiles)
            values |= {"shared_key": head * problem.n_keys + of_head * cut.keys.block_n, "splits": parts}
        add_preprocess(self, {**self.constants, "split_delta": False}, cut.head_dim, values)
        if cut.chunk:
            blocks *= cdiv(cut.head_dim_v, cut.part) + cdiv(cut.head_dim, cut.part)
            self._add("bwd_wide", "backward_wide_keys", blocks, "keys", self._sum_flags("dk", "dv", "dq"), {})
        else:
            values = {"shared_tile": first, "splits": parts, "split_tiles": row_tiles}
            self._add("bwd", "attention_backward", blocks, "keys", self._sum_flags("dk", "dv"), values)
        self._sum("dk")
        self._sum("dv")

    def _rows(self) -> None:
        """Compute dq in a fixed order, or round its sums."""
        problem, cut = self.problem, self.cut
        if cut.atomic:
            blocks = cut.row_tiles * math.prod(self.operands["q"].shape[:-2])
            self._add("bwd_convert", "backward_convert", blocks, "convert", {}, {})
            return
        blocks = cdiv(problem.n_queries, cut.rows.block_m) * problem.instances
        if cut.chunk:
            blocks *= cdiv(cut.head_dim, cut.part)
            self._add("bwd_wide", "backward_wide_rows", blocks, "rows", self._sum_flags("dk", "dv", "dq"), {})
        else:
            self._add("bwd_rows", "backward_rows", blocks, "rows", self._sum_flags("dq"), {})
        self._sum("dq")

    def _bias(self) -> None:
        """Compute dbias."""
        shape = self.operands["bias"].shape
        extra = {"split": self.splits > 1, "sum_rows": shape[-2] == 1, "sum_keys": shape[-1] == 1, "atomic_dq": False}
        values = {"splits": self.splits, "bias_instances": self.bias_instances}
        self._add("bwd_bias", "backward_bias", self.bias_tiles * self.splits, "bias", extra, values)
        self._sum("dbias")

    def _sum(self, name: str) -> None:
        """Add a gradient up over the axes that its operand was broadcast along, and round it."""
        total = self.sums.get(name)
        if total is None:
            return
        out = self.arrays[name]
        constants = {"grad": row_of(out.dtype).cuda, "acc": row_of(self.problem.stat_dtype).cuda}
        grid = (min(cdiv(max(out.size, 1), _THREADS), 16 * self.device.multiprocessors),)
        values: dict[str, Any] = {**total._asdict(), "results": out.size}
        launched = "util/bwd_sum.cu", "backward_sum", constants, grid, _THREADS
        self.sequence.add(*launched, _SUM_PARAMS, values, {"in": f"{name}_acc", "out": name})
