"""Gradients of the arrays that a score function reads: passes over the scores, then sums by element.

A pass (kernels/sm80/bwd_score.cu) makes dS once more and adds what belongs together whatever the array: what a head, a
row, a key or a diagonal shares, or what reads the same element of a small slice.  A gathering
(kernels/attn/score_gather.cuh) adds these sums to the elements that the function read with them, in a fixed order.
Where an index can only be told element by element, the pass adds to memory.
"""

import math
from collections.abc import Container
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, tile_counts
from cuattn.cuda.call import Call, Own
from cuattn.cuda.constants import Constants
from cuattn.cuda.learned import Learned, learned
from cuattn.cuda.sm80.tiles import BackwardTile
from cuattn.io_model.sizes import cdiv
from cuattn.problem import DTYPES, Problem
from cuattn.tracing import B, H, I, J, S
from cuattn.tracing.graph import constant

SCORE_SUMS = np.dtype(
    [
        *((name, np.uint64) for name in ("sums", "elements", "result")),
        *((name, np.int64) for name in ("first", "reach", "size", "heads_at", "slices_at")),
        *((name, np.int32) for name in ("owners", "lines", "slice", "histogram", "owned")),
    ],
    align=True,
)
"""What the kernels take beside ``Params``: ``ScoreSums`` (kernels/attn/score_sums.cuh)."""

_HEAD, _LINE, _SLICE, _ELEMENT = range(1, 5)  # kernels/attn/score_sums.cuh: what scores share, in three bits of
_BITS, _MOST = 3, 10  # an int for so many weights,
_KEYS, _ROWS, _DIAGONALS, HEADS = range(4)  # and what blocks walk over
_WALKS = {"key": _KEYS, "row": _ROWS, "diagonal": _DIAGONALS}
_TOGETHER = 4  # weights whose sums a pass holds in registers
_SHARERS = 4  # threads that may share their sums of a slice for another block beside theirs
_STATIC_BYTES = 1024  # of shared memory, which a pass declares itself
_GATHER_WARPS = 8
_UNIT = 4  # numbers that kernels zero at a time
_MAIN_KEYS = 128  # of a tile of the main kernel for compute capability 9.0,
_MOST_SUMS = 1 << 27  # each of which has sums of diagonals of its own in a fixed order, not more than about so many
_ZERO, _ONE = constant(0.0), constant(1.0)
_OWNED = 1024  # elements that a block of a gathering owns at most


class Pass(NamedTuple):
    """A launch of bwd_score.cu: its walk, and the numbers of the weights by what their scores share."""

    walk: int
    lines: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    slices: tuple[int, ...] = ()  # at most one
    elements: tuple[int, ...] = ()  # of one array

    @property
    def shared(self) -> int:
        """``cfg::shared``."""
        kinds = ((_LINE, self.lines), (_HEAD, self.heads), (_SLICE, self.slices), (_ELEMENT, self.elements))
        return sum(kind << _BITS * number for kind, numbers in kinds for number in numbers)


class Gathering(NamedTuple):
    """A launch that sums what an array has, or what another launch does beside its own.

    Attributes
    ----------
    constants, fields, own
        See :meth:`cuattn.cuda.call.Call.add`.
    blocks : int
    shared_bytes : int
        Of a block.
    """

    constants: Constants
    fields: dict[str, int]
    own: Own
    blocks: int
    shared_bytes: int

    def add(self, call: Call) -> None:
        """Append the launch."""
        launched = "util/score_sums.cu", "score_sums", self.constants, (self.blocks,), _GATHER_WARPS, self.fields
        call.add(*launched, own=self.own, shared_bytes=self.shared_bytes)


class Sums(NamedTuple):
    """Where a gathering finds the sums of a weight: in those of a pass, from the first on."""

    name: str
    walk: int
    kind: int
    first: int
    lines: int
    owners: int


def _is_own(found: Learned) -> bool:
    """Return whether all scores of a head read elements of their own."""
    return {I, J} <= {index.depends for index in found.weight.indices if index.op == "variable"}


