"""BlockMask: whole blocks of the matrix, seen or not."""

from typing import Any

from cuattn.io_model.sizes import cdiv
from cuattn.masks import checks, intervals
from cuattn.masks.base import Instance
from cuattn.masks.cells import CellMask
from cuattn.masks.cuda_half import CudaHalf
from cuattn.masks.device import copy, namespace


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

    __slots__ = ()
    kind = "block"
    cuda = CudaHalf(8, 1, "blocks", "mask", "util/mask_alive.cu", ("mask_alive",))
    _stretches = False

    def __init__(self, blocks: Any, block_m: int, block_n: int) -> None:
        blocks = checks.booleans("blocks", blocks, min_ndim=2)
        block_m, block_n = checks.tile(block_m, block_n)
        self._settle(copy(blocks), block_m=block_m, block_n=block_n, borrowed=False, _lengths=(None, None))

    @property
    def blocks(self) -> Any:
        """The blocks, True = attend."""
        return self._array

    def __repr__(self) -> str:
        rows, columns = self._array.shape[-2:]
        leading = f"{self.leading} x " if self.leading else ""
        return f"<BlockMask {leading}{rows} x {columns} blocks of {self.block_m} x {self.block_n} {self._where}>"

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
