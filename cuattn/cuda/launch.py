"""One launch of a kernel: arguments prepared once, completed with addresses in each call."""

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
_DESCRIBED = 64  # sets of addresses whose descriptions a kernel keeps


@dataclass(slots=True)
class Piece:
    """Arguments of a launch in memory: a struct's words, and behind them the address of each argument."""

    words: memoryview
    halves: memoryview  # the same, in 32 bits each
    arguments: int  # where the addresses are
    tables: Sequence[int] = ()  # those of tables that it holds


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
        self._template = np.frombuffer(record.tobytes(), np.uint64)
        named = [
            (word, name)
            for slot, taken in slots.items()
            for word, name in enumerate([taken] if isinstance(taken, str) else taken, dtype.fields[slot][1] // _WORD)
        ]
        self._slots = [(word, names[name]) for word, name in named if name not in tables]
        self._table_slots = [(word, tables[name]) for word, name in named if name in tables]
        self._mapped = [names[name] for name, _ in maps]
        self._described = functools.lru_cache(_DESCRIBED)(functools.partial(_described, [each for _, each in maps]))
        self._idle: list[Piece] = []  # arguments that no launch is being made of
        self.dtype, self._early = dtype, early
        self.is_placed = dtype.names[0] == PARAMS.names[0]
        self.is_traced = any(name.startswith("traced.") for name in dtype.names)

    @functools.cached_property
    def _launched(self) -> tuple[Any, tuple[int, ...]]:
        """The function, and what the driver is told in every launch: it, grid, block and shared memory.

        It is held here: of threads that need it first at the same time each has loaded its own.
        """
        found = function(*self._found)
        return found, (found.ptr, *self._shape)

    def _piece(self) -> Piece:
        """Return memory with the first argument and with room for the addresses of all."""
        size = len(self._template)
        storage = np.zeros(size + 1 + len(self._mapped), np.uint64)
        storage[:size] = self._template
        storage[size] = storage.ctypes.data
        words = memoryview(storage)
        return Piece(words, words.cast("B").cast("I"), storage.ctypes.data + _WORD * size)

    def launch(
        self,
        addresses: Sequence[int],
        stream: int,
        tables: Sequence[int] = (),
        changes: Iterable[Change] = (),
        keep: bool = True,
    ) -> None:
        """Launch on the stream with that handle, on the current device.

        Parameters
        ----------
        addresses : sequence of int
        stream : int
        tables : sequence of int, optional
            Further addresses; nobody changes this object.
        changes : iterable of Change, optional
            Further words of the first argument.
        keep : bool, optional
            Whether every later launch makes these changes, too.

        Raises
        ------
        CompileError
            The first time.
        """
        try:
            piece = self._idle.pop()
        except IndexError:
            piece = self._piece()
        words = piece.words
        for word, index in self._slots:
            words[word] = addresses[index]
        if tables is not piece.tables:
            for word, index in self._table_slots:
                words[word] = tables[index]
            piece.tables = tables
        for half, value in changes:
            piece.halves[half] = value
        maps = ()
        if self._mapped:
            maps, where = self._described(*[addresses[index] for index in self._mapped])
            words[-len(maps) :] = where
        self._start(piece, maps, stream)
        if keep:
            self._idle.append(piece)

    def _start(self, piece: Piece, maps: Sequence[Any], stream: int) -> None:
        """Launch with the arguments of a piece, which the driver copies; `maps` keeps those behind the first alive."""
        launch = _thread.launch or _prepare_thread()
        _held, told = self._launched
        early = launcher(self._found[0]) if self._early else None
        if early is None or early(*told, stream, piece.arguments, 0):
            launch(*told, stream, piece.arguments, 0)


def _described(describers: Sequence[Callable[[int], Any]], *addresses: int) -> tuple[list[Any], Any]:
    """Return what describes arrays, and where these descriptions are."""
    found = [describe(address) for describe, address in zip(describers, addresses, strict=True)]
    return found, np.array([each.address for each in found], np.uint64)


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
