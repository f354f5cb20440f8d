"""The tangents of gradients for compute capability 9.0: what rows need, then a launch for dq and one for dk and dv.

Both launches compute scores, dP and their tangents, one with the rows of 128 queries as owners and one with 128 keys
(kernels/sm90/bwd_jvp.cu), so that each sums its own gradients in registers, in a fixed order.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, pad, row_bytes, tile_counts
from cuattn.cuda.constants import Constants, is_sloped
from cuattn.cuda.sm80.backward import broadcast_heads
from cuattn.cuda.sm80.jvp import TangentCall
from cuattn.cuda.sm90 import forward
from cuattn.cuda.sm90.backward import Backward
from cuattn.cuda.sm90.forward import ROW_BYTES, SLAB_COLUMNS, sharing_cache
from cuattn.cuda.sm90.parts import count_first_parts
from cuattn.cuda.sm90.tensor_map import WARPGROUP_ROWS, MappedCall
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem

_OWN = 128  # rows of a tile of the owner's
_SHORT = 128
_MAX_HEAD_DIM = 128
_NUMBERS, _FLOAT = 5, 4
_TANGENTS = ("tq", "tk", "tv", "tdo")
_WARPS = 12  # a warpgroup that copies, two that multiply
_ROW_WARPS, _ROWS = 4, 8  # of backward_jvp_rows: warps, and rows that each takes at a time
_MOST = 3  # stages


class Ring(NamedTuple):
    """How the tiles of the other side travel: rows of one, tiles in flight, and a block's shared memory."""

    streamed: int
    stages: int
    shared_bytes: int


def takes_one_pass(problem: Problem) -> bool:
    """Return whether one launch sums dk and dv in registers and dq in memory, in no fixed order."""
    plain = not (problem.dropout or problem.deterministic or is_sloped(problem) or problem.score)
    plain = plain and {*problem.masks} <= {"column", "boolean"}  # tried with these alone
    return plain and max(problem.head_dim, problem.head_dim_v) <= SLAB_COLUMNS


