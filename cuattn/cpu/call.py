"""Running an operation, and its plan: the choice between whole heads and tiles, the results, the threads."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu import threads
from cuattn.cpu.arithmetic import BASE_2, SUM
from cuattn.cpu.backward import BackwardWalk
from cuattn.cpu.direct import Direct, WholeHeads, is_small, layout, nanoseconds
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.forward import ForwardWalk
from cuattn.cpu.pairs import Pairs, with_bias
from cuattn.cpu.score import Scores
from cuattn.cpu.task import Arrays
from cuattn.cpu.tiles import MASK_BYTES
from cuattn.cpu.walk import Tiles
from cuattn.masks.constructors import kept_band
from cuattn.masks.intervals import join
from cuattn.plans import Plan
from cuattn.problem import OF_ROWS, OPERATIONS, Array, Place, Problem, ScoreFunction
from cuattn.rng import RNGState

_KEPT = range(1 << 16, 1 << 24)  # bytes of results: fewer malloc keeps anyway, more it does not learn to keep
_TABLE_BYTES = 26  # of each key, for what is seen of a mask of intervals; its own tables are kept with it


def run(
    problem: Problem,
    operands: Arrays,
    masks: Sequence[Any],
    state: RNGState | None,
    place: Place,
    out: Arrays,
    numbers: Sequence[Any] = (),
) -> dict[str, ndarray]:
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
    numbers : sequence of int or float, optional
        Those of the score function, by slot of its parameters.

    Returns
    -------
    dict of str to ndarray
        A forward's o and, if they are wanted, l and m: row sum of exp(s - m) and row maximum of the scores s; 0 and
        -inf in empty rows, where o is 0.  A backward's dq, dk, dv, dbias and dscore0, ... by slot.

    Notes
    -----
    Bitwise reproducible, whatever the number of threads.  Extra memory is what :func:`plan` tells.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithms 2 and 4 with the loops exchanged, 1 and 3 if small.
    """
    scored = problem.score is not None
    problem, operands, pairs = with_bias(problem, operands, place)
    (wanted, nbytes, shares, sums), whole = _made(problem, operands, pairs), {}
    if pairs is not None and "dbias" in wanted:
        whole = {f"dscore{pairs.slot}": np.zeros(pairs.shape, wanted["dbias"][1])}
        out = {**out, "dbias": pairs.view(*whole.values())}
    _have_kept(problem, nbytes)
    results = {name: out[name] if name in out else np.empty(*of) for name, of in wanted.items()}
    if not problem.n_keys or 0 in problem.stat_shape:
        for name, result in results.items():
            result.fill(-np.inf if name == "m" else 0)
        return results | whole
    totals = dict(results)
    for name, dtype in sums.items():
        if results[name].dtype != dtype:
            totals[name] = np.zeros(results[name].shape, dtype)
        else:
            results[name].fill(0)
    dropout = Dropout(problem, place, state) if problem.dropout else None
    score = None if problem.score is None else Scores(problem, operands, place, numbers)
    if scored:
        operands = {name: x for name, x in operands.items() if not ScoreFunction.has(name)}
    if "ddo" in results:
        results["ddo"][...] = operands["to"]
    task = _task(problem, operands, visible_parts(problem, masks, place), dropout, totals, shares, score)
    threads.run(task, lambda: _worker(task), _threads(task))
    for name in sums:
        if totals[name] is not results[name]:
            with np.errstate(over="ignore"):  # the largest numbers of narrow dtypes are soon reached
                results[name][...] = totals[name]
    return results | whole


def plan(problem: Problem, operands: Arrays, masks: Sequence[Any]) -> Plan:
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
    problem, operands, pairs = with_bias(problem, operands, problem.place)
    masks, made = visible_parts(problem, masks, problem.place), _made(problem, operands, pairs)
    task = _task(problem, operands, masks, None, {}, made.shares)
    workers = _threads(task)
    memory = workers * _worker(task).buffers.nbytes
    for name, dtype in made.sums.items():
        shape, own = made.wanted[name]
        memory += math.prod(shape) * dtype.itemsize * (dtype != own)
    size, notes = (problem.n_queries, problem.n_keys), ["whole score matrices of several heads at a time"]
    if isinstance(task, Tiles):
        blocks = task.blocks
        size, notes = (blocks.rows, blocks.keys), [f"up to {blocks.heads} heads x {blocks.step} tiles at a time"]
        tiles = blocks.row_tiles * blocks.key_tiles * blocks.rows * blocks.keys * problem.stat_dtype.itemsize
        memory += min(len(masks), 1) * min(tiles, MASK_BYTES) + len(masks) * _TABLE_BYTES * problem.n_keys
    notes[0] += f"; {problem.stat_dtype} sums"
    if BASE_2:
        notes.append("base-2 exponentials, which this NumPy vectorises")
    return Plan(
        "cpu", problem.operation, *size, workers, 0, memory, "the arrays are in host memory", notes=tuple(notes)
    )


