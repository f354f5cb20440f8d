"""Masks that hold a boolean for each cell of the matrix: a block of rows and keys, or a single element."""

import math
from typing import Any, ClassVar

import numpy as np

from cuattn.errors import MaskError
from cuattn.io_model.sizes import cdiv
from cuattn.masks import checks
from cuattn.masks.base import Instance, Mask
from cuattn.masks.column import ColumnMask
from cuattn.masks.cuda_half import (
    CudaHalf,
    Source,
    alive_kernels,
    alive_tables,
    boolean_kernels,
    boolean_tables,
    source_of,
)
from cuattn.masks.device import copy, namespace
from cuattn.masks.runs import Runs, indices, length_of, taken


class CellMask(Mask):
    """A mask whose array (..., cells along the rows, cells along the keys) says which cells are visible.

    The array alone leaves the lengths open; `bind` settles them.
    """

    _parameter_names = ("block_m", "block_n", "borrowed", "_lengths")
    block_m: int
    """Rows and keys of a cell."""
    block_n: int
    _lengths: tuple[int, int] | None  # of queries and keys; None: not known
    _stretches: ClassVar[bool] = False  # whether a single cell stands for any length

    def _derived(self) -> dict[str, Any]:
        *leading, rows, columns = self._array.shape
        n_queries, n_keys = self._lengths or (rows * self.block_m, columns * self.block_n)  # of whole cells
        return {"leading": tuple(leading), "n_queries": n_queries, "n_keys": n_keys}

    @property
    def block(self) -> tuple[int, int]:
        """Rows and keys of a cell."""
        return self.block_m, self.block_n

    def _bound(self, n_queries, n_keys):
        return self._wrap(self._array, *self._parameters[:-1], (n_queries, n_keys), _ready=self._ready)

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        if self._lengths:
            return super().fits(n_queries, n_keys)
        return all(
            cells == cdiv(length, size) or (self._stretches and cells == 1)
            for length, cells, size in zip((n_queries, n_keys), self._array.shape[-2:], self.block, strict=True)
        )

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> Any:
        matrix = self._array[instance]
        xp = namespace(matrix)
        rows, keys = (
            slice(None) if cells == 1 else part if size == 1 else xp.arange(part.start, part.stop) // size
            for part, cells, size in zip((rows, keys), matrix.shape, self.block, strict=True)
        )  # a single cell holds all there is
        return ~matrix[rows][:, keys].T

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        matrix = self._array[instance]
        xp, (rows, columns) = namespace(matrix), matrix.shape
        top, bottom = _cells_of_tiles(self.n_queries, block_m, self.block_m, rows)
        left, right = map(xp.asarray, _cells_of_tiles(self.n_keys, block_n, self.block_n, columns))
        # Columns before each that some row of a tile sees, and that all do.
        before = xp.zeros((2, stop - start, columns + 1), xp.int32)
        for tile, part in enumerate(map(slice, top[start:stop], bottom[start:stop])):
            before[0, tile, 1:] = matrix[part].any(axis=0).cumsum(dtype=xp.int32)
            before[1, tile, 1:] = matrix[part].all(axis=0).cumsum(dtype=xp.int32)
        some, every = before[..., right] - before[..., left]
        return (some > 0).astype(xp.int8) + (every == right - left)

    def source(self) -> Source:
        return source_of(self._array, block_m=self.block_m, block_n=self.block_n)

    def _restrict(self, rows, keys):
        block_m, part = _cut(self._array, rows, self.block_m, -2)
        block_n, part = _cut(part, keys, self.block_n, -1)
        return self._wrap(part, block_m, block_n, self.borrowed, (length_of(rows), length_of(keys)))

    def _heads(self, part):
        return self._wrap(self._array[..., part, :, :].copy(), *self._parameters)

    def joined(self, other: Mask) -> Mask | None:
        if not isinstance(other, CellMask) or self.block != other.block:
            return None
        return self._wrap(self._array & other._array, *self.block, False, self._lengths or other._lengths)


