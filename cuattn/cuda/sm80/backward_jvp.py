"""The gradients with their tangents by the portable kernels: a launch each for dq, dk and dv."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Array, layout_fields, steps_of, tile_counts
from cuattn.cuda.constants import Constants
from cuattn.cuda.learned import learned
from cuattn.cuda.params import MAX_WEIGHTS
from cuattn.cuda.sm80.backward import (
    BiasTiles,
    Sum,
    add_sum,
    broadcast_heads,
    sum_array,
    sum_of_parts,
    sum_over,
    summed_axes,
)
from cuattn.cuda.sm80.forward import unsupported_reason
from cuattn.cuda.sm80.jvp import Cut, TangentCall, Tile, notes, too_wide
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES

_NUMBERS = 5  # kRowNumbers: of each row (kernels/attn/tangents.cuh)
_QUERIES, _KEYS, _VALUES, _BIAS = range(4)  # kernels/sm80/bwd_jvp.cuh: what a launch sums
_OWNERS = {"q": _QUERIES, "k": _KEYS, "v": _VALUES}
_BY_ROWS = {"owner": _BIAS, "stages": 1, "columns": 32}  # of kernels that sum neither dq nor dk nor dv
_STREAMED = 32  # rows of a streamed tile at most: scores, their tangents, slopes and derivatives are in registers
_WARPS = 4  # of a block that looks at rows
_FLOAT64 = np.dtype(np.float64)


class BackwardJvp(TangentCall):
    """What rows need, a launch for each of dq, dk and dv, and sums over broadcast axes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        widths = self.widths
        widths.head_dim, widths.head_dim_v = widths.whole(widths.head_dim), widths.whole(widths.head_dim_v)

    def _cut(self, owner: int) -> Any:
        """Return how a launch is cut, a `Cut`; None if no tile is narrow enough."""
        widths, of_values = self.widths, owner == _VALUES
        d, dv = widths.head_dim, widths.head_dim_v
        rows = d * (1 + self.has("tq")) + dv * (1 + self.has("tdo"))
        keys = d * (1 + self.has("tk")) + (0 if of_values else dv * (1 + self.has("tv")))
        columns = widths.chunk(dv if of_values else d)
        sides = (rows, keys) if owner in (_QUERIES, _BIAS) else (keys, rows + 2 * _NUMBERS)  # rows have numbers
        found = widths.tile(*sides, self.device.shared_bytes, _STREAMED)
        return found and Cut(*found, columns)

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
        if against is None and None in map(self._cut, _OWNERS.values()):
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
            constants = self._cut(_BIAS).constants()
            self._bias = BiasTiles.of(self, constants["block_m"], constants["block_n"])
            for kind in self._kinds:
                total = sum_of_parts(self._bias.splits, operands["bias"].size)
                self._sums[f"{kind}bias"], scratch[f"{kind}bias_acc"] = total, sum_array(problem, total)
        for slot in problem.learned:
            scratch |= {f"{kind}score{slot}_acc": Array((self._size(slot),), _FLOAT64) for kind in self._kinds}
        self.begin(scratch, arithmetic=self.arithmetic)
        summed = {f"sum_d{name}": f"td{name}" in self._sums for name in "qkv"}
        constants = self.base_constants() | {"primal": "d" in self._kinds, **summed}
        if self.has_gradients:
            self._add_all(constants)
        cut = self._cut(_QUERIES) or Cut(Tile(1, 16, 1), 0, 0)
        own = cut.constants()
        block, warps = (own["block_m"], own["block_n"]), cut.tile.warps
        return self.planned("sm80/bwd_jvp.cu", block, warps, cut.shared_bytes, constants | own, *notes(problem))

    def _add_all(self, constants: Constants) -> None:
        self._add_rows(constants)
        for name, owner in _OWNERS.items():
            if 0 not in self.operands[name].shape:
                self._add(name, owner, constants)
                self._add_sums(name)
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
        problem, cut = self.problem, self._cut(owner)
        own = cut.constants(keys_own=owner != _QUERIES)
        fields: dict[str, Any] = {}
        slots: dict[str, Any] = {}
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
        counts = tile_counts(problem, (own["block_m"], own["block_n"]))
        tiles, instances = counts["row_tiles"], problem.instances
        if owner != _QUERIES:
            tiles, instances = counts["key_tiles"], instances // problem.group
        width = problem.head_dim_v if owner == _VALUES else problem.head_dim
        grid = tiles * instances, cdiv(width, cut.columns)
        self._launch("bwd_jvp", constants | {"owner": owner} | own, cut, grid, slots, fields)

    def _launch(
        self, name: str, constants: Constants, cut: Any, grid: tuple[int, ...], slots: dict[str, Any],
        fields: dict[str, Any], shared_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Append a kernel that walks over tiles; its own constants, slots and fields, and its least shared memory."""
        block = constants["block_m"], constants["block_n"]
        moved, own = self.tangents(("tq", "tk", "tv", "tbias", "tdo"), {"rows": "rows", **slots})
        values = {**tile_counts(self.problem, block), **moved, **fields}
        launched = f"sm80/{name}.cu", name.replace("bwd", "backward"), constants, grid, cut.tile.warps, values, block
        self.add(*launched, own=own, shared_bytes=max(cut.shared_bytes, shared_bytes))

    def _add_bias(self, constants: Constants) -> None:
        """Append the launches that make the gradient of the bias and its tangent."""
        cut, tiles = self._cut(_BIAS), self._bias
        own, fields = cut.constants(), dict(tiles.fields)
        if "dbias" not in self.arrays:  # the tangent's layout tells which heads share a bias
            fields |= layout_fields("dbias", steps_of(self.arrays["tdbias"]), self.axes, len(self.problem.batch))
        constants = constants | own | _BY_ROWS | summed_axes(self) | {"split": True}
        sums = 8 * own["block_m"] * (own["block_n"] + 1)  # bytes
        self._launch("bwd_jvp_bias", constants, cut, tiles.grid, {"tdbias_acc": "tdbias_acc"}, fields, sums)
        self._add_sums("bias")

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
        problem, cut, count = self.problem, self._cut(_BIAS), len(learned(self.problem))
        own = cut.constants()
        grid = (cdiv(problem.n_queries, own["block_m"]) * problem.instances,)
        if count:
            constants = constants | own | _BY_ROWS | {"weights": count}
            self._launch("bwd_jvp_score", constants, cut, grid, self._elements(), {})
        for slot in problem.learned:
            for kind in self._kinds:
                add_sum(self, f"{kind}score{slot}", sum_of_parts(1, self._size(slot)), _FLOAT64)

    def _add_sums(self, name: str) -> None:
        """Append the launches that add gradients up over the axes along which their operand was broadcast."""
        for kind in self._kinds:
            if f"{kind}{name}" in self._sums:
                add_sum(self, f"{kind}{name}", self._sums[f"{kind}{name}"])
