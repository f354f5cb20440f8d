"""Sums over keys for every row, on a GPU: launches of kernels/pairwise/rows.cu, or :mod:`cuattn.pairwise.near`'s."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn.cuda.arguments import address_of
from cuattn.cuda.device import device_of
from cuattn.cuda.launch import Kernel
from cuattn.io_model.sizes import cdiv
from cuattn.pairwise import near
from cuattn.pairwise.pairs import Pairs, Sums, Wanted
from cuattn.problem import DTYPES

MOST_BATCH = 65535  # of a grid
_THREADS = _KEYS = 128
_COLUMNS = {4: 8, 8: 4}  # that one block sums at most, by the bytes of a number
_REGISTERS = {4: 80, 8: 32}  # numbers that a thread's rows may hold, by the bytes of one
MOST_DIM = {4: 32, 8: 8}  # coordinates that the kernels take, by the bytes of one
_BLOCKS = 6  # that share a multiprocessor, about
_FULL = 0.94  # share of the last wave of blocks that is enough
_MOST_PARTS = 32
_LOG2_E = math.log2(math.e)

_ARRAYS = "x", "y", "u", "v", "row_log", "key_log", "factors", "sums", "directions", "moments"
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in _ARRAYS),
        ("factor", np.float64),
        *((name, np.int32) for name in ("n_rows", "n_keys", "columns", "parts", "keys_per_part")),
    ],
    align=True,
)
"""Mirror of ``PairwiseParams``."""

SUMS, LOGS, SLOPES = range(3)
"""What a kernel's ``cfg::reduction`` says."""


TAKEN = "at most 32 coordinates (8 in float64) and no mask"


def takes(pairs: Pairs) -> bool:
    """Return whether the kernels are for a call's points."""
    few = pairs.dim <= MOST_DIM[pairs.work.itemsize] and math.prod(pairs.batch) <= MOST_BATCH
    return few and not pairs.is_masked


def constants_of(dtype: np.dtype, function: int, dim: int, columns: int, wanted: Wanted) -> dict[str, Any]:
    """Return what the kernel is specialised by."""
    reduction = LOGS if wanted.logs else SLOPES if wanted.slopes else SUMS
    groups = max(cdiv(columns, _COLUMNS[dtype.itemsize]), 1)
    width = max(cdiv(columns, groups), 1)
    held = {SUMS: dim + 3 * width, LOGS: dim + 4, SLOPES: 3 * dim + width * (1 + 2 * wanted.sums) + 3}[reduction]
    rows = max(n for n in (1, 2, 4, 8) if n == 1 or n * held <= _REGISTERS[dtype.itemsize])
    return {
        "acc": DTYPES[dtype].cuda,
        "dim": dim,
        "width": width,
        "thread_rows": rows,
        "reduction": reduction,
        "function": function,
        "logs": wanted.row_log is not None,
        "values": wanted.sums,
    }


def parts_of(row_blocks: int, n_keys: int, at_once: int) -> int:
    """Return in how many parts the keys are divided, so that the blocks fill whole waves of so many."""
    most = max(min(_MOST_PARTS, n_keys // (4 * _KEYS)), 1)

    def share(parts: int) -> float:
        waves = row_blocks * parts / at_once
        return waves / math.ceil(waves)

    return next((parts for parts in range(1, most + 1) if share(parts) >= _FULL), max(range(1, most + 1), key=share))


@lru_cache(maxsize=256)
def _launch(
    device: int,
    dtype: np.dtype,
    constants: tuple[tuple[str, Any], ...],
    sizes: tuple[int, int, int, int],
    factor: float,
) -> tuple[Kernel, int, int]:
    """Return a launch, how many parts the keys are divided in, and in how many groups the columns."""
    batch, n_rows, n_keys, columns = sizes
    known = dict(constants)
    row_blocks = cdiv(n_rows, _THREADS * int(known["thread_rows"]))
    groups = max(cdiv(columns, int(known["width"])), 1)
    parts = parts_of(row_blocks * batch * groups, n_keys, _BLOCKS * device_of(device).multiprocessors)
    per_part = cdiv(cdiv(n_keys, parts), _KEYS) * _KEYS
    parts = cdiv(n_keys, per_part)
    values = {"factor": factor, "n_rows": n_rows, "n_keys": n_keys, "columns": columns, "parts": parts}
    values["keys_per_part"] = per_part
    grid = row_blocks, parts * groups, batch
    names, slots = {name: n for n, name in enumerate(_ARRAYS)}, {name: name for name in _ARRAYS}
    kernel = Kernel(device, names, "pairwise/rows.cu", "pairwise_rows", known, grid, _THREADS, PARAMS, values, slots)
    return kernel, parts, groups


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return sums over keys for the rows of a call's points, whose roles change with `transposed`; see `Wanted`."""
    xp, work = pairs.xp, pairs.work
    x, y = (xp.ascontiguousarray(pairs.spread(name)) for name in ("yx" if transposed else "xy"))
    *batch, n_rows, dim = x.shape
    columns = 0 if wanted.v is None else wanted.v.shape[-1]
    if pairs.is_empty or (wanted.sums and not columns):
        return nothing(xp, (*batch, n_rows), dim, columns)
    unit = pairs.function.base
    factor = pairs.factor * unit
    factors, factor = (None, float(factor)) if isinstance(factor, float) else (factor, 0.0)
    if wanted.logs and near.takes(pairs, n_rows, y.shape[-2]):
        return Sums(logs=near.log_sums(pairs, x, y, wanted.key_log, (factors, factor)))
    given = {"x": x, "y": y, "u": wanted.u, "v": wanted.v}
    given = {name: None if a is None else xp.ascontiguousarray(a.astype(work, copy=False)) for name, a in given.items()}
    for name in ("row_log", "key_log"):
        log = getattr(wanted, name)
        given[name] = None if log is None else xp.ascontiguousarray((log * _LOG2_E).astype(work, copy=False))
    given["factors"] = factors
    constants = tuple(constants_of(work, pairs.function.number, dim, columns, wanted).items())
    sizes = math.prod(batch), n_rows, y.shape[-2], columns
    device = pairs.origin.device
    kernel, parts, groups = _launch(device, work, constants, sizes, factor)
    stacked = parts * groups, *batch, n_rows
    made = {
        "sums": xp.empty((parts, *stacked[1:], columns), work) if wanted.sums else None,
        "directions": xp.empty((*stacked, dim), work) if wanted.slopes else None,
        "moments": xp.empty(stacked, work) if wanted.slopes or wanted.logs else None,
    }
    kernel.launch([address_of(a) for a in (*given.values(), *made.values())], pairs.origin.stream().ptr)
    if wanted.logs:
        return Sums(logs=log_sum(xp, made["moments"]) / _LOG2_E)
    sums, directions, moments = (None if a is None else a[0] if len(a) == 1 else a.sum(0) for a in made.values())
    return Sums(sums, None, directions, None if moments is None else moments / unit)


def log_sum(xp: Any, logs: Any) -> Any:
    """Return the base-2 logarithm of the sum of parts, which lie along the first axis."""
    if len(logs) == 1:
        return logs[0]
    most = logs.max(0)
    reference = xp.where(xp.isfinite(most), most, 0)
    return reference + xp.log2(xp.exp2(logs - reference).sum(0))


def nothing(xp: Any, shape: tuple[int, ...], dim: int, columns: int) -> Sums:
    """Return what rows of that shape sum over no pairs."""
    return Sums(xp.zeros((*shape, columns)), xp.full(shape, -xp.inf), xp.zeros((*shape, dim)), xp.zeros(shape))
