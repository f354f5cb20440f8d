"""Parts of arrays: runs along an axis, taken, sent and put together; and the way back to the caller's kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn import interop
from cuattn.distributed.comm import Comm
from cuattn.distributed.tape import add, empty_like, start
from cuattn.masks.runs import Runs, kept_before, length_of

_PIECE = 1 << 21  # bytes of a message from which on it is sent as it lies: copying many into one would take longer


def merged(runs: Iterable[Sequence[int]]) -> Runs:
    """Return runs in ascending order, without empty ones, those that touch as one.

    >>> merged([(4, 8), (2, 4), (3, 3)])
    ((2, 8),)
    """
    found: list[list[int]] = []
    for begin, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and found[-1][1] == begin:
            found[-1][1] = stop
        else:
            found.append([begin, stop])
    return tuple((begin, stop) for begin, stop in found)


def common(these: Runs, those: Runs) -> Runs:
    """Return what runs have in common.

    >>> common(((0, 4), (6, 9)), ((2, 8),))
    ((2, 4), (6, 8))
    """
    found, i, j = [], 0, 0
    while i < len(these) and j < len(those):
        found.append((max(these[i][0], those[j][0]), min(these[i][1], those[j][1])))
        if these[i][1] <= those[j][1]:
            i += 1
        else:
            j += 1
    return merged(found)


def without(these: Runs, those: Runs) -> Runs:
    """Return what runs have that others have not.

    >>> without(((0, 4), (6, 9)), ((2, 7),))
    ((0, 2), (7, 9))
    """
    edges = [0, *(edge for run in merged(those) for edge in run), max((stop for _, stop in these), default=0)]
    return common(merged(these), merged(zip(edges[::2], edges[1::2], strict=True)))


@lru_cache(maxsize=256)  # asked for by every array
def local(whole: Runs, part: Runs) -> tuple[slice, ...]:
    """Return where runs that are part of others lie in an array that holds these."""
    return tuple([slice(begin, stop) for begin, stop in kept_before(np.reshape(part, (-1, 2)), whole).tolist()])


def part(array: Any, whole: Runs, runs: Runs, axis: int) -> Any:
    """Return some runs of an array that holds those of `whole`: a view where they are neighbours, else a copy."""
    if runs == whole:
        return array
    places = local(whole, runs) or (slice(0, 0),)
    if len(places) == 1:
        return array[_at(array, axis, places[0])]
    out = like(array, axis, runs)
    _copy(out, local(runs, runs), array, places, axis)
    return out


def _copy(out: Any, targets: Sequence[slice], array: Any, sources: Sequence[slice], axis: int) -> None:
    for target, source in zip(targets, sources, strict=True):
        add(out[_at(out, axis, target)], array[_at(array, axis, source)])


def _at(array: Any, axis: int, place: slice) -> tuple[slice, ...]:
    index = [slice(None)] * array.ndim
    index[axis] = place
    return tuple(index)


def like(array: Any, axis: int, runs: Runs) -> Any:
    """Return room for some runs of an array like this one."""
    shape = list(array.shape)
    shape[axis] = length_of(runs)
    return empty_like(array, shape, array.dtype)


def taken(array: Any, whole: Runs, runs: Runs, axis: int) -> Any:
    """Return some runs of an array that holds those of `whole`, C-contiguous; the array itself if it is that."""
    return contiguous(part(array, whole, runs, axis))


def joined(parts: Sequence[Any], runs: Sequence[Runs], axis: int) -> Any:
    """Return one array, in ascending order, of arrays that hold disjoint runs."""
    filled = [(part, mine) for part, mine in zip(parts, runs, strict=True) if mine] or [(parts[0], ())]
    if len(filled) == 1:
        return filled[0][0]
    whole = merged(run for _, mine in filled for run in mine)
    out = like(parts[0], axis, whole)
    for part, mine in filled:
        put(out, whole, part, mine, axis)
    return out


def put(out: Any, whole: Runs, array: Any, runs: Runs, axis: int, held: Runs | None = None) -> None:
    """Copy some runs of an array, which holds these or those of `held`, to one that holds those of `whole`."""
    _copy(out, local(whole, runs), array, local(held or runs, runs), axis)


def pieces(array: Any, whole: Runs, runs: Runs, axis: int, in_rows: bool) -> list[Any] | None:
    """Return some runs of an array that holds those of `whole` as views: by head and run, or by run if heads are rows.

    None where these are small, so that one message is better: by shape, so that both ends of a message find the same.
    """
    lead = array.shape[: array.ndim + axis]
    if in_rows:
        lead = lead[:-1]
    else:
        count = math.prod(lead) * len(runs)
        size = array.itemsize * math.prod((length_of(runs), *array.shape[len(lead) + 1 :]))
        if size < _PIECE * len(runs) or not count:
            return None
    behind = [slice(None)] * (array.ndim + axis - len(lead))
    return [array[(*index, *behind, place)] for index in np.ndindex(*lead) for place in local(whole, runs)]


def messages(array: Any, whole: Runs, runs: Runs, axis: int, in_rows: bool) -> list[Any]:
    """Return the messages that take some runs of an array to another rank: each is contiguous, or in rows that are."""
    found = pieces(array, whole, runs, axis, in_rows)
    if found is not None and (not found or found[0].flags.c_contiguous or (in_rows and _is_in_rows(found[0]))):
        return found
    copy = taken(array, whole, runs, axis)
    return [copy] if found is None else pieces(copy, runs, runs, axis, in_rows) or []


def _is_in_rows(array: Any) -> bool:
    """Return whether what each index of the first axis has is contiguous, one behind the other."""
    row = array[:1]
    return row.flags.c_contiguous and array.strides[0] >= row.nbytes


class Rooms:
    """Room for what ranks hold of arrays.

    Parameters
    ----------
    me : int
        This rank.
    in_rows : bool
        Whether messages may be in rows.

    Attributes
    ----------
    recvs : list of (int, array)
        The messages that fill it, by rank.
    """

    def __init__(self, me: int, in_rows: bool) -> None:
        self._me, self._in_rows, self.recvs = me, in_rows, []
        self._own: list[tuple[Any, ...]] = []
        self._later: list[tuple[Any, ...]] = []

    def add(self, own: Any, runs: Mapping[int, Runs], axis: int, held: Runs) -> Any:
        """Return room for one more array, in ascending order.

        Parameters
        ----------
        own : array
            What this rank has, of the runs `held`.
        runs : dict of int to runs
            By rank.
        axis : int
        held : runs
        """
        every = merged(run for mine in runs.values() for run in mine)
        room = like(own, axis, every)
        for source, mine in runs.items():
            if source == self._me:
                self.keep(room, every, own, mine, axis, held)
            else:
                self.expect(source, room, every, mine, axis)
        return room

    def keep(self, *copied: Any) -> None:
        """Let arguments of :func:`put` wait until messages have begun: this rank's own."""
        self._own.append(copied)

    def expect(self, source: int, room: Any, whole: Runs, runs: Runs, axis: int) -> None:
        """Expect a rank's messages with some runs of an array that holds those of `whole`."""
        found = pieces(room, whole, runs, axis, self._in_rows)
        if found is None:
            found = [room if runs == whole and room.flags.c_contiguous else like(room, axis, runs)]
            self._later += [(room, whole, found[0], runs, axis)] * (found[0] is not room)
        self.recvs += [(source, x) for x in found]

    def start(self, comm: Comm, sends: Sequence[tuple[int, Any]]) -> Callable[[], None]:
        """Begin to exchange; copy meanwhile what this rank has; return what waits for the rest."""
        wait = start(comm, sends, self.recvs)
        for copied in self._own:
            put(*copied)

        def finish() -> None:
            wait()
            for copied in self._later:
                put(*copied)

        return finish


