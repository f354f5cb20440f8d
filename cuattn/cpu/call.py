"""Running an operation: the choice between whole heads and tiles, the results, and the work of all threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuattn.cpu import threads
from cuattn.cpu.backward import END, BackwardWalk
from cuattn.cpu.blocks import Blocks, choose
from cuattn.cpu.direct import DirectBackward, DirectForward, is_small, layout, nanoseconds
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.forward import ForwardWalk
from cuattn.cpu.heads import HeadGroup, head_groups, shares_sums
from cuattn.cpu.scores import Item, Task
from cuattn.cpu.sums import OrderedSum, total_like
from cuattn.io_model.sizes import cdiv
from cuattn.masks.constructors import kept_band
from cuattn.masks.interval_mask import join
from cuattn.problem import Place, Problem
from cuattn.rng import RNGState

__all__ = ["Call", "run"]

Arrays = Mapping[str, np.ndarray]


def run(
    problem: Problem, operands: Arrays, masks: Sequence[Any], state: RNGState | None, place: Place, out: Arrays
) -> dict[str, np.ndarray]:
    """Run an operation.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : dict of str to ndarray
        Its arrays by name, on the host, aligned to len(batch) + 3 axes (l, m and dlse to one less).
    masks : sequence of Mask
        What hides elements; they combine by AND, and with the band.
    state : RNGState or None
        Of dropout.
    place : Place
        Where the problem stands in a whole one.
    out : dict of str to ndarray
        C-contiguous arrays for some of the results, or none.

    Returns
    -------
    dict of str to ndarray
        A forward's o and, if they are wanted, l and m: row sum of exp(s - m) and row maximum of the scores s; 0 and
        -inf in empty rows, where o is 0.  A backward's dq, dk, dv and dbias.

    Notes
    -----
    Bitwise reproducible, whatever the number of threads.  Extra memory is what :func:`plan` tells.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithms 2 and 4 with the loops exchanged, 1 and 3 if small.
    """
    results = _allocate(problem, operands, out)
    if not problem.n_keys or 0 in problem.stat_shape:
        for name, result in results.items():
            result.fill(-np.inf if name == "m" else 0)
        return results
    call = Call(problem, operands, masks, place)
    if problem.operation == "forward":
        call.run(state, place, results)
        return results
    totals = call.totals(results)
    call.run(state, place, totals)
    for name, result in results.items():
        if totals[name[1:]] is not result:
            result[...] = totals[name[1:]]
    return results


def _allocate(problem: Problem, operands: Arrays, out: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays of the results, by name."""
    if problem.operation == "forward":
        wanted = {"o": (problem.o_shape, problem.out_dtype)}
        if problem.statistics:
            wanted |= dict.fromkeys(("l", "m"), (problem.stat_shape, problem.stat_dtype))
    else:
        given = [name for name in ("q", "k", "v", "bias") if name in operands]
        dtypes = dict.fromkeys("qkv", problem.out_dtype) | {"bias": problem.bias and problem.grad_dtype(problem.bias)}
        wanted = {f"d{name}": (operands[name].shape, dtypes[name]) for name in given}
    return {name: out[name] if name in out else np.empty(*of) for name, of in wanted.items()}


