"""What each rank's rows see of each rank's keys: a pure function of mask and layouts, so that all ranks agree on it."""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np

from cuattn.distributed.arrays import common, merged
from cuattn.distributed.layout import Layout, visible_tiles
from cuattn.io_model.sizes import cdiv
from cuattn.masks.base import Mask
from cuattn.masks.runs import Runs, kept_before

_TILES = 1024  # along an axis, at most
_LEAST = 16  # rows and keys of a tile: dropout wants runs to begin at its multiples


class Work:
    """What rows and keys that are dealt out have to do with each other.

    Parameters
    ----------
    rows, keys : Layout
        Of one size.
    mask : Mask or None
        Of the whole problem; None where everything is visible, or where that is not known.

    Attributes
    ----------
    elements : float array, (size, size)
        How many elements rank r's rows see of rank s's keys, about.

    Examples
    --------
    >>> from cuattn.masks import causal
    >>> work = Work(Layout.contiguous(64, 2), Layout.contiguous(64, 2), causal(64))
    >>> work.elements.tolist(), work.needed("key", 0, 1), work.needed("row", 0, 1)
    ([[768.0, 0.0], [1024.0, 768.0]], (), ((32, 64),))
    """

    def __init__(self, rows: Layout, keys: Layout, mask: Mask | None) -> None:
        self.layouts = {"row": rows, "key": keys}
        self._tile = {name: _tile(layout.n) for name, layout in self.layouts.items()}
        counts = [_overlap(layout, self._tile[name]) for name, layout in self.layouts.items()]
        self.size = rows.size
        if mask is None or mask.on_device:
            seen = np.ones([each.shape[1] for each in counts], np.float32)
        else:
            seen = _tiles_of(mask, *self._tile.values())
        by_row, by_key = counts
        self.elements = by_row @ seen @ by_key.T
        # Tiles of keys that some row of each rank sees, and tiles of rows that see some key of each.
        self._seen = {"key": (by_row > 0) @ seen > 0, "row": (by_key > 0) @ seen.T > 0}
        self._counts = dict(zip(("row", "key"), counts, strict=True))
        self._visible = seen
        self._needed: dict[tuple[str, int, int], Runs] = {}

    def needed(self, axis: str, rank: int, source: int) -> Runs:
        """Return the keys that a rank's rows need of another's (axis "key"), or the rows that need a rank's keys."""
        what = axis, rank, source
        if what not in self._needed:
            self._needed[what] = self._runs_of(axis, self._seen[axis][rank], source)
        return self._needed[what]

    def _runs_of(self, axis: str, seen: np.ndarray, source: int) -> Runs:
        """Return what a rank holds of some tiles of an axis."""
        tiles, size = np.flatnonzero(np.diff(seen, prepend=False, append=False)), self._tile[axis]
        edges = np.minimum(tiles * size, self.layouts[axis].n).reshape(-1, 2)
        return common(merged(edges.tolist()), self.layouts[axis].rows(source))

    def seen_by(self, rows: Runs, rank: int) -> Runs:
        """Return the keys of a rank that some of these rows see."""
        size, n = self._tile["row"], self.layouts["row"].n
        tiles = [tile for start, stop in rows for tile in range(start // size, cdiv(min(stop, n), size))]
        return self._runs_of("key", self._visible[tiles].any(0), rank)

    def lengths(self, axis: str) -> tuple[int, ...]:
        """Return how many rows, or keys, each rank holds."""
        return self.layouts[axis].lengths

    @cached_property
    def needs(self) -> dict[str, np.ndarray]:
        """How many keys, or rows, each rank needs of each: (size, size) by axis."""
        return {axis: self._seen[axis] @ self._counts[axis].T for axis in self._seen}

    @cached_property
    def alone(self) -> np.ndarray:
        """How many elements rows of each rank see that see keys of no other, (size,)."""
        by_row, by_key = self._counts["row"], self._counts["key"]
        found = np.zeros(self.size)
        for rank in range(self.size):
            tiles = np.flatnonzero(by_row[rank])
            theirs = by_key.sum(0) > by_key[rank]  # tiles of keys of which others hold some
            tiles = tiles[~(self._visible[tiles][:, theirs] > 0).any(1)]
            found[rank] = by_row[rank, tiles] @ self._visible[tiles] @ by_key[rank]
        return found


@lru_cache(maxsize=16)
def work_of(rows: Layout, keys: Layout, mask: Mask | None) -> Work:
    """Return what ranks have to do, which is kept: it is asked for in every call."""
    return Work(rows, keys, mask)


def _tile(n: int) -> int:
    size = _LEAST
    while size * _TILES < n:
        size *= 2
    return size


def _overlap(layout: Layout, size: int) -> np.ndarray:
    """Return how much of each tile of an axis each rank holds, (ranks, tiles)."""
    edges = np.minimum(np.arange(cdiv(layout.n, size) + 1) * size, layout.n)
    return np.array([np.diff(kept_before(edges, runs)) for runs in layout.runs], np.float32).reshape(layout.size, -1)


@lru_cache(maxsize=16)
def _tiles_of(mask: Mask, block_m: int, block_n: int) -> np.ndarray:
    return visible_tiles(mask, block_m, block_n)
