"""BlockMask: whole blocks of the matrix, seen or not."""

import math
from typing import Any

import numpy as np

from cuattn.errors import MaskError
from cuattn.io_model.sizes import cdiv
from cuattn.masks import checks, intervals
from cuattn.masks.base import Instance, Mask
from cuattn.masks.cuda_half import CudaHalf, Source, source_of
from cuattn.masks.device import copy, namespace
from cuattn.masks.runs import Runs, length_of

_FINEST = 16  # parts may cut blocks at multiples of it: finer ones would make blocks of a few elements each


class BlockMask(Mask):
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

    __slots__ = ("_n_keys", "_n_queries", "block_m", "block_n")
    kind = "block"
    cuda = CudaHalf(8, 1, "blocks", "mask", "util/mask_alive.cu", ("mask_alive",))
    _parameter_names = ("block_m", "block_n", "_n_queries", "_n_keys")
    block_m: int
    block_n: int
    _n_queries: int | None  # None: not known; all blocks then count as whole
    _n_keys: int | None

    def __init__(self, blocks: Any, block_m: int, block_n: int) -> None:
        blocks = checks.booleans("blocks", blocks, min_ndim=2)
        block_m, block_n = checks.tile(block_m, block_n)
        self._settle(copy(blocks), block_m=block_m, block_n=block_n, _n_queries=None, _n_keys=None)

    @property
    def blocks(self) -> Any:
        """The blocks, True = attend."""
        return self._array

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of `blocks` without its last two axes."""
        return tuple(self._array.shape[:-2])

    @property
    def n_queries(self) -> int:
        """Number of query rows; while that is not known (see `bind`) that of whole blocks."""
        return self._array.shape[-2] * self.block_m if self._n_queries is None else self._n_queries

    @property
    def n_keys(self) -> int:
        """Number of key columns, in the same way."""
        return self._array.shape[-1] * self.block_n if self._n_keys is None else self._n_keys

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        return all(
            cdiv(length, block) == blocks if known is None else length == known
            for length, known, block, blocks in (
                (n_queries, self._n_queries, self.block_m, self._array.shape[-2]),
                (n_keys, self._n_keys, self.block_n, self._array.shape[-1]),
            )
        )

    def _bound(self, n_queries: int, n_keys: int) -> "BlockMask":
        bound = self._wrap(self._array, self.block_m, self.block_n, n_queries, n_keys)
        object.__setattr__(bound, "_ready", self._ready)
        return bound

    def __repr__(self) -> str:
        rows, columns = self._array.shape[-2:]
        leading = f"{self.leading} x " if self.leading else ""
        place = "on the host" if self.device is None else f"on GPU {self.device}"
        return f"<BlockMask {leading}{rows} x {columns} blocks of {self.block_m} x {self.block_n} {place}>"

    def visible(self, instance: Instance, i: Any, j: Any) -> Any:
        return self._array[instance][i // self.block_m, j // self.block_n]

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        blocks = self._array[instance]
        xp = namespace(blocks)
        top, bottom = _blocks_of_tiles(self.n_queries, block_m, self.block_m, xp, start, stop)
        left, right = _blocks_of_tiles(self.n_keys, block_n, self.block_n, xp)
        first = start * block_m // self.block_m
        last = min(cdiv(stop * block_m, self.block_m), blocks.shape[0])
        seen = _count_before(blocks[first:last], 0)
        seen = _count_before(seen[bottom - first] - seen[top - first], 1)
        seen = seen[:, right] - seen[:, left]
        states = xp.where(seen == (bottom - top)[:, None] * (right - left), intervals.FULL, intervals.PARTIAL)
        return xp.where(seen == 0, intervals.SKIP, states).astype(xp.int8)

    def _dense(self) -> Any:
        xp = namespace(self._array)
        row, key = xp.arange(self.n_queries) // self.block_m, xp.arange(self.n_keys) // self.block_n
        return self._array[..., row[:, None], key]

    def source(self) -> Source:
        return source_of(self._array, block_m=self.block_m, block_n=self.block_n)

    def _restrict(self, rows: Runs, keys: Runs) -> "BlockMask":
        block_m, row = _blocks_of_runs("rows", rows, self.block_m)
        block_n, key = _blocks_of_runs("keys", keys, self.block_n)
        xp = namespace(self._array)
        blocks = self._array[..., xp.asarray(row)[:, None], xp.asarray(key)]
        return self._wrap(blocks, block_m, block_n, length_of(rows), length_of(keys))


def _blocks_of_tiles(
    length: int, tile: int, block: int, xp: Any, start: int = 0, stop: int | None = None
) -> tuple[Any, Any]:
    """Return the first block of each tile from `start` to `stop`, and the block after its last."""
    first = xp.arange(start, cdiv(length, tile) if stop is None else stop) * tile
    return first // block, cdiv(xp.minimum(first + tile, length), block)


def _count_before(values: Any, axis: int) -> Any:
    """Sum the values before each index along an axis, with a leading 0."""
    xp = namespace(values)
    shape = list(values.shape)
    shape[axis] = 1
    return xp.concatenate([xp.zeros(shape, xp.int64), values.cumsum(axis=axis, dtype=xp.int64)], axis=axis)


def _blocks_of_runs(name: str, runs: Runs, block: int) -> tuple[int, np.ndarray]:
    """Return a block size that no cut of the runs falls into, and which of the mask's blocks each such block is in.

    It is the mask's own where the cuts are where blocks begin.
    """
    cuts = [cut for start, stop in runs for cut in (start, stop)]
    size = math.gcd(block, *cuts[:-1])  # the last block may be ragged
    if size < min(block, _FINEST):
        raise MaskError(f"{name} cut blocks of {block} at multiples of {size}: expected multiples of {_FINEST}")
    firsts = [np.arange(start, stop, size) // block for start, stop in runs]
    return size, np.concatenate([np.zeros(0, np.int64), *firsts])
