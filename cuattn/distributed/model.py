"""What a way to share work costs: bytes, steps and time by a simple model, from which the way is chosen.

A rank begins a stage when it has computed the last and its part has arrived, which is sent when both ends begin the
stage before.  The same model, given measured rates, says what many GPUs would do (``bench/distributed.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cuattn.distributed.layout import Layout, grouped
from cuattn.distributed.walk import steps
from cuattn.distributed.work import Work, work_of
from cuattn.masks.base import Mask
from cuattn.plans import Plan, readable_bytes

ALGORITHMS = ("needed", "ring", "heads", "2d", "combine", "gather")
"""In the order of preference where costs are equal; the last is used only if it is asked for."""
_PARTS = (1, 2, 4)  # that heads which are exchanged are computed in, side by side
_SHARDS = 2  # of keys beside its own, which a rank may hold at a time
# Of a GPU and its host: seconds that a call and one more launch take, three times as many in the backward, and a host's
# step; rows of a tile, and multiprocessors, which wait half a tile's time where a launch ends.
_CALL, _LAUNCH, _HOST, _TILE, _MULTIPROCESSORS = 1e-4, 8e-5, 1.2e-4, 128, 132
_BY_ROWS = 0.12  # how much longer rows that travel take, in the backward
_COPIES = 10  # times that a gradient's sums are read or written, where own keys and others' come at once
_WHY = {
    "needed": "each rank is sent the keys that its rows see, from their owners in turn",
    "ring": "whole shards of keys in turn",
    "heads": "an exchange gives each rank all rows and keys of some heads, and another takes the results back",
    "2d": "heads are exchanged within groups of neighbours, keys travel between the groups",
    "combine": "rows travel, and partial results return to their owners",
    "gather": "all needed keys arrive before one local call",
}
_IN_PARTS = "; some are exchanged while others are computed"


@dataclass(frozen=True)
class Rates:
    """What ranks and the links between them do in a second.

    Attributes
    ----------
    flops : float
        Of one rank, in products of the scores' and the outputs' kind.
    link, between : float
        Bytes that a rank receives from the same island, and from others.
    memory : float
        Bytes that a rank reads and writes.
    latency : float
        Seconds of a stage.
    island : int
        Neighbours that a faster link joins.
    overlapped : bool
        Whether messages travel while ranks compute.
    """

    flops: float
    link: float
    between: float
    memory: float
    latency: float
    island: int
    overlapped: bool


def rates_of(backend: str, itemsize: int, island: int) -> Rates:
    """Return what is assumed where nothing was measured: an H200 with NVLink and a 400 Gbit/s link, or a CPU."""
    if backend == "cpu":
        return Rates(3e10, 5e9, 5e9, 1e10, 2e-4, island, overlapped=False)
    flops = {2: 6.5e14, 4: 1.2e14, 8: 4e13}[itemsize]
    return Rates(flops, 3.6e11, 5e10, 3.5e12, 3e-5, island, overlapped=True)


@dataclass(frozen=True)
class Size:
    """What a call's costs depend on beside its layouts: see `Problem`; `sums` is the size of a number of a sum."""

    backward: bool
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    itemsize: int
    sums: int

    @property
    def flops(self) -> float:
        """Of a visible element."""
        d, dv = self.head_dim, self.head_dim_v
        return 2.0 * self.batch * self.heads * (3 * d + 2 * dv if self.backward else d + dv)

    def travels(self, axis: str) -> tuple[float, float]:
        """Return the bytes of a key, or a row, that travels, and of its results that return."""
        d, dv, b, sums = self.head_dim, self.head_dim_v, self.itemsize, self.sums
        if axis == "key":
            there, back = (d + dv) * b, (d + dv) * sums * self.backward
        else:
            there, back = ((d + 2 * dv) * b + 2 * sums, d * sums) if self.backward else (d * b, (dv + 2) * sums)
        heads = self.batch * (self.kv_heads if axis == "key" else self.heads)
        return float(heads * there), float(heads * back)

    @property
    def stays(self) -> float:
        """Return the bytes of a row's partial results, which are added up at home."""
        return float(self.batch * self.heads * self.sums * (self.head_dim if self.backward else self.head_dim_v))

    def exchanged(self, rows: float, keys: float) -> float:
        """Return the bytes of rows and keys that an exchange of heads moves, there and back."""
        d, dv, b, sums = self.head_dim, self.head_dim_v, self.itemsize, self.sums
        of_row, of_key = (d + dv) * b, (d + dv) * b
        if self.backward:
            of_row, of_key = 2 * (d + dv) * b + 2 * sums, 2 * of_key
        return float(self.batch * (rows * self.heads * of_row + keys * self.kv_heads * of_key))