class AlongTangents(TangentCall, MappedCall):
    """What double backward and the gradients with their tangents have in common: the launches for tangents."""

    @staticmethod
    def simplify(problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        """Take a column mask that is no more than a band as one."""
        return (problem, masks) if "function" in problem.masks else MappedCall.simplify(problem, masks)

    @property
    def _sums(self) -> dict[str, str]:
        """Return what takes the addresses of dq's sums, and of what parts of first tiles leave."""
        parts = {"dk_acc": "tparts", "counters": "tcounters"} if self._in_parts else {}
        return parts | ({"dq_acc": "tdq_acc"} if self._one_pass else {})

    @property
    def _maps(self) -> dict[str, str]:
        """Return whose map goes for each tangent: its operand's, where it is not there."""
        return {name: name if self.has(name) else name[1:] for name in _TANGENTS}

    @functools.cached_property
    def _one_pass(self) -> bool:
        return takes_one_pass(self.problem) and not self.has("tdo")  # what gives dv more takes registers

    @property
    def _slabs(self) -> tuple[int, int]:
        return cdiv(self.problem.head_dim, SLAB_COLUMNS), cdiv(self.problem.head_dim_v, SLAB_COLUMNS)

    def _heads(self, keys_own: bool) -> int:
        """Return how many heads the owners are of."""
        return self.problem.instances // (self.problem.group if keys_own else 1)

    def _first_parts(self, keys_own: bool) -> int:
        """Return into how many parts the first tile of each head is divided in a launch."""
        problem = self.problem
        own, other = problem.n_keys, problem.n_queries
        if not keys_own:
            own, other = other, own
        owners, tiles = cdiv(own, _OWN) * self._heads(keys_own), cdiv(other, self._ring(keys_own).streamed)
        return count_first_parts(problem, owners, tiles, self.device.multiprocessors)

    @functools.cached_property
    def _in_parts(self) -> dict[bool, int]:
        """Of launches whose first tiles are divided, by whether keys own: into how many parts."""
        owners = (True,) if self._one_pass else (False, True)
        parts = {keys_own: self._first_parts(keys_own) for keys_own in owners}
        return {keys_own: count for keys_own, count in parts.items() if count > 1}

    def _ring(self, keys_own: bool) -> Ring:
        """Return the ring of a launch; shared memory as kernels/sm90/bwd_jvp_layout.cuh lays it out."""
        slabs, slabs_v = self._slabs
        rows = (slabs * (1 + self.has("tq")) + slabs_v * (1 + self.has("tdo"))) * ROW_BYTES
        keys = (slabs * (1 + self.has("tk")) + slabs_v * (1 + self.has("tv"))) * ROW_BYTES
        own, other = (keys, rows) if keys_own else (rows, keys)
        walk = 48 + 16 * bool({"boolean", "function"} & {*self.problem.masks})  # or the place of masks
        problem, wide = self.problem, max(slabs, slabs_v) > 1
        # Two sums of wide heads leave few registers, and so does what is done to single elements beside two sums.
        crowded = keys_own and (wide or is_sloped(problem) or problem.dropout > 0)
        for streamed in (32,) if crowded else (64, 32):
            stage = streamed * (other + keys_own * _NUMBERS * _FLOAT) + 16 + 3 * 8  # of which step and barriers
            held = _OWN * own + keys_own * self._one_pass * 2 * 2 * _OWN * streamed * self.problem.dtype.itemsize
            stages = min((self.device.shared_bytes - held - walk - 64) // stage, _MOST)
            if stages > 1:
                break
        return Ring(streamed, stages, pad(held + stages * stage + 16, 16) + walk + 16)

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = forward.unsupported_reason(problem, self.device)
        widest = max(problem.head_dim, problem.head_dim_v)
        if against is not None:
            return against
        if problem.bias is not None or problem.learned:
            return "it makes no gradients of biases and of a score function's arrays"
        if problem.head_dim % 8:
            return f"it writes rows in units of 8 elements, and q has {problem.head_dim}"
        if widest > _MAX_HEAD_DIM:
            return f"it takes head dimensions up to {_MAX_HEAD_DIM}, not {problem.head_dim} and {problem.head_dim_v}"
        if problem.kernel is None and max(problem.n_queries, problem.n_keys) < _SHORT:
            return "rows and keys are fewer than its tiles have"
        for name in broadcast_heads(self):
            return f"the gradient of {name} is a sum over axes along which it was broadcast"
        return self.layout_reason(filter(self.has, _TANGENTS))

    def begin(self, scratch: dict[str, Array], counters: int = 0, arithmetic: np.dtype | None = None) -> None:
        """Make the launch sequence, with scratch memory for the tangents."""
        rows = Array((self.problem.instances, pad(self.problem.n_queries, _OWN), _NUMBERS), np.dtype(np.float32))
        scratch = {**scratch, "rows": rows}
        if self._one_pass:
            size = self.problem.instances * pad(self.problem.n_queries, _OWN) * SLAB_COLUMNS
            scratch["tdq_acc"] = Array((size,), np.dtype(np.float32))
        if self._in_parts:
            slabs, slabs_v = self._slabs
            sizes = [
                self._heads(keys_own) * parts * _OWN * SLAB_COLUMNS * (slabs + slabs_v * keys_own)
                for keys_own, parts in self._in_parts.items()
            ]
            scratch["tparts"] = Array((max(sizes),), np.dtype(np.float32))
            scratch["tcounters"] = Array((self._counters,), np.dtype(np.int32))
        super().begin(scratch, counters, arithmetic)

    def add_tangents(self) -> Plan:
        """Append the launches for tangents, and plan them alone."""
        by_keys, by_rows = self._ring(keys_own=True), self._ring(keys_own=False)
        slabs, slabs_v = self._slabs
        constants = self.base_constants() | {
            "head_dim": SLAB_COLUMNS * slabs, "head_dim_v": SLAB_COLUMNS * slabs_v, "unit": by_keys.streamed,
            "one_pass": self._one_pass,
        }  # fmt: skip
        self._add_rows(constants)
        if self._one_pass:
            self._add(constants, keys_own=True, ring=by_keys)
            self._convert(constants, by_keys)
            note = "dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable"
        else:
            self._add(constants, keys_own=False, ring=by_rows)
            self._add(constants, keys_own=True, ring=by_keys)
            note = "dq by a pass of its own over the scores; all sums in a fixed order"
        return self.planned("sm90/bwd_jvp.cu", (by_keys.streamed, _OWN), _WARPS, by_keys.shared_bytes, constants, note)

    @property
    def _counters(self) -> int:
        """How many counters tell which part of a first tile is done last: one for each warpgroup."""
        return _OWN // WARPGROUP_ROWS * self._heads(False not in self._in_parts) if self._in_parts else 0

    def _convert(self, constants: Constants, ring: Ring) -> None:
        """Append the launch that turns the sums of dq into rows."""
        constants = constants | {
            "keys_own": True, "block_m": ring.streamed, "block_n": _OWN, "stages": ring.stages, "first_parts": 1,
        }  # fmt: skip
        fields, own = self.tangents((), {"tdq.data": "tdq", "dq_acc": "tdq_acc"})
        blocks = self.problem.instances * pad(self.problem.n_queries, _OWN) // ring.streamed
        self.add("sm90/bwd_jvp_convert.cu", "backward_jvp_convert", constants, (blocks,), 4, fields, own=own)

    def _add_rows(self, constants: Constants) -> None:
        """Append the launch that computes what the others need of rows."""
        problem, names = self.problem, ("o", "to")
        of = {f"{name}_elem": DTYPES[getattr(self.operands.get(name), "dtype", problem.dtype)].cuda for name in names}
        constants = constants | of | {
            "dlse": self.has("dlse") > 0, "ddo": "ddo" in self.arrays,
            "whole_loads": self.load_bytes("o", "to", "do", "tdo") == 16,
            "first_parts": max(self._in_parts.values(), default=1),
        }  # fmt: skip
        slots = {"rows": "rows", **self._sums}
        fields, own = self.tangents(("tdo", "to", "tlse", "ddo"), slots)
        blocks = min(
            cdiv(problem.instances * pad(problem.n_queries, _OWN), _ROW_WARPS * _ROWS), 16 * self.device.multiprocessors
        )
        launched = "sm90/bwd_jvp_rows.cu", "backward_jvp_rows", constants, (blocks,), _ROW_WARPS
        self.add(*launched, fields | {"splits": self._counters}, own=own)

    def _add(self, constants: Constants, keys_own: bool, ring: Ring) -> None:
        """Append the launch that sums dq, or dk and dv."""
        problem = self.problem
        tile = (ring.streamed, _OWN) if keys_own else (_OWN, ring.streamed)
        constants = constants | {
            "keys_own": keys_own, "block_m": tile[0], "block_n": tile[1], "stages": ring.stages,
            "first_parts": self._in_parts.get(keys_own, 1),
        }  # fmt: skip
        counts = tile_counts(problem, tile)
        heads = self._heads(keys_own)
        length = problem.n_queries * problem.group if keys_own else problem.n_keys
        ordered = bool(problem.masks) or problem.band is not None
        counts["section"] = min(sharing_cache(2 * length * row_bytes(problem)) if ordered else 1, heads)
        work = (counts["key_tiles" if keys_own else "row_tiles"] + self._in_parts.get(keys_own, 1) - 1) * heads
        written = ("tdk", "tdv") if keys_own else ("tdq",)
        names = ("tq", "tk", "tv", "tbias", "tdo")
        slots = {"rows": "rows", **{f"{name}.data": name for name in written}, **self._sums}
        fields, own = self.tangents(names, slots)
        launched = "sm90/bwd_jvp.cu", "backward_jvp", constants, work, _WARPS, counts | fields, tile
        every = cdiv(work, self.device.multiprocessors)
        self.add_mapped(*launched, ring.shared_bytes, (), self._maps, together=every, own=own)


class DoubleBackward(AlongTangents):
    """The tangents alone."""

    packed_masks = False

    def prepare(self) -> Plan:
        self.begin({})
        return self.add_tangents()


class BackwardJvp(AlongTangents, Backward):
    """The gradients, as the backward makes them, and behind them their tangents."""

    def unsupported_reason(self) -> str | None:
        return super().unsupported_reason() or Backward.unsupported_reason(self)

    def prepare(self) -> Plan:
        plan = super().prepare()
        return replace(plan, notes=(*plan.notes, *(f"tangents: {note}" for note in self.add_tangents().notes)))
