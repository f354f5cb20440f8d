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
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

__all__ = ["plan", "run"]

Arrays = Mapping[str, np.ndarray]


def run(problem, operands, masks, state, place, out):
    dropout = Dropout(problem, place, state) if problem.dropout else None
    results = {"o": np.empty(problem.o_shape, problem.out_dtype)}
    if problem.statistics:
        results["l"] = np.empty(problem.stat_shape, problem.stat_dtype)
        results["m"] = np.empty(problem.stat_shape, problem.stat_dtype)
    blocks = choose(problem, operands, masks)
    task = Task(problem, operands, masks, dropout, blocks)
    stacks = cdiv(blocks.row_tiles, blocks.stack)
    groups = list(head_groups(problem, blocks.heads))
    sizes = [len(group) * stacks for group in groups]

    def prepare(group, index):
        heads, stack = divmod(index, stacks)
        start = stack * blocks.stack
        stop = min(start + blocks.stack, blocks.row_tiles)
        return Item(groups[group][heads], start, task.visibility.groups(groups[group][heads].first, start, stop))

    count = threads.useful(sum(sizes), problem.instances * problem.n_queries * problem.n_keys)
    threads.run(threads.Dispatcher(sizes), prepare, lambda: ForwardWalk(task, results), count)
    return results


def plan():
    pass