@dataclass(frozen=True)
class Cost:
    """What a way to share work takes.

    Attributes
    ----------
    seconds : float
        Until the last rank is done.
    computing, waiting : float
        Of that rank: what it computes, and what it waits for others.
    travelling : float
        Seconds that its messages take.
    received : float
        Bytes that the rank with most receives.
    steps : int
    balance : float
        The largest load over the mean.
    parts : int
        In how many parts heads are computed, with all keys at once; 0: with the keys of one owner after the other.
    """

    seconds: float
    computing: float
    waiting: float
    travelling: float
    received: float
    steps: int
    balance: float
    parts: int = 0


def cost(algorithm: str, work: Work, size: Size, rates: Rates, inner: int = 1, parts: int = 0) -> Cost:
    """Return what an algorithm takes.

    Parameters
    ----------
    algorithm : str
    work : Work
        Of the groups that rows and keys are dealt out to.
    size : Size
        Of the whole problem.
    rates : Rates
    inner : int, optional
        Ranks of a group, which exchange heads first.
    parts : int, optional
        Of the heads, which have all keys at once, and are exchanged while others are computed.
    """
    parts = 1 if algorithm == "gather" else parts
    ranks, axis = work.size, "row" if algorithm == "combine" else "key"
    seconds, rows = work.elements * (size.flops / inner / rates.flops), np.array(work.lengths("row"), float)
    trimmed = algorithm != "ring" and (axis == "key" or size.backward)
    moved = (work.needs[axis] if trimmed else np.tile(work.lengths(axis), (ranks, 1))) * (1 - np.eye(ranks))
    there, back = (each / inner for each in size.travels(axis))
    islands = np.arange(ranks) * inner // max(rates.island, 1)
    links = np.where(islands[:, None] == islands, rates.link, rates.between)
    shared, launch = rates.overlapped and ranks * inner > 1, _LAUNCH * (3 if size.backward else 1)
    loads = seconds.sum(1)
    end = shared * _TILE * _MULTIPROCESSORS * inner / (2 * np.maximum(rows * size.batch * size.heads, 1))
    seconds = seconds * (1 + end[:, None])
    if parts:
        travelling = (moved * (there + back) / links).sum(1) + parts * rates.latency
        # Rows that see own keys alone are computed meanwhile, and the others by a launch of their own.
        alone = work.alone * (loads / np.maximum(work.elements.sum(1), 1)) * (not size.backward)
        hidden = np.minimum(alone, travelling) * rates.overlapped
        more = (parts - 1) * _LAUNCH + ((alone > 0) & (travelling > parts * rates.latency)) * launch
        adding = rows * size.backward * (moved.sum(1) > 0) * _COPIES * size.stays / inner / rates.memory
        ends = travelling - hidden + np.maximum(seconds.sum(1) + more + adding, hidden)
    else:
        # A part to what there is, for all rows, or in the backward for those that see its keys.
        some = work.needs["row"].T if trimmed and size.backward and axis == "key" else np.tile(rows[:, None], ranks)
        adding = some * 3 * size.stays / inner / rates.memory + launch * shared
        longer = 1 + (_BY_ROWS if axis == "row" and size.backward and ranks > 1 else 0) * shared
        ends, travelling = _timeline(seconds * longer, adding, moved * there / links, moved.T * back / links, rates)
    held = size.exchanged(rows.max(initial=0), max(work.lengths("key"), default=0)) / inner
    exchange = held * (inner - 1) / inner
    copied = 2 * held / inner / rates.memory  # what is this rank's own of both
    shown = exchange / (max(parts, 1) if rates.overlapped else 1)  # the first part's arrays, and the last one's results
    swap = shown / rates.link + copied + 2 * rates.latency if inner > 1 else 0.0
    last = int(ends.argmax())
    steps_of_all = (parts or ranks) + 2 * (inner > 1)
    total = max(float(ends[last]) + swap + _CALL * shared, _HOST * (2 + steps_of_all) if rates.overlapped else 0.0)
    return Cost(
        total,
        float(loads[last]),
        max(total - float(loads[last]), 0.0),
        float(travelling[last]) + swap,
        float((moved.sum(1) * there + moved.sum(0) * back).max()) + exchange,
        steps_of_all,
        float(loads.max() / loads.mean()) if loads.any() else 1.0,
        parts,
    )


