"""From arrays to kernel arguments: cards, compiled functions, strides, streams, scratch memory."""

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda import compile as compiler
from cuattn.cuda import source
from cuattn.cuda.params import BATCH_AXES, PARAMS
from cuattn.cuda.sm80.tiles import TICKETS, Card
from cuattn.errors import UnsupportedError
from cuattn.problem import Problem

__all__ = [
    "Axes", "Struct", "band_fields", "card", "collapse", "function", "load_bytes", "merged_axes", "operand_fields",
    "problem_fields", "random_words", "start", "ticket_of", "whole", "zero",
]  # fmt: skip

# Values of cudaDeviceAttr.
_ATTRIBUTES = {
    "MultiProcessorCount": 16,
    "L2CacheSize": 38,
    "ComputeCapabilityMajor": 75,
    "ComputeCapabilityMinor": 76,
    "MaxSharedMemoryPerBlockOptin": 97,
}
_UNIT = 256  # bytes; pieces of memory begin at multiples of it
_PER_THREAD = 2  # address of the default stream that every thread has to itself
_OPEN = 2**30  # a band side that hides nothing; lengths are smaller


@functools.lru_cache(maxsize=64)
def card(device: int) -> Card:
    """Return what a plan needs to know about GPU number `device`."""
    import cupy

    read = functools.partial(_attribute, cupy.cuda.runtime, device)
    major, minor = read("ComputeCapabilityMajor"), read("ComputeCapabilityMinor")
    if major < 8:
        raise UnsupportedError(f"GPU {device} has compute capability {major}.{minor}; expected 8.0 or newer")
    return Card(
        f"sm_{major}{minor}", read("MultiProcessorCount"), read("MaxSharedMemoryPerBlockOptin"), read("L2CacheSize")
    )


def _attribute(runtime: Any, device: int, name: str) -> int:
    return int(runtime.deviceGetAttribute(_ATTRIBUTES[name], device))


@functools.lru_cache(maxsize=4096)
def function(
    device: int,
    path: str,
    kernel: str,
    constants: tuple[tuple[str, object], ...],
    shared_bytes: int = 0,
    arch: str | None = None,
):
    """Return a kernel of ``kernels/<path>`` for GPU number `device`, which must be current.

    ``function(grid, block, (argument,), shared_bytes, stream)`` launches it; `arch` is the device's unless given.
    """
    cubin = compiler.compile_cubin(source.build(path, constants), arch or card(device).arch, name=path)
    return compiler.load(cubin, kernel, shared_bytes)


class Piece(NamedTuple):
    """Arguments of a launch in memory: a struct's words, and behind them the address of each argument."""

    words: memoryview
    arguments: int  # where the addresses are


class _Thread(threading.local):
    """Whether the calling thread has launched before."""

    ready = False


_thread = _Thread()


def start(kernel: Any, shape: Sequence[int], piece: Piece, maps: Sequence[Any], stream: int) -> None:
    """Launch a kernel with the arguments of a piece, which the driver copies.

    Parameters
    ----------
    kernel : cupy.cuda.Function
    shape : sequence of int
        Blocks along three axes, threads along three axes, dynamic shared memory per block.
    piece : Piece
    maps : sequence of object
        Keeps the arguments behind the first alive.
    stream : int
        The stream's address.
    """
    if not _thread.ready:
        _bind()
    _launch()(kernel.ptr, *shape, stream, piece.arguments, 0)


def _bind() -> None:
    """Make the current device's context the calling thread's, which the driver's own calls do not."""
    import cupy

    cupy.cuda.runtime.memGetInfo()
    _thread.ready = True


@functools.cache
def _launch() -> Any:
    from cupy_backends.cuda.api import driver

    return driver.launchKernel


