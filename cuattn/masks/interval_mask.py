"""Masks whose keys each hide a few intervals of rows: the part of the protocol that they share."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from cuattn.masks import intervals
from cuattn.masks.base import Instance, Mask
from cuattn.masks.device import namespace

_TABLES = 8  # that a mask on the host remembers


class IntervalMask(Mask):
    """A mask that hides from each key the rows of K intervals: an array (2 K, ..., n_keys) of their starts and ends."""

    _parameter_names = ("n_queries",)

    @property
    def n_keys(self) -> int:
        """Number of key columns."""
        return int(self._array.shape[-1])

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the vectors without their last axis."""
        return tuple(self._array.shape[1:-1])

    def _bounds(self, instance: Instance) -> Any:
        """Return one matrix's starts and ends, (2 K, n_keys)."""
        return self._array[(slice(None), *instance)]

    @cached_property
    def _table(self) -> Callable[[int, int], Any]:
        """The function that returns the `intervals.tile_table` of tiles of a size; on the host some are kept."""
        make = partial(intervals.tile_table, self._array, self.n_queries)
        return make if self.on_device else lru_cache(_TABLES)(make)

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> Any:
        bounds = self._bounds(instance)[:, keys, None]
        i = namespace(bounds).arange(rows.start, rows.stop)
        return ((bounds[::2] <= i) & (i < bounds[1::2])).any(axis=0)

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        return intervals.tile_states(self._table(block_m, block_n)[instance], start, stop)

    def patterns(self, instance, block_m, block_n, row_tiles, key_tiles):
        keys = np.minimum(key_tiles[:, None] * block_n + np.arange(block_n), self.n_keys - 1)
        bounds = self._bounds(instance).take(keys, axis=1) - (row_tiles * block_m).astype(np.int32)[:, None]
        return [tile.tobytes() for tile in np.clip(bounds, 0, block_m).swapaxes(0, 1)]

    def shown(self, instance, block_m, block_n, row_tile, key_tile, ramp):
        first, last = self._table(block_m, block_n)[instance][2:, :, key_tile]
        touching = np.flatnonzero((first <= row_tile) & (row_tile < last))
        bounds = self._bounds(instance)[:, key_tile * block_n : (key_tile + 1) * block_n] - row_tile * block_m
        after, before = (ramp.take(bounds[2 * touching + side], 0, mode="clip") for side in (1, 0))
        np.invert(after, out=after)
        after |= before
        return np.bitwise_and.reduce(after, axis=0) if len(after) != 1 else after[0]


def join(masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Return masks that hide together what these do: those of intervals, on the host, are joined to one.

    Keys that they hide from every row only together are then known, so that more tiles may be skipped.
    """
    ours = [mask for mask in masks if isinstance(mask, IntervalMask) and not mask.on_device]
    if len(ours) < 2:
        return tuple(masks)
    bounds = np.stack(np.broadcast_arrays(*(bound for mask in ours for bound in mask._array)))
    return (IntervalMask._wrap(bounds, ours[0].n_queries), *(mask for mask in masks if mask not in ours))
