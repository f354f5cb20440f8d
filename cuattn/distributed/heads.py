"""Heads in place of rows: ranks of a group exchange, and each has all of the group's rows and keys, of some heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuattn.distributed.arrays import Rooms, messages, part
from cuattn.distributed.comm import Comm
from cuattn.distributed.layout import Layout, grouped
from cuattn.distributed.tape import Described, add, empty_like
from cuattn.distributed.walk import OF_KEYS, axis_of
from cuattn.distributed.whole import Whole


class Heads:
    """The exchange within groups of `inner` neighbours, of one of `count` parts of all heads.

    Parameters
    ----------
    comm : Comm
    inner : int
        Ranks of a group, each of which has as many of the part's heads; 1: nothing is exchanged.
    layouts : dict of str to Layout
        Of the ranks, by "row" and "key".
    slot, count : int, optional
        Which part, of how many; together with `inner` these divide query heads and key heads.

    Attributes
    ----------
    layouts : dict of str to Layout
        Of the groups.
    ranks : list of int
        Those of all groups that have the same heads as this one.
    index : int
        This one's group.
    """

    def __init__(self, comm: Comm, inner: int, layouts: Mapping[str, Layout], slot: int = 0, count: int = 1) -> None:
        self._comm, self.inner, self._of_ranks = comm, inner, layouts
        self.index, self._slot = divmod(comm.rank, inner)
        members = range(self.index * inner, (self.index + 1) * inner)
        self._parts = {rank: member * count + slot for member, rank in enumerate(members)}  # whose heads they are
        self._count, self._others = inner * count, [rank for rank in members if rank != comm.rank]
        self.ranks = list(range(self._slot, comm.size, inner))
        self.layouts = {axis: grouped(layout, inner) for axis, layout in layouts.items()}

    def whole(self, whole: Whole) -> Whole:
        """Return what is said of the whole problem, of this rank's heads."""
        if self._count == 1:
            return whole
        own = share(whole.leading[-1], self._parts[self._comm.rank], self._count)
        return whole.of_heads(own.start, own.stop)

    def place(self, array: Any) -> tuple[Any, ...]:
        """Return where this rank's heads are in an array without rows, as an index."""
        if self._count == 1 or array.ndim < 3 or array.shape[-3] == 1:
            return (...,)
        own = share(array.shape[-3], self._parts[self._comm.rank], self._count)
        return (..., own, slice(None), slice(None))

    def own(self, arrays: Mapping[str, Any], rank: int | None = None) -> dict[str, Any]:
        """Return this rank's heads of arrays, or another's of the group."""
        part = self._parts[self._comm.rank if rank is None else rank]
        return {name: part_of_heads(name, array, part, self._count) for name, array in arrays.items()}

    def spread(self, arrays: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Begin to exchange arrays of this rank's rows and all heads.

        Returns what waits for those of all the group's rows and this rank's heads, and returns them.
        """
        if self.inner == 1:
            return lambda: self.own(arrays)
        found = {name: array[self.place(array)] for name, array in arrays.items() if name == "key_bias"}
        arrays = {name: array for name, array in arrays.items() if name not in found}
        me, sends, in_rows = self._comm.rank, [], self._in_rows(arrays)
        rooms = Rooms(me, in_rows)
        for name, array in arrays.items():
            axis, runs = axis_of(name), {rank: self._layout(name).rows(rank) for rank in self._parts}
            for peer in self._others:
                theirs = self.own({name: array}, peer)[name]
                sends += [(peer, x) for x in messages(theirs, runs[me], runs[me], axis, in_rows)]
            found[name] = rooms.add(self.own({name: array})[name], runs, axis, runs[me])
        wait = rooms.start(self._comm, sends)

        def finish() -> dict[str, Any]:
            wait()
            return found

        return finish

    def collect(
        self, found: Mapping[str, Any], whole: Mapping[str, Any], out: Mapping[str, Any]
    ) -> Callable[[], dict[str, Any]]:
        """Begin to exchange results of all the group's rows and this rank's heads.

        Parameters
        ----------
        found : dict of str to array
            Those that are summed over all ranks stay as they are.
        whole : dict of str to array
            This rank's operands, of which those without heads have gradients that are summed over the group.
        out : dict of str to array
            Where results go, those of all heads; else to new arrays.

        Returns
        -------
        callable
            Waits for the results of this rank's rows and all heads, and returns them.
        """
        if self.inner == 1:
            return lambda: dict(found)
        me, sends, sums, in_rows = self._comm.rank, [], {}, self._in_rows(found)
        rooms, results = Rooms(me, in_rows), {name: array for name, array in found.items() if is_shared(name)}
        for name in [name for name in found if name not in results]:
            array, axis, layout, like = found[name], axis_of(name), self._layout(name), whole.get(name)
            rows, every = layout.rows(me), self.layouts[_dealt_with(name)].rows(self.index)
            for peer in self._others:
                sends += [(peer, x) for x in messages(array, every, layout.rows(peer), axis, in_rows)]
            mine = part(array, every, rows, axis)
            if like is not None and (like.ndim < 3 or like.shape[-3] == 1):
                places = {
                    peer: mine if peer == me else empty_like(mine, mine.shape, mine.dtype) for peer in self._parts
                }
                sums[name] = [*places.values()]
            else:
                shape = list(mine.shape)
                shape[axis - 1] *= self.inner
                results[name] = out[name] if name in out else empty_like(mine, shape, mine.dtype)
                places = {peer: self.own({name: results[name]}, peer)[name] for peer in self._parts}
                rooms.keep(places[me], rows, mine, rows, axis)
            for peer in self._others:
                rooms.expect(peer, places[peer], rows, rows, axis)
        wait = rooms.start(self._comm, sends)

        def finish() -> dict[str, Any]:
            wait()
            return results | {name: total(each) for name, each in sums.items()}

        return finish

    def _in_rows(self, arrays: Mapping[str, Any]) -> bool:
        return next(iter(arrays.values())).tape.takes_rows(self._comm)

    def _layout(self, name: str) -> Layout:
        return self._of_ranks[_dealt_with(name)]


def total(parts: Sequence[Described]) -> Described:
    """Return the sum of arrays of one shape and dtype, in their order."""
    found, *rest = parts
    for number, one in enumerate(rest):
        out = found if number else empty_like(found, found.shape, found.dtype)
        add(out, found, one)
        found = out
    return found


def part_of_heads(name: str, array: Any, slot: int, count: int) -> Any:
    """Return one of `count` equal parts of an array's heads, if it has several."""
    axis = axis_of(name) - 1
    if array.ndim < -axis or array.shape[axis] == 1:
        return array
    return array[(..., share(array.shape[axis], slot, count), *(slice(None),) * (-axis - 1))]


def share(heads: int, slot: int, count: int) -> slice:
    """Return which heads one of `count` parts of them has."""
    return slice(slot * heads // count, (slot + 1) * heads // count)


def is_shared(name: str) -> bool:
    """Return whether a gradient, by the name of its operand, is summed over all ranks."""
    return name == "key_bias" or name.startswith("score")


def _dealt_with(name: str) -> str:
    return "key" if name in OF_KEYS else "row"
