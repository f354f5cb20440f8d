"""Masks whose keys each hide a few intervals of rows: the part of the protocol that they share."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import and_
from typing import Any

import numpy as np

from cuattn.io_model.sizes import cdiv
from cuattn.masks import intervals
from cuattn.masks.base import Instance, Mask
from cuattn.masks.intervals import Interval

__all__ = ["IntervalMask", "join"]


class IntervalMask(Mask):
    """A mask that hides from each key the rows of K intervals."""

    __slots__ = ()

    @abstractmethod
    def _intervals(self) -> list[Interval]:
        """Return K >= 1 pairs (start, end) of integer arrays (*leading, n_keys), where the mask is."""

    def visible(self, instance: Instance, i: Any, j: Any) -> Any:
        bounds = ((start[instance][j], end[instance][j]) for start, end in self._intervals())
        return reduce(and_, ((i < start) | (i >= end) for start, end in bounds))

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        return intervals.tile_states(self._table(block_m, block_n)[instance], start, stop)

    def patterns(self, instance, block_m, block_n, row_tiles, key_tiles):
        bounds = self._bounds(block_n)[instance].swapaxes(0, 1)[key_tiles]
        bounds -= (row_tiles * block_m).astype(np.int32)[:, None, None]
        np.maximum(bounds, 0, out=bounds)
        return [tile.tobytes() for tile in np.minimum(bounds, block_m, out=bounds)]

    def shown(self, instance, block_m, block_n, row_tile, key_tile, ramp):
        keys = min(block_n, self.n_keys - key_tile * block_n)
        bounds = self._bounds(block_n)[instance][:, key_tile, :keys] - row_tile * block_m
        touched = self._table(block_m, block_n)[instance][key_tile].tolist()
        result = None
        for (_, _, low, high), start, end in zip(touched, bounds[::2], bounds[1::2], strict=True):
            if low <= row_tile < high:
                outside = _outside(start, end, ramp)
                result = outside if result is None else np.bitwise_and(result, outside, out=result)
        return ramp[-1:] if result is None else result

    def _table(self, block_m: int, block_n: int) -> Any:
        """Return the `intervals.tile_table` of tiles of this size; on the host it is kept."""
        key = ("table", block_m, block_n)
        table = self._tables.get(key)
        if table is None:
            table = intervals.tile_table(self._intervals(), self.n_queries, block_m, block_n)
            if not self.on_device:
                table = self._tables.keep(key, table)
        return table

    def _bounds(self, block_n: int) -> np.ndarray:
        """Return starts and ends in turn, int32 (..., 2K, Tc, block_n), with 0 for keys that do not exist; kept."""
        key = ("bounds", block_n)
        bounds = self._tables.get(key)
        if bounds is None:
            sides = [side for pair in self._intervals() for side in pair]
            key_tiles = cdiv(self.n_keys, block_n)
            bounds = np.zeros((*self.leading, len(sides), key_tiles * block_n), np.int32)
            for n, side in enumerate(sides):
                bounds[..., n, : self.n_keys] = side
            bounds = self._tables.keep(key, bounds.reshape(*bounds.shape[:-1], key_tiles, block_n))
        return bounds


class _Joined(IntervalMask):
    """Several masks of intervals on the host, as one of all their intervals, for one walk over its tiles."""

    __slots__ = ("_leading", "_pairs", "n_keys", "n_queries")
    kind = "joined"

    def __init__(self, masks: Sequence[IntervalMask]) -> None:
        leading = np.broadcast_shapes(*(mask.leading for mask in masks))
        n_queries, n_keys = masks[0].n_queries, masks[0].n_keys
        shape = (*leading, n_keys)
        pairs = [tuple(np.broadcast_to(side, shape) for side in pair) for mask in masks for pair in mask._intervals()]
        self._settle(None, n_queries=n_queries, n_keys=n_keys, _leading=leading, _pairs=pairs)

    @property
    def leading(self) -> tuple[int, ...]:
        return self._leading

    def _intervals(self) -> list[Interval]:
        return self._pairs


def join(masks: Sequence[Mask]) -> tuple[Mask, ...]:
    """Return masks that hide together what these do: those of intervals, on the host, are joined to one.

    Keys that they hide from every row only together are then known, so that more tiles may be skipped.
    """
    of_intervals, others = [], []
    for mask in masks:
        (of_intervals if isinstance(mask, IntervalMask) and not mask.on_device else others).append(mask)
    return (_Joined(of_intervals), *others) if len(of_intervals) > 1 else tuple(masks)


def _outside(start: np.ndarray, end: np.ndarray, ramp: np.ndarray) -> np.ndarray:
    """Return, as bits, row < start or row >= end for each key and row; a side that no key needs is not looked up."""
    rows = len(ramp) - 1
    if end.min() >= rows:
        return ramp.take(start, 0, mode="clip")
    after = ramp.take(end, 0, mode="clip")
    np.invert(after, out=after)
    if start.max() > 0:
        after |= ramp.take(start, 0, mode="clip")
    return after