def _timeline(
    seconds: np.ndarray, adding: np.ndarray, there: np.ndarray, back: np.ndarray, rates: Rates
) -> tuple[np.ndarray, np.ndarray]:
    """Return when ranks are done, and how long their messages travel.

    Parameters
    ----------
    seconds : array, (ranks, ranks)
        That each computes with what it is sent by each.
    adding : array, (ranks, ranks)
        To add that to what there is.
    there, back : array, (ranks, ranks)
        Seconds in which each receives a part, or results, from each.
    """
    ranks = len(seconds)
    order, sequence = np.arange(ranks), steps(ranks, bool(back.any()))

    def message(fetched: int, returned: int) -> np.ndarray:
        found = there[order, (order - fetched) % ranks] + back[order, (order + returned) % ranks]
        return np.where(found > 0, found + rates.latency, 0)

    begin = travelling = message(sequence[0], 0)
    for before, step, following in zip([0, *sequence], sequence, [*sequence[1:], 0], strict=False):
        under_way, part = message(following, before), (order, (order - step) % ranks)
        computed = begin + seconds[part] + adding[part] * (seconds[part] > 0) * (step != sequence[0])
        ready = begin if rates.overlapped else computed
        arrived = np.maximum(ready, ready[(order - following) % ranks]) + under_way
        begin = np.maximum(computed, np.where(under_way > 0, arrived, 0))
        travelling = travelling + under_way
    return begin, travelling


@dataclass(frozen=True)
class DistributedPlan:
    """How a call over ranks will run.  Made by :func:`cuattn.distributed.plan`; prints as a readable table.

    Attributes
    ----------
    algorithm : {"needed", "ring", "heads", "2d", "combine", "gather"}
    direction : {"forward", "backward"}
    ranks : int
    inner : int
        Ranks that exchange heads with each other.
    steps : int
        Groups of messages, one after the other.
    bytes : int
        What the rank that receives most receives.
    balance : float
        The largest load of visible elements over the mean.
    overlap : float
        The share of the messages' time in which ranks compute.
    efficiency : float
        The mean load's time over the whole time: 1 where ranks neither wait nor differ.
    why : str
        Why this algorithm was chosen.
    costs : tuple of (str, float)
        Seconds that the model gives each algorithm.
    local : Plan
        Of this rank's own rows and keys.

    See Also
    --------
    cuattn.distributed.plan : Makes one.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.distributed import connect, plan
    >>> with connect() as comm:
    ...     plan(*np.ones((3, 8, 4)), comm=comm).ranks
    1
    """

    algorithm: str
    direction: str
    ranks: int
    inner: int
    steps: int
    bytes: int
    balance: float
    overlap: float
    efficiency: float
    why: str
    costs: tuple[tuple[str, float], ...]
    local: Plan

    def __str__(self) -> str:
        rows = {
            "algorithm": f"{self.algorithm} ({self.why})",
            "direction": self.direction,
            "ranks": f"{self.ranks}" + (f", in groups of {self.inner}" if self.inner > 1 else ""),
            "steps": str(self.steps),
            "received": f"{readable_bytes(self.bytes)} by the rank that receives most",
            "balance": f"{self.balance:.2f} (largest load over mean)",
            "overlap": f"{self.overlap:.0%} of the messages' time, as modelled",
            "efficiency": f"{self.efficiency:.2f}, as modelled",
            "costs": ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.costs),
        }
        lines = [f"{name:<10}  {text}" for name, text in rows.items()]
        return "\n".join([*lines, *(f"local {line}" for line in str(self.local).splitlines())])


