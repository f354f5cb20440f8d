"""The forward along tangents for compute capability 9.0: one launch of persistent blocks, as the forward's."""

from typing import Any, NamedTuple

from cuattn.cuda.arguments import Array
from cuattn.cuda.constants import Constants
from cuattn.cuda.device import COUNTERS, Device
from cuattn.cuda.sm80.jvp import TangentCall
from cuattn.cuda.sm90 import forward
from cuattn.cuda.sm90.forward import ROW_BYTES, SLAB_COLUMNS
from cuattn.cuda.sm90.parts import count_first_parts
from cuattn.cuda.sm90.tensor_map import WARPGROUP_ROWS
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import Problem

_PATH = "sm90/jvp.cu"
_ROWS = 128
_MAX_HEAD_DIM = 128


class Widest(NamedTuple):
    """Up to which head dimension a tile serves, and its keys where each score is looked up somewhere."""

    head_dim: int
    tile: forward.Tile
    few_keys: int


# Scores and their tangents, and sums of both results, fill the registers.
_TILES = (
    Widest(64, forward.Tile(_ROWS, 128, 2, 2), 64),
    Widest(128, forward.Tile(_ROWS, 64, 2, 1), 32),
)


def unsupported_reason(problem: Problem, device: Device) -> str | None:
    """Say why the kernel does not take a problem, or return None; strides and addresses are another matter."""
    against = forward.unsupported_reason(problem, device)
    if against is not None:
        return against
    if max(problem.head_dim, problem.head_dim_v) > _MAX_HEAD_DIM:
        return f"its sums take head dimensions up to {_MAX_HEAD_DIM}, not {problem.head_dim} and {problem.head_dim_v}"
    if not (problem.moves or "v" in problem.tangents):
        return "no tangent is given"
    return None


class Cut(forward.Cut):
    """How it is cut."""

    def __init__(self, problem: Problem, bias: Any = None) -> None:
        super().__init__(problem, bias)
        self.split_bias, self.split_score = False, None
        self.bias_form = self.bias_form and ("keys" if self.bias_form == "keys" else "loads")
        # Tangents of k and v share the L2 cache with them.
        self.counts["section"] = min(max(self.counts["section"] // 2, problem.group), problem.instances)

    def divide(self, multiprocessors: int) -> None:
        """Divide the first row tile's keys where it may be far longer than others."""
        if self._warpgroups_first < COUNTERS:
            tiles = self.counts["key_tiles"]
            self.splits = count_first_parts(self.problem, self.blocks, tiles, multiprocessors)

    @property
    def _warpgroups_first(self) -> int:
        """How many warpgroups of all heads have rows of a first row tile."""
        return self.problem.instances * self.tile.block_m // WARPGROUP_ROWS

    @property
    def work(self) -> int:
        """Row tiles of all heads, and parts of them."""
        return self.blocks + self.problem.instances * (self.splits - 1)

    @property
    def scratch(self) -> tuple[dict[str, Array], int]:
        """What parts of the first row tiles leave for the last one, and how many counters tell which that is."""
        if self.splits == 1:
            return {}, 0
        threads = (self._warpgroups_first, self.splits, 2, 32 * 4)
        shapes = {"o_part": (*threads, self.head_dim_v // 2), "l_part": (*threads, 4)}
        return {name: Array(shape, self.problem.stat_dtype) for name, shape in shapes.items()}, self._warpgroups_first

    def _tile(self) -> forward.Tile:
        row = next(row for row in _TILES if max(self.head_dim, self.head_dim_v) <= row.head_dim)
        if self.problem.bias is None and self.problem.score is None:
            return row.tile
        return row.tile._replace(block_n=row.few_keys)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: the forward's and what tangents add to its buffers."""
        problem, (block_m, block_n, stages, q_stages, _) = self.problem, self.tile
        slabs, slabs_v = cdiv(self.head_dim, SLAB_COLUMNS), cdiv(self.head_dim_v, SLAB_COLUMNS)
        tq, tk, tv = (name in problem.tangents for name in "qkv")
        results = slabs_v if problem.out_dtype == problem.dtype else 0
        queries = max((1 + tq) * slabs, 2 * results) - max(slabs, results)
        return (
            super().shared_bytes
            + ROW_BYTES * (q_stages * block_m * queries + stages * block_n * (tk * slabs + tv * slabs_v))
            + 4 * (block_m // WARPGROUP_ROWS) * (self.splits > 1)
        )

    def slow_reason(self, device: Device) -> str | None:
        """Say why the portable kernel would sooner be done, or return None."""
        if 2 * self.blocks < device.multiprocessors:
            return "too few query rows fill the GPU, and the portable kernel has smaller tiles"
        return None

    @property
    def path(self) -> str:
        """The kernel's file."""
        return _PATH

    @property
    def constants(self) -> Constants:
        """The prologue of the kernel."""
        return {**super().constants, "overlap": True, "diagonal": False, "first_parts": self.splits}


class Jvp(forward.Forward, TangentCall):
    """One launch of persistent blocks."""

    cut_class = Cut
    problem_reason = staticmethod(unsupported_reason)

    @property
    def read(self) -> list[str]:
        """What the copy engine reads, as far as it is there."""
        return [name for name in ("q", "k", "v", "tq", "tk", "tv") if name in self.operands]

    def prepare(self) -> Plan:
        cut = self._cut
        tile, constants, size = cut.tile[:2], cut.constants, cut.shared_bytes
        scratch, counters = cut.scratch
        self.begin(scratch, counters=1 + counters, arithmetic=self.arithmetic)
        fields, own = self.tangents(("tq", "tk", "tv", "tbias", "to", "tlse"))
        warps = 4 * (tile[0] // WARPGROUP_ROWS + 1)
        launched = cut.path, "attention_jvp", constants, cut.work, warps, cut.counts | fields, (*tile, WARPGROUP_ROWS)
        beside = {name: name if name in self.arrays else name[1:] for name in ("tq", "tk", "tv")}
        self.add_mapped(*launched, size, ("o", "to"), beside, own=own)
        return self.planned(cut.path, tile, warps, size, constants)
