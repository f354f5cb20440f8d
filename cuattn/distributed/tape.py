"""What a rank does with its arrays in a call, taken down once and done as often as such calls are made.

It depends on layouts, mask and what arrays look like, not on their numbers: :mod:`cuattn.distributed.walk` goes its way
with arrays that are only :class:`Described`, and a :class:`Tape` takes down each step.  A run finds nothing out: it
hands arrays on, addresses on a GPU, and lets go of each array behind the last step that needs it.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cuattn import dispatch
from cuattn.api import gradients
from cuattn.distributed import flight
from cuattn.distributed.comm import Comm, Messages
from cuattn.interop.origin import constructor
from cuattn.masks.device import namespace
from cuattn.problem import Operation, Options

Step = Callable[["_Run"], None]
Place = tuple[int, tuple[Any, ...], tuple[Any, Any, int] | None]


class Described:
    """An array, or a part of one, that runs of a tape have: it tells what a NumPy array tells of its layout.

    Parameters
    ----------
    tape : Tape
    number : int
        Of the array.
    layout : numpy.ndarray
        One of the same shape, dtype and strides, without memory.
    begin : int, optional
        The address of the whole array's.
    views : tuple of index, optional
        What, one after the other, makes the part of the whole.
    """

    __slots__ = ("_begin", "_layout", "number", "tape", "views")

    def __init__(
        self, tape: Tape, number: int, layout: np.ndarray, begin: int | None = None, views: tuple[Any, ...] = ()
    ) -> None:
        self.tape, self.number, self._layout, self.views = tape, number, layout, views
        self._begin = layout.ctypes.data if begin is None else begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def __getitem__(self, index: Any) -> Described:
        part, whole = self._layout[index], self._layout
        if (part.shape, part.strides) == (whole.shape, whole.strides):  # what begins elsewhere is shorter
            return self
        return Described(self.tape, self.number, part, self._begin, (*self.views, index))

    @property
    def offset(self) -> int:
        """Where it begins in the whole array, in bytes."""
        return self._layout.ctypes.data - self._begin


def empty_like(array: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Return a new array of the same kind, described if that one is."""
    made = array.tape if isinstance(array, Described) else namespace(array)
    return made.empty(tuple(shape), dtype)


def add(out: Any, *terms: Any) -> None:
    """Round an array, or the sum of two, to `out`, see :func:`cuattn.dispatch.add`; or take that down."""
    (out.tape if isinstance(out, Described) else dispatch).add(out, *terms)


def start(comm: Comm, sends: Messages, recvs: Messages) -> Callable[[], None]:
    """Send and receive, see :func:`cuattn.distributed.flight.start`, or take that down; return what waits for it.

    Messages to itself and empty ones are skipped.
    """
    sends, recvs = ([(peer, x) for peer, x in pairs if peer != comm.rank and x.size] for pairs in (sends, recvs))
    if not sends and not recvs:
        return lambda: None
    array = (sends or recvs)[0][1]
    return array.tape.exchange(sends, recvs) if isinstance(array, Described) else flight.start(comm, sends, recvs)


class _Run:
    """The arrays of one run, by number, and what else its steps need."""

    __slots__ = ("arrays", "comm", "lane", "lanes", "new", "state", "stream", "waits")

    def __init__(self, count: int, comm: Comm, state: Any, cupy: Any) -> None:
        self.arrays: list[Any] = [None] * count
        self.waits: dict[int, Callable[[], None]] = {}
        self.comm, self.state = comm, state
        self.lane: int | None = None
        if cupy is not None:
            self.new, self.stream = constructor(cupy.ndarray), cupy.cuda.get_current_stream()
            self.lanes = flight.Lanes(self.stream)

    def view(self, number: int, views: tuple[Any, ...], flat: tuple[Any, Any, int] | None) -> Any:
        """Return an array, or a part of it, see :meth:`Tape._place`."""
        array = self.arrays[number]
        if flat is not None:
            shape, dtype, offset = flat
            return self.new(shape, dtype, array.data + offset)
        for index in views:
            array = array[index]
        return array


