"""When a forward's row tiles are done, and into how many parts their keys are divided to be done sooner."""

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cuattn.io_model.sizes import cdiv

# In steps of a key tile: a row's end; what it takes to leave a part, and to add up each (measured at d 64).
_END, _MERGE, _MERGE_OF_PART = 1.0, 3.0, 0.2
_LEAST_PART = 4  # key tiles
_MOST_PARTS = 16  # of a row
_SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25)  # of the longest row, as parts of rows of unequal length may have
_MOST_SIMULATED = 600  # row tiles of unequal length; of more, longest first, all multiprocessors are done at once
GAIN = 0.95  # by how much what is unusual must be done sooner
_TAIL_GAIN = 0.995  # the same of parts of a last round alone


class Division(NamedTuple):
    """How rows' keys are divided.

    Attributes
    ----------
    time : float
        When all rows are done, in steps of a key tile.
    parts, tiles : int
        Of the longest row, and key tiles of a part at most.
    whole : int
        How many of all heads' row tiles come before those in parts, where they are of equal length: full rounds.
    """

    time: float
    parts: int
    tiles: int
    whole: int


def makespan(lengths: Iterable[float], copies: Iterable[int], workers: int) -> float:
    """Return how long workers take for so many items of each length, each taking the next when it is done with one.

    Examples
    --------
    >>> makespan([3, 2, 1], [2, 2, 2], 2), makespan([3, 2, 1], [1, 1, 1], 3)
    (6, 3)
    """
    done: list[float] = [0] * workers
    for length, n in zip(lengths, copies, strict=True):
        for _ in range(n):
            heapq.heapreplace(done, done[0] + length)
    return max(done)


def time_of_parts(lengths: Sequence[int], heads: int, most: int, slots: int) -> float:
    """Return when all row tiles are done, in steps of a key tile, if their parts have at most so many key tiles.

    Parameters
    ----------
    lengths : sequence of int
        Key tiles of each row tile of a head, the longest first.
    heads : int
    most : int
        Key tiles of a part.
    slots : int
        Blocks that work side by side; each takes the next part when it is done with one.

    Examples
    --------
    >>> time_of_parts([8], 3, 8, 2) - time_of_parts([8], 3, 8, 3)
    9.0
    >>> time_of_parts([8], 3, 8, 2), time_of_parts([8], 3, 4, 2)  # the third one in parts
    (18.0, 17.4)
    """
    parts = [cdiv(length, most) for length in lengths]
    costs = [
        length / n + _END + (n > 1) * (_MERGE + _MERGE_OF_PART * n) for length, n in zip(lengths, parts, strict=True)
    ]
    if lengths[0] == lengths[-1]:
        rounds, rest = divmod(len(lengths) * heads, slots)
        return rounds * (lengths[0] + _END) + cdiv(rest * parts[0], slots) * costs[0]
    if len(lengths) * heads > _MOST_SIMULATED:
        return heads * sum(cost * n for cost, n in zip(costs, parts, strict=True)) / slots
    return makespan(costs, [n * heads for n in parts], slots)


def divide(lengths: Sequence[int], heads: int, slots: int, divisible: bool) -> Division:
    """Return the division by which row tiles of these lengths are done soonest; see :func:`time_of_parts`.

    Examples
    --------
    >>> divide([64] * 22, 1, 132, True)[1:], divide([64] * 22, 7, 132, True)[1:]
    ((6, 11, 0), (6, 11, 132))
    """
    whole = len(lengths) * heads // slots * slots if lengths[0] == lengths[-1] else 0
    best = Division(time_of_parts(lengths, heads, lengths[0], slots), 1, lengths[0], 0)
    for tiles in _shorter(lengths, heads) if divisible else ():
        time = time_of_parts(lengths, heads, tiles, slots)
        if time < ((_TAIL_GAIN if whole else GAIN) if best.parts == 1 else 1) * best.time:
            best = Division(time, cdiv(lengths[0], tiles), tiles, whole)
    return best


def _shorter(lengths: Sequence[int], heads: int) -> list[int]:
    """Return how many key tiles parts may have, the longest first."""
    longest = lengths[0]
    if longest == lengths[-1]:
        return [cdiv(longest, parts) for parts in range(2, min(longest // _LEAST_PART, _MOST_PARTS) + 1)]
    found = [int(longest * share) for share in _SHARES] if len(lengths) * heads <= _MOST_SIMULATED else []
    return [tiles for tiles in found if tiles >= _LEAST_PART]
