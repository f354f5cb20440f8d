"""Tables of masks in device memory: made once per mask, device and tile, and kept on the mask."""

import functools
import math
from itertools import accumulate
from typing import Any

from cuattn.cuda.arguments import Axes, Struct, band_fields, function, whole, zero
from cuattn.cuda.params import BATCH_AXES, MASK_PARAMS
from cuattn.cuda.sm80.forward_plan import mask_code
from cuattn.errors import UnsupportedError
from cuattn.masks.device import Ready
from cuattn.problem import Problem

__all__ = ["MaskTables", "mask_tables", "table_fields", "table_layout", "table_slots"]

_ORDER_SHARED_BYTES = 40 * 1024  # more row tiles than fit here run unsorted
_KEYS_PER_BLOCK, _ROWS_PER_BLOCK = 256, 512  # of mask_alive
_UNIT = 128  # keys are padded so that every key tile may be read whole


_SLOTS = ("mask.data", "table.cols", "table.bounds", "table.order", "table.alive")


def table_slots(number: int) -> dict[str, str]:
    """Return the slots of ``Params`` that belong to a mask, and what a record calls their addresses in its table."""
    return {slot: f"{slot} {number}" for slot in _SLOTS}


class MaskTables:
    """What the kernels with one tile read of a kind of mask; the memory comes from a mask or from a call.

    Attributes
    ----------
    nbytes : int
        Memory that the tables take.
    """

    nbytes: int

    def __init__(self, problem: Problem, device: int, *tile: int) -> None:
        band = problem.band
        sides = None if band is None else (band.left, band.right, band.offset)
        self._key = ("cuda tables", device, tile, problem.n_queries, problem.n_keys, sides)
        self._device = device

    def find(self, mask: Any, stream: Any, capturing: bool) -> list[int] | None:
        """Return the addresses for a mask's slots, or None when the call must fill tables of its own.

        It must for a boolean mask (None), which may change from call to call, and while `stream` is captured:
        what a capture records is written only when it is replayed.
        """
        if mask is None:
            return None
        kept = mask._cache.get(self._key)
        if kept is None:
            if capturing:
                return None
            kept = mask._cache[self._key] = self._make(mask, stream)
        addresses, ready, _ = kept
        ready.wait(stream)
        return addresses

    def _make(self, mask: Any, stream: Any) -> tuple[list[int], Ready, Any]:
        import cupy

        with stream:  # the pool hands memory out, and takes it back, in the order of its current stream
            memory = cupy.cuda.alloc(self.nbytes)
        return self.fill(self.source(mask, stream), memory.ptr, stream), Ready(stream), memory

    def source(self, mask: Any, stream: Any) -> int:
        """Return the address of a mask's vectors or blocks on this device, written before what `stream` does next."""
        with stream:
            twin = mask.to_device(self._device)
            twin._wait()
        return twin._array.data.ptr

    def fill(self, source: int, memory: int, stream: Any) -> list[int]:
        """Launch what fills `memory` from a mask at `source`; return the addresses for the mask's slots."""
        raise NotImplementedError


def mask_tables(
    problem: Problem, mask: Any, device: int, block_m: int, block_n: int, unit: int | None = None
) -> MaskTables:
    """Return the tables of a kind of mask.

    Parameters
    ----------
    problem : Problem
    mask : ColumnMask | BlockMask | cupy.ndarray
        Only its layout matters.
    device : int
        The current device.
    block_m, block_n : int
        Query rows and keys of a tile.
    unit : int, optional
        Query rows that the bounds of a column mask count in: a divisor of `block_m`, which is the default.
    """
    if problem.mask == "column":
        return _Columns(problem, mask, device, block_m, block_n, unit or block_m)
    return _Alive(problem, mask, device)


