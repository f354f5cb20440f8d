"""Tables of masks in device memory: made once per mask, device and tile, and kept on the mask."""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from cuattn.cuda.arguments import Axes, align_up, band_fields, change
from cuattn.cuda.compile import function
from cuattn.cuda.device import zero
from cuattn.cuda.launch import Kernel
from cuattn.cuda.params import BATCH_AXES, MASK_PARAMS
from cuattn.errors import UnsupportedError
from cuattn.masks.device import Ready
from cuattn.problem import Problem

__all__ = ["CallMasks", "Kept", "MaskTables", "mask_constants", "slots"]

_ORDER_SHARED_BYTES = 40 * 1024  # more row tiles than fit here run unsorted
_KEYS_PER_BLOCK, _ROWS_PER_BLOCK = 256, 512  # of mask_alive
_UNIT = 128  # keys are padded so that every key tile may be read whole
_CODES = {"column": 1, "block": 2, "boolean": 3}
_SLOTS = ("mask.data", "table.cols", "table.bounds", "table.order", "table.alive")


def slots(number: int) -> dict[str, str]:
    """Return the slots of ``Params`` that belong to masks, and what a sequence calls their addresses in its table."""
    return {slot: f"{slot} {number}" for slot in _SLOTS}


def mask_constants(problem: Problem) -> dict[str, object]:
    """Return the constants of masks that kernels are specialised by."""
    return {"mask": sum(_CODES[kind] for kind in problem.masks)}


class Kept(NamedTuple):
    """Tables that a mask keeps."""

    addresses: list[int]
    ready: Ready
    memory: Any


