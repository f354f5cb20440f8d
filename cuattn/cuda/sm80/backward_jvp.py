"""The gradients with their tangents by the portable kernels: a launch each for dq, dk and dv."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Array, layout_fields, steps_of, tile_counts
from cuattn.cuda.constants import Constants
from cuattn.cuda.learned import learned
from cuattn.cuda.params import BATCH_AXES, MAX_WEIGHTS, SUM_PARAMS
from cuattn.cuda.sm80.backward import Sum, broadcast_heads, sum_array, sum_over
from cuattn.cuda.sm80.forward import unsupported_reason
from cuattn.cuda.sm80.jvp import TangentCall, Tile, notes, too_wide
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES

_NUMBERS = 5  # kRowNumbers: of each row (kernels/attn/tangents.cuh)
_QUERIES, _KEYS, _VALUES, _BIAS = range(4)  # kernels/sm80/bwd_jvp.cuh: what a launch sums
_OWNERS = {"q": _QUERIES, "k": _KEYS, "v": _VALUES}
_STREAMED = 32  # rows of a streamed tile at most: scores, their tangents, slopes and derivatives are in registers
_WARPS = 4  # of a block that looks at rows
_THREADS = 256
_FLOAT64 = np.dtype(np.float64)


class BackwardJvp(TangentCall):
    """What rows need, a launch for each of dq, dk and dv, and sums over broadcast axes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        widths = self.widths
        widths.head_dim, widths.head_dim_v = widths.whole(widths.head_dim), widths.whole(widths.head_dim_v)

    def _tile(self, owner: int) -> tuple[Tile, int, int] | None:
        """Return the tile of a launch, its shared memory, and the columns that a block sums."""
        widths, of_values = self.widths, owner == _VALUES
        d, dv = widths.head_dim, widths.head_dim_v
        rows = d * (1 + self.has("tq")) + dv * (1 + self.has("tdo"))
        keys = d * (1 + self.has("tk")) + (0 if of_values else dv * (1 + self.has("tv")))
        columns = widths.chunk(dv if of_values else d)
        sides = (rows, keys) if owner in (_QUERIES, _BIAS) else (keys, rows + 2 * _NUMBERS)  # rows have numbers
        found = widths.tile(*sides, self.device.shared_bytes, _STREAMED)
        return found and (*found, columns)

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = unsupported_reason(problem)
        if against is None and (count := len(self._slots())) > MAX_WEIGHTS:
            return f"score reads arrays of floats in {count} places; expected at most {MAX_WEIGHTS} on a GPU"
        if against is None and problem.learned and problem.deterministic:
            return (
                "deterministic is True and score_args has arrays of floats, whose gradients' tangents are added up in "
                "no fixed order; expected deterministic=False"
            )
        if against is None and None in map(self._tile, _OWNERS.values()):
            return too_wide(problem)
        return against

    def prepare(self) -> Plan:
        problem, operands = self.problem, self.operands
        self._kinds = ["td"] if problem.operation == "double_backward" else ["d", "td"]
        self._sums: dict[str, Sum] = {
            f"{kind}{name}": sum_over(self.axes, operands[name].shape, heads)
            for name, heads in broadcast_heads(self).items()
            for kind in self._kinds
        }
        scratch = {f"{name}_acc": sum_array(problem, total) for name, total in self._sums.items()}
        numbers = np.dtype(np.float32) if self.widths.size == 2 else _FLOAT64
        scratch["rows"] = Array((_NUMBERS, problem.instances, problem.n_queries), numbers)
        if "bias" in operands:
            self._bias_splits(scratch)
        for slot in problem.learned:
            scratch |= {f"{kind}score{slot}_acc": Array((self._size(slot),), _FLOAT64) for kind in self._kinds}
        self.begin(scratch, arithmetic=self.arithmetic)
        summed = {f"sum_d{name}": f"td{name}" in self._sums for name in "qkv"}
        constants = self.base_constants() | {"primal": "d" in self._kinds, **summed}
        if problem.n_queries * problem.n_keys * problem.head_dim_v * problem.instances:  # else all is 0
            self._add_all(constants)
        tile, shared, columns = self._tile(_QUERIES) or (Tile(1, 16, 1), 0, 0)
        block, own = (16 * tile.warps, tile.streamed), tile._asdict() | {"columns": columns}
        return self.planned("sm80/bwd_jvp.cu", block, tile.warps, shared, constants | own, *notes(problem))

    def _add_all(self, constants: Constants) -> None:
        self._add_rows(constants)
        for name, owner in _OWNERS.items():
            self._add(name, owner, constants)
            for kind in self._kinds:
                self._add_sum(f"{kind}{name}")
        if "bias" in self.operands:
            self._add_bias(constants)
        if self.problem.learned:
            self._add_scores(constants)

    def _add_rows(self, constants: Constants) -> None:
        """Append the launch that computes what the others need of rows."""
        problem = self.problem
        names = {name: self.operands.get(name) for name in ("o", "to")}
        of = {name: problem.dtype if x is None else x.dtype for name, x in names.items()}
        constants = constants | {
            "o_elem": DTYPES[of["o"]].cuda, "to_elem": DTYPES[of["to"]].cuda, "dlse": self.has("dlse") > 0,
            "ddo": "ddo" in self.arrays,
        }  # fmt: skip
        fields, own = self.tangents(("tdo", "to", "tlse", "ddo"), {"rows": "rows", **self._elements()})
        sizes = list(map(self._size, self._slots()))
        fields["sizes"] = [*sizes, *[0] * (MAX_WEIGHTS - len(sizes))]
        blocks = min(cdiv(problem.instances * problem.n_queries, _WARPS), 32 * self.device.multiprocessors)
        self.add("util/bwd_jvp_rows.cu", "backward_jvp_rows", constants, (blocks,), _WARPS, fields, own=own)

    def _add(self, name: str, owner: int, constants: Constants) -> None:
        """Append the launch that sums one gradient."""
        found = self._tile(owner)
        assert found is not None
        tile, shared, columns = found
        owned, problem = 16 * tile.warps, self.problem
        block = (owned, tile.streamed) if owner == _QUERIES else (tile.streamed, owned)
        constants = constants | {
            "owner": owner, "block_m": block[0], "block_n": block[1], "warps": tile.warps, "stages": tile.stages,
            "columns": columns,
        }  # fmt: skip
        counts = tile_counts(problem, block)
        fields, own = self.tangents(("tq", "tk", "tv", "tbias", "tdo"), {"rows": "rows"})
        slots = {}
        for kind in ("d", "td"):
            target = f"{kind}{name}"
            if target in self._sums:
                total = self._sums[target]
                lead = (*problem.batch, problem.heads if name == "q" else problem.kv_heads)
                array = Array((*lead, *self.operands[name].shape[-2:]), problem.stat_dtype)
                slots[f"{target}.data"] = f"{target}_acc"
                assert array.size == sum_array(problem, total).size
            elif target in self.arrays:
                array = self.arrays[target]
                slots[f"{target}.data"] = target
            else:
                continue
            fields |= layout_fields(target, steps_of(array), self.axes, len(problem.batch))
        own = own._replace(slots={**own.slots, **slots})
        tiles, instances = counts["row_tiles"], problem.instances
        if owner != _QUERIES:
            tiles, instances = counts["key_tiles"], instances // problem.group
        width = problem.head_dim_v if owner == _VALUES else problem.head_dim
        grid = tiles * instances, cdiv(width, columns)
        launched = "sm80/bwd_jvp.cu", "backward_jvp", constants, grid, tile.warps, counts | fields, block
        self.add(*launched, own=own, shared_bytes=shared)

    def _bias_splits(self, scratch: dict[str, Array]) -> None:
        """Decide in how many parts the heads that share a bias are summed, and note the parts among scratch memory."""
        problem, bias = self.problem, self.operands["bias"]
        found = self._tile(_BIAS)
        assert found is not None
        owned, streamed = 16 * found[0].warps, found[0].streamed
        *lead, rows, keys = bias.shape
        self._instances = math.prod(lead)
        self._tiles = self._instances * cdiv(rows, owned) * cdiv(keys, streamed)
        members = problem.instances // max(self._instances, 1)
        splits = max(1, min(members, cdiv(2 * self.device.multiprocessors, max(self._tiles, 1))))
        keep, size = (False, *[True] * BATCH_AXES), (splits, *[1] * BATCH_AXES)
        for kind in self._kinds:
            self._sums[f"{kind}bias"] = {"keep": keep, "size": size, "inner": bias.size}
            scratch[f"{kind}bias_acc"] = sum_array(problem, self._sums[f"{kind}bias"])

    def _add_bias(self, constants: Constants) -> None:
        """Append the launches that make the gradient of the bias and its tangent."""
        found = self._tile(_BIAS)
        assert found is not None
        tile, shared, _ = found
        block, (*_, rows, keys) = (16 * tile.warps, tile.streamed), self.operands["bias"].shape
        splits = self._sums["tdbias"]["size"][0]
        constants = constants | {
            "owner": _BIAS, "block_m": block[0], "block_n": block[1], "warps": tile.warps, "stages": 1, "columns": 32,
            "sum_rows": rows == 1, "sum_keys": keys == 1,
        }  # fmt: skip
        values = {**tile_counts(self.problem, block), "splits": splits, "bias_instances": self._instances}
        fields, own = self.tangents(("tq", "tk", "tv", "tbias", "tdo"), {"rows": "rows", "tdbias_acc": "tdbias_acc"})
        if "dbias" not in self.arrays:  # the tangent's layout tells which heads share a bias
            fields |= layout_fields("dbias", steps_of(self.arrays["tdbias"]), self.axes, len(self.problem.batch))
        launched = "sm80/bwd_jvp_bias.cu", "backward_jvp_bias", constants, (self._tiles * splits,), tile.warps
        self.add(*launched, values | fields, block, own=own, shared_bytes=max(shared, 8 * block[0] * block[1]))
        for kind in self._kinds:
            self._add_sum(f"{kind}bias")

    def _size(self, slot: int) -> int:
        """Return the elements of a score function's array."""
        return math.prod(self.problem.score.facts.arrays[slot].shape)

    def _slots(self) -> list[int]:
        """Return the slot of the array that each expression reads; behind these, arrays that none reads."""
        slots = [x.weight.slot for x in learned(self.problem)]
        return slots + [slot for slot in self.problem.learned if slot not in slots]

    def _elements(self) -> dict[str, list[str]]:
        """Return what takes the addresses of the sums of arrays' elements, by expression that reads an array."""
        slots = self._slots()
        names = {"d": "elements", "td": "telements"}
        return {names[kind]: [f"{kind}score{slot}_acc" for slot in slots] for kind in self._kinds} if slots else {}

    def _add_scores(self, constants: Constants) -> None:
        """Append the launches that make the gradients of a score function's arrays and their tangents."""
        problem, found = self.problem, self._tile(_BIAS)
        assert found is not None
        tile, shared, _ = found
        block, count = (16 * tile.warps, tile.streamed), len(learned(problem))
        constants = constants | {
            "owner": _BIAS, "block_m": block[0], "block_n": block[1], "warps": tile.warps, "stages": 1, "columns": 32,
            "weights": count,
        }  # fmt: skip
        counts = tile_counts(problem, block)
        fields, own = self.tangents(("tq", "tk", "tv", "tbias", "tdo"), {"rows": "rows", **self._elements()})
        grid = (counts["row_tiles"] * problem.instances,)
        if count:
            launched = (
                "sm80/bwd_jvp_score.cu",
                "backward_jvp_score",
                constants,
                grid,
                tile.warps,
                counts | fields,
                block,
            )
            self.add(*launched, own=own, shared_bytes=shared)
        for slot in problem.learned:
            keep, sizes = (False,) * (1 + BATCH_AXES), (1,) * (1 + BATCH_AXES)
            for kind in self._kinds:
                self._sums[f"{kind}score{slot}"] = {"keep": keep, "size": sizes, "inner": self._size(slot)}
                self._add_sum(f"{kind}score{slot}", "double")

    def _add_sum(self, name: str, acc: str = "") -> None:
        """Append the launch that adds a gradient up over the axes along which its operand was broadcast."""
        if name not in self._sums or not self.arrays[name].size:
            return
        out = self.arrays[name]
        constants = {"grad": DTYPES[out.dtype].cuda, "acc": acc or DTYPES[self.problem.stat_dtype].cuda}
        grid = (min(cdiv(out.size, _THREADS), 16 * self.device.multiprocessors),)
        values = {**self._sums[name], "results": out.size}
        launched = "util/bwd_sum.cu", "backward_sum", constants, grid, _THREADS, SUM_PARAMS, values
        self.sequence.add(*launched, {"in": f"{name}_acc", "out": name})