def _have_kept(problem: Problem, nbytes: int) -> None:
    """See to it that malloc keeps what a small problem takes, its results among it, from one call to the next.

    As much as it once got back in one piece it keeps; else the pages of each call would be new.
    """
    if nbytes in _KEPT and 0 not in (problem.n_keys, *problem.stat_shape) and is_small(problem):
        np.empty(nbytes + sum(layout(problem)[1].values()) * problem.stat_dtype.itemsize, np.uint8)


def visible_parts(problem: Problem, masks: Sequence[Any], place: Place) -> tuple[Any, ...]:
    """Return the masks of a problem with its band as one of them."""
    masks, band = [mask.bind(problem.n_queries, problem.n_keys) for mask in masks], problem.band
    if band is not None:
        offset = band.offset + place.shift
        masks.append(kept_band(problem.n_queries, problem.n_keys, band.left, band.right, offset))
    return join(masks)


class _Layout(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


class _Made(NamedTuple):
    """What a call makes."""

    wanted: dict[str, Array]  # shapes and dtypes of the results, by name
    nbytes: int  # of the results
    shares: bool  # whether a backward's items of any heads share sums
    sums: dict[str, np.dtype]  # dtypes of the sums that several items add to


def _made(problem: Problem, operands: Arrays, pairs: Pairs | None) -> _Made:
    """Return what a call makes."""
    layouts: list[tuple[str, tuple[int, ...], np.dtype]] = []
    if OPERATIONS[problem.operation].replays:
        layouts = [(name, x.shape, x.dtype) for name, x in operands.items() if name not in OF_ROWS]
    made = _made_by_tiles(problem, tuple(layouts), pairs is None or pairs.learned)
    return made._replace(sums={}) if made.sums and not made.shares and is_small(problem) else made


@lru_cache(maxsize=256)
def _made_by_tiles(
    problem: Problem, layouts: tuple[tuple[str, tuple[int, ...], np.dtype], ...], with_dbias: bool
) -> _Made:
    """Return what a call by tiles makes, given the operands of a backward."""
    operands = {name: _Layout(shape, dtype) for name, shape, dtype in layouts}
    made = OPERATIONS[problem.operation].made(problem, operands)
    if not with_dbias:
        made.pop("dbias", None)
    aligned = dict.fromkeys(("o", "to", "ddo"), problem.o_shape) | dict.fromkeys(OF_ROWS, problem.stat_shape)
    wanted = {name: (aligned.get(name, shape), dtype) for name, (shape, dtype) in made.items()}
    heads = {"q": problem.heads, "k": problem.kv_heads, "v": problem.kv_heads, "bias": problem.heads}
    shapes = {name: operands[name].shape for name in heads if name in operands}
    broadcast = any(shape[:-2] != (*problem.batch, heads[name]) for name, shape in shapes.items())
    shares = broadcast or bool(layouts and problem.learned)
    names = [name for name in shapes if shares or name != "q"]
    dtypes = dict.fromkeys(names, problem.stat_dtype)
    if "bias" in names and 1 in shapes["bias"][-2:]:
        dtypes["bias"] = SUM
    dtypes |= {f"score{slot}": SUM for slot in problem.learned}
    sums = {f"{kind}{name}": dtype for kind in ("d", "td") for name, dtype in dtypes.items()}
    nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted.values())
    return _Made(wanted, nbytes, shares, {name: dtype for name, dtype in sums.items() if name in wanted})


def _task(problem: Problem, *arguments: Any) -> Tiles | WholeHeads:
    return (WholeHeads if is_small(problem) else Tiles)(problem, *arguments)


def _threads(task: Tiles | WholeHeads) -> int:
    return threads.useful(sum(task.sizes), nanoseconds(task.problem))


def _worker(task: Tiles | WholeHeads) -> Direct | ForwardWalk | BackwardWalk:
    """Return what computes items of a task in one thread."""
    if not isinstance(task, Tiles):
        return Direct(task)
    return (BackwardWalk if task.replays else ForwardWalk)(task)
