"""Gradients of the arrays that a score function reads: passes over the scores, then sums by element.

A pass (kernels/sm80/bwd_score.cu) makes dS once more and adds what belongs together whatever the array: what a head, a
row, a key or a diagonal shares.  A gathering (kernels/util/score_sums.cu) adds these sums to the elements that the
function read with them, in a fixed order.  Where an index can only be told element by element, the pass adds to memory.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, tile_counts
from cuattn.cuda.call import Call, Own
from cuattn.cuda.constants import Constants
from cuattn.cuda.functions import weights_of
from cuattn.cuda.sm80.tiles import BackwardTile
from cuattn.io_model.sizes import cdiv
from cuattn.problem import DTYPES, Problem
from cuattn.tracing import B, H, I, J, Weight

SCORE_SUMS = np.dtype(
    [
        *((name, np.uint64) for name in ("sums", "elements", "result")),
        *((name, np.int64) for name in ("first", "size")),
        *((name, np.int32) for name in ("owners", "lines", "owned")),
    ],
    align=True,
)
"""What the kernels take beside ``Params``: ``ScoreSums`` (kernels/attn/score_sums.cuh)."""

_HEAD, _LINE, _ELEMENT = 1, 2, 3  # kernels/attn/score_sums.cuh: which scores share an index,
_KEYS, _ROWS, _DIAGONALS, _HEADS = range(4)  # and what blocks walk over
_WALKS = {"key": _KEYS, "row": _ROWS, "diagonal": _DIAGONALS}
_TOGETHER = 4  # weights whose sums a pass holds in registers
_MOST = 15  # weights that a constant has two bits for
_GATHER_WARPS = 8
_OWNED = 1024  # elements that a block of a gathering owns at most


class Pass(NamedTuple):
    """A launch of bwd_score.cu: its walk, and the weights by what their scores share."""

    walk: int
    lines: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    elements: tuple[int, ...] = ()

    @property
    def shared(self) -> int:
        """Return ``cfg::shared``."""
        kinds = ((_LINE, self.lines), (_HEAD, self.heads), (_ELEMENT, self.elements))
        return sum(kind << 2 * number for kind, numbers in kinds for number in numbers)


def place_of(weight: Weight, problem: Problem) -> str:
    """Return which scores of a call read the same element: of parts that are made of pieces, no diagonals."""
    return "element" if problem.runs and weight.place == "diagonal" else weight.place


def is_own(weight: Weight) -> bool:
    """Return whether all scores of a head read elements of their own."""
    return {I, J} <= {index.depends for index in weight.indices if index.op == "variable"}


def unsupported_reason(problem: Problem) -> str | None:
    """Say which gradients of arrays no kernel makes, or return None."""
    found = weights_of(problem) if problem.score is not None else []
    if len(found) > _MOST:
        return f"score reads arrays of floats in {len(found)} places; expected at most {_MOST} in a backward on a GPU"
    if problem.deterministic:
        for weight in found:
            if place_of(weight, problem) == "element" and not is_own(weight):
                indices = ", ".join(map(str, weight.indices))
                return (
                    f"deterministic is True and score reads an array of floats at [{indices}], whose gradient is added "
                    "up in no fixed order; expected indices made of b, h, i, j and i - j (of a call that is no part in "
                    "several pieces), or deterministic=False"
                )
    return None


class ScoreGradients:
    """The launches that make the gradients of a score function's arrays.

    Parameters
    ----------
    problem : Problem
    tile : BackwardTile
        Of the passes.

    Attributes
    ----------
    scratch : dict of str to Array
        What they need beside rows' statistics.
    notes : list of str
        What is worth knowing of them.
    """

    def __init__(self, problem: Problem, tile: BackwardTile) -> None:
        self.problem, self.tile, self.weights = problem, tile, weights_of(problem)
        self._counts = tile_counts(problem, tile)
        self._places = [place_of(weight, problem) for weight in self.weights]
        self.passes = self._passes()
        self._sizes = {slot: math.prod(problem.score.facts.arrays[slot].shape) for slot in problem.score.learned}
        self.scratch = {
            f"score_elements{slot}": Array((size,), problem.stat_dtype)
            for slot, size in self._sizes.items()
            if self._takes_steps(slot)
        }
        for number, made in enumerate(self.passes):
            lines, owners = self._lines(made.walk)
            size = problem.instances * (len(made.lines) * lines + len(made.heads) * owners)
            if size:
                self.scratch[f"score_sums{number}"] = Array((size,), problem.stat_dtype)

    def _of_slot(self, slot: int) -> list[int]:
        return [number for number, weight in enumerate(self.weights) if weight.slot == slot]

    def _takes_steps(self, slot: int) -> bool:
        """Whether a gradient is made in several steps."""
        numbers = self._of_slot(slot)
        return len(numbers) > 1 or any(self._places[number] == "element" for number in numbers)

    def _passes(self) -> list[Pass]:
        """Return the passes: of each walk that weights ask for, which others go along with."""
        places = {place: [n for n, found in enumerate(self._places) if found == place] for place in self._places}
        elements, heads = places.pop("element", []), places.pop("head", [])
        made = [
            Pass(_WALKS[place], lines=tuple(numbers[first : first + _TOGETHER]))
            for place, numbers in places.items()
            for first in range(0, len(numbers), _TOGETHER)
        ]
        for number in heads:
            if not made or len(made[-1].lines) + len(made[-1].heads) == _TOGETHER:
                made.append(Pass(_KEYS))
            made[-1] = made[-1]._replace(heads=(*made[-1].heads, number))
        if self.problem.deterministic:
            return made + [Pass(_HEADS, elements=(number,)) for number in elements]
        slots = {self.weights[number].slot for number in elements}
        for index, slot in enumerate(sorted(slots)):
            if index == len(made):
                made.append(Pass(_KEYS))
            own = tuple(number for number in elements if self.weights[number].slot == slot)
            made[index] = made[index]._replace(elements=own)
        return made

    @property
    def notes(self) -> list[str]:
        """What is worth knowing of the plan."""
        if not self.passes:
            return []
        in_order = self.problem.deterministic or "element" not in self._places
        order = "in a fixed order" if in_order else "some of them added up in memory in no fixed order"
        return [f"gradients of score's arrays by {len(self.passes)} further pass(es) over the scores, {order}"]

    def _lines(self, walk: int) -> tuple[int, int]:
        """Return the sums to a head of a pass, and the blocks."""
        rows, keys = self._counts.values()
        block_m, block_n = self.tile[:2]
        if walk == _HEADS:
            return 0, rows * keys
        if walk != _DIAGONALS:
            return (self.problem.n_keys, keys) if walk == _KEYS else (self.problem.n_queries, rows)
        owners = ((rows - 1) * block_m + (keys - 1) * block_n) // math.gcd(block_m, block_n) + 1
        return owners * (block_m + block_n), owners

    def add(self, call: Call, constants: Constants, shared_bytes: int) -> None:
        """Append the launches, behind those that make rows' statistics.

        Parameters
        ----------
        call : Call
            Begun, with `scratch`.
        constants : dict
            Of the portable backward, see :meth:`cuattn.cuda.sm80.backward.Cut.constants`.
        shared_bytes : int
            Of a block of a pass.
        """
        tile, weights = self.tile, max(len(self.weights), 1)
        constants = {**constants, **tile._asdict(), "atomic_dq": False, "score": True, "weights": weights}
        gather = functools.partial(self._gather, call, constants)
        for slot in {self.weights[number].slot for made in self.passes for number in made.elements}:
            gather(slot, to=f"score_elements{slot}")  # zeros
        for number, made in enumerate(self.passes):
            lines, owners = self._lines(made.walk)
            heads = 1 if made.walk == _HEADS else self.problem.instances
            slots = {"sums": f"score_sums{number}"} if made.lines or made.heads else {}
            if made.elements:
                slots["elements"] = f"score_elements{self.weights[made.elements[0]].slot}"
            values = {"first": self._first_of_heads(made), "owners": owners, "lines": lines}
            own = {**constants, "walk": made.walk, "shared": made.shared}
            launched = "sm80/bwd_score.cu", "backward_score", own, (owners * heads,), tile.warps
            call.add(
                *launched, {**self._counts, **values}, tile[:2], own=Own(SCORE_SUMS, slots), shared_bytes=shared_bytes
            )
        for slot in self.problem.score.learned:
            self._gather_all(gather, slot)

    def _first_of_heads(self, made: Pass) -> int:
        return len(made.lines) * self.problem.instances * self._lines(made.walk)[0]

    def _gather_all(self, gather: Any, slot: int) -> None:
        """Add up what belongs to one array, weight by weight."""
        all_of_slot = self._of_slot(slot)
        numbers = [number for number in all_of_slot if self._places[number] != "element"]
        adds = len(numbers) < len(all_of_slot)
        for number in numbers[:-1]:
            gather(slot, number, adds, to=f"score_elements{slot}")
            adds = True
        gather(slot, *(numbers[-1:] or [None]), adds)

    def _gather(
        self, call: Call, constants: Constants, slot: int, number: int | None = None, adds: bool = False, to: str = ""
    ) -> None:
        """Append a launch that sums what a weight has, if there is one, with what there `adds` to it already."""
        problem, elements, size = self.problem, f"score_elements{slot}", self._sizes[slot]
        if not size:
            return
        result = to or f"dscore{slot}"
        out = (self.scratch if to else call.arrays)[result].dtype
        own: dict[str, Any] = {
            "walk": 0, "gathers": 0, "weight": 0, "by_batch": False, "by_head": False, "adds": adds,
            "rounds": not to, "result": DTYPES[out].cuda,
        }  # fmt: skip
        slots, values = {"result": result}, {"size": size}
        if adds:
            slots["elements"] = elements
        if number is not None:
            index, made = next((n, x) for n, x in enumerate(self.passes) if number in (*x.lines, *x.heads))
            lines, owners = self._lines(made.walk)
            of_lines = number in made.lines
            among = (made.lines if of_lines else made.heads).index(number)
            depends = self.weights[number].offset.depends
            own |= {
                "walk": made.walk, "gathers": _LINE if of_lines else _HEAD, "weight": number,
                "by_batch": bool(depends & B), "by_head": bool(depends & H),
            }  # fmt: skip
            slots["sums"] = f"score_sums{index}"
            each = lines if of_lines else owners
            values |= {
                "first": (0 if of_lines else self._first_of_heads(made)) + among * problem.instances * each,
                "lines": each,
            }
        owned = max(min(cdiv(size, 2 * call.device.multiprocessors), _OWNED), 1)
        call.add(
            "util/score_sums.cu", "score_sums", {**constants, **own, "warps": _GATHER_WARPS}, (cdiv(size, owned),),
            _GATHER_WARPS, {**self._counts, **values, "owned": owned}, own=Own(SCORE_SUMS, slots),
            shared_bytes=_GATHER_WARPS * owned * problem.stat_dtype.itemsize,
        )  # fmt: skip