class Struct:
    """A packed argument: a template filled once per kind of call, copied and completed in each.

    Pointers are written as 64-bit words; `slots` names those that change from call to call, as "field",
    "field.of.a.struct" or "field.3" for an item of an array.
    """

    def __init__(self, dtype: np.dtype, values: dict[str, Any], slots: Sequence[str]) -> None:
        record = np.zeros((), dtype)
        for name, value in values.items():
            _assign(record, name, value)
        self._bytes = np.dtype(f"V{dtype.itemsize}")
        self._template = record.tobytes()
        self.slots = tuple(_offset(dtype, name) // 8 for name in slots)

    def fill(self, pointers: Sequence[int]) -> memoryview:
        """Return the 64-bit words of an argument with the slots set to `pointers`, in the order they were named."""
        words = memoryview(bytearray(self._template)).cast("Q")
        for slot, pointer in zip(self.slots, pointers, strict=True):
            words[slot] = pointer
        return words

    def seal(self, words: memoryview) -> np.void:
        """Return what a launch takes by value."""
        return np.frombuffer(words.obj, self._bytes)[0]

    def piece(self, maps: int) -> Piece:
        """Return memory with the template and with room for the addresses of `maps` further arguments."""
        size = len(self._template) // 8
        storage = np.zeros(size + 1 + maps, np.uint64)
        storage[:size] = np.frombuffer(self._template, np.uint64)
        storage[size] = storage.ctypes.data
        return Piece(memoryview(storage), storage.ctypes.data + 8 * size)


def _assign(record: np.ndarray, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        record = record[part]
    record[last] = value


def _offset(dtype: np.dtype, name: str) -> int:
    offset = 0
    for part in name.split("."):
        if part.isdecimal():
            dtype, position = dtype.base, int(part) * dtype.base.itemsize
        else:
            dtype, position = dtype.fields[part][:2]
        offset += position
    return offset


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


def merged_axes(problem: Problem, arrays: Iterable[Any], tables: tuple[tuple[int, ...], ...] | None) -> Axes:
    """Return the merged batch axes of a call from its arrays and from shape and strides of its mask's tables."""
    rank = len(problem.batch)
    layouts = [(array.shape[:rank], array.strides[:rank]) for array in arrays]
    if tables is not None:
        layouts.append((tables[0][:rank], tables[1][:rank]))
    return collapse(problem.batch, tuple(layouts))


def _even(shape: tuple[int, ...], strides: tuple[int, ...], outer: int, inner: int, size: int) -> bool:
    outer_stride = 0 if shape[outer] == 1 else strides[outer]
    inner_stride = 0 if shape[inner] == 1 else strides[inner]
    return outer_stride == inner_stride * size


def operand_fields(name: str, array: Any, axes: Axes, rank: int) -> dict[str, Any]:
    """Return the fields of an ``Operand`` except its pointer.

    The array is (*batch, heads, rows, columns) with `rank` batch axes, or lacks the columns.
    """
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


def band_fields(problem: Problem) -> dict[str, int]:
    """Return the band's fields of ``Params`` or ``MaskParams``."""
    band = problem.band
    if band is None:
        return {}

    def side(width: int | None) -> int:
        return _OPEN if width is None else min(width, _OPEN)

    offset = max(min(band.offset, _OPEN), -_OPEN)
    return {"band_left": side(band.left), "band_right": side(band.right), "band_offset": offset}


@functools.lru_cache(maxsize=256)
def _round_keys(seed: int) -> tuple[int, ...]:
    """Return the two 32-bit keys of each Philox round as one word, the first in the low half."""
    pairs = (((seed + r * 0x9E3779B9) & 0xFFFFFFFF, ((seed >> 32) + r * 0xBB67AE85) & 0xFFFFFFFF) for r in range(7))
    return tuple(low | high << 32 for low, high in pairs)


_KEYS = _offset(PARAMS, "dropout.keys") // 8
_OFFSET = _offset(PARAMS, "dropout.offset") // 8
_OFFSET_DATA = _offset(PARAMS, "dropout.offset_data") // 8


def random_words(state: Any) -> list[tuple[int, int, int]]:
    """Return the words of a ``Params`` that hold a random state: place, bits that belong to something else, value.

    The offset may be a 0-d array of integers on the device, whose low word the kernel reads.
    """
    number = isinstance(state.offset, (int, np.integer))
    offset = int(state.offset) if number else 0
    address = 0 if number else state.offset.__cuda_array_interface__["data"][0]
    keys = [(place, 0, key) for place, key in enumerate(_round_keys(int(state.seed)), _KEYS)]
    return [*keys, (_OFFSET, 0xFFFFFFFF << 32, offset), (_OFFSET_DATA, 0, address)]


def _random_fields(problem: Problem) -> dict[str, int]:
    """Return the fields of ``Params.dropout`` that a problem fixes: the place of its first element in the whole."""
    origin = problem.origin
    return {
        "dropout.batch": origin.batch,
        "dropout.head": origin.head,
        "dropout.heads": problem.heads if origin.heads is None else origin.heads,
        "dropout.row": origin.row,
        "dropout.key": origin.key,
    }


def problem_fields(problem: Problem, axes: Axes) -> dict[str, Any]:
    """Return the fields of ``Params`` that follow from a problem and its merged batch axes alone."""
    return {
        **band_fields(problem), **_random_fields(problem),
        "scale": problem.scale, "softcap": problem.softcap or 0.0,
        "cap_scale": problem.scale / problem.softcap if problem.softcap else 0.0, "dropout_scale": problem.dropout_scale,
        "batch_size": axes.size, "batch": math.prod(problem.batch), "heads": problem.heads,
        "kv_heads": problem.kv_heads, "group": problem.group,
        "n_queries": problem.n_queries, "n_keys": problem.n_keys,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
    }  # fmt: skip


def whole(size: int) -> int:
    """Round a number of bytes up to where the next piece of memory may begin."""
    return -(-size // _UNIT) * _UNIT


def zero(address: int, size: int, stream: Any) -> None:
    """Fill device memory with zeros."""
    import cupy

    if size:
        cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)


def ticket_of(stream: Any) -> int:
    """Return the address of a stream's 32-bit counters, TICKETS of them, which every launch leaves at 0."""
    import cupy

    thread = threading.get_ident() if stream.ptr == _PER_THREAD else 0
    return _ticket(cupy.cuda.runtime.getDevice(), stream.ptr, thread).ptr


@functools.cache  # never evicted: launches may be under way
def _ticket(device: int, stream: int, thread: int) -> Any:
    import cupy

    memory = cupy.cuda.alloc(4 * TICKETS)
    cupy.cuda.runtime.memsetAsync(memory.ptr, 0, 4 * TICKETS, stream)
    return memory
