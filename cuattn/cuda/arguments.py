"""From arrays to kernel arguments: packed structs, strides, merged axes, and the words that change with each call."""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.device import check_reachable
from cuattn.cuda.params import BATCH_AXES, OPERAND_FIELDS, PARAMS
from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Place, Problem
from cuattn.rng import RNGState, round_keys

__all__ = [
    "Axes", "Change", "Piece", "Struct", "align_up", "band_fields", "change", "collapse", "load_bytes", "merged_axes",
    "operand_fields", "pad", "place_changes", "problem_fields", "slot_of", "state_changes",
]  # fmt: skip

_ALIGNMENT = 256  # bytes; pieces of memory begin at multiples of it
_OPEN = 2**30  # a band side that hides nothing; lengths are smaller
_WORD = 8  # bytes
_FIELDS = {"do": "dout"}  # operands whose names C++ reserves

Change = tuple[int, int, int]
"""A word of an argument, its bits that belong to something else, and the others' value."""


def align_up(size: int) -> int:
    """Round a number of bytes up to where the next piece of memory may begin."""
    return cdiv(size, _ALIGNMENT) * _ALIGNMENT


def pad(length: int, unit: int) -> int:
    """Round up to a multiple of `unit`, at least one of them.

    >>> pad(80, 32), pad(0, 32)
    (96, 32)
    """
    return max(cdiv(length, unit), 1) * unit


class Piece(NamedTuple):
    """Arguments of a launch in memory: a struct's words, and behind them the address of each argument."""

    words: memoryview
    arguments: int  # where the addresses are


