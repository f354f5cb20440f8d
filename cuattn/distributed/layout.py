"""Which rows, or keys, of a whole problem each rank holds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cuattn import interop
from cuattn.distributed.arrays import gathered, given_back, joined, merged, taken
from cuattn.distributed.comm import Comm
from cuattn.errors import ArgumentError, DtypeError, ShapeError, as_integer, shown
from cuattn.io_model.sizes import cdiv
from cuattn.masks.base import Mask
from cuattn.masks.runs import Runs, length_of

_STRIP = 64  # row tiles that are classified at once
_KEY_TILES = 1024  # by which loads are counted, at most


@dataclass(frozen=True)
class Layout:
    """How an axis, of rows or of keys, is dealt out to ranks; each holds its runs in ascending order.

    Made by :meth:`contiguous`, :meth:`zigzag`, :meth:`balanced` or :meth:`from_runs`.

    Parameters
    ----------
    runs : tuple of tuple of (start, stop)
        By rank, the parts of the axis that it holds: ascending, disjoint, not empty, merged where they touch.

    See Also
    --------
    spawn : Runs ranks that hold its shards.
    plan : Says what a layout costs.

    Examples
    --------
    >>> layout = Layout.zigzag(64, 2)
    >>> layout.rows(0), layout.rows(1), layout.lengths
    (((0, 16), (48, 64)), ((16, 48),), (32, 32))
    """

    runs: tuple[Runs, ...]

    @classmethod
    def contiguous(cls, n: int, size: int, *, unit: int = 16) -> Layout:
        """Return one run for each rank, in rank order.

        Parameters
        ----------
        n, size : int
            Length of the axis, and number of ranks.
        unit : int, optional
            Runs begin at its multiples; units are split as by :func:`numpy.array_split`.
        """
        return cls._of((edges,) for edges in pairwise(_edges(n, size, unit)))

    @classmethod
    def zigzag(cls, n: int, size: int, *, unit: int = 16) -> Layout:
        """Return two runs for each rank, the r-th and the r-th from the end of 2 x `size`: balanced when causal.

        Parameters
        ----------
        n, size, unit : int
            As for :meth:`contiguous`.
        """
        chunks = list(pairwise(_edges(n, 2 * _count("size", size, 1), unit)))
        return cls._of(zip(chunks[:size], reversed(chunks[size:]), strict=True))

    @classmethod
    def balanced(
        cls, mask: Mask, size: int, *, n_queries: int | None = None, equal_rows: bool = False, unit: int = 128
    ) -> Layout:
        """Return rows dealt out so that all ranks see about as many tiles of a mask.

        Parameters
        ----------
        mask : mask of :mod:`cuattn.masks`
        size : int
            Number of ranks.
        n_queries : int, optional
            Of masks that leave their lengths open.
        equal_rows : bool, optional
            Deal out equally many units, the costliest first, in place of one run for each rank.
        unit : int, optional
            Rows, and at least the keys, of a tile.
        """
        if not isinstance(mask, Mask):
            raise DtypeError(f"mask is {interop.type_name(mask)}; expected a mask of cuattn.masks")
        size, unit = _count("size", size, 1), _count("unit", unit, 1)
        mask = mask.bind(n_queries)
        costs = visible_tiles(mask, unit, max(unit, cdiv(mask.n_keys, _KEY_TILES))).sum(axis=1, dtype=float)
        if equal_rows:
            owners = _deal(costs, size)
            return cls._of([_run(mask.n_queries, unit, i, i + 1) for i in mine] for mine in owners)
        cuts = _cut(np.concatenate([[0.0], costs.cumsum()]), size)
        return cls._of([_run(mask.n_queries, unit, *cut)] for cut in pairwise(cuts))

    @classmethod
    def from_runs(cls, runs: Sequence[Sequence[Sequence[int]]]) -> Layout:
        """Return the layout in which each rank holds the runs that are given for it.

        Parameters
        ----------
        runs : sequence of sequences of (start, stop)
            By rank; together a partition of an axis.

        Raises
        ------
        ArgumentError
            They overlap or leave a gap.
        """
        try:
            found = cls._of([[(as_integer(start), as_integer(stop)) for start, stop in mine] for mine in runs])
        except (TypeError, ValueError):
            raise ArgumentError(f"runs is {shown(runs)}; expected for each rank pairs of integers") from None
        every = sorted(run for mine in found.runs for run in mine)
        edges = [0, *(stop for _, stop in every)]
        if not found.runs or [start for start, _ in every] != edges[:-1]:
            raise ArgumentError(f"runs is {shown(runs)}; expected each index of an axis at exactly one rank")
        return found

    @classmethod
    def _of(cls, runs: Iterable[Iterable[Sequence[int]]]) -> Layout:
        return cls(tuple(merged(mine) for mine in runs))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.runs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How much of the axis each rank holds."""
        return tuple(map(length_of, self.runs))

    @property
    def n(self) -> int:
        """Length of the whole axis."""
        return sum(self.lengths)

    def rows(self, rank: int) -> Runs:
        """Return the runs (start, stop) that a rank holds."""
        return self.runs[rank]

    def shard(self, x: Any, rank: int, axis: int = -2) -> Any:
        """Return a copy of what a rank holds of a whole array.

        Parameters
        ----------
        x : array
            NumPy, CuPy, PyTorch, JAX or any other DLPack array.
        rank : int
        axis : int, optional
            The one that is dealt out.
        """
        views, origin = interop.to_backend({"x": x})
        if views["x"].shape[axis] != self.n:
            raise ShapeError(f"x has shape {views['x'].shape}; expected {self.n} along axis {axis}")
        with origin.scope():
            part = taken(views["x"], ((0, self.n),), self.runs[rank], axis)
            return given_back(origin, [part.copy() if part is views["x"] else part])[0]

    def unshard(self, x: Any, comm: Comm, axis: int = -2) -> Any:
        """Return the whole of an array of which each rank brings its part; every rank calls this.

        Parameters
        ----------
        x : array
            What this rank holds.
        comm : Comm
        axis : int, optional
            The one that is dealt out.
        """
        views, origin = interop.to_backend({"x": x})
        mine, axis = views["x"], axis % views["x"].ndim
        if comm.size != self.size or mine.shape[axis] != self.lengths[comm.rank]:
            raise ShapeError(
                f"x has shape {mine.shape} on rank {comm.rank} of {comm.size}; expected a length of "
                f"{self.lengths} by rank along axis {axis}"
            )
        with origin.scope():
            parts = gathered(comm, mine, [(*mine.shape[:axis], n, *mine.shape[axis + 1 :]) for n in self.lengths])
            return given_back(origin, [joined(parts, self.runs, axis)])[0]


