"""The plan of a call on the CPU."""

from __future__ import annotations

import numpy as np

from cuattn.cpu.blocks import LANES, Blocks, choose, is_plain, most_parts, sum_columns
from cuattn.cpu.exponent import exponential
from cuattn.cpu.threads import useful
from cuattn.cpu.tiles import VEIL_BYTES
from cuattn.plans import Plan
from cuattn.problem import Operands, Problem

__all__ = ["plan"]


def plan(problem: Problem, operands: Operands) -> Plan:
    """Tell how a problem would be computed; computes nothing.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : Operands
        Its arrays; a backward may lack do, o, l and m.

    Returns
    -------
    Plan
        Tiles, threads and memory.
    """
    blocks = choose(problem, operands)
    workers = useful(problem, blocks)
    plain = is_plain(problem)
    together = f"{blocks.stack} row tiles" if plain else f"{blocks.team} heads"
    notes = [f"{together} x {blocks.chunk} key tiles at a time; {problem.stat_dtype} sums"]
    if exponential is np.exp2:
        notes.append("base-2 exponentials, which this NumPy vectorises")
    return Plan(
        kernel="cpu",
        direction=problem.direction,
        block_m=blocks.rows,
        block_n=blocks.keys,
        workers=workers,
        smem_bytes=0,
        workspace_bytes=workers * bytes_per_thread(problem, blocks) + bytes_of_masks(problem, blocks),
        reason="the arrays are in host memory",
        notes=tuple(notes),
    )


def bytes_of_masks(problem: Problem, blocks: Blocks) -> int:
    """Return an upper bound of what is remembered of partial tiles, for all threads."""
    if problem.mask is problem.band is None:
        return 0
    tile = 2 * blocks.rows * blocks.keys * problem.stat_dtype.itemsize
    return min(VEIL_BYTES, blocks.row_tiles * blocks.key_tiles * tile)


def bytes_per_thread(problem: Problem, blocks: Blocks) -> int:
    """Return the size of a thread's buffers, and in the backward pass of the sums of the heads that it works on."""
    d, dv = problem.head_dim, problem.head_dim_v
    members = blocks.stack * blocks.team  # row tiles of an item of work, and of a pass through the keys
    passing = members if is_plain(problem) else blocks.team
    swept = problem.direction == "forward" and not is_plain(problem)
    stack, tiles = members * blocks.rows, passing * (blocks.slots if swept else blocks.chunk)
    copies = 1 if problem.group > 1 else blocks.team
    scores = tiles * blocks.keys * blocks.rows
    counts = sum_columns(problem) if problem.direction == "forward" else 1
    panel = copies * blocks.panel * blocks.keys * (d + dv + 1 + counts)
    if problem.direction == "forward":
        parts = (most_parts(problem, blocks) + 1) * passing * blocks.rows * (dv + counts)
        state = stack * (2 * d + dv + counts + blocks.key_tiles + 2 * LANES + 18)
        return problem.stat_dtype.itemsize * (scores + panel + parts + state)
    parts = tiles * max(blocks.keys * max(d, dv), blocks.rows * d)
    sums = copies * blocks.key_tiles * blocks.keys * (d + dv)
    return problem.stat_dtype.itemsize * (2 * scores + panel + parts + sums + stack * (4 * d + 3 * dv + 4))