class Tape:
    """The steps of a rank.

    Parameters
    ----------
    arrays : dict of str to array
        Like those of runs, NumPy or CuPy.

    Attributes
    ----------
    arrays : dict of str to Described
        The same.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._xp = namespace(next(iter(arrays.values())))
        self._steps: list[tuple[int | None, Step]] = []  # and their lanes
        self._uses: list[list[int]] = []
        self._done: list[tuple[int | None, Step, list[int]]] = []  # with the arrays that no later one needs
        self._lane: int | None = None
        self._lane_of: list[int | None] = []  # by array, the one that it is made in
        self._results: dict[str, Place] = {}
        self._exchanges = 0
        self.arrays = {name: self._described(x.shape, x.dtype, x.strides) for name, x in arrays.items()}

    def _described(self, shape: Sequence[int], dtype: Any, strides: Sequence[int] | None = None) -> Described:
        layout = np.empty(1, dtype)
        if strides is None:
            strides = [*accumulate(shape[:0:-1], operator.mul, initial=layout.itemsize)][::-1][: len(shape)]
        number = len(self._lane_of)
        self._lane_of.append(self._lane)
        return Described(self, number, as_strided(layout, shape, strides))

    def _place(self, array: Described) -> Place:
        """Return what a run finds an array by: its number, its views and, of a contiguous part on a GPU, its place."""
        flat = None
        if self._xp is not np and array.views and array.flags.c_contiguous:
            flat = array.shape, array.dtype, array.offset
        return array.number, array.views, flat

    def _take(self, step: Step, *used: Described) -> None:
        self._steps.append((self._lane, step))
        self._uses.append([array.number for array in used])

    def takes_rows(self, comm: Comm) -> bool:
        """Return whether messages may be rows at equal distances."""
        return self._xp is not np and getattr(comm, "takes_rows", False)

    def is_laned(self, array: Described) -> bool:
        """Return whether an array is made in a lane."""
        return self._lane_of[array.number] is not None

    @contextlib.contextmanager
    def lane(self, number: int | None) -> Iterator[None]:
        """Take steps down for one of a GPU's lanes: what one of them computes fills what another leaves free.

        Steps of no lane come behind all that lanes did before, and before what they do after.  An array that is made in
        a lane is used there, or by steps of no lane; one that is returned is made in none.  Within a lane it is that.
        """
        before = self._lane
        if before is None and self._xp is not np:
            self._lane = number
        try:
            yield
        finally:
            self._lane = before

    def empty(self, shape: Sequence[int], dtype: Any) -> Described:
        """Make an array."""
        return self._made("empty", shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: Any) -> Described:
        """Make an array of zeros."""
        return self._made("zeros", shape, dtype)

    def _made(self, name: str, shape: Sequence[int], dtype: Any) -> Described:
        out, make, shape = self._described(shape, dtype), getattr(self._xp, name), tuple(shape)
        number = out.number

        def step(run: _Run) -> None:
            run.arrays[number] = make(shape, dtype)

        self._take(step, out)
        return out

    def add(self, out: Described, *terms: Described) -> None:
        """Round an array, or the sum of two, to `out`."""
        if out.size:
            self._fill((out, *terms), dispatch.adding, dispatch.add)

    def merge(self, *arrays: Described) -> None:
        """Merge the (o, l, m) of two parts, see :func:`cuattn.dispatch.merge_into`."""
        self._fill(arrays, dispatch.merging, dispatch.merge_into)

    def _fill(self, used: Sequence[Described], prepare: Callable[..., Any], fill: Callable[..., None]) -> None:
        """Take down what fills the first of some arrays; its launches are found in the first run and kept."""
        places = [self._place(array) for array in used]
        offsets, found = [(array.number, array.offset) for array in used], []

        def step(run: _Run) -> None:
            if not found:
                found.append(prepare(*[run.view(*place) for place in places]))
            if found[0] is None:
                return fill(*[run.view(*place) for place in places])
            addresses = [run.arrays[number].data.ptr + offset for number, offset in offsets]
            dispatch.fill(found[0], addresses, run.stream)

        self._take(step, *used)

    def exchange(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Begin to send and to receive, see :func:`start`; return what takes the wait down."""
        used = [x for _, x in (*sends, *recvs)]
        number, self._exchanges = self._exchanges, self._exchanges + 1
        sent, received = ([(peer, self._place(x)) for peer, x in pairs] for pairs in (sends, recvs))

        def step(run: _Run) -> None:
            pairs = ([(peer, run.view(*place)) for peer, place in each] for each in (sent, received))
            run.waits[number] = flight.start(run.comm, *pairs)  # which holds nothing: the arrays live until the wait

        def wait(run: _Run) -> None:
            run.waits.pop(number)()

        self._take(step, *used)
        return lambda: self._take(wait, *used)

    def compute(
        self,
        operation: Operation,
        arrays: Mapping[str, Any],
        options: Options,
        origin: Any,
        functions: tuple[Any, Any],
        made: Mapping[str, tuple[Sequence[int], Any]],
        into: Mapping[str, Described] = MappingProxyType({}),
    ) -> dict[str, Described]:
        """Compute a part, see :class:`cuattn.dispatch.Call`.

        Parameters
        ----------
        operation : Operation
        arrays : dict of str to array
            Described, but for a mask.
        options, origin : Options, Origin or None
        functions : (score, score_args)
        made : dict of str to (shape, dtype)
            The results, a gradient by the name of its operand.
        into : dict of str to array, optional
            Of a forward, where these go.
        """
        if into and self._xp is np:
            found = self.compute(operation, arrays, options, origin, functions, made)
            for name, array in into.items():
                self.add(array, found[name])
            return dict(into)
        results = dict(into) or {name: self._described(*of) for name, of in made.items()}
        numbers, replays = {name: x.number for name, x in results.items()}, operation.replays
        given = operation.given(arrays)
        described = {name: x for name, x in given.items() if isinstance(x, Described)}
        places = [(name, self._place(x)) for name, x in described.items()]
        rest = {name: x for name, x in given.items() if name not in described}
        order = tuple(given) if rest else ()
        targets = [(name, self._place(x)) for name, x in into.items()]

        def step(run: _Run) -> None:
            named = {name: run.view(*place) for name, place in places}
            if order:
                named |= rest
                named = {name: named[name] for name in order}
            call = dispatch.Call(operation, named, options, run.state, origin, None, *functions)
            if targets:
                call.into = {name: run.view(*place) for name, place in targets}
            found = dispatch.compute(call)[0]
            if targets:
                return
            for name, array in _by_operand(call, found).items() if replays else zip(numbers, found, strict=True):
                if name in numbers:
                    run.arrays[numbers[name]] = array

        self._take(step, *described.values(), *results.values())
        return results

    def end(self, results: Mapping[str, Described]) -> Tape:
        """Tell what a run returns."""
        self._results = {name: self._place(x) for name, x in results.items()}
        self._laned = any(lane is not None for lane, _ in self._steps)
        needed = {number for number, *_ in self._results.values()}
        for (lane, step), used in zip(reversed(self._steps), reversed(self._uses), strict=True):
            self._done.append((lane, step, [number for number in {*used} if number not in needed]))
            needed.update(used)
        self._done.reverse()
        return self

    def run(self, arrays: Mapping[str, Any], comm: Comm, state: Any) -> dict[str, Any]:
        """Do it all; return the results.

        Parameters
        ----------
        arrays : dict of str to array
        comm : Comm
        state : RNGState or None
            Of dropout.
        """
        run = _Run(len(self._lane_of), comm, state, None if self._xp is np else self._xp)
        for name, described in self.arrays.items():
            run.arrays[described.number] = arrays[name]
        try:
            for lane, step, done in self._done:
                if lane != run.lane:
                    run.lane, run.stream = lane, run.lanes.go(lane)
                step(run)
                for number in done:
                    run.arrays[number] = None
        finally:
            if self._laned:
                run.lanes.end()
        return {name: run.view(*place) for name, place in self._results.items()}


def _by_operand(call: dispatch.Call, results: list[Any]) -> dict[str, Any]:
    """Return the results of a backward by the names of their operands."""
    found = gradients(call, results)
    named = {"q": found.dq, "k": found.dk, "v": found.dv, "bias": found.dbias, "key_bias": found.dbias}
    return named | {f"score{index}": x for index, x in enumerate(found.dscore)}