class _Columns(MaskTables):
    """Of a ColumnMask: its bounds key by key, the ranges of row tiles that they hide, an order of the row tiles."""

    def __init__(self, problem: Problem, mask: Any, device: int, block_m: int, block_n: int, unit: int) -> None:
        super().__init__(problem, device, block_m, block_n, unit)
        instances, keys = math.prod(mask.leading), problem.n_keys
        _check_instances(instances)
        key_tiles, row_tiles, items = (
            -(-keys // block_n),
            -(-problem.n_queries // unit),
            -(-problem.n_queries // block_m),
        )
        ordered = 4 * (row_tiles + 1) <= _ORDER_SHARED_BYTES
        padded = key_tiles * block_n
        sizes = (16 * instances * padded, 32 * instances * key_tiles, 4 * instances * items if ordered else 0)
        *self._offsets, self.nbytes = accumulate(map(whole, sizes), initial=0)
        self._step = 4 * instances * keys  # bytes from one of the four vectors to the next
        self._ordered = ordered
        self._launches: list[tuple[Any, ...]] = []
        if instances * key_tiles * row_tiles == 0:
            return
        values = {
            **band_fields(problem),
            "n_queries": problem.n_queries,
            "n_keys": keys,
            "keys_padded": padded,
            "row_tiles": row_tiles,
            "key_tiles": key_tiles,
        }
        self._struct = Struct(MASK_PARAMS, values, ("lts", "lte", "uts", "ute", "cols", "bounds", "order"))
        kernels = {"mask_bounds": ((key_tiles, instances), -(-block_n // 32) * 32, 0)}
        if ordered:
            kernels["mask_order"] = ((instances,), 1024, 4 * (row_tiles + 1))
        constants = (*_constants(problem, unit, block_n), ("rows_per_item", block_m // unit))
        for name, (grid, threads, shared_bytes) in kernels.items():
            kernel = function(device, "util/mask_bounds.cu", name, constants)
            self._launches.append((kernel, grid, (threads,), shared_bytes))

    def fill(self, source: int, memory: int, stream: Any) -> list[int]:
        if not self._launches:  # without keys nothing would write an order, which rows would yet be taken in
            return [0] * 5
        cols, bounds, order = (memory + offset for offset in self._offsets)
        order = order if self._ordered else 0
        for kernel, grid, block, shared_bytes in self._launches:
            words = self._struct.fill([*(source + i * self._step for i in range(4)), cols, bounds, order])
            kernel(grid, block, (self._struct.seal(words),), shared_bytes, stream)
        return [0, cols, bounds, order, 0]


class _Alive(MaskTables):
    """Of a boolean mask or a BlockMask: which keys some row sees."""

    def __init__(self, problem: Problem, mask: Any, device: int) -> None:
        super().__init__(problem, device)  # for all tiles the same
        array = mask.blocks if problem.mask == "block" else mask
        sizes = (mask.block_m, mask.block_n) if problem.mask == "block" else (1, 1)
        leading, (rows, columns) = array.shape[:-2], array.shape[-2:]
        instances = math.prod(leading)
        _check_instances(instances)
        padded = -(-problem.n_keys // _UNIT) * _UNIT
        self.nbytes = instances * padded
        self._grid = (-(-problem.n_keys // _KEYS_PER_BLOCK), -(-rows // _ROWS_PER_BLOCK), instances)
        if self.nbytes * problem.n_queries == 0:
            self._grid = ()
            return
        counts, strides = _leading_axes(leading, array.strides[:-2])
        values = {
            **band_fields(problem),
            "stride": strides,
            "size": counts,
            "row": array.strides[-2] if rows > 1 else 0,
            "col": array.strides[-1] if columns > 1 else 0,
            "rows": rows,
            "block_m": sizes[0],
            "block_n": sizes[1],
            "n_queries": problem.n_queries,
            "n_keys": problem.n_keys,
            "keys_padded": padded,
        }
        self._struct = Struct(MASK_PARAMS, values, ("mask", "alive"))
        constants = _constants(problem, *sizes)
        self._function = function(device, "util/mask_alive.cu", "mask_alive", constants)

    def fill(self, source: int, memory: int, stream: Any) -> list[int]:
        zero(memory, self.nbytes, stream)
        if self._grid:
            argument = self._struct.seal(self._struct.fill([source, memory]))
            self._function(self._grid, (_KEYS_PER_BLOCK,), (argument,), 0, stream)
        return [source, 0, 0, 0, memory if self.nbytes else 0]


def table_layout(problem: Problem, mask: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and instance strides of a mask's tables over (*batch, heads)."""
    if mask is None:
        return None
    leading = mask.shape[:-2] if problem.mask == "dense" else mask.leading
    leading = (1,) * (len(problem.batch) + 1 - len(leading)) + tuple(leading)
    strides = [1] * len(leading)
    for axis in range(len(leading) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * leading[axis + 1]
    return leading, tuple(strides)


def table_fields(problem: Problem, mask: Any, layout: tuple, axes: Axes, block_n: int) -> dict[str, Any]:
    """Return the fields of ``Params`` that describe a mask's tables, from :func:`table_layout`."""
    shape, strides = layout
    batch = axes.strides(shape[:-1], strides[:-1], 1)
    head = strides[-1] if shape[-1] > 1 else 0
    padded = block_n if problem.mask == "column" else 128
    values: dict[str, Any] = {
        "table.batch": batch,
        "table.head": head,
        "table.keys_padded": -(-problem.n_keys // padded) * padded,
    }
    if problem.mask == "block":
        rows, columns = mask.blocks.shape[-2:]
        values.update(
            {
                "table.block_m": mask.block_m,
                "table.block_n": mask.block_n,
                "table.block_rows": rows,
                "table.block_cols": columns,
                "mask.batch": tuple(stride * rows * columns for stride in batch),
                "mask.head": head * rows * columns,
                "mask.row": columns,
                "mask.col": 1,
            }
        )
    return values


def _check_instances(instances: int) -> None:
    if instances > 65535:
        raise UnsupportedError(f"mask holds {instances} different masks; expected at most 65535 on a GPU")


def _leading_axes(leading: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Fit a mask's leading axes into the BATCH_AXES + 1 of ``MaskParams``, without the axes of length 1."""
    kept = [(n, s) for n, s in zip(leading, strides, strict=True) if n != 1]
    if len(kept) > BATCH_AXES + 1:
        raise UnsupportedError(f"mask has {len(kept)} leading axes; expected at most {BATCH_AXES + 1} on a GPU")
    kept = [(1, 0)] * (BATCH_AXES + 1 - len(kept)) + kept
    return [n for n, _ in kept], [s for _, s in kept]


@functools.lru_cache(maxsize=256)
def _constants(problem: Problem, block_m: int, block_n: int) -> tuple[tuple[str, object], ...]:
    band = problem.band
    return (
        ("block_m", block_m),
        ("block_n", block_n),
        ("band_left", band is not None and band.left is not None),
        ("band_right", band is not None and band.right is not None),
        ("mask", mask_code(problem)),
    )