def contiguous(array: Any) -> Any:
    """Return the array itself if its elements follow each other in memory, else a copy."""
    return array if array.flags.c_contiguous else rounded(array, array.dtype)


def rounded(array: Any, dtype: Any) -> Any:
    """Return a contiguous copy of a dtype."""
    out = empty_like(array, array.shape, dtype)
    add(out, array)
    return out


def gathered(comm: Comm, mine: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return the arrays of all ranks, by rank, given their shapes."""
    mine = contiguous(mine)
    parts = [mine if peer == comm.rank else empty_like(mine, shape, mine.dtype) for peer, shape in enumerate(shapes)]
    start(comm, [(peer, mine) for peer in range(comm.size)], list(enumerate(parts)))()
    return parts


def given_back(origin: interop.ArrayOrigin, arrays: Sequence[Any]) -> list[Any]:
    """Return arrays, which nobody else holds, as the caller's kind; None stays None."""
    if origin.kind != "torch" or origin.backend == "cpu":
        return [origin.from_backend(array) for array in arrays]
    there = [array for array in arrays if array is not None]
    tensors = iter(origin.allocator([(tuple(array.shape), array.dtype) for array in there])(0, False, ())[0])
    return [array if array is None else _copied(array, next(tensors)) for array in arrays]


def _copied(array: Any, tensor: Any) -> Any:
    """Copy an array to a tensor, and return this."""
    interop.to_backend({"x": tensor})[0]["x"][...] = array
    return tensor
