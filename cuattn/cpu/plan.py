"""The plan of a call on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cuattn.cpu.buffers import bytes_of
from cuattn.cpu.call import Call
from cuattn.cpu.exponent import BASE_2
from cuattn.plans import Plan
from cuattn.problem import Problem

__all__ = ["plan"]

_TABLE_BYTES = 26  # of each key, for what is seen of a mask of intervals; its own tables are kept with it


def plan(problem: Problem, operands: Mapping[str, np.ndarray], masks: Sequence[Any]) -> Plan:
    """Tell how a problem would be computed; computes nothing.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : dict of str to ndarray
        Its arrays; a backward may lack do, o, l and m.
    masks : sequence of Mask
        What hides elements.

    Returns
    -------
    Plan
        Tiles, threads and memory.
    """
    if not problem.n_keys or 0 in problem.stat_shape:
        return Plan("cpu", problem.operation, 1, 1, 1, 0, 0, "there is nothing to compute")
    call = Call(problem, operands, masks, problem.place)
    blocks, memory = call.blocks, call.workers * bytes_of(problem.stat_dtype, call.shapes())
    if problem.operation == "backward":
        memory += call.bytes_of_totals()
    if blocks is None:
        size, notes = (problem.n_queries, problem.n_keys), ["whole score matrices of several heads at a time"]
    else:
        size = blocks.rows, blocks.keys
        notes = [f"up to {blocks.heads} heads x {blocks.abreast} row tiles abreast; {blocks.room} tiles at a time"]
        memory += call.mask_bytes() + len(call.masks) * _TABLE_BYTES * problem.n_keys
    notes[0] += f"; {problem.stat_dtype} sums"
    if BASE_2:
        notes.append("base-2 exponentials, which this NumPy vectorises")
    return Plan(
        kernel="cpu",
        direction=problem.operation,
        block_m=size[0],
        block_n=size[1],
        workers=call.workers,
        smem_bytes=0,
        workspace_bytes=memory,
        reason="the arrays are in host memory",
        notes=tuple(notes),
    )
