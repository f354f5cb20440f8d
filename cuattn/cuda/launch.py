"""One launch of a kernel: arguments prepared once, completed with addresses in each call."""

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Change
from cuattn.cuda.compile import function
from cuattn.cuda.early import launcher
from cuattn.cuda.params import PARAMS
from cuattn.cuda.source import constants_of

_WORD = 8  # bytes
_KEPT = 128  # sets of addresses for which arguments are kept


@dataclass(slots=True)
class Piece:
    """Arguments of a launch in memory: a struct's words, and behind them the address of each argument."""

    words: memoryview
    halves: memoryview  # the same, in 32 bits each
    arguments: int  # where the addresses are
    maps: Sequence[Any] = ()  # the arguments behind the first
    tables: Sequence[int] = ()  # the addresses of tables that it holds
    changes: Sequence[Change] = ()  # and the changes
    early: Callable[[int, int], int] | None = None  # what launches it early


class Idle(dict[tuple[int, ...], Any]):
    """Arguments that no launch is being made of, by the addresses that they hold."""

    def oldest(self) -> Any:
        """Take those that were not used for longest, if many are kept; else return None."""
        try:
            return self.pop(next(iter(self))) if len(self) >= _KEPT else None
        except (KeyError, RuntimeError):  # another thread took them
            return None


class Kernel:
    """One launch and its arguments, but for their addresses.

    Parameters
    ----------
    device : int
        The current one.
    names : mapping of str to int
        The numbers of the addresses by which they are named below.
    path, kernel, constants, grid, threads
        The kernel, see :func:`cuattn.cuda.compile.function`; its grid and the size of its blocks.  It is told those of
        the constants that its file reads.
    dtype, values : dtype, dict of str to object
        The first argument, and what its fields hold; others are 0.
    slots : mapping of str to (sequence of) str
        Fields of that argument that take addresses, and which.
    shared_bytes : int, optional
        Dynamic shared memory of a block.
    maps : sequence of (str, callable), optional
        Further arguments: an address, and a function of it that describes the array there.  A kernel that takes some
        is compiled for the device's exact architecture, as ``sm_90a``.
    tables : mapping of str to int, optional
        The numbers of further addresses, of tables of masks, which many launches share.
    exact : bool, optional
        Whether any other kernel is.
    traced : str, optional
        The text of its score and mask functions.
    early : bool, optional
        Whether it may begin before the launch in front of it has ended, see :mod:`cuattn.cuda.early`.

    Attributes
    ----------
    is_placed : bool
        Whether its first argument begins with ``CoreParams``, of which a call's random state and place change words.
    is_traced : bool
        Whether that holds arguments of functions, too, of which a call's numbers change words.
    """

    def __init__(
        self,
        device: int,
        names: Mapping[str, int],
        path: str,
        kernel: str,
        constants: Mapping[str, object],
        grid: tuple[int, ...],
        threads: int,
        dtype: np.dtype,
        values: dict[str, Any],
        slots: Mapping[str, str | Sequence[str]],
        *,
        shared_bytes: int = 0,
        maps: Sequence[tuple[str, Callable[[int], Any]]] = (),
        tables: Mapping[str, int] = MappingProxyType({}),
        exact: bool = False,
        traced: str = "",
        early: bool = False,
    ) -> None:
        self._found = device, path, kernel, constants_of(path, constants), shared_bytes, exact or bool(maps), traced
        self._shape = (*(*grid, 1, 1)[:3], threads, 1, 1, shared_bytes)
        record = np.zeros((), dtype)
        for name, value in values.items():
            record[name] = value
        self._template = record.tobytes()
        named = [
            (word, name)
            for slot, taken in slots.items()
            for word, name in enumerate([taken] if isinstance(taken, str) else taken, dtype.fields[slot][1] // _WORD)
        ]
        self._slots = [(word, names[name]) for word, name in named if name not in tables]
        self._table_slots = [(word, tables[name]) for word, name in named if name in tables]
        self._maps = [(names[name], describe) for name, describe in maps]
        self._idle = Idle()
        self.dtype, self._early = dtype, early
        self.is_placed = dtype.names[0] == PARAMS.names[0]
        self.is_traced = any(name.startswith("traced.") for name in dtype.names)

    @functools.cached_property
    def _launched(self) -> tuple[Any, tuple[int, ...], Callable[..., Any] | None]:
        """The function; what the driver is told in every launch: it, grid, block, shared memory; what launches early.

        It is held here: of threads that need it first at the same time each has loaded its own.
        """
        found = function(*self._found)
        return found, (found.ptr, *self._shape), launcher(self._found[0]) if self._early else None

    def piece(self) -> Piece:
        """Return memory with the first argument and with room for the addresses of all."""
        storage = bytearray(self._template) + bytes(_WORD * (1 + len(self._maps)))  # NumPy's takes four times as long
        start, end = ctypes.addressof(ctypes.c_char.from_buffer(storage)), len(self._template)
        piece = Piece(memoryview(storage).cast("Q"), memoryview(storage).cast("I"), start + end)
        piece.words[end // _WORD] = start
        return piece

    def fill(self, piece: Piece, addresses: Sequence[int]) -> None:
        """Write addresses into the arguments of a launch."""
        words = piece.words
        for word, index in self._slots:
            words[word] = addresses[index]
        if self._maps:
            piece.maps = [describe(addresses[index]) for index, describe in self._maps]
            for word, described in enumerate(piece.maps, len(words) - len(piece.maps)):
                words[word] = described.address

    def launch(self, addresses: Iterable[int], stream: int, changes: Sequence[Change] = ()) -> None:
        """Launch on the stream with that handle, on the current device.

        Parameters
        ----------
        addresses : iterable of int
        stream : int
        changes : sequence of Change, optional
            Further words of the first argument, the same ones in every launch; nobody changes this object.

        Raises
        ------
        CompileError
            The first time.
        """
        addresses = tuple(addresses)
        piece = self._idle.pop(addresses, None)
        if piece is None:
            piece = self._idle.oldest() or self.piece()
            self.fill(piece, addresses)
        self.change(piece, (), changes)
        self.start(piece, stream)
        self._idle[addresses] = piece

    def change(self, piece: Piece, tables: Sequence[int], changes: Sequence[Change]) -> None:
        """Write the addresses of tables, and changes as of :meth:`launch`, where a piece has others."""
        if tables is not piece.tables:
            for word, index in self._table_slots:
                piece.words[word] = tables[index]
            piece.tables = tables
        if changes is not piece.changes:
            for half, value in changes:
                piece.halves[half] = value
            piece.changes = changes

    def start(self, piece: Piece, stream: int) -> None:
        """Launch with the arguments of a piece, which the driver copies."""
        launch = _thread.launch or _prepare_thread()
        _held, told, early = self._launched
        if early is not None:
            piece.early = piece.early or early(*told)
            if not piece.early(stream, piece.arguments):
                return
        launch(*told, stream, piece.arguments, 0)


class _Thread(threading.local):
    """The driver's function, once the calling thread may use it."""

    launch: Any = None


_thread = _Thread()


def _prepare_thread() -> Any:
    """Make the current device's context the calling thread's, which the driver's own calls do not."""
    import cupy
    from cupy_backends.cuda.api import driver

    cupy.cuda.runtime.memGetInfo()
    _thread.launch = driver.launchKernel
    return _thread.launch