def unsupported_reason(problem: Problem) -> str | None:
    """Say which gradients of arrays no kernel makes, or return None."""
    found = learned(problem)
    if len(found) > _MOST:
        return f"score reads arrays of floats in {len(found)} places; expected at most {_MOST} in a backward on a GPU"
    for each in found if problem.deterministic else ():
        if each.place == "element" and not _is_own(each):
            indices = ", ".join(map(str, each.weight.indices))
            return (
                f"deterministic is True and score reads an array of floats at [{indices}], whose gradient is added up "
                "in no fixed order; expected indices made of b, h, i, j and i - j (no parts in several pieces), an "
                "array with fewer elements, or deterministic=False"
            )
    return None


class Main(NamedTuple):
    """What the main kernel for compute capability 9.0 sums, so that no pass has to.

    Attributes
    ----------
    tile : tuple of int
        Its rows and keys.
    warps : int
        Each of which leaves a sum of a head for a key tile.
    """

    tile: tuple[int, int]
    warps: int


def on_diagonals(problem: Problem) -> bool:
    """Return whether some index depends on rows and keys by their difference alone."""
    return any(each.place == "diagonal" for each in learned(problem))


def by_main(problem: Problem) -> bool:
    """Return whether few sums over keys, heads or, of dS alone, diagonals are all that the gradients need."""
    found = learned(problem)
    sizes = 4 * problem.instances * (problem.n_queries + problem.n_keys) * cdiv(problem.n_keys, _MAIN_KEYS)
    summed = not problem.dropout and (not problem.deterministic or sizes <= _MOST_SUMS)
    diagonals = [each for each in found if each.place == "diagonal" and each.weight.weight is _ONE and summed]
    lines = [each for each in found if each.place in ("key", "head") and not _is_curved(each, problem)]
    return len(lines) <= _TOGETHER and 0 < len(lines) + len(diagonals) == len(found)


def _is_curved(found: Learned, problem: Problem) -> bool:
    """Return whether a weight depends on the score in a way that dK of one head does not tell."""
    return bool(found.weight.weight.depends & S) and (found.line is None or problem.group > 1)