def _cells_of_tiles(length: int, tile: int, block: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first cell of each tile, and the cell after its last; one that stretches is in all tiles."""
    first = np.arange(0, length, tile)
    return np.minimum(first // block, cells - 1), np.minimum(cdiv(np.minimum(first + tile, length), block), cells)


def _cut(array: Any, runs: Runs, block: int, axis: int) -> tuple[int, Any]:
    """Return the cells that runs along an axis take, and their size: the mask's own, or one that no cut falls into."""
    if array.shape[axis] == 1:
        return block, array
    size = math.gcd(block, *[cut for run in runs for cut in run][:-1])  # the last cell may be ragged
    return size, taken(array, indices(runs, size) // block, axis)


class BlockMask(CellMask):
    """A mask of blocks: row i may see key j if ``blocks[..., i // block_m, j // block_n]``.

    The mask does not know how many rows and keys its last blocks hold; its methods take them, `bind` settles them, and
    by default every block counts as whole.

    Parameters
    ----------
    blocks : array_like of bool, (..., ceil(n_queries / block_m), ceil(n_keys / block_n))
        True = attend, on the host or on a GPU (any array library).  The leading axes broadcast to the problem's
        (..., heads).  The array is copied.
    block_m, block_n : int
        Rows and keys of a block, >= 1.

    Attributes
    ----------
    blocks : bool array
        Read-only; a NumPy array or, on a GPU, a CuPy array.
    block_m, block_n : int
        Rows and keys of a block.
    leading : tuple of int
        Shape of `blocks` without its last two axes.
    on_device : bool
        Whether the blocks lie on a GPU; `device` is its index or None.

    Raises
    ------
    MaskError
        `blocks` has fewer than two axes, or a block size is below 1.
    DtypeError
        `blocks` is not boolean or a block size not an integer.

    See Also
    --------
    ColumnMask : Element-wise bounds in O(n_keys) memory.

    Notes
    -----
    A kernel skips tiles in proportion to the hidden blocks where the blocks are multiples of its tiles.

    References
    ----------
    T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", algorithm 5.

    Examples
    --------
    >>> from cuattn.masks import BlockMask
    >>> mask = BlockMask([[True, False], [True, True]], block_m=1, block_n=2)
    >>> mask
    <BlockMask 2 x 2 blocks of 1 x 2 on the host>
    >>> mask.dense(n_queries=2, n_keys=3).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """

    kind = "block"
    cuda: ClassVar[CudaHalf | None] = CudaHalf(8, 1, "blocks", "mask", alive_tables, alive_kernels, by_tile=False)

    def __init__(self, blocks: Any, block_m: int, block_n: int) -> None:
        self._settle(copy(checks.booleans("blocks", blocks)), *checks.tile(block_m, block_n), False, None)

    @property
    def blocks(self) -> Any:
        """The blocks, True = attend."""
        return self._array

    def __repr__(self) -> str:
        rows, columns = self._array.shape[-2:]
        leading = f"{self.leading} x " if self.leading else ""
        return f"<BlockMask {leading}{rows} x {columns} blocks of {self.block_m} x {self.block_n} {self._where}>"


class BooleanMask(CellMask):
    """A mask that says of every element whether it is visible, as a boolean array does.

    Parameters
    ----------
    array : array_like of bool, (..., n_queries | 1, n_keys | 1)
        True = attend, on the host or on a GPU (any array library).  All axes broadcast to the problem's
        (..., heads, n_queries, n_keys).  It is copied.

    Attributes
    ----------
    array : bool array
        Read-only; a NumPy array or, on a GPU, a CuPy array.

    Raises
    ------
    MaskError
        `array` has fewer than two axes.
    DtypeError
        `array` is not boolean.

    See Also
    --------
    ColumnMask : The same in O(N), where two intervals a key suffice.
    BlockMask : Whole blocks.

    Examples
    --------
    >>> from cuattn.masks import BooleanMask
    >>> BooleanMask([[True, False]]).dense(n_queries=2).astype(int)
    array([[1, 0],
           [1, 0]])
    """

    kind = "boolean"
    cuda: ClassVar[CudaHalf | None] = CudaHalf(16, 1, "boolean", "boolean", boolean_tables, boolean_kernels)
    _stretches = True

    def __init__(self, array: Any) -> None:
        self._settle(copy(checks.booleans("array", array)), 1, 1, False, None)

    @classmethod
    def borrow(cls, array: Any) -> "BooleanMask":
        """Return a mask for one call around a caller's NumPy or CuPy array, bool with two axes or more: no copy."""
        return cls._wrap(array.view(), 1, 1, True, None, _ready=None)

    @property
    def array(self) -> Any:
        """The matrix or matrices, True = attend."""
        return self._array

    @property
    def unowned(self) -> bool:
        return self.borrowed

    def as_columns(self, n_queries: int, n_keys: int) -> Mask:
        if self.on_device or self.array.shape[-1] != n_keys:
            return self
        try:
            found = ColumnMask.from_dense(self.array)
        except MaskError:
            return self
        # A single row stands for all of them.
        return found if found.n_queries == n_queries else ColumnMask._wrap(found._array * n_queries, n_queries)

    def __repr__(self) -> str:
        return f"<BooleanMask {self._array.shape} {self._where}>"
