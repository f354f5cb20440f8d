"""Tables of masks in device memory: of all masks of a call together, made once for each tile, and kept on a mask.

What a kind of mask needs is said by its class (:class:`cuattn.masks.cuda_half.CudaHalf`); nothing here asks for a kind.
"""

import functools
import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Array, Axes, align_up, band_fields, changes, collapse, steps_of
from cuattn.cuda.device import zero
from cuattn.cuda.launch import Kernel
from cuattn.cuda.params import BATCH_AXES, MASK_PARAMS
from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv
from cuattn.masks.base import KINDS, Mask
from cuattn.masks.cuda_half import Source
from cuattn.masks.device import Ready
from cuattn.problem import Problem

_ORDER_SHARED_BYTES = 40 * 1024  # more row tiles than fit here run unsorted
_KEYS_PER_BLOCK, _GROUPS_PER_BLOCK = 256, 512  # of mask_alive
_MAX_GRID = 2**31 - 1
_KEPT = 8  # tables that a mask keeps on each device

_OPERANDS = ("mask", "boolean")  # the operands of Params that kernels read beside the tables
_TABLES = ("cols", "bounds", "order", "alive")
TABLE_SLOTS = (*(f"{name}.data" for name in _OPERANDS), *(f"table.{name}" for name in _TABLES))
"""The fields of ``Params`` that take the addresses of :meth:`MaskTables.fill`."""


def mask_constants(problem: Problem) -> dict[str, object]:
    """Return the constants of masks that kernels are specialised by.

    Raises
    ------
    UnsupportedError
        A kind of mask is not for GPUs, or there are more of it than a kernel takes.
    """
    code = 0
    for kind in problem.masks:
        half = KINDS[kind].cuda
        if half is None:
            raise UnsupportedError(f"mask holds a {kind} mask; expected kinds that a GPU takes")
        count = problem.masks.count(kind)
        if count > half.most:
            raise UnsupportedError(f"mask holds {count} {kind} masks; expected at most {half.most} on a GPU")
        code += half.code
    return {"mask": code}


def band_constants(problem: Problem) -> dict[str, object]:
    """Return which sides of the band hide keys."""
    band = problem.band
    return {f"band_{side}": band is not None and getattr(band, side) is not None for side in ("left", "right")}


class Kept:
    """Tables that a mask keeps; whoever launches on them holds this until it has."""

    __slots__ = ("_device", "_held", "_home", "_ready", "_users", "addresses")

    def __init__(self, addresses: list[int], held: Any, stream: Any, device: int) -> None:
        self.addresses, self._held = addresses, held
        self._ready, self._home, self._device = Ready(stream), stream, device
        self._users: dict[int, Any] = {}

    def use(self, stream: Any) -> None:
        """Let `stream` wait until the tables are written."""
        self._ready.wait(stream)
        if stream.ptr != self._home.ptr:
            self._users[stream.ptr] = stream

    def __del__(self) -> None:
        """Give the memory back only behind the work of all streams that read it."""
        if not self._users or sys.is_finalizing():
            return
        import cupy

        with cupy.cuda.Device(self._device):
            for stream in self._users.values():
                self._home.wait_event(stream.record())


