"""What a kind of call launches: made once, then only given addresses.

A :class:`LaunchSequence` lists the kernels of an operation for one problem and one layout of its arrays.  Running it
allocates results and scratch memory, fills the masks' tables where none are kept, writes the call's addresses into
copies of prepared arguments, and launches.  Nothing in it waits for the device.

While a graph is captured all memory of a call is one piece that lives as long as its results.  Two instances of one
graph therefore share scratch memory and results: replay them one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Array, Change, place_changes, state_changes
from cuattn.cuda.device import counters_of, zero
from cuattn.cuda.functions import Functions
from cuattn.cuda.launch import Idle, Kernel, Piece
from cuattn.cuda.tables import KeptTables, MaskTables
from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import align_up
from cuattn.masks.device import upload
from cuattn.problem import Place, Problem

_COUNTER_BYTES = 4
_NO_TABLES = KeptTables((), (), None)
_SHIFTS_KEPT = 16  # places of parts whose tables a call remembers
_RUNS_KEPT = 256  # shards whose rows or keys come in runs


class LaunchSequence:
    """What a kind of call launches.

    Parameters
    ----------
    device : int
    inputs : sequence of str
        Names of the arrays whose addresses a run is given, in that order.
    results, scratch : dict of str to Array
        What a run allocates.
    counters : int, optional
        Number of 32-bit counters, at most ``device.COUNTERS``, at the address "counters", each 0 before and after every
        launch.
    problem : Problem, optional
        Whose place runs may be told.
    functions : Functions, optional
        Its score function, whose numbers runs are told.

    Attributes
    ----------
    device : int
    inputs : tuple of str
    results : dict of str to Array
    laid : bool
        Whether these lie where arrays of their names do that it was made for.
    names : dict of str to int
        The number of each address; "" is null.
    scratch_bytes : int
        What a run allocates beside its results, without tables, which masks keep.
    """

    laid = False

    def __init__(
        self,
        device: int,
        inputs: Sequence[str],
        results: dict[str, Array],
        scratch: dict[str, Array],
        counters: int = 0,
        problem: Problem | None = None,
        functions: Functions | None = None,
    ) -> None:
        self.device, self.inputs, self.results = device, tuple(inputs), results
        self._problem, self._functions = problem, functions
        self._places: dict[int, tuple[Place, list[Change], list[Any]]] = {}  # what they change, of the last ones
        self._tables: list[MaskTables] = []
        self._kernels: list[Kernel] = []
        # By whether the call is a part: what a part's place changes no other call would change back.
        self._idle, self._placed = Idle(), Idle()
        *self._offsets, self.scratch_bytes = accumulate(
            (align_up(array.nbytes) for array in scratch.values()), initial=0
        )
        self._counter_bytes = _COUNTER_BYTES * counters
        names = ["", *inputs, *results, *scratch, *["counters"] * bool(counters)]
        self.names = {name: number for number, name in enumerate(names)}
        self._plain = self.inputs.index("mask") if "mask" in self.inputs else None  # of a caller's boolean array

    def add(self, *launched: Any, tables: MaskTables | None = None, **more: Any) -> None:
        """Append a launch: arguments of :class:`Kernel`, and the tables of masks that it reads."""
        numbers = {}
        if tables is not None:
            if tables not in self._tables:
                self._tables.append(tables)
            before = self._tables[: self._tables.index(tables)]
            numbers = {slot: n for n, slot in enumerate(tables.slots, sum(len(other.slots) for other in before))}
        self._kernels.append(Kernel(self.device, self.names, *launched, tables=numbers, **more))

    @property
    def workspace_bytes(self) -> int:
        """Memory beyond arguments and results, with the tables that masks keep and without a stream's counters."""
        return self.scratch_bytes + self._table_bytes

    @property
    def _table_bytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def run(
        self,
        allocate: Any,
        stream: Any,
        addresses: Sequence[int],
        masks: Sequence[Any] = (),
        state: Any = None,
        place: Place | None = None,
        held: Sequence[Any] = (),
        numbers: tuple[Any, ...] = (),
        tables: dict[int, KeptTables] | None = None,
    ) -> list[Any]:
        """Launch everything on a stream of the current device.

        Parameters
        ----------
        allocate : callable
            ``allocate(scratch_bytes, together, held)`` makes the results and scratch memory on the stream.  It returns
            the results, their addresses with that of the scratch memory last, and what keeps that memory alive.
            With `together`, all is one piece of memory, which lives, and `held` with it, as long as any result: what a
            captured graph goes on using.
        stream : cupy.cuda.Stream
        addresses : sequence of int
            Of the inputs.
        masks : sequence of Mask, optional
            All but a caller's own boolean array, which is the input "mask".
        state : RNGState, optional
            Of dropout.
        place : Place, optional
            Of a part in the whole; None is the whole.
        held : sequence of object, optional
            Copies that some of the inputs are.
        numbers : tuple, optional
            Those of the score function, by slot.
        tables : dict, optional
            Remembers the tables of calls with these masks, by the shift of their places; else each is looked for.

        Returns
        -------
        list of array
            As `allocate` made them.
        """
        handle = stream.ptr
        capturing = handle > 1 and stream.is_capturing()  # the legacy default stream cannot be captured
        needed, shift, changes, kept = self.scratch_bytes, 0, (), _NO_TABLES
        if state is not None or place is not None:
            changes, blocks = self._told(state, place)
            shift, held = 0 if place is None else place.shift, (*held, *blocks)
        if self._tables:
            tables = {} if tables is None else tables
            kept = tables.get(shift)
            if kept is None or kept.home is not stream:
                kept = self._kept(masks, shift, stream, capturing, tables)
            needed += 0 if kept else self._table_bytes
        if capturing:
            held = (*held, kept)
            needed += self._counter_bytes
        results, places, keep = allocate(needed, capturing, held)
        free, counters = places[-1], 0
        if not self._kernels:  # there is nothing to compute
            self._zero_results(places, stream)
        if self._counter_bytes:
            counters = self._counters(stream, free + needed - self._counter_bytes if capturing else 0)
        if kept:
            tabled = kept.addresses
        else:
            plain = addresses[self._plain] if self._plain is not None else 0
            tabled = self._filled(masks, plain, shift, free + self.scratch_bytes, stream)
        with_numbers = self._with_numbers(changes, numbers) if numbers else changes
        idle, known = self._idle if place is None else self._placed, (*addresses, *places, counters)
        pieces = idle.pop(known, None) or self._pieces(known, idle.oldest())
        for kernel, piece in pieces:
            own = with_numbers if kernel.is_traced else changes if kernel.is_placed else ()
            if tabled is not piece.tables or own is not piece.changes:
                kernel.change(piece, tabled, own)
            kernel.start(piece, handle)
        idle[known] = pieces
        del keep
        return results

    def _with_numbers(self, changes: Sequence[Change], numbers: tuple[Any, ...]) -> Sequence[Change]:
        """Return changes with those that numbers make; these alone are the same object for the same numbers."""
        last, more = self._functions.told
        if numbers is not last:
            more = self._functions.changes(numbers)
        return [*changes, *more] if changes else more

    def _pieces(self, known: tuple[int, ...], pieces: list[tuple[Kernel, Piece]] | None) -> list[tuple[Kernel, Piece]]:
        """Return each kernel with its arguments at some addresses, in memory of their own or in that of others."""
        *addresses, free, counters = 0, *known
        if self._offsets:
            addresses += [free + offset for offset in self._offsets]
        addresses.append(counters)
        pieces = pieces or [(kernel, kernel.piece()) for kernel in self._kernels]
        for kernel, piece in pieces:
            kernel.fill(piece, addresses)
        return pieces

    def _kept(
        self, masks: Sequence[Any], shift: int, stream: Any, capturing: bool, known: dict[int, KeptTables]
    ) -> KeptTables | None:
        """Return the tables that masks keep, or None where the call must fill tables of its own.

        It must for a caller's boolean array, which may change from call to call, and may have to while `stream` is
        captured.
        """
        found = known.get(shift)
        if found is None:
            if not self._tables[0].lasting:
                return None
            made = [table.find(masks, shift, stream, capturing) for table in self._tables]
            if None in made:
                return None
            if len(known) >= _SHIFTS_KEPT:
                known.clear()
            addresses = [address for table in made for address in table.addresses]
            home = stream if all(table.home is stream for table in made) else None
            found = known[shift] = KeptTables(made, addresses, home)
        if found.home is not stream:
            for table in found.tables:
                table.use(stream)
        return found

    def _filled(self, masks: Sequence[Any], plain: int, shift: int, free: int, stream: Any) -> list[int]:
        """Return the addresses of the call's own tables, filled where memory is free."""
        known = []
        for table in self._tables:
            known += table.fill(table.sources(masks, plain, stream), shift, free, stream)
            free += table.nbytes
        return known

    def _zero_results(self, addresses: Sequence[int], stream: Any) -> None:
        for array, address in zip(self.results.values(), addresses, strict=False):
            zero(address, array.nbytes, stream)

    def _counters(self, stream: Any, own: int) -> int:
        """Return the counters' address: its stream's, or a graph's `own`, which may run beside others of its stream."""
        if not own:
            return counters_of(stream, self.device)
        zero(own, self._counter_bytes, stream)
        return own

    def _told(self, state: Any, place: Place | None) -> tuple[list[Change], list[Any]]:
        """Return what gives a ``Params`` a random state and a place, and the device arrays that it then points to."""
        changes = [] if state is None else state_changes(state, self.device)
        if place is None:
            return changes, []
        known = self._places.get(id(place))
        if known is None or known[0] is not place:
            if len(self._places) >= _SHIFTS_KEPT:
                self._places.clear()
            held = [None if blocks is None else _uploaded(self.device, blocks.tobytes()) for blocks in place[-2:]]
            addresses = [0 if array is None else array.data.ptr for array in held]
            known = self._places[id(place)] = place, place_changes(self._problem, place, *addresses), held
        _, placed, held = known
        return changes + placed if changes else placed, held


@functools.lru_cache(maxsize=_RUNS_KEPT)
def _uploaded(device: int, blocks: bytes) -> Any:
    """Return the device's copy of where a shard's rows or keys, or every 16th of them, stand in the whole.

    It has memory of its own, not the pool's: to free it waits for every launch that may still read it.
    """
    import cupy

    try:
        with cupy.cuda.using_allocator(None):
            return upload(np.frombuffer(blocks, np.int32), device)
    except UnsupportedError as error:
        raise UnsupportedError(
            "origin has runs, whose places a graph being captured cannot copy to a GPU; make such a call before"
        ) from error
