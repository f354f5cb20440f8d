"""BlockMask: whole blocks of the matrix, seen or not."""

from typing import Any

from cuattn.errors import MaskError
from cuattn.masks import checks, intervals
from cuattn.masks.base import Mask
from cuattn.masks.device import copy, namespace


class BlockMask(Mask):
    """A mask of blocks: row i may see key j if ``blocks[..., i // block_m, j // block_n]``.

    The mask does not know how many rows and keys its last blocks hold; its methods take them, and by default count
    every block as whole.

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

    __slots__ = ("block_m", "block_n")
    kind = "block"
    block_m: int
    block_n: int

    def __init__(self, blocks: Any, block_m: int, block_n: int) -> None:
        blocks = checks.booleans("blocks", blocks, min_ndim=2)
        block_m, block_n = checks.integer("block_m", block_m, 1), checks.integer("block_n", block_n, 1)
        self._settle(copy(blocks), block_m=block_m, block_n=block_n)

    @staticmethod
    def _parameter_names() -> tuple[str, ...]:
        return "block_m", "block_n"

    @property
    def blocks(self) -> Any:
        """The blocks, True = attend."""
        return self._array

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of `blocks` without its last two axes."""
        return tuple(self._array.shape[:-2])

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        needed = (intervals.tiles(n_queries, self.block_m), intervals.tiles(n_keys, self.block_n))
        return self._array.shape[-2:] == needed

    def __repr__(self) -> str:
        rows, columns = self._array.shape[-2:]
        leading = f"{self.leading} x " if self.leading else ""
        place = "on the host" if self.device is None else f"on GPU {self.device}"
        return f"<BlockMask {leading}{rows} x {columns} blocks of {self.block_m} x {self.block_n} {place}>"

    def dense(self, n_queries: int | None = None, n_keys: int | None = None) -> Any:
        """Return the mask as a boolean matrix.

        Parameters
        ----------
        n_queries, n_keys : int, optional
            Shape of the problem; by default all blocks are whole.

        Returns
        -------
        bool array, (..., n_queries, n_keys)
            True = attend; where the blocks are.

        Raises
        ------
        MaskError
            The shape does not have this many blocks.
        """
        n_queries, n_keys = self._extent(n_queries, n_keys)
        with self._scope() as xp:
            row, key = xp.arange(n_queries) // self.block_m, xp.arange(n_keys) // self.block_n
            return self._array[..., row[:, None], key]

    def tile_states(self, block_m: int, block_n: int, n_queries: int | None = None, n_keys: int | None = None) -> Any:
        """Classify tiles of any size, exactly.

        Parameters
        ----------
        block_m, block_n : int
            Rows and keys of a tile, >= 1; they need not be those of the mask.
        n_queries, n_keys : int, optional
            Shape of the problem; by default all blocks are whole.

        Returns
        -------
        int8 array, (..., Tr, Tc)
            0 = skip, nothing is visible; 1 = partial; 2 = full, everything is visible.

        Examples
        --------
        >>> from cuattn.masks import BlockMask
        >>> BlockMask([[True, False], [True, True]], 64, 64).tile_states(64, 128)
        array([[1],
               [2]], dtype=int8)
        """
        block_m, block_n = checks.integer("block_m", block_m, 1), checks.integer("block_n", block_n, 1)
        n_queries, n_keys = self._extent(n_queries, n_keys)
        with self._scope() as xp:
            first_row, last_row = _blocks_of_tiles(n_queries, block_m, self.block_m, xp)
            first_key, last_key = _blocks_of_tiles(n_keys, block_n, self.block_n, xp)
            seen = self._prefix_sums(axes=(-2, -1))
            seen = seen[..., last_row, :] - seen[..., first_row, :]
            seen = seen[..., last_key] - seen[..., first_key]
            total = (last_row - first_row)[:, None] * (last_key - first_key)
            states = xp.where(seen == total, intervals.FULL, intervals.PARTIAL)
            return xp.where(seen == 0, intervals.SKIP, states).astype(xp.int8)

    def block_sparsity(
        self, block_m: int = 128, block_n: int = 128, n_queries: int | None = None, n_keys: int | None = None
    ) -> float:
        """Return the share of tiles that are skipped, over all leading axes.

        Parameters
        ----------
        block_m, block_n : int, optional
            Rows and keys of a tile.
        n_queries, n_keys : int, optional
            Shape of the problem; by default all blocks are whole.

        Returns
        -------
        float
            In [0, 1]; 0 if there are no tiles.
        """
        states = self.tile_states(block_m, block_n, n_queries, n_keys)
        return float((states == intervals.SKIP).mean()) if states.size else 0.0

    def dead_keys(
        self,
        n_queries: int | None = None,
        n_keys: int | None = None,
        *,
        left: int | None = None,
        right: int | None = None,
        offset: int = 0,
    ) -> Any:
        """Return which keys no row may see, given also a band.

        Parameters
        ----------
        n_queries, n_keys : int, optional
            Shape of the problem; by default all blocks are whole.
        left, right, offset : int, optional
            Band: key j is seen by row i only if i + offset - left <= j <= i + offset + right; None is open.

        Returns
        -------
        bool array, (..., n_keys)
            Without rows, all True.
        """
        n_queries, n_keys = self._extent(n_queries, n_keys)
        with self._scope() as xp:
            first, last = xp.zeros(n_keys, dtype=xp.int64), xp.full(n_keys, n_queries, dtype=xp.int64)
            for start, end in intervals.band_intervals(n_queries, n_keys, left, right, offset, xp):
                # Each side hides the first rows or the last ones; what hides all counts as the first.
                first, last = xp.where(start == 0, xp.maximum(first, end), first), xp.where(start == 0, last, start)
            above = self._prefix_sums(axes=(-2,))
            column = xp.arange(n_keys) // self.block_n
            top, bottom = first // self.block_m, -(-last // self.block_m)
            return (first >= last) | (above[..., bottom, column] == above[..., top, column])

    def _prefix_sums(self, axes: tuple[int, ...]) -> Any:
        """Count the True blocks before each index along `axes`, with a leading 0."""
        xp = namespace(self._array)
        sums = self._array.astype(xp.int64)
        for axis in axes:
            shape = list(sums.shape)
            shape[axis] = 1
            sums = xp.concatenate([xp.zeros(shape, dtype=xp.int64), sums.cumsum(axis=axis)], axis=axis)
        return sums

    def _extent(self, n_queries: int | None, n_keys: int | None) -> tuple[int, int]:
        rows, columns = self._array.shape[-2:]
        return (
            _length("n_queries", n_queries, rows, self.block_m),
            _length("n_keys", n_keys, columns, self.block_n),
        )


def _length(name: str, length: int | None, blocks: int, block: int) -> int:
    if length is None:
        return blocks * block
    length = checks.integer(name, length)
    if intervals.tiles(length, block) != blocks:
        raise MaskError(f"{name} = {length}: expected a length that has {blocks} blocks of {block}")
    return length


def _blocks_of_tiles(length: int, tile: int, block: int, xp: Any) -> tuple[Any, Any]:
    """Return the first block of each tile and the block after its last."""
    tile_start = xp.arange(intervals.tiles(length, tile)) * tile
    return tile_start // block, -(-xp.minimum(tile_start + tile, length) // block)
