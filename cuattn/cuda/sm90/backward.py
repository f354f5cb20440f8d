"""The backward for compute capability 9.0: preprocess, key kernel, and what dq needs.

There are two ways.  Where dK and dV of 128 keys fit into registers, one kernel (sm90/bwd.cu) computes everything and
adds dq up in memory, key tiles taking turns where the order must be fixed; sm90/bwd_convert.cu turns the sums into
rows.  Where a row's keys are one key tile, or a block holds dq of a head, that kernel writes dq itself.  Else the same
kernel computes dK and dV alone, of 128 keys or 64.  Of tiles of 64 it keeps slabs of dS, which
sm90/bwd_dq.cu multiplies with k; else sm90/bwd_rows.cu computes dq anew from the scores.

A block has all query heads that share its key tile.  Where that leaves multiprocessors without work, several blocks
share it, each with some of the heads, or with a slice of the rows.  They add their dK and dV up in memory; where the
order must be fixed each leaves its own, and sm90/bwd_add_parts.cuh, which rounds them, adds them up.
"""

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, pad, row_bytes, tile_counts
from cuattn.cuda.constants import Constants, function_of, is_sloped, problem_constants
from cuattn.cuda.device import Device
from cuattn.cuda.learned import learned
from cuattn.cuda.sm80 import score_gradients
from cuattn.cuda.sm80.backward import add_preprocess, broadcast_heads, row_arrays
from cuattn.cuda.sm80.score_gradients import Gathering, Main
from cuattn.cuda.sm90 import forward
from cuattn.cuda.sm90.bias import NO_BIAS, BiasForm, BiasGradient, Dbias, bias_form
from cuattn.cuda.sm90.forward import HALVES_BYTES, KEY_BIAS_BYTES, ROW_BYTES, SLAB_COLUMNS, sharing_cache, width_of
from cuattn.cuda.sm90.kept import BLOCK, STAGES, Kept, arrays, slabs
from cuattn.cuda.sm90.pairs import ArrayPass, PairScoreGradients, like_biases
from cuattn.cuda.sm90.parts import Tail, count_parts, cut_tail, side_by_side, visible_rows
from cuattn.cuda.sm90.tensor_map import MappedCall
from cuattn.io_model.sizes import cdiv
from cuattn.plans import Plan
from cuattn.problem import DTYPES, Problem
from cuattn.tracing import I, J, S, addend, derivative, is_linear

_FUSED_HEAD_DIM = 128
_WARPGROUPS = 2  # consumers
_STAGES = 2  # tiles in flight
_SHORT, _SHORT_HEADS = 128, 1056  # rows and keys of few heads, at least; of so many heads fewer do:
_SHORTEST, _SHORTEST_ORDERED = 65, 33  # of up to 64 one of the portable kernel's tiles holds all; in a fixed order
_MAX_SOFTCAP = 1024  # beyond it rows may be far: their slopes are lost with their scores (attn/bwd_workspace.cuh)
_DELTA_PARTS = 3  # bfloat16 that add up to a row's delta (kernels/attn/bwd_workspace.cuh)
_DELTA_OPERAND = 8 * ROW_BYTES  # bytes of which a row tile's parts are the first rows
_TURNS, _CAUSAL_TURNS = 16, 32  # heads at least, where key tiles take turns: measured at N 8192
_CONVERT_WARPS = 8
_TALL, _NARROW = 128, 32  # rows of a tile, columns for which there is a product of that width
_FEW_PARTS = 2
_UNIT_BYTES = 16  # of dk and dv that a thread rounds
_OWNED, _OWNED_V = 3, 2  # slabs of 128 keys of which dK and dV fit into registers without dQ
_HELD_ROWS, _HELD_HEADS = 256, 264  # rows of which a block holds dq, heads that keep all multiprocessors busy


def unsupported_reason(problem: Problem, device: Device) -> str | None:
    """Say why these kernels do not take a problem, or return None; strides and addresses are another matter."""
    against = forward.unsupported_reason(problem, device)
    sloped = is_sloped(problem) and not has_slopes_of_heads(problem)
    if against is None and problem.dropout and problem.score is not None and sloped:
        return "it marks what dropout drops by a sign, which a function's slope may change"
    if against is None and problem.head_dim % 8:
        return f"it writes rows in units of 8 elements, and q has {problem.head_dim}"
    if against is None and problem.softcap is not None and problem.softcap > _MAX_SOFTCAP:
        return f"it takes softcaps up to {_MAX_SOFTCAP}, not {problem.softcap}"
    return against


