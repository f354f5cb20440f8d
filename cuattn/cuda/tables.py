"""Tables of masks in device memory: of all masks of a call together, made once for each tile, and kept on a mask.

What a kind of mask needs is said by its class (:class:`cuattn.masks.cuda_half.CudaHalf`); nothing here asks for a kind.
"""

import functools
import math
import weakref
from collections import ChainMap
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, Axes, band_fields, changes, collapse, layout_fields, steps_of
from cuattn.cuda.constants import halves, problem_constants
from cuattn.cuda.device import zero
from cuattn.cuda.launch import Kernel
from cuattn.cuda.params import BATCH_AXES, MASK_PARAMS, TABLES, derived
from cuattn.cuda.source import functions_text
from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import align_up
from cuattn.masks.base import Mask
from cuattn.masks.cuda_half import CudaHalf, Extent, Source
from cuattn.masks.device import Ready
from cuattn.problem import Problem

_MAX_GRID = 2**31 - 1
_ZEROED = 2  # tables, the last, that are zeros before they are written
_KEPT = 16  # tables that a mask keeps on each device

_numbers = count()
_PREFIX = "visible."  # of the arguments of a mask function


class Kept:
    """Tables that a mask keeps, written on the stream `home`; whoever launches on them holds this until it has."""

    def __init__(self, addresses: list[int], held: Any, stream: Any, device: int) -> None:
        self.addresses, self._held = addresses, held
        self._ready, self.home = Ready(stream), stream
        self._users: dict[int, Any] = {}
        weakref.finalize(self, _give_back, stream, self._users, device).atexit = False

    def use(self, stream: Any) -> None:
        """Let another stream wait until the tables are written."""
        self._ready.wait(stream)
        if stream.ptr != self.home.ptr:
            self._users[stream.ptr] = stream


class KeptTables(NamedTuple):
    """All tables of a call, their addresses, and the stream that wrote them all, if one did."""

    tables: Sequence[Kept]
    addresses: Sequence[int]
    home: Any


def _give_back(home: Any, users: dict[int, Any], device: int) -> None:
    """Let the stream that memory goes back to wait for the work of others that read it."""
    if users:
        import cupy

        with cupy.cuda.Device(device):
            for stream in users.values():
                home.wait_event(stream.record())


