"""Running an operation: the choice between whole heads and tiles, and the work of all threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuattn.cpu import threads
from cuattn.cpu.blocks import choose
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.forward import ForwardWalk
from cuattn.cpu.heads import head_groups, shares_sums
from cuattn.cpu.scores import Item, Task
from cuattn.cpu.backward import END, BackwardWalk
from cuattn.cpu.sums import OrderedSum, total_like
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

__all__ = ["plan", "run"]

Arrays = Mapping[str, np.ndarray]


def run(problem, operands, masks, state, place, out):
    dropout = Dropout(problem, place, state) if problem.dropout else None
    if problem.operation == "forward":
        results = {"o": np.empty(problem.o_shape, problem.out_dtype)}
        if problem.statistics:
            results["l"] = np.empty(problem.stat_shape, problem.stat_dtype)
            results["m"] = np.empty(problem.stat_shape, problem.stat_dtype)
        totals = results
    else:
        results = {"d" + name: np.empty(operands[name].shape, problem.grad_dtype(operands[name].dtype)) for name in ("q", "k", "v", "bias") if name in operands}
        totals = {}
        for name, result in results.items():
            dtype = problem.stat_dtype
            if name == "dbias" and 1 in result.shape[-2:]:
                dtype = np.dtype(np.float64)
            if name == "dq" and result.shape[:-2] == (*problem.batch, problem.heads):
                totals["q"] = result
            else:
                totals[name[1:]] = total_like(result, dtype)
    blocks = choose(problem, operands, masks)
    task = Task(problem, operands, masks, dropout, blocks)
    stacks = cdiv(blocks.row_tiles, blocks.stack)
    turns = OrderedSum()
    groups = list(head_groups(problem, blocks.heads))
    shared = problem.operation == "backward" and shares_sums(problem, operands)
    if shared:
        groups = [[group for several in groups for group in several]]
    sizes = [len(group) * stacks for group in groups]

    def prepare(group, index):
        heads, stack = divmod(index, stacks)
        start = stack * blocks.stack
        stop = min(start + blocks.stack, blocks.row_tiles)
        group = groups[group][heads]
        row_groups = task.visibility.groups(group.first, start, stop)
        if problem.operation == "forward":
            return Item(group, start, row_groups)
        line = () if shared else (*group.batch, group.kv_start)
        numbers = [turns.take_number((line, part.index)) for rg in row_groups for part in rg.steps]
        return Item(group, start, row_groups, line, (*numbers, turns.take_number((line, END))))

    count = threads.useful(sum(sizes), problem.instances * problem.n_queries * problem.n_keys)
    make = (lambda: ForwardWalk(task, results)) if problem.operation == "forward" else (lambda: BackwardWalk(task, totals, turns))
    threads.run(threads.Dispatcher(sizes), prepare, make, count, turns.abort)
    if problem.operation != "forward":
        for name, result in results.items():
            if totals[name[1:]] is not result:
                result[...] = totals[name[1:]]
    return results


def plan():
    pass