def has_slopes_of_heads(problem: Problem) -> bool:
    """Return whether all scores of a head have the same slope, other than 1, and dQ and dK are sums of one head.

    Only the kernel that computes everything makes use of it.
    """
    root, widest = function_of(problem), max(width_of(problem.head_dim), width_of(problem.head_dim_v))
    if root is None or problem.softcap is not None or problem.bias is not None or problem.group > 1 or problem.dropout:
        return False
    alone = not derivative(root).depends & (S | I | J) and is_linear(root) and addend(root) is None
    return alone and widest <= _FUSED_HEAD_DIM and problem.masks != ("block",)


class Tile(NamedTuple):
    """One kernel's tile, shared memory, and fields of ``Params``: row_tiles, key_tiles, section."""

    block_m: int
    block_n: int
    shared_bytes: int
    counts: dict[str, int]
    v_stages: int = 0  # of the row kernel


class Cut:
    """How a backward is cut.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Padded head dimensions.
    columns : int
        Of a row of dq's accumulator: whole slabs.
    fused : bool
        One kernel computes everything and adds dq up in memory.
    owns_keys : bool
        Else: warpgroups divide the keys of a tile, not what is computed of them.
    split_delta : bool
        Tensor cores subtract delta from dP: dropout needs it apart, and blocks take the registers of V.
    split_bias : bool
        Tensor cores add a bias of keys, as in the forward.
    split_score : Node or None
        What a score function adds, if they add it to keys, as in the forward.
    bias : BiasForm
    dq_tiles : int
        Of a head's rows, whose dq a block holds in shared memory over all key tiles; else 0.
    dq_leaves : bool
        Each row sees something of the one key tile, and nothing else: its dq leaves at once.
    slopes_of_heads : bool
        All scores of a head have the same slope: it joins dQ and dK last.
    sloped : bool
        Slopes are others.
    weighted : bool
        The main kernel sums what arrays of a score function need of dS.
    arrays : dict of int to Learned
        Of those arrays that are like biases, see :func:`like_biases`.
    parts : int
        Blocks that share a key tile, each with as many query heads of those that share k and v, or a slice of one's
        rows.
    slices : int
        Of a head's rows.
    kept : list of Kept
        Slabs of dS that launches of the main kernel keep for those of sm90/bwd_dq.cu; empty if dq is made otherwise.
    keys, rows : Tile
        Of sm90/bwd.cu and, if dq is computed elsewhere, of the kernel that does.
    """

    def __init__(
        self,
        problem: Problem,
        bias: BiasForm = NO_BIAS,
        shares_q: bool = False,
        multiprocessors: int = forward.MULTIPROCESSORS,
    ) -> None:
        self.problem, blocks = problem, problem.masks == ("block",)
        self._multiprocessors, self._shares_q = multiprocessors, shares_q
        self.head_dim, self.head_dim_v = (
            _NARROW if columns <= _NARROW else width_of(columns) for columns in (problem.head_dim, problem.head_dim_v)
        )
        widest = max(self.head_dim, self.head_dim_v)
        # Walking blocks takes registers beside anything else, and so does dropout beside slopes.
        self.slopes_of_heads = has_slopes_of_heads(problem)
        self.sloped = sloped = is_sloped(problem) and not self.slopes_of_heads
        beside = problem.band is not None or problem.deterministic or problem.dropout or sloped
        crowded = (blocks and beside) or (sloped and problem.dropout)
        self.fused = widest <= 64 or (widest <= _FUSED_HEAD_DIM and not crowded)
        self.slabs = cdiv(self.head_dim, SLAB_COLUMNS), cdiv(self.head_dim_v, SLAB_COLUMNS)
        self.bias = bias if self.fused else BiasForm(bias.keys)
        unsloped = self.fused and not sloped and problem.bias is None
        self.weighted = unsloped and score_gradients.by_main(problem)
        if self.weighted:
            diagonals = score_gradients.on_diagonals(problem)
            self.bias = BiasForm(gradient=Dbias.DIAGONALS if diagonals else Dbias.WEIGHTED)
        self.arrays = {} if self.weighted else like_biases(problem)
        tables = len(self.arrays) < len(learned(problem)) and not self.weighted  # which take registers, too
        apart = problem.dropout or blocks or tables or sloped
        self.owns_keys = not self.fused and forward.leaves_scores(problem)
        self.owns_keys = self.owns_keys and self.slabs[0] <= _OWNED and self.slabs[1] <= _OWNED_V
        self.split_delta = self.fused and widest > 64 and not apart
        self.split_bias = self.bias.keys and forward.splits_bias(problem)
        self.split_score = forward.split_score(problem)
        self.dq_tiles, self.dq_leaves, self.parts, self.slices = 0, False, 1, 1
        self.keys = self._key_tile()
        narrow = self.keys.block_m == _TALL and self.head_dim <= _NARROW
        self.columns = _NARROW if narrow else max(self.head_dim, SLAB_COLUMNS)
        masked = problem.masks or problem.deterministic  # with masks registers are short; they keep a fixed order, too
        free = not (shares_q or problem.dropout or self.weighted or self.slopes_of_heads)
        fits = narrow or (self.keys.block_m == _TALL and problem.bias is None and problem.score is None)
        leaves = self.fused and forward.leaves_scores(problem) and not shares_q and problem.out_dtype == problem.dtype
        self.dq_leaves = leaves and self._sees_one_tile()
        few = problem.group == 1 and problem.n_queries <= _HELD_ROWS and problem.instances >= _HELD_HEADS
        if free and fits and few and not self.dq_leaves:
            self.dq_tiles = self.keys.counts["row_tiles"]
            self.keys = self._key_tile()
        elif problem.bias is None and not problem.learned and not (masked and (sloped or problem.dropout)):
            self.parts = count_parts(problem, self.keys.counts, self.keys.block_n, self._moved, multiprocessors)
            self.slices = max(self.parts // problem.group, 1)
            self.keys = self._key_tile()
        elsewhere = not (self.fused or self.owns_keys)
        self.kept = slabs(problem, self.keys.counts, self.parts, multiprocessors) if elsewhere else []
        self.rows = self._product_tile() if self.kept else self._row_tile()

    def _counts(self, tile: tuple[int, int], size: int, heads: int, least: int = 1) -> dict[str, int]:
        """Return the numbers of tiles, and how many heads are worked on side by side.

        Where the order of the tiles matters, what they read, `size` bytes a head, shares the L2 cache, but of at least
        `least` heads, and of as many to the end; where key tiles take turns, the more heads, the fewer of one head wait
        for each other.
        """
        problem, together = self.problem, 1
        if problem.masks or problem.band is not None:
            together = max(sharing_cache(size), least)
            if least > 1:
                together = cdiv(heads, max(heads // together, 1))
        if self.bias.batches_first:
            together = math.prod(problem.batch)
        if problem.deterministic and self.fused:
            together = max(together, _CAUSAL_TURNS if not problem.masks and problem.band is not None else _TURNS)
        if self.dq_tiles:
            together = 1
        return {**tile_counts(problem, tile), "section": min(together, heads)}

    def _sees_one_tile(self) -> bool:
        """Whether there is one key tile, of which each row sees something."""
        problem, rows = self.problem, visible_rows(self.problem, self.keys.block_n)
        known = problem.band is None or not (problem.placed or problem.runs)
        return known and len(rows) == 1 and rows[0] == problem.n_queries

    @property
    def _moved(self) -> int:
        """Bytes of a row of q, of do, and of dq where it is added up."""
        return row_bytes(self.problem) + 4 * self.fused * self.problem.head_dim

    def _key_tile(self) -> Tile:
        """Return the tile of sm90/bwd.cu; shared memory as kernels/sm90/bwd_layout.cuh lays it out."""
        problem, (slabs, slabs_v), one = self.problem, self.slabs, self.fused
        one = one or self.owns_keys
        block_m, block_n = 64, 128 if one else 64
        # Registers are short with slopes, and with dropout beside what takes some, too.
        beside = problem.masks == ("block",) or problem.bias is not None or problem.score is not None
        crowded = self.sloped or (problem.dropout and beside)
        if one and max(slabs, slabs_v) == 1 and not crowded:
            block_m = _TALL
        rows = block_m * ((slabs + slabs_v) * ROW_BYTES + 4)
        rows += _DELTA_OPERAND if self.split_delta else 4 * block_m
        draws = problem.dropout > 0
        if one:
            keys = (2 * slabs + slabs_v) * block_n * ROW_BYTES
            width = _NARROW if block_m == _TALL and self.head_dim <= _NARROW else SLAB_COLUMNS * slabs
            # dq on its way, or held; and dS, where dk and dv are on their way.
            stages = 1 if self.dq_tiles and width > _NARROW else 2
            sums = block_m * (4 * width * (stages - 1 + self.dq_tiles) + stages * _WARPGROUPS * ROW_BYTES)
            if self.owns_keys:
                sums = 2 * 4 * 32 * block_m  # scores of far rows
            barriers = 6
        else:
            keys = 2 * max(slabs, slabs_v) * block_n * ROW_BYTES
            sums = 2 * 4 * 64 * block_m  # P
            barriers = 4
        tiles = keys + _STAGES * rows + sums + draws * block_m * block_n // 8
        counting = (block_m // 8 + 3) * 32
        if self.split_bias or self.split_score is not None:
            by_row = self.split_score is not None and self.split_score.depends & I and not problem.runs
            tiles += (counting if by_row else HALVES_BYTES) * (not self.split_delta)
            tiles += KEY_BIAS_BYTES * block_n * (max(slabs, slabs_v) == 1 and not by_row)
        tiles += counting * (self.bias.gradient >= Dbias.WEIGHTED and not self.split_delta)
        # What the warpgroups tell each other: work, steps and draws of each stage, mail, walk, heads, places of dq.
        walk = 48 + 16 * bool({"boolean", "function"} & {*problem.masks})
        told = 16 * (3 if one else 2) + _STAGES * 16 * (1 + draws) + 32 + walk + 24 + 40
        sums = self.bias.gradient == Dbias.DIAGONALS
        size = pad(tiles + 8 * (barriers + 8 + (4 + 3 * draws + sums) * _STAGES), 16) + told
        size = pad(size, _DELTA_OPERAND) if self.split_delta else size
        heads, rows = problem.instances // problem.group * self.parts, problem.n_queries * problem.group // self.parts
        differ = problem.group > 1 and problem.band is not None
        least = side_by_side(problem.n_keys, block_n, self._multiprocessors) if differ else 1
        if self.parts > _FEW_PARTS:
            least = max(least // 2, 1)  # what ends last is shorter, and the cache counts
        counts = self._counts((block_m, block_n), max(rows, 1) * self._moved, heads, least)
        return Tile(block_m, block_n, size, counts)

    def _product_tile(self) -> Tile:
        """Return the tile of sm90/bwd_dq.cu, which lays out its shared memory."""
        problem, slabs = self.problem, self.slabs[0]
        staged = _WARPGROUPS * 2 * BLOCK * ROW_BYTES
        steps = STAGES * (_WARPGROUPS + slabs) * BLOCK * ROW_BYTES
        size = pad(steps + staged + 8 * (2 + 2 * STAGES), 16) + 16
        counts = self._counts((_TALL, BLOCK), problem.n_keys * row_bytes(problem), problem.instances)
        return Tile(_TALL, BLOCK, size, counts)

    def _row_tile(self) -> Tile:
        """Return the tile of sm90/bwd_rows.cu; shared memory as kernels/sm90/bwd_rows_layout.cuh lays it out."""
        problem, (slabs, slabs_v) = self.problem, self.slabs
        wide = max(slabs, slabs_v) > 2
        masked = bool(problem.masks) and wide
        block_m, block_n = 128, 32 if masked else 64
        v_stages = 1 if wide and not masked else 2
        rows = block_m * ((slabs + slabs_v) * ROW_BYTES + 2 * 4)
        keys = (_STAGES * slabs + v_stages * slabs_v) * block_n * ROW_BYTES
        barriers = 8 * (2 + 2 * _STAGES + 2 * v_stages + 2)
        place = 40 + 8 * ("function" in problem.masks)
        size = pad(rows + keys + barriers, 16) + 16 + place + 24 + 4 * _STAGES  # work, place, mail, steps
        counts = self._counts((block_m, block_n), problem.n_keys * row_bytes(problem), problem.instances)
        return Tile(block_m, block_n, size, counts, v_stages)

    @functools.cached_property
    def tail(self) -> Tail | None:
        """The key tiles that several blocks share, since fewer would be left than there are multiprocessors.

        Only of tiles of 64 rows: where registers are short, what it takes costs the loop as much as it gains.
        """
        problem = self.problem
        if not self._alone or problem.band is not None or self.keys.block_m == _TALL:
            return None
        return cut_tail(problem, self.keys.counts, self._multiprocessors)

    @property
    def _alone(self) -> bool:
        """Whether nothing stands beside the scores of one head for each of k, and dq is added up in memory."""
        problem = self.problem
        one = problem.group == 1 and self.parts == 1 and self.adds_dq
        return one and forward.leaves_scores(problem) and not (problem.deterministic or self._shares_q)

    @property
    def adds_dq(self) -> bool:
        """Whether dq is added up in memory."""
        return self.fused and not (self.dq_tiles or self.dq_leaves)

    def scratch(self, dq_instances: int) -> dict[str, Array]:
        """Return the scratch memory by name; `dq_instances` counts the different (N, d) matrices of q."""
        found, row_tiles = row_arrays(self.problem), self.keys.counts["row_tiles"]
        if self.split_delta:
            found["delta"] = Array((*found["delta"].shape, _DELTA_PARTS), np.dtype(np.uint16))
        int32 = found["counters"].dtype
        found["ticket"] = Array((2,), int32)
        if self.adds_dq:
            if self.problem.deterministic:
                found["turns"] = Array((dq_instances, row_tiles), int32)
            rows = row_tiles * self.keys.block_m
            found["dq_acc"] = Array((dq_instances, rows, self.columns), self.problem.stat_dtype)
        if self.parts > 1:
            problem = self.problem
            parts = problem.instances // problem.group * self.stored_parts, problem.n_keys
            found["dk_acc"] = Array((*parts, problem.head_dim), problem.stat_dtype)
            found["dv_acc"] = Array((*parts, problem.head_dim_v), problem.stat_dtype)
        if self.kept:
            found |= arrays(self.problem, self.kept, row_tiles, self.rows.counts["row_tiles"] * _TALL)
        if self.tail:
            keys = self.tail.tiles * self.tail.slices, self.keys.block_n
            found["dk_acc"] = Array((*keys, self.head_dim), self.problem.stat_dtype)
            found["dv_acc"] = Array((*keys, self.head_dim_v), self.problem.stat_dtype)
        return found

    @property
    def stored_parts(self) -> int:
        """Sums of dk and dv for each key tile: of all blocks that share it, or of each."""
        return self.parts if self.problem.deterministic else 1

    @property
    def part_blocks(self) -> int:
        """Blocks that round these sums, or add them up first."""
        problem = self.problem
        units = problem.instances // problem.group * problem.n_keys * row_bytes(problem) // _UNIT_BYTES
        return cdiv(units, 32 * _CONVERT_WARPS) if self.parts > 1 else 0

    @property
    def part_fields(self) -> dict[str, int]:
        """Fields of ``Params`` of the kernel of keys alone, to which a part is a head of k and v."""
        problem, parts, slices = self.problem, self.parts, self.slices
        if parts == 1:
            return self.tail_fields
        group = problem.group * slices // parts
        return {"kv_heads": problem.kv_heads * parts, "group": group, "splits": parts, "split_tiles": slices}

    @property
    def tail_fields(self) -> dict[str, int]:
        """The same of the kernel that adds up what the blocks that share the last key tiles have."""
        return {"shared_tile": self.tail.first, "split_tiles": self.tail.slices} if self.tail else {}

    @property
    def part_constants(self) -> Constants:
        """What that kernel is told besides: parts leave unrounded."""
        return {"grad": DTYPES[self.problem.stat_dtype].cuda} if self.parts > 1 else {}

    @property
    def constants(self) -> Constants:
        """The prologue of kernels/sm90/bwd.cu, and of the others but for their tiles."""
        return {
            **problem_constants(self.problem),
            **forward.scaling(self.problem, self.split_bias, self.split_score),
            **{name: getattr(self, name) for name in ("head_dim", "head_dim_v", "split_delta")},
            "sloped": self.sloped,
            "slopes_of_heads": self.slopes_of_heads,
            "batches_first": self.bias.batches_first,
            "bias_keys": self.bias.keys,
            "bias_tiles": self.bias.tiles,
            "dbias": int(self.bias.gradient),
            "block_m": self.keys.block_m,
            "block_n": self.keys.block_n,
            "stages": _STAGES,
            "v_stages": self.rows.v_stages,
            "atomic_dq": self.adds_dq,
            "dq_tiles": self.dq_tiles,
            "in_parts": self.parts > 1,
            "tail": self.tail is not None,
            "keeps_ds": bool(self.kept),
            "deterministic": self.problem.deterministic,
        }

    @property
    def notes(self) -> list[str]:
        """How dq is made, and who makes dk and dv if that is not one block for each key tile."""
        order = "a fixed order" if self.problem.deterministic else "memory, in no fixed order"
        shared = f"{self.parts} blocks share a key tile; their parts of dk and dv are added up in {order}"
        return [self.note, *[shared] * (self.parts > 1)]

    @property
    def note(self) -> str:
        """How dq is made."""
        if self.dq_tiles:
            return "a block sums dq of a head over all keys, in a fixed order"
        if self.dq_leaves:
            return "rows see one key tile, which makes all of their dq"
        if self.kept:
            slab = self.kept[0]
            kept = f"kept in slabs of {slab.tiles} key tiles of {slab.heads} heads"
            return f"dq by a product with dS, {kept}, in a fixed order"
        if not self.fused:
            return "dq by a second pass over the scores, in a fixed order"
        if self.problem.deterministic:
            return "key tiles take turns to add to dq, in a fixed order"
        return "dq is added up in memory in no fixed order; deterministic=True makes it bitwise repeatable"


class Backward(MappedCall):
    """Three launches, of which the last makes dq, from its sums, or anew from the scores; and what dbias needs."""

    @functools.cached_property
    def cut(self) -> Cut:
        """How the call is cut."""
        form = bias_form(self.problem, self.operands.get("bias"))
        return Cut(self.problem, form, "q" in broadcast_heads(self), self.device.multiprocessors)

    def unsupported_reason(self) -> str | None:
        problem = self.problem
        against = unsupported_reason(problem, self.device)
        if against is None and problem.kernel is None and max(problem.n_queries, problem.n_keys) < self._shortest:
            against = "rows and keys are fewer than its tiles have"
        return against or score_gradients.unsupported_reason(problem) or self._sum_reason() or self.layout_reason()

    @property
    def _shortest(self) -> int:
        """The least number of rows or keys for which the portable kernels, of smaller tiles, are not faster."""
        problem = self.problem
        many = problem.instances >= _SHORT_HEADS and max(problem.head_dim, problem.head_dim_v) <= SLAB_COLUMNS
        ordered = problem.deterministic and self.cut.adds_dq
        if ordered or not (many and forward.leaves_scores(problem)):
            return _SHORT
        return _SHORTEST_ORDERED if problem.deterministic else _SHORTEST

    def _sum_reason(self) -> str | None:
        problem = self.problem
        for name in broadcast_heads(self):
            if name != "q" or problem.deterministic or not self.cut.fused or self.cut.slopes_of_heads:
                return f"the gradient of {name} is a sum over axes along which it was broadcast"
        return None

    def prepare(self) -> Plan:
        problem, cut = self.problem, self.cut
        keys, constants = cut.keys, cut.constants
        dq_instances = math.prod(self.operands["q"].shape[:-2])
        dbias = BiasGradient(self, cut.bias.gradient) if "bias" in self.operands else None
        scratch, counts = cut.scratch(dq_instances), keys.counts
        if dbias is not None:
            scratch, counts = scratch | dbias.scratch, counts | dbias.fields
        main = Main(keys[:2], 4 * _WARPGROUPS) if cut.weighted else None
        elsewhere = [found.weight.slot for found in cut.arrays.values()]
        by_score = PairScoreGradients(problem, main, elsewhere) if problem.learned else None
        counts = counts | (by_score.main_fields if by_score and main else {})
        arrays = [ArrayPass(self, *each) for each in cut.arrays.items()]
        for passed in (by_score, *arrays):
            scratch |= passed.scratch if passed else {}
        self.begin(scratch)
        add_preprocess(self, constants, cut.columns, counts)
        warps = 4 * (_WARPGROUPS + 1)
        key_warps = warps + 4 * bool(problem.dropout and cut.fused)  # more of them draw
        work = (1 if cut.dq_tiles else keys.counts["key_tiles"]) * problem.instances // problem.group
        path = "sm90/bwd_bias.cu" if cut.bias.tiles else "sm90/bwd.cu"
        if by_score and by_score.main_constants:
            path, constants = "sm90/bwd_weights.cu", constants | by_score.main_constants
        of_keys, fields = constants | cut.part_constants, {**counts, **cut.part_fields}
        launched = path, "attention_backward", of_keys, work * cut.parts, key_warps, fields, keys[:2]
        beside = {}
        if cut.bias.tiles:  # a map that is not needed takes the place of dbias's, of memory that has an address
            beside = {"bias": "bias", **({"dbias": "dbias"} if cut.bias.gradient == Dbias.STORED else {"stat": "q"})}
        self._add_main(launched, beside, constants)
        whole = constants | forward.scaling(problem)  # passes make whole scores
        if dbias is not None:
            dbias.finish(whole)
        for each in arrays:
            each.add(whole)
        last = by_score.add(self, whole, 0, self._room(dq_instances)) if by_score else None
        self._finish(constants, dq_instances, last)
        notes = [*cut.notes, *(by_score.notes if by_score else [])]
        return self.planned(path, keys[:2], key_warps, keys.shared_bytes, of_keys, *notes)

    def _room(self, dq_instances: int) -> int:
        """Return how many blocks beside those that convert dq all multiprocessors have at once, three each."""
        cut, most = self.cut, 3 * self.device.multiprocessors
        return most - cut.keys.counts["row_tiles"] * dq_instances if cut.adds_dq else 0

    def _finish(self, constants: Constants, dq_instances: int, last: Gathering | None) -> None:
        """Append what makes dq of its sums, or anew, and rounds dk and dv of key tiles that several blocks shared.

        `last` is a sum that is made beside.
        """
        cut = self.cut
        counts, stored = cut.keys.counts, {"splits": cut.stored_parts}
        if cut.adds_dq:
            shared = cut.tail.tiles * sum(cut.slabs) if cut.tail else 0
            grid = (counts["row_tiles"] * dq_instances + shared + cut.part_blocks,)
            convert = "sm90/bwd_convert_heads.cu" if cut.slopes_of_heads else "sm90/bwd_convert.cu"
            fields = counts | cut.tail_fields | stored
            own, beside = constants, {}
            if last is not None:
                convert, grid = "sm90/bwd_convert_sums.cu", (grid[0] + last.blocks,)
                own = {**last.constants, **constants, "score": True}  # also of one that changes no score
                fields, beside = last.fields | fields, {"own": last.own, "shared_bytes": last.shared_bytes}
            self.add(convert, "backward_convert", own, grid, _CONVERT_WARPS, fields, **beside)
        elif cut.part_blocks:
            grid = (cut.part_blocks,)
            self.add("sm90/bwd_add_parts.cu", "backward_add_parts", constants, grid, _CONVERT_WARPS, stored)
        if not (cut.fused or cut.kept):
            self._add_dq(constants)

    def _add_main(self, launched: tuple, beside: Mapping[str, str], constants: Constants) -> None:
        """Append the main kernel; where it keeps dS, for some heads after the others, each time with that of dq."""
        *kernel, work, warps, fields, tile = launched
        problem, cut = self.problem, self.cut
        written = cut.keys.shared_bytes, ("dk", "dv"), beside
        if not cut.kept:
            self.add_mapped(*launched, *written)
        for kept in cut.kept:
            own = kept.fields(fields, problem.group, problem.instances, cut.parts)
            share = work * kept.heads // problem.instances * kept.tiles // cut.keys.counts["key_tiles"]
            self.add_mapped(*kernel, share, warps, own, tile, *written)
            self._add_dq(constants, kept)

    def _add_dq(self, constants: Constants, kept: Kept | None = None) -> None:
        """Append the launch that makes dq, of some heads from what was kept, or of all from the scores."""
        rows, heads, counts = self.cut.rows, self.problem.instances, self.cut.rows.counts
        constants, name = {**constants, "block_m": rows.block_m, "block_n": rows.block_n}, "rows"
        if kept is not None:
            constants, name, heads = constants | {"stages": STAGES}, "dq", kept.heads
            counts = kept.fields(counts, 1, self.problem.instances)
        kernel = f"sm90/bwd_{name}.cu", f"backward_{name}", constants, rows.counts["row_tiles"] * heads
        self.add_mapped(*kernel, 4 * (_WARPGROUPS + 1), counts, rows[:2], rows.shared_bytes, ("dq",), early=True)