class CallMasks:
    """The masks of one kind of call: what of them its launches depend on.

    Parameters
    ----------
    problem : Problem
    masks : sequence of Mask
        In the order of ``problem.masks``; only their layouts matter.
    device : int
    packed : bool, optional
        Whether the kernels read elements of boolean masks as bits.

    Attributes
    ----------
    layouts : dict of str to tuple of int
        Strides over (*batch, heads), and any behind them, that merging axes must keep.
    """

    def __init__(self, problem: Problem, masks: Sequence[Mask], device: int, packed: bool = False) -> None:
        self.problem, self.device, self._packed, self._rank = problem, device, packed, len(problem.batch)
        # A function in the place of a boolean mask is one whose elements are computed ahead.
        self.halves = [
            half if mask.kind == kind else mask.elements
            for half, mask, kind in zip(halves(problem), masks, problem.masks, strict=True)
        ]
        self.sources = [_aligned(mask.source(), self._rank + 1) for mask in masks]
        self.leading = np.broadcast_shapes(*(source.leading for source in self.sources))
        self.lasting = not any(mask.borrowed for mask in masks)
        self._operands = {
            half.operand: source for half, source in zip(self.halves, self.sources, strict=True) if half.operand
        }
        # Strides of the tables' own instances, as a mask with one element each, and of masks that are read beside them.
        self.layouts = {"table": steps_of(Array(self.leading, np.dtype(np.uint8)))} if masks else {}
        self.layouts |= {name: (*source.strides, source.row, source.col) for name, source in self._operands.items()}
        self.generated = {name: text for mask in masks for name, text in mask.generated.items()}
        self._own_fields = {name: value for mask in masks for name, value in mask.fields.items()}
        self._tables = functools.cache(functools.partial(MaskTables, self))

    def extent(self, block_m: int, block_n: int, unit: int | None = None) -> Extent:
        """Return what tables for such tiles are made for."""
        problem = self.problem
        instances = math.prod(self.leading) if problem.n_keys else 0  # else nothing is read
        sources = tuple(zip(problem.masks, self.sources, strict=True))
        tile = block_m, block_n, unit or block_m
        return Extent(instances, problem.n_queries, problem.n_keys, *tile, self._packed, sources)

    def fields(self, axes: Axes, extent: Extent) -> dict[str, Any]:
        """Return the fields of ``Params`` that describe masks and tables."""
        values: dict[str, Any] = {"table.keys_padded": extent.key_tiles * extent.block_n}
        values |= {f"table.{name}": stride for name, stride in extent.strides.items()}
        for name, steps in self.layouts.items():
            values |= layout_fields(name, steps, axes, self._rank)
        if blocks := self._operands.get("mask"):
            values |= {"table.block_m": blocks.block_m, "table.block_n": blocks.block_n}
        return values | self._own_fields

    def traced(self, dtype: np.dtype, name: str) -> tuple[np.dtype, dict[str, Any], str]:
        """Return a kernel's argument with those of the mask function behind it, their values, and its text.

        Parameters
        ----------
        dtype : dtype
        name : str
            What the function is for; "" where it is not asked.
        """
        made = self.generated.get(name)
        if made is None:
            return dtype, {}, ""
        values = {_PREFIX + field: made.arguments[field] for field in made.arguments.dtype.names}
        return derived(dtype, made.arguments.dtype, _PREFIX), values, made.text

    def source_fields(self) -> tuple[list[str], dict[str, Any]]:
        """Return the fields of ``MaskParams`` that take the masks' addresses, and those that describe the masks."""
        axes = collapse(self.leading, [source.strides for source in self.sources], BATCH_AXES + 1, "mask")
        slots, fields = [], {"size": axes.size, **self._own_fields}
        for number, (half, source) in enumerate(zip(self.halves, self.sources, strict=True)):
            name = half.source if half.most == 1 else f"{half.source}.{self.halves[:number].count(half)}"
            slots.append(f"{name}.data")
            fields[f"{name}.stride"] = axes.pick(source.strides)
            fields |= {f"{name}.{field}": getattr(source, field) for field in ("row", "col", "block_m", "block_n")}
            slots += [f"{_PREFIX}array{slot}" for slot in range(source.arrays)]
        return slots, fields

    def tables(self, extent: Extent) -> "MaskTables":
        """Return the tables for tiles of some sizes; those that are the same are one object."""
        if not any(half.by_tile for half in self.halves):
            extent = extent._replace(block_m=1, block_n=1, unit=1)
        return self._tables(extent)


@functools.lru_cache(maxsize=1024)
def _number_of(*key: Hashable) -> int:
    """Return a number for what tables depend on beside masks, which is quicker to look up."""
    return next(_numbers)


