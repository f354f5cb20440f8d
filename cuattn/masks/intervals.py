"""Arithmetic on the row intervals that key columns hide, and on their tiles.

A mask hides from key j the rows of K half-open intervals ``start[j] <= i < end[j]``: two of a `ColumnMask`, those of
several together where they are joined.  The functions here take them as one array of shape (2 K, ..., n_keys), starts
and ends in turn, NumPy or CuPy, of any content: a bound outside [0, n_queries] is clamped and ``start >= end`` is an
empty interval, so vectors that nobody has checked cannot name a row that does not exist.

Tiles are `block_m` rows by `block_n` keys; `Tr` and `Tc` count the row and the key tiles.  Over the keys of one
key tile an interval gives two ranges of row tiles, from the minimum and maximum of its bounds (the FlashMask
paper's equation 4): a *skip* range, in which it hides everything, and a *partial* range, outside of which it hides
nothing.  Four integers per key tile and interval answer every question about the Tr x Tc tiles, which are
therefore never stored.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial, reduce
from operator import or_
from typing import Any, ClassVar

import numpy as np

from cuattn.io_model.sizes import cdiv
from cuattn.masks.base import Instance, Mask
from cuattn.masks.device import namespace

FULL, PARTIAL, SKIP = 2, 1, 0
"""Tile states: everything visible, elements must be tested, nothing visible."""

_TABLES = 8  # that a mask on the host remembers


def tile_table(bounds: Any, n_queries: int, block_m: int, block_n: int) -> Any:
    """Return, per key tile and interval, the row tiles in which it hides everything and those where it may hide some.

    Row tile t is skipped if ``a <= t < b`` for some interval, else partial if ``p <= t < q`` for one.  A key that the
    intervals together hide from every row counts as hidden by each of them, so that it spoils the skip range of none.

    Parameters
    ----------
    bounds : array, (2 K, ..., n_keys), int32 or int64
        Starts and ends of K >= 1 intervals in turn, of any content.
    n_queries : int
        Rows.
    block_m, block_n : int
        Rows and keys of a tile, >= 1.

    Returns
    -------
    int32 array, (..., 4, K, Tc)
        ``a, b, p, q``, indices of row tiles in [0, Tr]; a range is empty if its first is not below its second.

    Examples
    --------
    Causal over 8 rows and keys in tiles of 2 x 4: keys 4 to 7 are skipped by row tiles 0 and 1.

    >>> import numpy as np
    >>> tile_table(np.array([[0] * 8, range(8)]), n_queries=8, block_m=2, block_n=4)[..., 1].ravel().tolist()
    [0, 2, 0, 4]
    """
    xp = namespace(bounds)
    leading, n_keys = bounds.shape[1:-1], bounds.shape[-1]
    if bounds.size == 0:  # CuPy has no minimum of nothing, whatever the axis
        return xp.zeros((*leading, 4, len(bounds) // 2, cdiv(n_keys, block_n)), dtype=xp.int32)
    block_n = min(block_n, n_keys)
    bounds = xp.pad(xp.clip(bounds, 0, n_queries), [*[(0, 0)] * (bounds.ndim - 1), (0, -n_keys % block_n)], mode="edge")
    bounds = bounds.reshape(*bounds.shape[:-1], -1, block_n)  # the last key fills a ragged last tile
    starts, ends = bounds[::2], bounds[1::2]
    row = xp.zeros((), xp.int32)  # of each key, the first that no interval hides as far as is known
    for _ in starts:
        row = xp.where((starts <= row) & (ends > row), ends, row).max(axis=0)
    empty, dead = starts >= ends, row >= n_queries
    # An empty interval becomes (n_queries, 0), which is neutral in a minimum of starts and in a maximum of ends.
    starts = xp.where(dead, 0, xp.where(empty, n_queries, starts))
    ends = xp.where(dead, n_queries, xp.where(empty, 0, ends))
    first_end, row_tiles = ends.min(axis=-1), cdiv(n_queries, block_m)
    table = [
        cdiv(starts.max(axis=-1), block_m),
        xp.where(first_end == n_queries, row_tiles, first_end // block_m),  # a ragged last tile ends with the rows
        starts.min(axis=-1) // block_m,
        cdiv(ends.max(axis=-1), block_m),
    ]
    return xp.moveaxis(xp.stack(table).astype(xp.int32), (0, 1), (-3, -2))


def tile_states(table: Any, row_start: int, row_stop: int) -> Any:
    """Return the states of the tiles in a range of row tiles: skipped if any interval skips, else partial if any does.

    Parameters
    ----------
    table : int32 array, (4, K, Tc)
        From `tile_table`, of one mask.
    row_start, row_stop : int
        Range of row tiles.

    Returns
    -------
    int8 array, (row_stop - row_start, Tc)
        `SKIP` (0), `PARTIAL` (1) or `FULL` (2).  Sound for any vectors; PARTIAL may stand for a tile that is in
        truth full or empty.

    Examples
    --------
    >>> import numpy as np
    >>> table = tile_table(np.array([[0] * 8, range(8)]), n_queries=8, block_m=2, block_n=4)
    >>> tile_states(table, 0, 4).tolist()
    [[1, 0], [1, 0], [2, 1], [2, 1]]
    """
    xp = namespace(table)
    row = xp.arange(row_start, row_stop, dtype=xp.int32)[:, None]
    states = xp.full((row_stop - row_start, table.shape[-1]), FULL, dtype=xp.int8)
    for first, last in (table[:2], table[2:]):  # an interval that skips a tile also counts as partial there
        states -= ((row >= first[:, None]) & (row < last[:, None])).any(axis=0)
    return states


class IntervalMask(Mask):
    """A mask that hides from each key the rows of K intervals: an array (2 K, ..., n_keys) of their starts and ends."""

    _parameter_names = ("n_queries",)

    _names: ClassVar[tuple[str, ...]] = ()
    """What the starts and ends are called."""

    def _derived(self) -> dict[str, Any]:
        shape = self._array.shape
        return dict(zip(self._names, self._array, strict=False), leading=shape[1:-1], n_keys=shape[-1])

    def _bounds(self, instance: Instance) -> Any:
        """Return one matrix's starts and ends, (2 K, n_keys)."""
        return self._array[(slice(None), *instance)]

    @cached_property
    def _table(self) -> Callable[[int, int], Any]:
        """The function that returns the `tile_table` of tiles of a size; on the host some are kept."""
        make = partial(tile_table, self._array, self.n_queries)
        return make if self.on_device else lru_cache(_TABLES)(make)

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> Any:
        bounds = self._bounds(instance)[:, keys, None]
        i = namespace(bounds).arange(rows.start, rows.stop, dtype=bounds.dtype)
        return reduce(or_, [(start <= i) & (i < end) for start, end in zip(bounds[::2], bounds[1::2], strict=True)])

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        return tile_states(self._table(block_m, block_n)[instance], start, stop)

    def patterns(
        self, instance: Instance, block_m: int, block_n: int, row_tiles: np.ndarray, key_tiles: np.ndarray
    ) -> Sequence[Hashable]:
        bounds = np.pad(self._bounds(instance), ((0, 0), (0, -self.n_keys % block_n)))
        tiles = bounds.reshape(len(bounds), -1, block_n).swapaxes(0, 1)[key_tiles]
        tiles -= (row_tiles * block_m).astype(np.int32)[:, None, None]
        return [tile.tobytes() for tile in np.clip(tiles, 0, block_m, out=tiles)]


def join(masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Return masks that hide together what these do: those of intervals, on the host, are joined to one.

    Keys that they hide from every row only together are then known, so that more tiles may be skipped.
    """
    ours, others = [], []
    for mask in masks:
        (ours if isinstance(mask, IntervalMask) and not mask.on_device else others).append(mask)
    if len(ours) < 2:
        return tuple(masks)
    bounds = np.stack(np.broadcast_arrays(*(bound for mask in ours for bound in mask._array)))
    return (IntervalMask._wrap(bounds, ours[0].n_queries), *others)
