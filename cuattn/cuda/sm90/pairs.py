"""Passes over pairs of tiles: dS once more, for gradients that the main kernel does not sum (sm90/bwd_pairs.cuh).

A block sums what belongs to its place, so the order is fixed: a tile of dbias, or of the gradient of an array that is
read like a bias, over all heads that read it.
"""

import math
from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, pad, tile_counts
from cuattn.cuda.call import Own
from cuattn.cuda.constants import Constants
from cuattn.cuda.learned import Learned, learned
from cuattn.cuda.params import BATCH_AXES
from cuattn.cuda.sm80 import backward as portable
from cuattn.cuda.sm80.score_gradients import SCORE_SUMS, Pass, ScoreGradients
from cuattn.cuda.sm80.tiles import BackwardTile
from cuattn.cuda.sm90.forward import is_long
from cuattn.cuda.sm90.tensor_map import MappedCall
from cuattn.io_model.sizes import cdiv
from cuattn.problem import DTYPES, Problem
from cuattn.tracing import Node, S
from cuattn.tracing.graph import variable

TILE = 128, 128  # rows and keys
_WARPGROUPS, _MORE = 2, 4  # consumers; more where nothing but a bias takes registers
_SLAB_BYTES = 128 * sum(TILE)  # of two operands
_MOST, _LEAST = 6, 4  # stages
_FLOAT = 4  # bytes


class Ring(NamedTuple):
    """How many stages a block has, and how much shared memory without its own."""

    stages: int
    shared_bytes: int


