"""A kind of call and all that it launches: made once, then only given addresses.

A :class:`Record` lists the kernels of a forward, a backward or a merge for one problem and one layout of its arrays.
Running it allocates results and scratch memory, fills the mask's tables where none are kept, writes the call's
addresses into copies of prepared arguments, and launches.  Nothing in it waits for the device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import Piece, Struct, random_words, start, ticket_of, whole, zero
from cuattn.cuda.sm90.tensor_map import TensorMap
from cuattn.cuda.tables import MaskTables, table_slots

__all__ = ["Array", "Record"]

_TICKET_BYTES = 4  # of a counter


class Array(NamedTuple):
    """Shape and dtype of a C-contiguous array that is yet to be allocated."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        steps = accumulate(self.shape[:0:-1], operator.mul, initial=self.dtype.itemsize)
        return tuple(steps)[: self.ndim][::-1]


class _Kernel(NamedTuple):
    """One launch of a record."""

    function: Any
    shape: tuple[int, ...]  # see launch.start
    struct: Struct
    slots: tuple[tuple[int, int], ...]  # word of the struct, index of its address
    runs: tuple[tuple[int, int, np.ndarray], ...]  # first word, index of an address, what each word adds to it
    maps: tuple[tuple[int, Callable[[int], TensorMap]], ...]  # index of an address, and its description as an argument
    random: bool  # takes the words of a random state
    idle: list[Piece]  # arguments that no launch is being made of

    def launch(self, addresses: Sequence[int], random: Sequence[tuple[int, int, int]], stream: int) -> None:
        try:
            piece = self.idle.pop()
        except IndexError:
            piece = self.struct.piece(len(self.maps))
        words = piece.words
        for word, index in self.slots:
            words[word] = addresses[index]
        for first, index, steps in self.runs:
            np.add(steps, np.uint64(addresses[index]), out=np.frombuffer(words, np.uint64, len(steps), 8 * first))
        if self.random:
            for word, kept, value in random:
                words[word] = words[word] & kept | value
        maps = [describe(addresses[index]) for index, describe in self.maps]
        for word, described in enumerate(maps, len(words) - len(maps)):
            words[word] = described.address
        start(self.function, self.shape, piece, maps, stream)
        self.idle.append(piece)


class Record:
    """What a kind of call launches.

    Parameters
    ----------
    inputs : sequence of str
        Names of the arrays whose addresses a run is given, in that order.
    results, scratch : dict of str to Array
        What a run allocates.
    tables : sequence of MaskTables, optional
        Of the mask, one for each tile that the kernels take.
    tickets : int, optional
        Number of 32-bit counters, at most ``tiles.TICKETS``, at the address "ticket", each 0 before and after every
        launch.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        results: dict[str, Array],
        scratch: dict[str, Array],
        tables: Sequence[MaskTables] = (),
        tickets: int = 0,
    ) -> None:
        self.results = tuple(results.values())
        self._tables = tuple(tables)
        self._kernels: list[_Kernel] = []
        self._zeroed = False
        sizes = [whole(array.nbytes) for array in scratch.values()]
        self._table_sizes = [whole(table.nbytes) for table in self._tables]
        self._offsets = list(accumulate(sizes, initial=0))
        self._scratch_bytes = self._offsets.pop()
        names = ["", *inputs, *results, *scratch]
        names += [name for number in range(len(self._tables)) for name in table_slots(number).values()]
        names += ["ticket"] if tickets else []
        self._ticket_bytes = _TICKET_BYTES * tickets
        self._index = {name: index for index, name in enumerate(names)}

    def add(
        self,
        function: Any,
        grid: tuple[int, ...],
        threads: int,
        dtype: np.dtype,
        values: dict[str, Any],
        slots: dict[str, str],
        *,
        shared_bytes: int = 0,
        runs: Sequence[tuple[int, str, np.ndarray]] = (),
        maps: Sequence[tuple[str, Callable[[int], TensorMap]]] = (),
        random: bool = False,
    ) -> None:
        """Append a launch.

        Parameters
        ----------
        function : cupy.cuda.Function
        grid : tuple of int
        threads : int
            Per block.
        dtype, values, slots : dtype, dict of str to object, dict of str to str
            The first argument, see :class:`cuattn.cuda.arguments.Struct`: what the kind of call fixes, and for each
            slot the name of its address.  Slots of names that the record does not have stay null.
        shared_bytes : int, optional
            Dynamic shared memory per block.
        runs : sequence of (int, str, array of uint64), optional
            First word of the struct, name of an address, and what is added to it for this and the following words.
        maps : sequence of (str, callable), optional
            Further arguments: the name of an address and a function of it.
        random : bool, optional
            Whether the first argument is a ``Params`` that takes the state of dropout.
        """
        index = self._index
        filled = [slot for slot, name in slots.items() if name in index]
        struct = Struct(dtype, values, filled)
        words = tuple(zip(struct.slots, [index[slots[slot]] for slot in filled], strict=True))
        runs = tuple((first, index[name], steps) for first, name, steps in runs)
        maps = tuple((index[name], describe) for name, describe in maps)
        shape = (*(*grid, 1, 1)[:3], threads, 1, 1, shared_bytes)
        self._kernels.append(_Kernel(function, shape, struct, words, runs, maps, random, []))

    def zero(self) -> None:
        """Let runs fill the results with zeros: there is nothing to compute."""
        self._zeroed = True

    def run(
        self,
        allocate: Any,
        stream: Any,
        inputs: Sequence[int],
        mask: Any = None,
        state: Any = None,
        held: Sequence[Any] = (),
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
        inputs : sequence of int
            Addresses, 0 for an array that is absent; a boolean mask's among them.
        mask : ColumnMask | BlockMask, optional
        state : RNGState, optional
            Of dropout.
        held : sequence of object, optional
            Copies that some of the inputs are.

        Returns
        -------
        list of array
            As `allocate` made them.
        """
        pointer = stream.ptr
        capturing = pointer > 1 and stream.is_capturing()  # the legacy default stream cannot be captured
        kept = [table.find(mask, stream, capturing) for table in self._tables] if self._tables else ()
        needed = self._scratch_bytes
        if capturing or None in kept:
            needed += sum(size for size, found in zip(self._table_sizes, kept, strict=True) if found is None)
            needed += self._ticket_bytes if capturing else 0
        results, places, keep = allocate(needed, capturing, held)
        scratch = places.pop()
        if self._zeroed:
            for array, address in zip(self.results, places, strict=True):
                zero(address, array.nbytes, stream)
        addresses = [0, *inputs, *places]
        if self._offsets:
            addresses += [scratch + offset for offset in self._offsets]
        free = scratch + self._scratch_bytes
        for table, size, found in zip(self._tables, self._table_sizes, kept, strict=True):
            if found is None:
                source = addresses[self._index["mask"]] if mask is None else table.source(mask, stream)
                found = table.fill(source, free, stream)
                free += size
            addresses += found
        if self._ticket_bytes:
            if capturing:  # the graph may be replayed beside other work of its stream
                zero(free, self._ticket_bytes, stream)
            addresses.append(free if capturing else ticket_of(stream))
        random = () if state is None else random_words(state)
        for kernel in self._kernels:
            kernel.launch(addresses, random, pointer)
        del keep
        return results
