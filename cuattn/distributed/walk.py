"""One rank's part of a call: stages in which keys, or rows, arrive, are computed with, and partial results go back.

Keys travel (k and v) or rows do (q and all that belongs to it); the other axis stays.  Each stage has sources, whose
part arrives, and clients, who are sent this rank's.  While a stage is computed, the next one's part is on its way, and
with it, in one group of messages, the partial results of the last.  Sums are taken in the order of the stages, which
depends on layouts and mask alone.  So does all that is done here: a tape takes it down, see
:mod:`cuattn.distributed.tape`, and arrays are only described.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuattn.distributed.arrays import Rooms, local, merged, messages, part, put, taken, without
from cuattn.distributed.comm import Comm
from cuattn.distributed.layout import Layout
from cuattn.distributed.whole import Whole
from cuattn.distributed.work import Work
from cuattn.masks.runs import Runs, length_of
from cuattn.problem import BACKWARD, FORWARD, Operation, Options

_MOST = 0.75  # of a rank's rows, that a part may have instead of all
Stage = tuple[tuple[int, ...], tuple[int, ...]]
"""Sources and clients of a rank, among those that share an axis."""

Arrays = dict[str, Any]

Partial = tuple[Arrays, Runs, Runs]
"""Partial results, the runs that they hold, and those that are of one source."""


class Arrived(NamedTuple):
    """What a stage computes with: by source the runs that it sent; all of them, in ascending order; and the arrays."""

    runs: dict[int, Runs]
    every: Runs
    arrays: Arrays


OF_ROWS, OF_KEYS = ("q", "do", "o", "l", "m", "dlse", "bias"), ("k", "v")
"""What is dealt out with rows and with keys; gradients go by the names of their operands."""


def steps(size: int, returning: bool) -> list[int]:
    """Return by how many places sources precede, and clients follow, a rank in each of its stages.

    Its own part comes first, so that the first that is sent can be fetched meanwhile; or last, so that the last partial
    results can return.

    >>> steps(3, False), steps(3, True)
    ([0, 1, 2], [1, 2, 0])
    """
    found = list(range(1, size))
    return [*found, 0] if returning else [0, *found]


def stages(algorithm: str, index: int, size: int, returning: bool) -> list[Stage]:
    """Return what a rank does in turn.

    >>> stages("ring", 0, 3, False), stages("gather", 0, 3, False)
    ([((0,), (0,)), ((2,), (1,)), ((1,), (2,))], [((0, 1, 2), (0, 1, 2))])
    """
    if algorithm == "gather":
        return [(tuple(range(size)), tuple(range(size)))]
    return [(((index - step) % size,), ((index + step) % size,)) for step in steps(size, returning)]


@dataclass
class Team:
    """The ranks that rows and keys are dealt out to, and how they share them.

    Attributes
    ----------
    comm : Comm
    ranks : sequence of int
        In the order of the layouts.
    index : int
        Which of them this rank is.
    work : Work
        Of the layouts.
    axis : {"key", "row"}
        What travels.
    trimmed : bool
        Whether only what is needed of it does.
    """

    comm: Comm
    ranks: Sequence[int]
    index: int
    work: Work
    axis: str
    trimmed: bool

    def layout(self, axis: str) -> Layout:
        """Return the layout of rows or of keys."""
        return self.work.layouts[axis]

    def own(self, axis: str) -> Runs:
        """Return the rows or keys that this rank holds."""
        return self.layout(axis).rows(self.index)

    def sent(self, source: int, client: int) -> Runs:
        """Return what travels from one to another; everything from a rank to itself, if anything is needed."""
        whole = self.layout(self.axis).rows(source)
        needed = self.work.needed(self.axis, client, source) if self.trimmed else whole
        return whole if needed and source == client else needed


class Walk(ABC):
    """The way through the stages; subclasses compute an operation's part and take its results.

    Parameters
    ----------
    team : Team
    whole : Whole
    arrays : dict of str to Described
        This rank's, of the tape that takes the way down.  A bias without rows is "key_bias".
    sums : numpy.dtype
        Of partial results.
    dtypes : dict of str to dtype
        Of what it comes to; gradients by the names of their operands.
    out : dict of str to array
        Where this goes; else to new arrays.
    """

    results: tuple[str, ...]
    """Of a part, by name."""
    adds_rows = False
    """Whether a part may have some of this rank's rows alone, those that see its keys."""

    def __init__(
        self,
        team: Team,
        whole: Whole,
        arrays: Arrays,
        sums: np.dtype,
        dtypes: Mapping[str, Any],
        out: Arrays,
    ) -> None:
        self.team, self.whole, self.arrays, self.sums, self.dtypes, self._out = team, whole, arrays, sums, dtypes, out
        self.tape, self._lasting = arrays["q"].tape, len(team.ranks) == team.comm.size
        self._in_rows = self.tape.takes_rows(team.comm)
        of_axis = OF_ROWS if team.axis == "row" else OF_KEYS
        self.moving = [name for name in self.arrays if name in of_axis]
        self.returned = [name for name in self.results if name in of_axis]
        lead = whole.leading
        self.shapes = {"l": (*lead, 0), "m": (*lead, 0), "o": (*lead, 0, arrays["v"].shape[-1])}
        self.shapes |= {name: tuple(array.shape) for name, array in arrays.items()}

    @abstractmethod
    def compute(self, arrays: Arrays, bias: Any, options: dict[str, Any]) -> Arrays:
        """Return the results of a part."""

    @abstractmethod
    def accept(self, found: Arrays, rows: Runs, keys: Runs) -> None:
        """Take results for some of this rank's rows, or keys."""

    @abstractmethod
    def outcome(self) -> Arrays:
        """Return what the walk has come to."""

    def _room_for(self, name: str, shape: tuple[int, ...]) -> Any:
        return self._out[name] if name in self._out else self.tape.empty(shape, self.dtypes[name])

    def _may_leave(self, name: str, array: Any) -> bool:
        """Return whether an array, which nobody else holds, can be a result as it is."""
        lasts = not (self._lasting and self.tape.is_laned(array))
        return name not in self._out and array.dtype == self.dtypes[name] and lasts

    def _put(self, name: str, array: Any) -> Any:
        """Return an array that nobody else holds as a result."""
        if array is self._out.get(name) or self._may_leave(name, array):
            return array
        room = self._room_for(name, array.shape)
        self.tape.add(room, array)
        return room

    def _call(
        self,
        operation: Operation,
        arrays: Arrays,
        options: dict[str, Any],
        made: Mapping[str, tuple[Any, Any]],
        into: Arrays | None = None,
    ) -> Arrays:
        """Compute a part; a GPU's kernels leave `sm_margin` multiprocessors free, if the comm asks for some."""
        given = {name: options[name] for name in Options._fields if name in options}
        settings = Options(**given, sm_margin=getattr(self.team.comm, "sm_margin", 0))
        functions = options["score"], options["score_args"]
        return self.tape.compute(
            operation, {**arrays, "mask": options["mask"]}, settings, options["origin"], functions, made, into or {}
        )

    def begin(self, plan: Sequence[Stage]) -> Callable[[], Any]:
        """Begin to fetch for the first stage; return what waits for that."""
        return self._start(plan[0], None)

    def run(self, plan: Sequence[Stage], fetched: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
        """Walk through all stages, given what :meth:`begin` returned.

        Returns what begins to return the last results, and then returns what waits for them.
        """
        back = None
        for stage, following in itertools.zip_longest(plan, plan[1:]):
            arrived = fetched()
            fetched = self._start(following, back)
            back = stage, self._stage(arrived)
        fetched()
        return lambda: self._start(None, back)

    def _start(self, stage: Stage | None, back: tuple[Stage, dict[int, Partial]] | None) -> Callable[[], Any]:
        """Begin to fetch for a stage and to return partial results of another; return what waits for both."""
        team, me = self.team, self.team.index
        sends, rooms = self._sends(stage, {} if back is None else back[1]), Rooms(me, self._in_rows)
        arrived = self._rooms(rooms, {source: self._arriving(source) for source in stage[0]} if stage else {})
        results = []
        for client in back[0][1] if back and self.returned else ():
            if client != me and (runs := team.sent(me, client)):
                results.append((client, runs, {name: self._room(name, runs, client) for name in self.returned}))
        for client, runs, arrays in results:
            for name, room in arrays.items():
                rooms.expect(client, room, runs, runs, axis_of(name))
        sends, rooms.recvs = ([(team.ranks[peer], x) for peer, x in pairs] for pairs in (sends, rooms.recvs))
        wait = rooms.start(team.comm, sends)

        def finish() -> Arrived | None:
            wait()
            for client, runs, arrays in results:
                self.accept(arrays, *self._part(runs, team.layout("key").rows(client)))
            return arrived

        return finish

    def _arriving(self, source: int) -> Runs:
        """Return what a stage is given of a source."""
        return self.team.sent(source, self.team.index)

    def _sends(self, stage: Stage | None, partial: dict[int, Partial]) -> list[tuple[int, Any]]:
        """Return the messages to clients of a stage, and those with partial results to their sources."""
        team, sends = self.team, []
        for client in stage[1] if stage else ():
            if client != team.index and (runs := team.sent(team.index, client)):
                for name in self.moving:
                    array = self._moved(name, client)
                    found = messages(array, team.own(team.axis), runs, axis_of(name), self._in_rows)
                    sends += [(client, x) for x in found]
        for source, (arrays, every, mine) in partial.items():
            for name, array in arrays.items():
                sends += [(source, x) for x in messages(array, every, mine, axis_of(name), self._in_rows)]
        return sends

    def _rooms(self, rooms: Rooms, runs: dict[int, Runs]) -> Arrived | None:
        """Return what a stage computes with, once messages have arrived."""
        me, runs = self.team.index, {source: mine for source, mine in runs.items() if mine}
        if not runs:
            return None
        every, arrays = merged(run for mine in runs.values() for run in mine), {}
        for name in self.moving:
            own = arrays[name] = self._moved(name, me)
            if [*runs] != [me]:
                arrays[name] = rooms.add(own, runs, axis_of(name), self.team.own(self.team.axis))
        return Arrived(runs, every, arrays)

    def _rows_that_see(self, sources: Iterable[int]) -> Runs:
        """Return the rows of this rank that see keys of these, as far as it is known; all, if most do."""
        team, own = self.team, self.team.own("row")
        if not team.trimmed:
            return own
        seeing = merged(run for source in sources for run in team.work.needed("row", source, team.index))
        return seeing if length_of(seeing) <= _MOST * length_of(own) else own

    def _of_rows(self, rows: Runs) -> Arrays:
        """Return this rank's arrays, of some of its rows."""
        own = self.team.own("row")
        return {name: part(x, own, rows, axis_of(name)) if name in OF_ROWS else x for name, x in self.arrays.items()}

    def _part(self, runs: Runs, keys: Runs | None = None) -> tuple[Runs, Runs]:
        """Return rows and keys of a part, given those that travel; of rows that travel, with which keys."""
        if self.team.axis == "key":
            return self.team.own("row"), runs
        return runs, self.team.own("key") if keys is None else keys

    def _moved(self, name: str, client: int) -> Any:
        """Return this rank's own of what travels, for a client or itself."""
        return (
            self.whole.bias(self.arrays, self.team.layout("key").rows(client)) if name == "bias" else self.arrays[name]
        )

    def _room(self, name: str, runs: Runs, client: int) -> Any:
        """Return an array for partial sums that come back from a client."""
        shape = list(self.shapes[name])
        if name == "bias" and shape[-1] > 1:
            shape[-1] = self.team.layout("key").lengths[client]
        shape[axis_of(name)] = length_of(runs)
        return self.tape.empty(shape, self.sums)

    def _compute(self, own: Arrays, moved: Arrays, rows: Runs, keys: Runs) -> Arrays:
        """Return the results of some rows and keys, given this rank's arrays and those that take their place."""
        bias = moved["bias"] if "bias" in moved else self.whole.bias(own, keys)
        return self.compute({**own, **moved}, bias, self.whole.part(rows, keys))

    def _stage(self, arrived: Arrived | None) -> dict[int, Partial]:
        """Compute with what arrived; return what goes back, by source."""
        team, back = self.team, {}
        if arrived is None:
            return back
        runs, every, moved = arrived
        rows, keys = self._part(every)
        if team.axis == "key" and self.adds_rows and team.index not in runs:
            rows = self._rows_that_see(runs)
        found = self._compute(self._of_rows(rows) if team.axis == "key" else self.arrays, moved, rows, keys)
        self.accept({name: x for name, x in found.items() if name not in self.returned}, rows, keys)
        returned = {name: found[name] for name in self.returned}
        for source, mine in runs.items() if returned else ():
            if source == team.index:
                own = {name: taken(x, every, mine, axis_of(name)) for name, x in returned.items()}
                self.accept(own, *self._part(mine))
            else:
                back[source] = returned, every, mine
        return back


class ForwardWalk(Walk):
    """The forward, of merged parts."""

    results = ("o", "l", "m")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._total: Arrays = {}
        self._late: Arrays = {}
        self._late_rows: Runs = ()
        self._out_dtype: Any = self.sums
        self._into: Arrays = {}

    def begin(self, plan: Sequence[Stage]) -> Callable[[], Any]:
        """Begin to fetch for the first stage; return what waits for that.

        If it is the only one, what arrives is for the rows that see others' keys alone.
        """
        team, own = self.team, self.team.own("row")
        others = [source for stage in plan for source in stage[0] if source != team.index]
        if len(plan) == 1 and team.axis == "key" and (late := self._rows_that_see(others)) != own:
            self._late_rows = late
        return super().begin(plan)

    def _arriving(self, source: int) -> Runs:
        found, team = super()._arriving(source), self.team
        return team.work.seen_by(self._late_rows, source) if self._late_rows and source == team.index else found

    def run(self, plan: Sequence[Stage], fetched: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
        """Walk through all stages."""
        team = self.team
        visited = [stage for stage in plan if any(team.sent(source, team.index) for source in stage[0])]
        if team.axis == "key" and len(visited) < 2:
            self._out_dtype = self.whole.options.get("out_dtype")  # nothing will be merged
            self._into = self._out if visited and self.results == (*self._out,) and not self._late_rows else {}
        if self._late_rows:
            self._by_rows(self._late_rows, fetched)
            return lambda: lambda: None
        returning = super().run(plan, fetched)

        def end() -> None:
            if not self._total:  # nothing is visible
                nothing = {name: self.arrays[name][..., :0, :] for name in "kv"}
                bias, options = self.whole.bias(self.arrays, ()), self.whole.part(team.own("row"), ())
                found = self.compute({**self.arrays, **nothing}, bias, options)
                self.accept(found, team.own("row"), ())

        def begin() -> Callable[[], Any]:
            ending = returning()
            return lambda: (ending(), end())

        return begin

    def _by_rows(self, late: Runs, fetched: Callable[[], Any]) -> None:
        """Compute the rows that see this rank's keys alone while others' keys arrive for the rows that come late."""
        own, keys = self.team.own("row"), self.team.own("key")
        rows = without(own, late)
        shapes = self._shapes(self.arrays)
        rooms = self._total = {name: self._room_for(name, shapes[name]) for name in self.results}
        with self.tape.lane(0):
            self._compute_into(rooms, {}, rows, keys)
        with self.tape.lane(1):
            _, every, moved = fetched()
            self._compute_into(rooms, moved, late, every)

    def _compute_into(self, rooms: Arrays, moved: Arrays, rows: Runs, keys: Runs) -> None:
        """Compute some rows; their results go where they belong in arrays of all."""
        own, arrays = self.team.own("row"), self._of_rows(rows)
        if len(local(own, rows)) == 1:
            self._into = {name: part(x, own, rows, axis_of(name)) for name, x in rooms.items()}
            self._compute(arrays, moved, rows, keys)
            return
        for name, found in self._compute(arrays, moved, rows, keys).items():
            put(rooms[name], own, found, rows, axis_of(name))

    def compute(self, arrays: Arrays, bias: Any, options: dict[str, Any]) -> Arrays:
        """Return o, l and m of a part."""
        dtypes, shapes, into = self._out_dtype or arrays["q"].dtype, self._shapes(arrays), self._into
        made = {name: (shapes[name], dtypes if name == "o" else self.sums) for name in self.results}
        self._into = {}
        return self._call(FORWARD, {**arrays, "bias": bias}, {**options, "out_dtype": self._out_dtype}, made, into)

    def _shapes(self, arrays: Arrays) -> dict[str, tuple[int, ...]]:
        """Return the results' shapes."""
        rows = *self.whole.leading, arrays["q"].shape[-2]
        return {"o": (*rows, arrays["v"].shape[-1]), "l": rows, "m": rows}

    def outcome(self) -> Arrays:
        """Return o, l and m."""
        if self._late and all(array.flags.c_contiguous for array in self._out.values()):
            found = {name: self._room_for(name, x.shape) for name, x in self._total.items()}
            self._merge_late(found)
            return {name: found[name] for name in self.dtypes}
        if self._late:
            self._merge_late(self._total)
        return {name: self._put(name, self._total[name]) for name in self.dtypes}

    def _merge_late(self, out: Arrays) -> None:
        late, self._late = self._late, {}
        self.tape.merge(*[arrays[name] for arrays in (out, self._total, late) for name in self.results])

    def accept(self, found: Arrays, rows: Runs, keys: Runs) -> None:
        """Merge a part for all of this rank's rows: the last one at the end, as o is rounded then.

        It is done in place: a third o would not fit beside the two.
        """
        if self._late:
            self._merge_late(self._total)
        if found and self._total:
            self._late = found
        elif found:
            self._total = found


class BackwardWalk(Walk):
    """The backward: sums of the gradients of parts, by the names of their operands.

    Two parts of each are not added at once: a small one that comes first, since one may come that is whole, for the sum
    to begin with; and the last one that is whole, so that the sum with it may be rounded as it is made.
    """

    adds_rows = True

    def __init__(self, team: Team, whole: Whole, arrays: Arrays, *more: Any) -> None:
        self.results = tuple(name for name in ("q", "k", "v", "bias") if name in arrays)
        super().__init__(team, whole, arrays, *more)
        args = enumerate(whole.options["score_args"])
        self.shapes |= {f"score{index}": tuple(x.shape) for index, x in args if hasattr(x, "shape")}
        self._totals: Arrays = {}
        self._early: dict[str, tuple[Any, dict[int, tuple[Runs, Runs]]]] = {}
        self._late: Arrays = {}

    def outcome(self) -> Arrays:
        """Return the gradients, of the shapes of their operands."""
        return {name: self._gradient(name) for name in self.dtypes}

    def _gradient(self, name: str) -> Any:
        total, late = self._totals.pop(name, None), self._late.pop(name, None)
        if total is None:
            total = self.tape.zeros(self.shapes[name], self.sums if name in self._early else self.dtypes[name])
        if name in self._early:
            self._add_part(total, *self._early.pop(name))
        if late is None:
            return self._put(name, total)
        room = total if self._may_leave(name, total) else self._room_for(name, total.shape)
        self.tape.add(room, total, late)
        return room

    def compute(self, arrays: Arrays, bias: Any, options: dict[str, Any]) -> Arrays:
        """Return the gradients of a part."""
        arrays = {**arrays, "bias": bias}
        operands = {name: arrays["bias" if name == "key_bias" else name] for name in self.dtypes if name in self.arrays}
        args = self.whole.options["score_args"]
        operands |= {name: args[int(name.removeprefix("score"))] for name in self.dtypes if name not in operands}
        # Nothing is added where one rank has all rows and keys, of some heads.
        alone = len(self.team.ranks) == 1 and operands.keys() <= {"q", "k", "v"}
        dtype = self.whole.options["out_dtype"] if alone else self.sums
        rounded = not alone and self.sums == arrays["q"].dtype
        made = {name: (tuple(x.shape), x.dtype if rounded else dtype or x.dtype) for name, x in operands.items()}
        return self._call(BACKWARD, arrays, {**options, "out_dtype": dtype}, made)

    def accept(self, found: Arrays, rows: Runs, keys: Runs) -> None:
        """Add gradients by some rows and keys."""
        own, every = self.team.own, ((0, self.whole.n_keys),)
        for name, array in found.items():
            places = {"q": {-2: (own("row"), rows)}, "bias": {-2: (own("row"), rows)}}.get(name, {})
            if name in OF_KEYS:
                places = {-2: (own("key"), keys)}
            if name.endswith("bias") and self.shapes[name][-1] > 1:
                places = {**places, -1: (every, keys)}
            self._add(name, array, places)

    def _add(self, name: str, array: Any, places: dict[int, tuple[Runs, Runs]]) -> None:
        """Add to a sum, of whose axes the array holds some runs."""
        total, early, late = (each.pop(name, None) for each in (self._totals, self._early, self._late))
        is_whole = all(whole == runs for whole, runs in places.values())
        if total is None and not is_whole and early is None:
            self._early[name] = array, places
            return
        if late is not None:
            self.tape.add(total, total, late)
        if total is not None and is_whole:
            self._late[name] = array
        elif total is not None or not is_whole:
            total = self.tape.zeros(self.shapes[name], array.dtype) if total is None else total
            self._add_part(total, array, places)
        else:
            total = array
        if early is not None:
            self._add_part(total, *early)
        self._totals[name] = total

    def _add_part(self, total: Any, array: Any, places: dict[int, tuple[Runs, Runs]]) -> None:
        pairs = [zip(local(whole, runs), local(runs, runs), strict=True) for whole, runs in places.values()]
        for chosen in itertools.product(*pairs):
            index, other = [slice(None)] * array.ndim, [slice(None)] * array.ndim
            for axis, (target, source) in zip(places, chosen, strict=True):
                index[axis], other[axis] = target, source
            target = total[tuple(index)]
            self.tape.add(target, target, array[tuple(other)])


def axis_of(name: str) -> int:
    """Return which axis of an array its rows or keys are."""
    return -1 if name in ("l", "m", "dlse") else -2
