"""One launch of a kernel: arguments prepared once, completed with addresses in each call."""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Change, Piece, Struct
from cuattn.cuda.params import PARAMS

__all__ = ["Kernel"]


class Kernel:
    """One launch and its arguments, but for their addresses.

    Parameters
    ----------
    function : cupy.cuda.Function
    grid : tuple of int
    threads, shared_bytes : int
        Of a block; `shared_bytes` is dynamic shared memory.
    dtype, values : dtype, dict of str to object
        The first argument, see :class:`cuattn.cuda.arguments.Struct`.
    slots : dict of str to int
        Slots of that argument, and the number of the address that each takes.
    runs : sequence of (int, int, array of uint64), optional
        First word of the argument, number of an address, and what is added to it for this and the following words.
    maps : sequence of (int, callable), optional
        Further arguments: the number of an address, and a function of it that describes the array there.
    """

    def __init__(
        self,
        function: Any,
        grid: tuple[int, ...],
        threads: int,
        shared_bytes: int,
        dtype: np.dtype,
        values: dict[str, Any],
        slots: dict[str, int],
        runs: Sequence[tuple[int, int, np.ndarray]] = (),
        maps: Sequence[tuple[int, Callable[[int], Any]]] = (),
    ) -> None:
        self._function = function
        self._shape = (*(*grid, 1, 1)[:3], threads, 1, 1, shared_bytes)
        self._struct = Struct(dtype, values, slots)
        self._slots = tuple(zip(self._struct.slots, slots.values(), strict=True))
        self._runs, self._maps = tuple(runs), tuple(maps)
        self._idle: list[Piece] = []  # arguments that no launch is being made of
        self.takes_params = dtype == PARAMS

    def launch(self, addresses: Sequence[int], stream: int, changes: Iterable[Change] = (), keep: bool = True) -> None:
        """Launch on the stream with that handle, on the current device.

        Parameters
        ----------
        addresses : sequence of int
        stream : int
        changes : iterable of Change, optional
            Further words of the first argument.
        keep : bool, optional
            Whether every later launch makes these changes, too.
        """
        try:
            piece = self._idle.pop()
        except IndexError:
            piece = self._struct.piece(len(self._maps))
        words = piece.words
        for word, index in self._slots:
            words[word] = addresses[index]
        for first, index, steps in self._runs:
            np.add(steps, np.uint64(addresses[index]), out=np.frombuffer(words, np.uint64, len(steps), 8 * first))
        for word, kept, value in changes:
            words[word] = words[word] & kept | value
        maps = [describe(addresses[index]) for index, describe in self._maps]
        for word, described in enumerate(maps, len(words) - len(maps)):
            words[word] = described.address
        _start(self._function, self._shape, piece, maps, stream)
        if keep:
            self._idle.append(piece)


class _Thread(threading.local):
    """Whether the calling thread has launched before."""

    ready = False


_thread = _Thread()


def _start(function: Any, shape: Sequence[int], piece: Piece, maps: Sequence[Any], stream: int) -> None:
    """Launch with the arguments of a piece, which the driver copies; `maps` keeps those behind the first alive."""
    if not _thread.ready:
        _make_current()
    _driver_launch()(function.ptr, *shape, stream, piece.arguments, 0)


def _make_current() -> None:
    """Make the current device's context the calling thread's, which the driver's own calls do not."""
    import cupy

    cupy.cuda.runtime.memGetInfo()
    _thread.ready = True


@functools.cache
def _driver_launch() -> Any:
    from cupy_backends.cuda.api import driver

    return driver.launchKernel