def _why(chosen: str, parts: int) -> str:
    if parts > 1:
        return _WHY[chosen] + _IN_PARTS
    return _WHY["gather" if parts and chosen == "needed" else chosen]


def planned(options: Options, chosen: str, asked: bool, size: Size, ranks: int, local: Plan) -> DistributedPlan:
    """Return the plan of an algorithm, given the costs of all and the plan of this rank's own part."""
    cost, inner = options[chosen]
    hidden = 1 - min(cost.waiting / cost.travelling, 1.0) if cost.travelling else 1.0
    mean = cost.computing / cost.balance
    return DistributedPlan(
        chosen,
        "backward" if size.backward else "forward",
        ranks,
        inner,
        cost.steps,
        round(cost.received),
        cost.balance,
        hidden,
        mean / cost.seconds if cost.seconds else 1.0,
        _why(chosen, cost.parts) + ("; asked for" if asked else "; least by the model"),
        tuple((name, each.seconds) for name, (each, _) in options.items()),
        local,
    )


Options = dict[str, tuple[Cost, int]]
"""By algorithm, what it takes, and how many ranks exchange heads."""


@lru_cache(maxsize=64)  # asked for in every call
def options_of(
    rows: Layout, keys: Layout, visible: Mask | None, size: Size, rates: Rates, grouped_heads: int, slices: int = 1
) -> Options:
    """Return what every algorithm takes that a call can be computed by.

    Parameters
    ----------
    rows, keys : Layout
    visible : Mask or None
        As far as it is known.
    size : Size
    rates : Rates
    grouped_heads : int
        A number that ranks that exchange heads must divide.
    slices : int, optional
        A number that parts of heads that are computed in turn must divide.
    """
    ranks, found = rows.size, {}
    inner = dict.fromkeys(ALGORITHMS, 1) | {"heads": ranks}
    island = math.gcd(rates.island if rates.island < ranks else ranks, ranks, grouped_heads)
    inner["2d"] = max((g for g in range(1, ranks) if island % g == 0), default=1)
    for name, group in inner.items():
        if name in ("heads", "2d") and (group == 1 or grouped_heads % group):
            continue
        work = work_of(grouped(rows, group), grouped(keys, group), visible)
        most = float((work.needs["key"] * (1 - np.eye(work.size))).sum(1).max(initial=0))
        room = _SHARDS * max(work.lengths("key"), default=0)
        parts = [0, *[1] * (name == "needed" and most <= room)]
        if name == "heads":
            parts = [n for n in _PARTS if n == 1 or slices % (n * group) == 0]
        costs = [cost(name, work, size, rates, group, n) for n in parts]
        found[name] = min(costs, key=lambda each: each.seconds), group
    return found


def least(options: Options) -> str:
    """Return the algorithm that takes least; of those that differ by a hundredth the one with least traffic."""
    costs = {name: cost for name, (cost, _) in options.items() if name != "gather"}
    best = min(cost.seconds for cost in costs.values())
    return min((name for name in costs if costs[name].seconds <= 1.01 * best), key=lambda name: costs[name].received)