class CallMasks:
    """The masks of one kind of call: what of them its launches depend on.

    Parameters
    ----------
    problem : Problem
    masks : sequence of Mask
        In the order of ``problem.masks``; only their layouts matter.
    device : int
    """

    def __init__(self, problem: Problem, masks: Sequence[Mask], device: int) -> None:
        self.problem, self.device = problem, device
        self.constants = mask_constants(problem)
        self.halves = [KINDS[kind].cuda for kind in problem.masks]
        # The structs in ``MaskParams`` that describe them.
        fields = [half.source for half in self.halves]
        self.prefixes = [
            half.source if half.most == 1 else f"{half.source}.{fields[:number].count(half.source)}"
            for number, half in enumerate(self.halves)
        ]
        self.sources = [_aligned(mask.source(), len(problem.batch) + 1) for mask in masks]
        self.leading = np.broadcast_shapes(*(source.leading for source in self.sources))
        self.instances = math.prod(self.leading)
        self.lasting = not any(mask.borrowed for mask in masks)
        # The tables' own instances, as a mask with one element each.
        table = Source(self.leading, steps_of(Array(self.leading, np.dtype(np.uint8))), 0, 0)
        described = [(half.operand, source) for half, source in zip(self.halves, self.sources, strict=True)]
        self._described = {"table": table} if masks else {}
        self._described |= {name: source for name, source in described if name}
        self.kernels = {name: half.file for half in self.halves for name in half.kernels}
        self.columns = sum("mask_bounds" in half.kernels for half in self.halves)
        self._tables = functools.cache(functools.partial(MaskTables, self))

    @property
    def layouts(self) -> list[tuple[int, ...]]:
        """Strides over (*batch, heads) that merging axes must keep."""
        return [source.strides for source in self._described.values()]

    def fields(self, axes: Axes, block_n: int) -> dict[str, Any]:
        """Return the fields of ``Params`` that describe masks and tables."""
        values: dict[str, Any] = {"table.keys_padded": cdiv(self.problem.n_keys, block_n) * block_n}
        for name, source in self._described.items():
            values |= {f"{name}.batch": axes.pick(source.strides), f"{name}.head": source.strides[-1]}
            if name != "table":
                values |= {f"{name}.row": source.row, f"{name}.col": source.col}
            if name == "mask":
                values |= {"table.block_m": source.block_m, "table.block_n": source.block_n}
        return values

    def tables(self, block_m: int, block_n: int, unit: int | None = None) -> "MaskTables":
        """Return the tables for tiles of `block_m` rows and `block_n` keys; those that are the same are one object.

        `unit`, a divisor of `block_m` and by default that, is what bounds of column masks count rows in.
        """
        return self._tables(block_m, block_n, unit or block_m) if self.columns else self._tables(1, 1, 1)