class ScoreGradients:
    """The launches that make the gradients of a score function's arrays: a base class for other passes.

    Parameters
    ----------
    problem : Problem
    tile : BackwardTile
        Of the passes.
    main : Main, optional
        The main kernel takes the place of all passes (:func:`by_main`).
    elsewhere : container of int, optional
        Slots of arrays whose gradients something else makes.

    Attributes
    ----------
    scratch : dict of str to Array
        What they need beside rows' statistics.
    notes : list of str
        What is worth knowing of them.
    """

    together: ClassVar[dict[str, int]] = dict.fromkeys(_WALKS, _TOGETHER)
    """Weights whose sums over lines a pass holds in registers."""

    def __init__(
        self, problem: Problem, tile: BackwardTile, main: Main | None = None, elsewhere: Container[int] = ()
    ) -> None:
        self._slots = [slot for slot in problem.learned if slot not in elsewhere]
        self.problem, self.tile, self.weights, self._main = problem, tile, learned(problem), main
        self._counts = tile_counts(problem, main.tile if main else tile)
        self.passes = self._passes()
        self._sizes = {slot: math.prod(problem.score.facts.arrays[slot].shape) for slot in self._slots}
        steps = {
            slot: len(numbers) > 1 or any(self.weights[number].place == "element" for number in numbers)
            for slot, numbers in ((slot, self._of_slot(slot)) for slot in self._sizes)
        }
        stat = problem.stat_dtype
        self.scratch = {f"score_elements{slot}": Array((self._sizes[slot],), stat) for slot in steps if steps[slot]}
        for index, made in enumerate(self.passes):
            if size := self._starts(made)[-1]:
                self.scratch[self._name(index)] = Array((self._base(made) + size,), stat)

    def _name(self, index: int) -> str:
        """Return the name of a pass's sums."""
        return "dbias_acc" if self._main else f"score_sums{index}"

    def _of_slot(self, slot: int) -> list[int]:
        return [number for number, found in enumerate(self.weights) if found.weight.slot == slot]

    def _passes(self) -> list[Pass]:
        """Return the passes: of each walk that weights ask for, which others go along with.

        The main kernel's are one along diagonals, whose sums serve all, and one over keys.
        """
        numbers: dict[str, list[int]] = {}
        for number, found in enumerate(self.weights):
            if found.weight.slot in self._slots:
                numbers.setdefault(found.place, []).append(number)
        if self._main:
            lines = {place: tuple(several) for place, several in numbers.items()}
            along = [Pass(_DIAGONALS, lines["diagonal"])] if "diagonal" in lines else []
            over = [Pass(_KEYS, lines.pop("key", ()), lines.pop("head", ()))] if lines.keys() - {"diagonal"} else []
            return along + over
        elements, slices, heads = (numbers.pop(place, []) for place in ("element", "slice", "head"))
        made = [
            Pass(_WALKS[place], lines=tuple(several[first : first + self.together[place]]))
            for place, several in numbers.items()
            for first in range(0, len(several), self.together[place])
        ]
        for number in heads:
            if not made or len(made[-1].lines) + len(made[-1].heads) == _TOGETHER:
                made.append(Pass(_KEYS))
            made[-1] = made[-1]._replace(heads=(*made[-1].heads, number))
        _go_along(made, "slices", [(number,) for number in slices])
        if self.problem.deterministic:
            return made + [Pass(HEADS, elements=(number,)) for number in elements]
        slots = sorted({self.weights[number].weight.slot for number in elements})
        _go_along(made, "elements", [tuple(n for n in elements if self.weights[n].weight.slot == x) for x in slots])
        return made

    @property
    def main_constants(self) -> Constants:
        """What the main kernel is told of sums over keys and heads; nothing if there are none."""
        over = next((made for made in self.passes if made.walk == _KEYS), None)
        if not self._main or over is None:
            return {}
        bits = dict.fromkeys(("rests", "climbs", "tilts", "apart"), 0)
        for number in (*over.lines, *over.heads):
            line, bit = self.weights[number].line, 1 << number
            bits["apart"] |= bit if line is None else 0
            if line is not None:
                bits["rests"] |= bit if line.rests else 0
                bits["climbs"] |= bit if line.step is not _ZERO else 0
                bits["tilts"] |= bit if line.tilt is not _ZERO else 0
        return {"weights": len(self.weights), "shared": over.shared, **bits}

    @property
    def main_fields(self) -> dict[str, Any]:
        """Fields of ``Params`` for the main kernel: the sums of diagonals of a head, and how many heads have them."""
        along = any(made.walk == _DIAGONALS for made in self.passes)
        if not along:
            return {}
        lines, tiles = self._lines(_DIAGONALS)[0], self._sharers(_DIAGONALS)
        own = lines if tiles > 1 else 0
        return {"dbias.head": lines * tiles, "dbias.row": own, "bias_instances": self.problem.instances}

    @property
    def notes(self) -> list[str]:
        """What is worth knowing of the plan."""
        if not self.passes or self._main:
            return []
        in_order = self.problem.deterministic or not any(made.elements for made in self.passes)
        order = "in a fixed order" if in_order else "some of them added up in memory in no fixed order"
        return [f"gradients of score's arrays by {len(self.passes)} further pass(es) over the scores, {order}"]

    def _lines(self, walk: int) -> tuple[int, int]:
        """Return the lines of a head that a pass sums, and its blocks to a head."""
        rows, keys = self._counts.values()
        block_m, block_n = self._main.tile if self._main else self.tile[:2]
        if self._main and walk == _KEYS:
            return self.problem.n_keys, keys * self._main.warps
        if walk == HEADS:
            return 0, rows * keys
        if walk != _DIAGONALS:
            return (self.problem.n_keys, keys) if walk == _KEYS else (self.problem.n_queries, rows)
        owners = ((rows - 1) * block_m + (keys - 1) * block_n) // math.gcd(block_m, block_n) + 1
        return owners * (block_m + block_n), owners

    def _sharers(self, walk: int) -> int:
        """Return how many sums a line of a head has: in a fixed order each key tile has its own of diagonals."""
        own = self._main and walk == _DIAGONALS and self.problem.deterministic
        return self._counts["key_tiles"] if own else 1

    def _slice(self, made: Pass) -> int:
        return sum(self.weights[number].length for number in made.slices)

    def _starts(self, made: Pass) -> tuple[int, int, int]:
        """Return where in a pass's sums those of heads and of slices begin, and their number."""
        (lines, owners), instances = self._lines(made.walk), self.problem.instances
        heads_at = self._arrays(made) * instances * lines * self._sharers(made.walk)
        slices_at = heads_at + len(made.heads) * instances * owners
        return heads_at, slices_at, slices_at + instances * owners * self._slice(made)

    def _arrays(self, made: Pass) -> int:
        """Return how many arrays of lines a pass makes; the main kernel makes one of diagonals."""
        return 1 if self._main and made.walk == _DIAGONALS else len(made.lines)

    def _base(self, made: Pass) -> int:
        """Return where the sums of a pass begin: the main kernel's lie in one array, an odd number before diagonals."""
        if made.walk == _DIAGONALS:
            return int(self._main is not None)
        others = [other for other in self.passes if self._main and other.walk == _DIAGONALS]
        return sum(self._starts(other)[-1] + _UNIT for other in others)

    def add(self, call: Call, constants: Constants, shared_bytes: int, room: int = 0) -> Gathering | None:
        """Append the launches, behind those that make rows' statistics.

        Parameters
        ----------
        call : Call
            Begun, with `scratch`.
        constants : dict
            Of the portable backward, see :meth:`cuattn.cuda.sm80.backward.Cut.constants`.
        shared_bytes : int
            Of a block of a pass.
        room : int, optional
            Blocks that a launch behind them has room for.

        Returns
        -------
        Gathering or None
            The last launch, left to that one, which counts tiles of its own, if it has no more blocks.
        """
        count = max(len(self.weights), 1)
        constants = {**constants, **self.tile._asdict(), "atomic_dq": False, "score": True, "weights": count}
        for slot in {self.weights[number].weight.slot for made in self.passes for number in made.elements}:
            if self._sizes[slot]:
                self._gathering(call, constants, slot, to=f"score_elements{slot}").add(call)  # zeros
        for index, made in enumerate(() if self._main else self.passes):
            self._pass(call, constants, index, made, shared_bytes)
        *before, last = [each for slot in self._sizes for each in self._gatherings(call, constants, slot)] or [None]
        for each in before:
            each.add(call)
        counts = self._main is None and last is not None and last.constants["walk"] == _DIAGONALS
        if last is None or (last.blocks <= room and not counts):
            return last
        last.add(call)
        return None

    def _blocks(self, made: Pass) -> int:
        """Return the blocks of a pass."""
        return self._lines(made.walk)[1] * (1 if made.walk == HEADS else self.problem.instances)

    def _fields(self, made: Pass) -> dict[str, int]:
        """Return what a pass is told."""
        (lines, owners), (heads_at, slices_at, _) = self._lines(made.walk), self._starts(made)
        places = {"heads_at": heads_at, "slices_at": slices_at, "owners": owners, "lines": lines}
        return {**self._counts, **places, "slice": self._slice(made)}

    def _slots_of(self, index: int, made: Pass) -> dict[str, str]:
        """Return which arrays a pass writes."""
        slots = {"sums": self._name(index)} if self._starts(made)[-1] else {}
        if made.elements:
            slots["elements"] = f"score_elements{self.weights[made.elements[0]].weight.slot}"
        return slots

    def _pass(self, call: Call, constants: Constants, index: int, made: Pass, shared_bytes: int) -> None:
        """Append a pass."""
        length, histogram = self._slice(made), cdiv(shared_bytes, 16) * 16
        sharers, threads, element = 1, 32 * self.tile.warps, self.problem.stat_dtype.itemsize
        while sharers < 32:
            blocks = 2 if sharers < _SHARERS else 1  # to a multiprocessor
            if length * threads // sharers * element <= call.device.shared_bytes // blocks - _STATIC_BYTES - histogram:
                break
            sharers *= 2
        own = {**constants, "walk": made.walk, "shared": made.shared, "sharers": sharers}
        values = {**self._fields(made), "histogram": histogram}
        call.add(
            "sm80/bwd_score.cu", "backward_score", own, (self._blocks(made),), self.tile.warps, values, self.tile[:2],
            own=Own(SCORE_SUMS, self._slots_of(index, made)),
            shared_bytes=histogram + length * threads // sharers * element,
        )  # fmt: skip

    def _gatherings(self, call: Call, constants: Constants, slot: int) -> list[Gathering]:
        """Return what adds up what belongs to one array, weight by weight."""
        if not self._sizes[slot]:
            return []
        all_of_slot = self._of_slot(slot)
        numbers = [number for number in all_of_slot if self.weights[number].place != "element"]
        some = len(numbers) < len(all_of_slot)  # added up element by element
        found = [
            self._gathering(call, constants, slot, number, some or index > 0, to=f"score_elements{slot}")
            for index, number in enumerate(numbers[:-1])
        ]
        last = numbers[-1] if numbers else None
        return [*found, self._gathering(call, constants, slot, last, some or bool(found))]

    def _sums(self, number: int) -> Sums:
        """Return where the sums of a weight are."""
        index, made = next((n, x) for n, x in enumerate(self.passes) if number in (*x.lines, *x.heads, *x.slices))
        (lines, owners), (heads_at, slices_at, _) = self._lines(made.walk), self._starts(made)
        of_pass, instances, base = (self._name(index), made.walk), self.problem.instances, self._base(made)
        if number in made.lines:
            array = made.lines.index(number) % self._arrays(made)
            return Sums(*of_pass, _LINE, base + array * instances * lines, lines, self._sharers(made.walk))
        if number in made.heads:
            return Sums(*of_pass, _HEAD, base + heads_at + made.heads.index(number) * instances * owners, owners, 1)
        return Sums(*of_pass, _SLICE, slices_at, self._slice(made), owners)

    def _gathering(
        self, call: Call, constants: Constants, slot: int, number: int | None = None, adds: bool = False, to: str = ""
    ) -> Gathering:
        """Return what sums what a weight has, if there is one, with what there `adds` to it already."""
        size, result = self._sizes[slot], to or f"dscore{slot}"
        out = (self.scratch if to else call.arrays)[result].dtype
        own: dict[str, Any] = {
            "walk": 0, "gathers": 0, "weight": 0, "by_batch": False, "by_head": False, "alike": False, "adds": adds,
            "rounds": not to, "result": DTYPES[out].cuda, "warps": _GATHER_WARPS,
        }  # fmt: skip
        owned = max(min(cdiv(size, 2 * call.device.multiprocessors), _OWNED), 1)
        slots, values = {"result": result}, {**self._counts, "size": size, "owned": owned}
        if adds:
            slots["elements"] = f"score_elements{slot}"
        if number is not None:
            found, sums = self.weights[number], self._sums(number)
            depends = found.offset.depends
            own |= {"walk": sums.walk, "gathers": sums.kind, "weight": number}
            if self._main:
                own |= dict(zip(("block_m", "block_n"), self._main.tile, strict=True))
            own |= {"by_batch": bool(depends & B), "by_head": bool(depends & H), "alike": found.alike}
            slots["sums"] = sums.name
            values |= {"first": sums.first, "lines": sums.lines, "owners": sums.owners, "reach": found.reach}
        shared_bytes = _GATHER_WARPS * owned * self.problem.stat_dtype.itemsize
        return Gathering({**constants, **own}, values, Own(SCORE_SUMS, slots), cdiv(size, owned), shared_bytes)


def _go_along(made: list[Pass], what: str, groups: list[tuple[int, ...]]) -> None:
    """Give each pass, or further ones, one group of weights."""
    for index, group in enumerate(groups):
        if index == len(made):
            made.append(Pass(_KEYS))
        made[index] = made[index]._replace(**{what: group})