class MaskTables:
    """What the kernels with one tile read of a call's masks; the memory is kept on a mask, or is the call's own.

    There are none for a call without queries, which launches nothing that would read them.

    Attributes
    ----------
    slots : list of str
        The fields of ``Params`` that take the addresses of :meth:`fill`, as far as a kernel has them.
    nbytes : int
        Memory that the tables take.
    """

    def __init__(self, masks: CallMasks, extent: Extent) -> None:
        problem, halves = masks.problem, sorted({*masks.halves}, key=lambda half: half.code)
        self._masks, self._device, self._problem, self.lasting = masks, masks.device, problem, masks.lasting
        self._place = "tables", masks.device
        self._number = _number_of(*extent[:-1], problem.masks, masks.leading, problem.band)
        needed = ChainMap(*(half.tables(extent) for half in halves))
        sizes = [needed.get(name, 0) for name in TABLES]
        *places, self.nbytes = accumulate(map(align_up, sizes), initial=0)
        self._places = [place if size else None for place, size in zip(places, sizes, strict=True)]
        self._zeros = places[-_ZEROED]
        slots, values = masks.source_fields()
        values |= {
            **band_fields(problem), **extent.strides, "instances": extent.instances, "alike": extent.alike,
            "n_queries": problem.n_queries, "n_keys": problem.n_keys, "keys_padded": extent.key_tiles * extent.block_n,
            "row_tiles": extent.row_tiles, "key_tiles": extent.key_tiles,
        }  # fmt: skip
        read = {f"{half.source}.data": f"{half.operand}.data" for half in halves if half.operand}
        self.slots = [*(read.get(slot, slot) for slot in slots), *(f"table.{name}" for name in TABLES)]
        self._kernels = self._launches(halves, extent, [*slots, *TABLES], values)

    def _launches(self, halves: Iterable[CudaHalf], extent: Extent, slots: list[str], values: dict) -> list[Kernel]:
        """Return what makes the tables, of arguments with these values and addresses."""
        unit, problem, found = extent.unit, self._problem, []
        sized = {"block_m": unit, "block_n": extent.block_n, "rows_per_item": extent.block_m // unit}
        constants, numbers = problem_constants(problem) | sized, {name: number for number, name in enumerate(slots)}
        kernels = dict.fromkeys(x for half in halves for x in half.kernels(extent))
        for file, name, blocks, threads, shared, text, _ in sorted(kernels, key=lambda kernel: kernel.last):
            if blocks > _MAX_GRID:
                raise UnsupportedError(f"mask needs {blocks} blocks of {name}; expected less than 2**31")
            if blocks:
                dtype, more, traced = self._masks.traced(MASK_PARAMS, text)
                names = {name: name for name in slots if name in dtype.fields}
                launched = file, name, constants, (blocks,), threads, dtype, {**values, **more}, names
                found.append(
                    Kernel(self._device, numbers, *launched, shared_bytes=shared, traced=functions_text("", traced))
                )
        return found

    def find(self, masks: Sequence[Mask], shift: int, stream: Any, capturing: bool) -> Kept | None:
        """Return tables that a mask keeps, made if need be; None where there are none and `stream` is captured.

        What a capture records is written only when it is replayed.  A captured graph must hold what this returns.

        Parameters
        ----------
        masks : sequence of Mask
            All but a caller's boolean array.
        shift : int
            What is added to the band's offset.
        """
        made = masks[0]._cache.setdefault(self._place, {})
        key = self._number, shift, *map(id, masks[1:])
        kept = made.get(key)
        if kept is None and not capturing:
            while len(made) >= _KEPT:
                made.pop(next(iter(made)), None)
            kept = made[key] = self._make(masks, shift, stream)
        return kept

    def _make(self, masks: Sequence[Mask], shift: int, stream: Any) -> Kept:
        import cupy

        with stream:  # the pool hands memory out, and takes it back, in the order of its current stream
            memory = cupy.cuda.alloc(self.nbytes)
        arrays = self._arrays(masks, stream)
        addresses = self.fill([array.data.ptr for array in arrays], shift, memory.ptr, stream)
        return Kept(addresses, (memory, masks[1:], arrays), stream, self._device)

    def _arrays(self, masks: Sequence[Mask], stream: Any) -> list[Any]:
        with stream:
            return [array for mask in masks for array in mask.arrays_on(self._device)]

    def sources(self, masks: Sequence[Mask], plain: int, stream: Any) -> list[int]:
        """Return the addresses of the masks' arrays on this device, written before what `stream` does next.

        `plain` is that of a caller's boolean array, which comes last.
        """
        addresses = [array.data.ptr for array in self._arrays(masks, stream)]
        return addresses if len(masks) == len(self._problem.masks) else [*addresses, plain]

    def fill(self, sources: Sequence[int], shift: int, memory: int, stream: Any) -> list[int]:
        """Launch what fills `memory` from arrays at `sources`; return the addresses for `slots`."""
        tables = [0 if place is None else memory + place for place in self._places]
        zero(memory + self._zeros, self.nbytes - self._zeros, stream)
        moved = changes(MASK_PARAMS, band_fields(self._problem, shift))
        addresses = [*sources, *tables]
        for kernel in self._kernels:
            kernel.launch(addresses, stream.ptr, changes=moved)
        return addresses


def _aligned(source: Source, rank: int) -> Source:
    """Give a mask as many leading axes as a problem has; along new ones it is broadcast."""
    more = rank - len(source.leading)
    return source._replace(leading=(1,) * more + source.leading, strides=(0,) * more + source.strides)