def grouped(layout: Layout, inner: int) -> Layout:
    """Return the layout of groups of neighbours."""
    every = [layout.runs[first : first + inner] for first in range(0, layout.size, inner)]
    return Layout(tuple(merged(run for mine in group for run in mine) for group in every))


def visible_tiles(mask: Mask, block_m: int, block_n: int) -> np.ndarray:
    """Return the share of a mask's matrices that see each tile, float32 (Tr, Tc)."""
    row_tiles, key_tiles = cdiv(mask.n_queries, block_m), cdiv(mask.n_keys, block_n)
    instances = list(np.ndindex(*mask.leading))
    found = np.zeros((row_tiles, key_tiles), np.float32)
    for start in range(0, row_tiles, _STRIP):
        stop = min(start + _STRIP, row_tiles)
        for instance in instances:
            found[start:stop] += mask.states(instance, block_m, block_n, start, stop) > 0
    return found / max(len(instances), 1)


def _count(name: str, value: Any, least: int) -> int:
    number = as_integer(value)
    if number is None or number < least:
        raise ArgumentError(f"{name} is {shown(value)}; expected an integer >= {least}")
    return number


def _edges(n: int, parts: int, unit: int) -> list[int]:
    """Return where the parts of an axis begin, and its end."""
    n, parts, unit = _count("n", n, 0), _count("size", parts, 1), _count("unit", unit, 1)
    each, more = divmod(cdiv(n, unit), parts)
    return [min((each * part + min(part, more)) * unit, n) for part in range(parts + 1)]


def _run(n: int, unit: int, start: int, stop: int) -> tuple[int, int]:
    return min(start * unit, n), min(stop * unit, n)


def _deal(costs: np.ndarray, size: int) -> list[list[int]]:
    """Deal out equally many units: the costliest first, to the rank with the least load that has room."""
    room = [len(costs) // size + (rank < len(costs) % size) for rank in range(size)]
    loads = [(0.0, rank) for rank in range(size) if room[rank]]
    owners: list[list[int]] = [[] for _ in range(size)]
    for unit in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        owners[rank].append(unit)
        if len(owners[rank]) < room[rank]:
            heapq.heappush(loads, (load + float(costs[unit]), rank))
    return owners


def _cut(before: np.ndarray, size: int) -> list[int]:
    """Return where to cut units, given the load before each, so that the largest of `size` loads is least."""

    def cuts(limit: float) -> list[int]:
        found = [0]
        for _ in range(size):
            found.append(int(np.searchsorted(before, before[found[-1]] + limit, "right")) - 1)
        return found

    low, high, units = 0.0, float(before[-1]), len(before) - 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cuts(middle)[-1] == units else (middle, high)
    return cuts(high)