def ring(problem: Problem, split_delta: bool, own: int, available: int) -> Ring:
    """Return what a block with `own` bytes beside its ring has, as kernels/sm90/bwd_pairs.cuh lays it out."""
    stage = _SLAB_BYTES + TILE[0] * (6 if split_delta else 4) + 32 + 2 * 8  # numbers of rows, step, barriers
    walk = 48 + 16 * bool({"boolean", "function"} & {*problem.masks})
    stages = min((available - own - walk) // stage, _MOST)
    return Ring(stages, pad(stages * stage, 16) + walk)


def _splits(tiles: int, members: int, multiprocessors: int) -> int:
    """Return among how many blocks the heads that share a tile are dealt out, where tiles alone are too few."""
    most = min(members, cdiv(2 * multiprocessors, tiles))
    return min(range(1, most + 1), key=lambda n: cdiv(tiles * n, multiprocessors) * cdiv(members, n))


class ElementPass:
    """A gradient with one element for each row and key, by launches behind those that leave delta and statistics.

    Parameters
    ----------
    call : MappedCall
    name : str
        Of the result, which has all axes: dbias; or what a function's array has, like one.
    shape : tuple of int
    fields : dict of str to object, optional
        Of ``Params``: how the result lies, where the call has not said it.

    Attributes
    ----------
    scratch : dict of str to Array
        The parts of a sum, where the heads that share an element are dealt out to several blocks.
    """

    def __init__(
        self, call: MappedCall, name: str, shape: tuple[int, ...], fields: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        *lead, rows, keys = shape
        self._call, self._name, instances = call, name, math.prod(lead)
        self._fields = {"bias_instances": instances, **fields}
        self._sums = {"sum_rows": rows == 1, "sum_keys": keys == 1}
        tiles = cdiv(rows, TILE[0]) * cdiv(keys, TILE[1]) * instances
        self._splits = _splits(tiles, call.problem.instances // instances, call.device.multiprocessors)
        self._blocks = tiles * self._splits
        self._sum = portable.sum_of_parts(self._splits, math.prod(shape))
        self.scratch: dict[str, Array] = {}
        if self._splits > 1:
            self.scratch[f"{name}_acc"] = portable.sum_array(call.problem, self._sum)

    def add(self, constants: Constants, path: str = "sm90/bwd_dbias.cu", own: int = 0) -> None:
        """Append the launches.

        Parameters
        ----------
        constants : dict
            Those of the main kernel.
        path : str, optional
        own : int, optional
            Bytes of shared memory that a block needs beside the ring.
        """
        call, split, name = self._call, self._splits > 1, self._name
        stages, shared_bytes = ring(call.problem, bool(constants["split_delta"]), own, call.device.shared_bytes)
        warpgroups = _WARPGROUPS if call.problem.masks or not own else _MORE
        tile = {"block_m": TILE[0], "block_n": TILE[1], "stages": stages, "pair_warpgroups": warpgroups}
        grad = DTYPES[call.arrays[name].dtype].cuda
        constants = {
            **constants,
            **tile,
            **self._sums,
            "split": split,
            "bias_grad": grad,
            "inputs": False,
            "dp_late": False,
        }
        instances = self._blocks // self._splits
        values = {
            **tile_counts(call.problem, TILE),
            "splits": self._splits,
            "bias_instances": instances,
            **self._fields,
        }
        slots = {"dbias.data": name, **({"dbias_acc": f"{name}_acc"} if split else {})}
        together = cdiv(self._blocks, call.device.multiprocessors) if any(self._sums.values()) else 1
        launched = path, "backward_bias", constants, self._blocks, 4 * (warpgroups + 1), values, TILE
        call.add_mapped(*launched, shared_bytes + own, (), together=together, own=Own(np.dtype([]), slots))
        if split:
            portable.add_sum(call, name, self._sum)


class BiasPass(ElementPass):
    """dbias: a tile of the bias over all heads that read it."""

    def __init__(self, call: MappedCall) -> None:
        super().__init__(call, "dbias", call.operands["bias"].shape)

    def add(self, constants: Constants) -> None:
        """Append the launches; `constants` are those of the main kernel."""
        super().add(constants, own=math.prod(TILE) * self._call.operands["bias"].dtype.itemsize)


class ArrayPass(ElementPass):
    """The gradient of an array that is like a bias (:func:`like_biases`)."""

    def __init__(self, call: MappedCall, number: int, found: Learned) -> None:
        problem, indices = call.problem, found.weight.indices
        sizes = ((variable("b"), math.prod(problem.batch)), (variable("h"), problem.heads))
        batch, heads = (size if index in indices else 1 for index, size in sizes)
        size = problem.n_queries * problem.n_keys
        fields = {
            "dbias.batch": (*(0,) * (BATCH_AXES - 1), heads * size if batch > 1 else 0),
            "dbias.head": size if heads > 1 else 0,
        }
        super().__init__(call, f"dscore{found.weight.slot}", (batch, heads, problem.n_queries, problem.n_keys), fields)
        self._own = {"weights": len(learned(problem)), "weight": number}

    def add(self, constants: Constants) -> None:
        """Append the launches; `constants` are those of the main kernel."""
        super().add({**constants, **self._own}, "sm90/bwd_elements.cu")


def like_biases(problem: Problem) -> dict[int, Learned]:
    """Return which arrays of a score function are read as biases are, by (b, h, i, j) or some of them, i and j last.

    By the number of their only expression; its weight must not depend on the score.
    """
    found, limits = learned(problem), () if problem.score is None else problem.score.facts.limits
    axes = dict(zip(map(variable, "bhij"), limits, strict=False))
    orders = {order: tuple(map(axes.get, order)) for order in _orders(tuple(axes))}
    slots = [each.weight.slot for each in found]
    return {
        number: each
        for number, each in enumerate(found)
        if slots.count(each.weight.slot) == 1
        and not each.weight.weight.depends & S
        and orders.get(each.weight.indices) == problem.score.facts.arrays[each.weight.slot].shape
    }


def _orders(axes: tuple[Node, ...]) -> list[tuple[Node, ...]]:
    lead, places = axes[:2], axes[2:]
    return [(*some, *places) for count in range(len(lead) + 1) for some in combinations(lead, count)]


class PairScoreGradients(ScoreGradients):
    """The launches for other arrays, whose passes are over pairs of tiles; see :class:`ScoreGradients`."""

    together: ClassVar[dict[str, int]] = {"key": 2, "row": 4, "diagonal": 1}

    def __init__(self, problem: Problem, *what: Any) -> None:
        super().__init__(problem, BackwardTile(*TILE, 4 * (_WARPGROUPS + 1), 1), *what)

    def _pass(self, call: MappedCall, constants: Constants, index: int, made: Pass, shared_bytes: int) -> None:
        length, consumers, available = self._slice(made), math.prod(TILE) // 64, call.device.shared_bytes
        split_delta, sharers = bool(constants["split_delta"]), 1
        while length * consumers // sharers * _FLOAT > available - _LEAST * _SLAB_BYTES - _SLAB_BYTES // 2:
            sharers *= 2
        own = length * consumers // sharers * _FLOAT
        stages, ring_bytes = ring(self.problem, split_delta, own, available)
        inputs = any(found.weight.weight.depends & S for found in self.weights)
        constants = {
            **constants,
            "stages": stages,
            "walk": made.walk,
            "shared": made.shared,
            "sharers": sharers,
            "inputs": inputs,
            "dp_late": is_long(self.problem),
            "pair_warpgroups": _WARPGROUPS,
        }
        blocks = self._blocks(made)
        together = cdiv(blocks, call.device.multiprocessors)
        launched = "sm90/bwd_score.cu", "backward_score", constants, blocks, self.tile.warps, self._fields(made), TILE
        slots = self._slots_of(index, made)
        call.add_mapped(*launched, ring_bytes + own, (), together=together, own=Own(SCORE_SUMS, slots))