class Call:
    """How a forward or a backward is to be computed, whatever its arrays hold.

    Attributes
    ----------
    blocks : Blocks or None
        Sizes of tiles; None where whole heads are computed.
    workers : int
        Threads.
    """

    def __init__(self, problem: Problem, operands: Arrays, masks: Sequence[Any], place: Place) -> None:
        self.problem, self.operands = problem, operands
        self.masks = visible_parts(problem, masks, place)
        self.shares = problem.operation == "backward" and shares_sums(problem, operands)
        self.blocks: Blocks | None = None
        if is_small(problem):
            self._batches = layout(problem).batches
            self._sizes = [len(self._batches)]
        else:
            self.blocks = choose(problem, operands, self.masks)
            groups = list(head_groups(problem, self.blocks.heads))
            # What adds to common sums is handed out in one order.
            self._groups = [[group for some in groups for group in some]] if self.shares else groups
            self._stacks = cdiv(self.blocks.row_tiles, self.blocks.stack)
            self._sizes = [len(group) * self._stacks for group in self._groups]
        self.workers = threads.useful(sum(self._sizes), nanoseconds(problem))

    def totals(self, results: Arrays) -> dict[str, np.ndarray]:
        """Return what a backward's terms are added to, or written to where there is one: the results if they can be."""
        return {
            name[1:]: result if self._is_owned(name[1:]) else total_like(result, self._dtype_of_sum(name[1:]))
            for name, result in results.items()
        }

    def _is_owned(self, name: str) -> bool:
        """Whether each element of a gradient is one item's, which rounds it."""
        return not self.shares if self.blocks is None else name == "q" and not self._is_broadcast("q")

    def _dtype_of_sum(self, name: str) -> np.dtype:
        """Return the dtype of a sum: of a bias that is broadcast, of many terms that nearly cancel."""
        many = name == "bias" and 1 in self.operands["bias"].shape[-2:]
        return np.dtype(np.float64) if many else self.problem.stat_dtype

    def bytes_of_totals(self) -> int:
        """Return the size of the sums of a backward that are not its results."""
        size = 0
        for name in ("q", "k", "v", "bias"):
            if name in self.operands and not self._is_owned(name):
                dtype = self._dtype_of_sum(name)
                result = self.problem.out_dtype if name != "bias" else self.problem.grad_dtype(self.problem.bias)
                size += self.operands[name].size * dtype.itemsize * (dtype != result)
        return size

    def _is_broadcast(self, name: str) -> bool:
        return self.operands[name].shape[:-2] != (*self.problem.batch, self.problem.heads)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of each thread's buffers."""
        if self.blocks is None:
            return layout(self.problem).shapes
        walk = ForwardWalk if self.problem.operation == "forward" else BackwardWalk
        return walk.shapes(self.problem, self.operands, self.blocks)

    def run(self, state: RNGState | None, place: Place, results: Arrays) -> None:
        """Compute everything; results are as a forward's, or as :meth:`totals` gives them."""
        dropout = Dropout(self.problem, place, state) if self.problem.dropout else None
        turns = OrderedSum()
        run = self._run_heads if self.blocks is None else self._run_tiles
        prepare, make_worker = run(dropout, results, turns)
        threads.run(self._sizes, prepare, make_worker, self.workers, turns.abort)

    def _run_heads(self, dropout: Dropout | None, results: Arrays, turns: OrderedSum) -> tuple[Callable, Callable]:
        common = self.problem, self.operands, self.masks, dropout, results
        if self.problem.operation == "forward":
            return lambda _, n: self._batches[n], lambda: DirectForward(*common)
        shared = turns if self.shares else None
        return lambda _, n: (self._batches[n], n), lambda: DirectBackward(*common, turns=shared)

    def _run_tiles(self, dropout: Dropout | None, results: Arrays, turns: OrderedSum) -> tuple[Callable, Callable]:
        task = Task(self.problem, self.operands, self.masks, dropout, self.blocks)
        forward = self.problem.operation == "forward"

        def prepare(group: int, index: int) -> Item:
            heads, stack = divmod(index, self._stacks)
            item = self._item(task, self._groups[group][heads], stack)
            return item if forward else self._with_turns(item, turns)

        return prepare, lambda: ForwardWalk(task, results) if forward else BackwardWalk(task, results, turns)

    def _item(self, task: Task, heads: HeadGroup, stack: int) -> Item:
        start = stack * self.blocks.stack
        stop = min(start + self.blocks.stack, self.blocks.row_tiles)
        return Item(heads, start, task.visibility.groups(heads.first, start, stop))

    def _with_turns(self, item: Item, turns: OrderedSum) -> Item:
        line = () if self.shares else (*item.group.batch, item.group.kv_start)
        indices = [part.index for row_group in item.row_groups for part in row_group.steps]
        return item._replace(line=line, numbers=tuple([turns.take_number((line, n)) for n in (*indices, END)]))

    def mask_bytes(self) -> int:
        """Return how much memory the element masks of partial tiles will take; visits the tiles."""
        task = Task(self.problem, self.operands, self.masks, None, self.blocks)
        for group in self._groups:
            for heads in group:
                for stack in range(self._stacks):
                    self._item(task, heads, stack)
                    if task.visibility.is_full:
                        return task.visibility.mask_bytes
        return task.visibility.mask_bytes


def visible_parts(problem: Problem, masks: Sequence[Any], place: Place) -> tuple[Any, ...]:
    """Return the masks of a problem with its band as one of them."""
    masks, band = [mask.bind(problem.n_queries, problem.n_keys) for mask in masks], problem.band
    if band is None:
        return join(masks)
    return join(
        (*masks, kept_band(problem.n_queries, problem.n_keys, band.left, band.right, band.offset + place.shift))
    )
