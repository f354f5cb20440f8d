"""Masks that hold a boolean for each cell of the matrix: a block of rows and keys, or a single element."""

import math
from typing import Any, ClassVar, TypeVar

import numpy as np

from cuattn.errors import MaskError
from cuattn.io_model.sizes import cdiv
from cuattn.masks.base import Instance, Mask
from cuattn.masks.cuda_half import Source, source_of
from cuattn.masks.device import namespace
from cuattn.masks.runs import Runs, length_of, take

__all__ = ["CellMask"]

Self = TypeVar("Self", bound="CellMask")

_FINEST = 16  # parts may cut blocks at multiples of it: finer ones would make blocks of a few elements each


class CellMask(Mask):
    """A mask whose array (..., cells along the rows, cells along the keys) says which cells are visible.

    The array alone leaves the lengths open; `bind` settles them.
    """

    __slots__ = _parameter_names = ("block_m", "block_n", "borrowed", "_lengths")
    block_m: int
    """Rows and keys of a cell."""
    block_n: int
    borrowed: bool
    """Whether the array is a caller's, who may change it after a call: nothing made of it may be kept."""
    _lengths: tuple[int | None, int | None]  # of queries and keys; None: not known
    _stretches: ClassVar[bool]  # whether a single cell stands for any length

    @classmethod
    def _around(cls: type[Self], array: Any, ready: Any, *parameters: Any) -> Self:
        """Build a mask around an array that it shares with others, who do not write to it once `ready`."""
        mask = object.__new__(cls)
        mask._settle(None, **dict(zip(cls._parameter_names, parameters, strict=True)))
        object.__setattr__(mask, "_array", array)
        object.__setattr__(mask, "_ready", ready)
        return mask

    def _bound(self: Self, n_queries: int, n_keys: int) -> Self:
        size = self.block_m, self.block_n
        return self._around(self._array, self._ready, *size, self.borrowed, (n_queries, n_keys))

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the array without its last two axes."""
        return tuple(self._array.shape[:-2])

    @property
    def n_queries(self) -> int:
        """Number of query rows; while that is not known (see `bind`) that of whole cells."""
        known = self._lengths[0]
        return self._array.shape[-2] * self.block_m if known is None else known

    @property
    def n_keys(self) -> int:
        """Number of key columns, in the same way."""
        known = self._lengths[1]
        return self._array.shape[-1] * self.block_n if known is None else known

    @property
    def layout(self) -> tuple[Any, ...]:
        """All of the mask that a launch depends on."""
        return (*super().layout, self._array.strides)

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        return all(
            length == known if known is not None else cells == cdiv(length, size) or (self._stretches and cells == 1)
            for length, known, cells, size in zip(
                (n_queries, n_keys), self._lengths, self._array.shape[-2:], (self.block_m, self.block_n), strict=True
            )
        )

    def visible(self, instance: Instance, i: Any, j: Any) -> Any:
        matrix = self._array[instance]
        xp, (rows, columns) = namespace(matrix), matrix.shape
        # A cell that stretches is the only one, and the last.
        return matrix[xp.minimum(i // self.block_m, rows - 1), xp.minimum(j // self.block_n, columns - 1)]

    def source(self) -> Source:
        return source_of(self._array, block_m=self.block_m, block_n=self.block_n)

    def _restrict(self: Self, rows: Runs, keys: Runs) -> Self:
        block_m, part = _cut("rows", self._array, rows, self.block_m, -2)
        block_n, part = _cut("keys", part, keys, self.block_n, -1)
        lengths = length_of(rows), length_of(keys)
        return self._around(part, self._ready, block_m, block_n, self.borrowed, lengths)


def _cut(name: str, array: Any, runs: Runs, block: int, axis: int) -> tuple[int, Any]:
    """Return the cells that runs along an axis take, and their size: the mask's own, or one that no cut falls into."""
    if array.shape[axis] == 1:
        return block, array
    cuts = [cut for run in runs for cut in run]
    size = math.gcd(block, *cuts[:-1])  # the last cell may be ragged
    if size < min(block, _FINEST):
        raise MaskError(f"{name} cut blocks of {block} at multiples of {size}: expected multiples of {_FINEST}")
    if size == block:
        return block, take(array, [(start // block, cdiv(stop, block)) for start, stop in runs], axis)
    cells = np.concatenate([np.arange(start, stop, size) // block for start, stop in runs])
    xp = namespace(array)
    return size, xp.take(array, xp.asarray(cells), axis=axis)