class Struct:
    """A packed argument: a template filled once per kind of call, copied and completed in each.

    Pointers are written as 64-bit words; `slots` names those that change from call to call, as "field",
    "field.of.a.struct" or "field.3" for an item of an array.
    """

    def __init__(self, dtype: np.dtype, values: dict[str, Any], slots: Iterable[str]) -> None:
        record = np.zeros((), dtype)
        for name, value in values.items():
            _assign(record, name, value)
        self._template = np.frombuffer(record.tobytes(), np.uint64)
        self.slots = tuple(_offset(dtype, name) // _WORD for name in slots)

    def piece(self, maps: int = 0) -> Piece:
        """Return memory with the template and with room for the addresses of `maps` further arguments."""
        size = len(self._template)
        storage = np.zeros(size + 1 + maps, np.uint64)
        storage[:size] = self._template
        storage[size] = storage.ctypes.data
        return Piece(memoryview(storage), storage.ctypes.data + _WORD * size)


def _assign(record: np.ndarray, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        record = record[part]
    record[last] = value


@functools.cache
def _offset(dtype: np.dtype, name: str) -> int:
    offset = 0
    for part in name.split("."):
        if part.isdecimal():
            dtype, position = dtype.base, int(part) * dtype.base.itemsize
        else:
            dtype, position = dtype.fields[part][:2]
        offset += position
    return offset


def slot_of(name: str) -> str | None:
    """Return the slot of ``Params`` that takes the address of an operand, result or piece of workspace."""
    field = _FIELDS.get(name, name)
    return f"{field}.data" if field in OPERAND_FIELDS else field if field in PARAMS.names else None


class Axes(NamedTuple):
    """The batch axes of a call after neighbours with matching strides were merged."""

    size: tuple[int, ...]  # BATCH_AXES entries, outermost first, unused ones 1
    groups: tuple[tuple[int, ...], ...]  # the problem's axes that became each of them, innermost last

    def strides(self, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        """Return an array's element strides along the merged axes; 0 where it is broadcast."""
        own = tuple(0 if n == 1 else s // itemsize for n, s in zip(shape, strides, strict=True))
        # Within a group all strides follow from the innermost axis.
        inner = [own[group[-1]] if group else 0 for group in self.groups]
        return (0,) * (BATCH_AXES - len(inner)) + tuple(inner)


@functools.lru_cache(maxsize=1024)
def collapse(batch: tuple[int, ...], layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> Axes:
    """Merge neighbouring batch axes that every array walks evenly.

    Parameters
    ----------
    batch : tuple of int
        The problem's batch axes.
    layouts : tuple of (shape, strides)
        Of each array, its leading ``len(batch)`` axes; sizes 1 or the problem's.

    Raises
    ------
    UnsupportedError
        More axes remain than a kernel can index.
    """
    groups: list[list[int]] = []
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        if groups and all(_even(shape, strides, groups[-1][-1], axis, size) for shape, strides in layouts):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) > BATCH_AXES:
        raise UnsupportedError(
            f"the leading axes of q, k, v {batch} have strides that leave {len(groups)} separate axes; expected at "
            f"most {BATCH_AXES} on a GPU (make the arrays contiguous)"
        )
    sizes = [math.prod(batch[axis] for axis in group) for group in groups]
    return Axes((1,) * (BATCH_AXES - len(sizes)) + tuple(sizes), tuple(map(tuple, groups)))


def merged_axes(problem: Problem, arrays: Iterable[Any], more: Iterable[tuple] = ()) -> Axes:
    """Return the merged batch axes of a call from its arrays and from `more` shapes and strides."""
    rank = len(problem.batch)
    layouts = [*((array.shape, array.strides) for array in arrays), *more]
    return collapse(problem.batch, tuple((shape[:rank], strides[:rank]) for shape, strides in layouts))


def _even(shape: tuple[int, ...], strides: tuple[int, ...], outer: int, inner: int, size: int) -> bool:
    outer_stride = 0 if shape[outer] == 1 else strides[outer]
    inner_stride = 0 if shape[inner] == 1 else strides[inner]
    return outer_stride == inner_stride * size


def operand_fields(name: str, array: Any, axes: Axes, rank: int) -> dict[str, Any]:
    """Return the fields of an ``Operand`` except its pointer.

    The array is (*batch, heads, rows, columns) with `rank` batch axes, or lacks the columns.
    """
    name = _FIELDS.get(name, name)
    shape, strides = (*array.shape, 1)[: rank + 3], (*array.strides, 0)[: rank + 3]
    size = array.dtype.itemsize
    head, row, col = (0 if n == 1 else s // size for n, s in zip(shape[rank:], strides[rank:], strict=True))
    return {
        f"{name}.batch": axes.strides(shape[:rank], strides[:rank], size),
        f"{name}.head": head,
        f"{name}.row": row,
        f"{name}.col": col,
    }


def load_bytes(*arrays: Any) -> int:
    """Return the widest access (16, 8, 4 or 2 bytes) that the arrays' addresses and row strides allow."""
    bits = 16
    for array in arrays:
        bits |= array.data.ptr
        for size, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
            if size > 1:
                bits |= stride
    return bits & -bits


def band_fields(problem: Problem, shift: int = 0) -> dict[str, int]:
    """Return the band's fields of ``Params`` or ``MaskParams``, with its offset and a part's `shift` in its sides."""
    band = problem.band
    if band is None:
        return {}
    offset = band.offset + shift

    def side(width: int | None, sign: int) -> int:
        return _OPEN if width is None else max(min(width + sign * offset, _OPEN), -_OPEN)

    return {"band_left": side(band.left, -1), "band_right": side(band.right, 1)}


def problem_fields(problem: Problem, axes: Axes) -> dict[str, Any]:
    """Return the fields of ``Params`` that follow from a problem and its merged batch axes alone."""
    return {
        **band_fields(problem),
        "dropout.heads": problem.heads, "dropout_scale": problem.dropout_scale,
        "scale": problem.scale, "softcap": problem.softcap or 0.0,
        "cap_scale": problem.scale / problem.softcap if problem.softcap else 0.0,
        "batch_size": axes.size, "batch": math.prod(problem.batch),
        "heads": problem.heads, "kv_heads": problem.kv_heads, "group": problem.group,
        "n_queries": problem.n_queries, "n_keys": problem.n_keys,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
    }  # fmt: skip


@functools.cache
def _word_of(dtype: np.dtype, name: str) -> tuple[int, int, int]:
    """Return the word that holds a field of 4 or 8 bytes, the field's first bit, and the bits of others."""
    word, byte = divmod(_offset(dtype, name), _WORD)
    field = dtype
    for part in name.split("."):
        field = field.fields[part][0]
    mine = ((1 << 8 * field.itemsize) - 1) << 8 * byte
    return word, 8 * byte, (1 << 8 * _WORD) - 1 & ~mine


def change(dtype: np.dtype, name: str, value: int) -> Change:
    """Return what sets a field of an argument to a value of its size."""
    word, bit, kept = _word_of(dtype, name)
    return word, kept, (value << bit) & ~kept & (1 << 8 * _WORD) - 1


_KEYS = _offset(PARAMS, "dropout.keys") // _WORD
_OFFSET, _OFFSET_DATA = _word_of(PARAMS, "dropout.offset"), _word_of(PARAMS, "dropout.offset_data")


@functools.lru_cache(maxsize=256)
def _key_changes(seed: int) -> tuple[Change, ...]:
    """Return what sets the two 32-bit keys of each Philox round, the first in the low half of a word."""
    return tuple((_KEYS + r, 0, low | high << 32) for r, (low, high) in enumerate(round_keys(RNGState(seed).key)))


def state_changes(state: RNGState, device: int) -> list[Change]:
    """Return what gives a ``Params`` a random state.

    The offset may be a 0-d array of integers on the device, whose low word the kernel reads.
    """
    number = isinstance(state.offset, (int, np.integer))
    offset = int(state.offset) if number else 0
    address = 0
    if not number:
        address = state.offset.__cuda_array_interface__["data"][0]
        check_reachable("rng.offset", address, device)
    (word, bit, kept), (data_word, _, _) = _OFFSET, _OFFSET_DATA
    return [*_key_changes(int(state.seed)), (word, kept, offset << bit), (data_word, 0, address)]


def place_changes(problem: Problem, place: Place, row_blocks: int = 0, key_blocks: int = 0) -> list[Change]:
    """Return what gives a ``Params`` the place of a part in the whole; `row_blocks`, `key_blocks` are addresses."""
    fields = {f"dropout.{name}": getattr(place, name) for name in ("batch", "head", "heads", "row", "key")}
    fields |= {"dropout.row_blocks": row_blocks, "dropout.key_blocks": key_blocks}
    fields |= band_fields(problem, place.shift)
    return [change(PARAMS, name, value) for name, value in fields.items()]