class MaskTables:
    """What the kernels with one tile read of a call's masks; the memory is kept on a mask, or is the call's own.

    Attributes
    ----------
    nbytes : int
        Memory that the tables take.
    """

    def __init__(self, masks: CallMasks, block_m: int, block_n: int, unit: int) -> None:
        problem, columns, instances = masks.problem, masks.columns, masks.instances
        self._masks = masks
        self._key = (block_m, block_n, unit, problem.n_queries, problem.n_keys, problem.masks, masks.leading)
        row_tiles, key_tiles = cdiv(problem.n_queries, unit), cdiv(problem.n_keys, block_n)
        order_shared = 4 * (row_tiles + 1)
        ordered = columns and order_shared <= _ORDER_SHARED_BYTES
        sizes = {
            "cols": 16 * columns * instances * key_tiles * block_n,
            "bounds": 32 * columns * instances * key_tiles,
            "order": 4 * instances * cdiv(problem.n_queries, block_m) if ordered else 0,
            "alive": instances * problem.n_keys if "mask_alive" in masks.kernels else 0,
        }
        self._sizes = list(sizes.values())
        *self._offsets, self.nbytes = accumulate(map(align_up, self._sizes), initial=0)
        # Without keys nothing would write an order, which rows would yet be taken in.
        self._empty = instances * problem.n_keys * problem.n_queries == 0
        # Neighbouring rows that see the same, as far as sizes tell.
        alike = max(min(problem.n_queries if source.row == 0 else source.block_m for source in masks.sources), 1)
        chunks = cdiv(cdiv(problem.n_queries, alike), _GROUPS_PER_BLOCK)
        shapes = {
            "mask_alive": (instances * chunks * cdiv(problem.n_keys, _KEYS_PER_BLOCK), _KEYS_PER_BLOCK, 0),
            "mask_bounds": (instances * key_tiles, cdiv(block_n, 32) * 32, 0),
            "mask_order": (instances if sizes["order"] else 0, 1024, order_shared),
        }
        values = {
            **_source_fields(masks), **band_fields(problem), "alike": alike, "n_queries": problem.n_queries,
            "n_keys": problem.n_keys, "keys_padded": key_tiles * block_n, "row_tiles": row_tiles,
            "key_tiles": key_tiles,
        }  # fmt: skip
        constants = {
            "block_m": unit, "block_n": block_n, "rows_per_item": block_m // unit, **band_constants(problem),
            **masks.constants,
        }  # fmt: skip
        slots = [*(f"{name}.data" for name in masks.prefixes), *_TABLES]
        numbers, names = {name: number for number, name in enumerate(slots)}, {name: name for name in slots}
        self._kernels = []
        for name, path in masks.kernels.items():
            blocks, threads, shared = shapes[name]
            if blocks > _MAX_GRID:
                raise UnsupportedError(f"mask needs {blocks} blocks of {name}; expected less than 2**31")
            if blocks:
                launched = path, name, constants, (blocks,), threads, MASK_PARAMS, values, names
                self._kernels.append(Kernel(masks.device, numbers, *launched, shared_bytes=shared))

    def find(self, masks: Sequence[Mask], shift: int, stream: Any, capturing: bool) -> Kept | None:
        """Return tables that a mask keeps, or None when the call must fill tables of its own.

        It must for a caller's boolean array, which may change from call to call, and while `stream` is captured: what a
        capture records is written only when it is replayed.  A captured graph must hold what this returns.

        Parameters
        ----------
        masks : sequence of Mask
            All but a caller's boolean array.
        shift : int
            What is added to the band's offset.
        """
        if not self._masks.lasting:
            return None
        device = self._masks.device
        cache, place = masks[0]._cache, ("cuda", device)
        cells = cache.get(place) or cache.setdefault(place, functools.lru_cache(_KEPT)(lambda *key: []))
        cell = cells(*self._key, *band_fields(self._masks.problem, shift).values(), *map(id, masks[1:]))
        if not cell:  # until its tables are made
            if capturing:
                return None
            cell.append(self._make(masks, shift, stream))
        cell[0].use(stream)
        return cell[0]

    def _make(self, masks: Sequence[Mask], shift: int, stream: Any) -> Kept:
        import cupy

        with stream:  # the pool hands memory out, and takes it back, in the order of its current stream
            memory = cupy.cuda.alloc(self.nbytes)
        addresses = self.fill(self.sources(masks, 0, stream), shift, memory.ptr, stream)
        held = memory, masks[1:], [mask.to_device(self._masks.device)._array for mask in masks]
        return Kept(addresses, held, stream, self._masks.device)

    def sources(self, masks: Sequence[Mask], plain: int, stream: Any) -> list[int]:
        """Return the masks' addresses on this device, written before what `stream` does next.

        `plain` is that of a caller's boolean array, which comes last.
        """
        addresses = []
        with stream:
            for mask in masks:
                twin = mask.to_device(self._masks.device)
                twin._wait()
                addresses.append(twin._array.data.ptr)
        return addresses if self._masks.lasting else [*addresses, plain]

    def fill(self, sources: Sequence[int], shift: int, memory: int, stream: Any) -> list[int]:
        """Launch what fills `memory` from masks at `sources`; return the addresses for the slots of masks."""
        operands = {half.operand: address for half, address in zip(self._masks.halves, sources, strict=True)}
        found = [operands.get(name, 0) for name in _OPERANDS]
        if self._empty:
            return [*found, *[0] * len(_TABLES)]
        tables = [memory + at if size else 0 for at, size in zip(self._offsets, self._sizes, strict=True)]
        zero(tables[-1], self._sizes[-1], stream)
        moved = changes(MASK_PARAMS, band_fields(self._masks.problem, shift))
        for kernel in self._kernels:
            kernel.launch([*sources, *tables], stream.ptr, moved)
        return [*found, *tables]


def _aligned(source: Source, rank: int) -> Source:
    """Give a mask as many leading axes as a problem has; along new ones it is broadcast."""
    more = rank - len(source.leading)
    return source._replace(leading=(1,) * more + source.leading, strides=(0,) * more + source.strides)


def _source_fields(masks: CallMasks) -> dict[str, Any]:
    """Return the fields of ``MaskParams`` that describe the masks as they were given."""
    axes = collapse(masks.leading, [source.strides for source in masks.sources], BATCH_AXES + 1, "mask")
    fields: dict[str, Any] = {"size": axes.size}
    for name, source in zip(masks.prefixes, masks.sources, strict=True):
        fields[f"{name}.stride"] = axes.pick(source.strides)
        fields |= {f"{name}.{field}": getattr(source, field) for field in ("row", "col", "block_m", "block_n")}
    return fields