class CallMasks:
    """The masks of one kind of call: what of them its launches depend on."""

    def __init__(self, problem: Problem, masks: Sequence[Any], device: int) -> None:
        if len(masks) > 1:
            raise UnsupportedError(f"mask has {len(masks)} parts; expected one on a GPU")
        self._problem, self._device = problem, device
        self._mask = masks[0] if masks else None
        self._layout = table_layout(problem, self._mask)

    @property
    def layouts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes and strides over (*batch, heads) that merging axes must keep."""
        found = [] if self._layout is None else [self._layout]
        if self._problem.masks == ("boolean",):
            array = self._array()
            found.append((array[0], array[1]))
        return found

    def _array(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        array, rank = self._mask.array, len(self._problem.batch) + 3
        more = rank - array.ndim
        return (1,) * more + tuple(array.shape), (0,) * more + tuple(array.strides)

    def fields(self, axes: Axes, block_n: int) -> dict[str, Any]:
        """Return the fields of ``Params`` that describe masks and tables."""
        if self._mask is None:
            return {}
        values = table_fields(self._problem, self._mask, self._layout, axes, block_n)
        if self._problem.masks == ("boolean",):
            shape, strides = self._array()
            rank = len(self._problem.batch)
            head, row, col = (0 if n == 1 else s for n, s in zip(shape[rank:], strides[rank:], strict=True))
            values |= {"mask.batch": axes.strides(shape[:rank], strides[:rank], 1)}
            values |= {"mask.head": head, "mask.row": row, "mask.col": col}
        return values

    def tables(self, block_m: int, block_n: int, unit: int | None = None) -> "MaskTables":
        """Return the tables for a tile; those that are the same have the same `key`."""
        if self._problem.masks == ("column",):
            return _Columns(self._problem, self._mask, self._device, block_m, block_n, unit or block_m)
        return _Alive(self._problem, self._mask, self._device)


class MaskTables:
    """What the kernels with one tile read of a kind of mask; the memory comes from a mask or from a call.

    Attributes
    ----------
    nbytes : int
        Memory that the tables take.
    key : hashable
        The same for tables that are the same.
    """

    nbytes: int

    def __init__(self, problem: Problem, device: int, *tile: int) -> None:
        self._problem, self._device = problem, device
        self.key = ("cuda tables", device, tile, problem.n_queries, problem.n_keys)

    def find(self, masks: Sequence[Any], shift: int, stream: Any, capturing: bool) -> Kept | None:
        """Return tables that are kept, or None when the call must fill tables of its own.

        It must for a boolean array, which may change from call to call, and while `stream` is captured:
        what a capture records is written only when it is replayed.
        """
        if not masks:
            return None
        key = (*self.key, *band_fields(self._problem, shift).values())
        kept = masks[0]._cache.get(key)
        if kept is None:
            if capturing:
                return None
            kept = masks[0]._cache[key] = self._make(masks, shift, stream)
        kept.ready.wait(stream)
        return kept

    def _make(self, masks: Sequence[Any], shift: int, stream: Any) -> Kept:
        import cupy

        with stream:  # the pool hands memory out, and takes it back, in the order of its current stream
            memory = cupy.cuda.alloc(self.nbytes)
        return Kept(self.fill(self.sources(masks, 0, stream), shift, memory.ptr, stream), Ready(stream), memory)

    def sources(self, masks: Sequence[Any], plain: int, stream: Any) -> int:
        """Return the address of a mask on this device, written before what `stream` does next.

        `plain` is that of a caller's boolean array.
        """
        if not masks:
            return plain
        with stream:
            twin = masks[0].to_device(self._device)
            twin._wait()
        return twin._array.data.ptr

    def fill(self, source: int, shift: int, memory: int, stream: Any) -> list[int]:
        """Launch what fills `memory` from a mask at `source`; return the addresses for the mask's slots."""
        raise NotImplementedError


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
        *self._offsets, self.nbytes = accumulate(map(align_up, sizes), initial=0)
        self._step = 4 * instances * keys  # bytes from one of the four vectors to the next
        self._ordered = ordered
        self._empty = instances * key_tiles * row_tiles == 0
        values = {
            "n_queries": problem.n_queries, "n_keys": keys, "keys_padded": padded,
            "row_tiles": row_tiles, "key_tiles": key_tiles, **band_fields(problem),
        }  # fmt: skip
        shapes = {"mask_bounds": ((key_tiles, instances), -(-block_n // 32) * 32, 0)}
        if ordered:
            shapes["mask_order"] = ((instances,), 1024, 4 * (row_tiles + 1))
        constants = (*_constants(problem, unit, block_n), ("rows_per_item", block_m // unit))
        names = ("lts", "lte", "uts", "ute", "cols", "bounds", "order")
        numbers = {name: number for number, name in enumerate(names)}

        def kernels() -> list[Kernel]:
            return [
                Kernel(function(device, "util/mask_bounds.cu", name, constants), *shape, MASK_PARAMS, values, numbers)
                for name, shape in shapes.items()
            ]

        self._kernels = functools.cache(kernels)

    def fill(self, source: int, shift: int, memory: int, stream: Any) -> list[int]:
        if self._empty:  # without keys nothing would write an order, which rows would yet be taken in
            return [0] * 5
        cols, bounds, order = (memory + offset for offset in self._offsets)
        order = order if self._ordered else 0
        addresses = [*(source + i * self._step for i in range(4)), cols, bounds, order]
        changes = [change(MASK_PARAMS, *field) for field in band_fields(self._problem, shift).items()]
        for kernel in self._kernels():
            kernel.launch(addresses, stream.ptr, changes)
        return [0, cols, bounds, order, 0]


class _Alive(MaskTables):
    """Of a boolean mask or a BlockMask: which keys some row sees."""

    def __init__(self, problem: Problem, mask: Any, device: int) -> None:
        super().__init__(problem, device)  # for all tiles the same
        block = problem.masks == ("block",)
        array = mask.blocks if block else mask.array
        sizes = (mask.block_m, mask.block_n) if block else (1, 1)
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
        constants = _constants(problem, *sizes)

        def kernel() -> Kernel:
            found = function(device, "util/mask_alive.cu", "mask_alive", constants)
            return Kernel(found, self._grid, _KEYS_PER_BLOCK, 0, MASK_PARAMS, values, {"mask": 0, "alive": 1})

        self._kernel = functools.cache(kernel)

    def fill(self, source: int, shift: int, memory: int, stream: Any) -> list[int]:
        zero(memory, self.nbytes, stream)
        if self._grid:
            changes = [change(MASK_PARAMS, *field) for field in band_fields(self._problem, shift).items()]
            self._kernel().launch([source, memory], stream.ptr, changes)
        return [source, 0, 0, 0, memory if self.nbytes else 0]


def table_layout(problem: Problem, mask: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and instance strides of a mask's tables over (*batch, heads)."""
    if mask is None:
        return None
    leading = mask.leading
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
    padded = block_n if problem.masks == ("column",) else 128
    values: dict[str, Any] = {
        "table.batch": batch,
        "table.head": head,
        "table.keys_padded": -(-problem.n_keys // padded) * padded,
    }
    if problem.masks == ("block",):
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
        *mask_constants(problem).items(),
    )
