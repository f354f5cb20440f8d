"""Heads in place of rows: ranks of a group exchange, and each has all of the group's rows and keys, of some heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuattn.distributed.arrays import contiguous, joined, taken
from cuattn.distributed.comm import Comm
from cuattn.distributed.layout import Layout, grouped
from cuattn.distributed.tape import Described, add, empty_like, start
from cuattn.distributed.walk import OF_KEYS, axis_of
from cuattn.distributed.whole import Whole


class Heads:
    """The exchange within groups of `inner` neighbours; a group of one changes nothing.

    Parameters
    ----------
    comm : Comm
    inner : int
        Ranks of a group, which divides the ranks, query heads and key heads.
    layouts : dict of str to Layout
        Of the ranks, by "row" and "key".

    Attributes
    ----------
    layouts : dict of str to Layout
        Of the groups.
    ranks : list of int
        Those of all groups that have the same heads as this one.
    index : int
        This one's group.
    """

    def __init__(self, comm: Comm, inner: int, layouts: Mapping[str, Layout]) -> None:
        self._comm, self.inner, self._of_ranks = comm, inner, layouts
        self.index, self._slot = divmod(comm.rank, inner)
        self._members = range(self.index * inner, (self.index + 1) * inner)
        self.ranks = list(range(self._slot, comm.size, inner))
        self.layouts = {axis: grouped(layout, inner) for axis, layout in layouts.items()}

    def whole(self, whole: Whole) -> Whole:
        """Return what is said of the whole problem, of this rank's heads."""
        if self.inner == 1:
            return whole
        own = share(whole.leading[-1], self._slot, self.inner)
        return whole.of_heads(own.start, own.stop)

    def place(self, array: Any) -> tuple[Any, ...]:
        """Return where this rank's heads are in an array without rows, as an index."""
        if self.inner == 1 or array.ndim < 3 or array.shape[-3] == 1:
            return (...,)
        return (..., share(array.shape[-3], self._slot, self.inner), slice(None), slice(None))

    def spread(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return arrays of all the group's rows and of this rank's heads, from those of its rows and all heads."""
        if self.inner == 1:
            return dict(arrays)
        found = {name: array[self.place(array)] for name, array in arrays.items() if name == "key_bias"}
        arrays = {name: array for name, array in arrays.items() if name != "key_bias"}
        sent = {
            peer: {n: contiguous(part_of_heads(n, x, slot, self.inner)) for n, x in arrays.items()}
            for slot, peer in enumerate(self._members)
        }

        def shape(name: str, peer: int) -> list[int]:
            found = list(sent[self._comm.rank][name].shape)
            found[axis_of(name)] = self._layout(name).lengths[peer]
            return found

        parts = self._exchanged(sent, shape)
        for name in arrays:
            runs = [self._layout(name).rows(peer) for peer in self._members]
            found[name] = joined([parts[peer][name] for peer in self._members], runs, axis_of(name))
        return found

    def collect(self, found: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return results of this rank's rows and all heads, from those of all the group's rows and its heads.

        Parameters
        ----------
        found : dict of str to array
        whole : dict of str to array
            This rank's operands, of which those without heads have gradients that are summed.
        """
        if self.inner == 1:
            return dict(found)
        whose = {n: self.layouts[_dealt_with(n)].rows(self.index) for n in found}
        sent = {
            peer: {n: taken(x, whose[n], self._layout(n).rows(peer), axis_of(n)) for n, x in found.items()}
            for peer in self._members
        }
        parts = self._exchanged(sent, lambda name, peer: sent[self._comm.rank][name].shape)
        results = {}
        for name, array in found.items():
            pieces, like = [parts[peer][name] for peer in self._members], whole.get(name)
            if like is not None and (like.ndim < 3 or like.shape[-3] == 1):
                results[name] = total(pieces)
                continue
            shape, axis = list(pieces[0].shape), axis_of(name) - 1
            shape[axis] *= self.inner
            results[name] = empty_like(array, shape, array.dtype)
            for slot, piece in enumerate(pieces):
                add(part_of_heads(name, results[name], slot, self.inner), piece)
        return results

    def _layout(self, name: str) -> Layout:
        return self._of_ranks[_dealt_with(name)]

    def _exchanged(self, sent: Mapping[int, Mapping[str, Any]], shape: Any) -> dict[int, dict[str, Any]]:
        """Exchange arrays within the group; return what arrives, by rank."""
        me = self._comm.rank
        parts = {
            peer: {n: x if peer == me else empty_like(x, shape(n, peer), x.dtype) for n, x in sent[me].items()}
            for peer in self._members
        }
        start(self._comm, *([(peer, x) for peer in each for x in each[peer].values()] for each in (sent, parts)))()
        return parts


def total(parts: Sequence[Described]) -> Described:
    """Return the sum of arrays of one shape and dtype, in their order."""
    found, *rest = parts
    for number, part in enumerate(rest):
        out = found if number else empty_like(found, found.shape, found.dtype)
        add(out, found, part)
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


def _dealt_with(name: str) -> str:
    return "key" if name in OF_KEYS else "row"
