"""Messages between GPUs, each of a process: within a machine by their copy engines, else by NCCL."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuattn.distributed.comm import LOG, DistributedError, Messages
from cuattn.masks.device import load_cupy

_PLACE = np.dtype([("allocation", np.int64, 8), ("offset", np.int64), ("nbytes", np.int64)])
"""Where a message lies: what CUDA names its allocation by for other processes, and the place in it."""
_COUNT = 4  # bytes of a count
_MAPPED = 64  # allocations of others that are kept, at most
_TRIAL = 10.0  # seconds
_MOST = 2**31 - 1  # bytes from one row of a copy to the next


def load_nccl() -> Any:
    """Return CuPy's NCCL, a module that CuPy itself does not import; its `available` says whether it can be used."""
    load_cupy("array")
    return importlib.import_module("cupy.cuda.nccl")


class OnGpu(ABC):
    """Messages of GPUs, and a thread that ends those that do not happen in time.

    Parameters
    ----------
    timeout : float
        Seconds that work on the GPU may take.

    Attributes
    ----------
    failed : str
        Why this was ended, and cannot be used again; else empty.
    """

    name: str

    def __init__(self, timeout: float) -> None:
        self._timeout, self.failed = timeout, ""
        self._cuda = load_cupy("array").cuda
        self._device: Any = None
        self._free: list[Any] = []  # events
        self._pending: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="cuattn-messages", daemon=True).start()

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Enqueue messages."""
        cuda = self._cuda
        stream, self._device = stream or cuda.get_current_stream(), self._device or cuda.Device()
        done = self._free.pop() if self._free else cuda.Event(disable_timing=True)
        enqueued: list[bool] = []  # which waits for peers, too, when they first meet
        self._pending.put((enqueued, done, time.monotonic() + self._timeout))
        self._enqueue(sends, recvs, stream)
        done.record(stream)
        enqueued.append(True)

    def _watch(self) -> None:
        """End what is not done in time."""
        while (item := self._pending.get()) is not None:
            enqueued, event, end = item
            with self._device:
                while not (done := enqueued and event.done) and time.monotonic() < end and self._sound():
                    time.sleep(1e-2)
            if not done:
                return self.abort(f"{self.name} failed, or did not finish within {self._timeout:g} s")
            self._free.append(event)

    def abort(self, why: str) -> None:
        """End all work of this rank on the GPU."""
        if not self.failed:
            self.failed = why
            LOG.error("%s: aborted", why)
            self._end()

    def close(self) -> None:
        """End, and free what this has made."""
        self._pending.put(None)

    @abstractmethod
    def _enqueue(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        """Let messages be sent and received in the order of a stream."""

    @abstractmethod
    def _end(self) -> None:
        """End what is enqueued."""

    def _sound(self) -> bool:
        """Return whether no error is known."""
        return True


class Nccl(OnGpu):
    """Messages by NCCL, in one group each.

    Parameters
    ----------
    nccl : cupy.cuda.nccl.NcclCommunicator
    timeout : float
    """

    name = "NCCL"

    def __init__(self, nccl: Any, timeout: float) -> None:
        self._nccl, self._library = nccl, load_nccl()
        super().__init__(timeout)

    def _enqueue(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        nccl, kind = self._library, self._library.NCCL_UINT8
        nccl.groupStart()
        try:
            for call, messages in ((self._nccl.send, sends), (self._nccl.recv, recvs)):
                for peer, array in messages:
                    call(array.data.ptr, array.nbytes, kind, peer, stream.ptr)
        finally:
            nccl.groupEnd()

    def _sound(self) -> bool:
        try:
            self._nccl.check_async_error()
        except Exception:  # CuPy's NcclError, which only a build with NCCL has
            return False
        return True

    def _end(self) -> None:
        self._nccl.abort()

    def close(self, *, destroy: bool = True) -> None:
        """End, and free the communicator."""
        super().close()
        if destroy and not self.failed:
            self._nccl.destroy()


class Copies(OnGpu):
    """Messages by copy engines, which leave all multiprocessors to what is computed: ranks read their peers' memory.

    Hosts tell each other where messages lie.  Streams await each other's counts, in the memory of the GPU that waits:
    how many groups of messages a peer has made ready, and how many it has taken.

    Parameters
    ----------
    rank, size : int
    tell : callable
        ``tell(sends, recvs)`` exchanges host arrays.
    timeout : float
    """

    name = "copying between GPUs"

    def __init__(self, rank: int, size: int, tell: Callable[[Messages, Messages], None], timeout: float) -> None:
        super().__init__(timeout)
        self._rank, self._size, self._tell, self._driver = rank, size, tell, _driver()
        runtime = self._cuda.runtime
        self._counts = self._cuda.Memory(2 * size * _COUNT)
        runtime.memset(self._counts.ptr, 0, self._counts.size)
        runtime.deviceSynchronize()
        self._rescue = self._cuda.Stream(non_blocking=True)
        self._theirs: dict[int, int] = {}  # addresses of peers' counts
        self._mapped: dict[bytes, int] = {}
        self._ready, self._taken = [1] * size, [1] * size  # groups that this rank has sent, and fetched
        self.allocation = self._allocation(self._counts.ptr)[2]

    def meet(self, allocations: Sequence[bytes]) -> bool:
        """Map all peers' counts, given all ranks' allocations; return whether that is done, or raise."""
        self._theirs = {peer: self._map(x) for peer, x in enumerate(allocations) if peer != self._rank}
        return True

    def works(self, allocations: Sequence[bytes]) -> bool:
        """Return whether peers' counts come here, and can be read there: all ranks that have met ask this."""
        stream, runtime = self._cuda.Stream(non_blocking=True), self._cuda.runtime
        found = np.zeros((self._size - 1, 1), np.uint32)
        for counts in self._theirs.values():
            self._write(stream, counts + self._at(self._rank, 0), 1)
        for peer in self._theirs:
            self._await(stream, self._counts.ptr + self._at(peer, 0), 1)
        rooms = [self._cuda.alloc(_COUNT) for _ in self._theirs]
        for room, counts in zip(rooms, self._theirs.values(), strict=True):
            where = counts + self._at(self._rank, 0)
            runtime.memcpyAsync(room.ptr, where, _COUNT, runtime.memcpyDefault, stream.ptr)
        done, end = stream.record(), time.monotonic() + _TRIAL
        while not done.done and time.monotonic() < end:
            time.sleep(1e-4)
        if not done.done:
            self.abort(f"{self.name}: no answer within {_TRIAL:g} s")
            return False
        for number, room in zip(found, rooms, strict=True):
            runtime.memcpy(number.ctypes.data, room.ptr, _COUNT, runtime.memcpyDefault)
        return bool((found == 1).all())

    def _enqueue(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        ours, targets = _by_peer(sends), _by_peer(recvs)
        for peer in ours:
            self._ready[peer] += 1
            self._write(stream, self._theirs[peer] + self._at(self._rank, 0), self._ready[peer])
        places = {peer: np.empty(len(arrays), _PLACE) for peer, arrays in targets.items()}
        mine = [(peer, self._places(arrays).view(np.uint8)) for peer, arrays in ours.items()]
        self._tell(mine, [(peer, x.view(np.uint8)) for peer, x in places.items()])
        for peer, arrays in targets.items():
            self._taken[peer] += 1
            self._await(stream, self._counts.ptr + self._at(peer, 0), self._taken[peer])
            self._fetch(arrays, places[peer], stream)
            self._write(stream, self._theirs[peer] + self._at(self._rank, 1), self._taken[peer])
        for peer in ours:
            self._await(stream, self._counts.ptr + self._at(peer, 1), self._ready[peer])

    def _places(self, arrays: Sequence[Any]) -> np.ndarray:
        """Return where arrays lie."""
        found, begin, end = np.empty(len(arrays), _PLACE), 0, 0
        for place, array in zip(found, arrays, strict=True):
            at = array.data.ptr
            if not begin <= at < end:
                begin, end, name = self._allocation(at)
                number = np.frombuffer(name, np.int64)
            place["allocation"], place["offset"], place["nbytes"] = number, at - begin, array.nbytes
        return found

    def _fetch(self, arrays: Sequence[Any], places: np.ndarray, stream: Any) -> None:
        """Copy what lies somewhere to arrays."""
        sizes = places["nbytes"].tolist()
        for array, nbytes in zip(arrays, sizes, strict=True):
            if array.nbytes != nbytes:
                raise DistributedError(f"a message has {nbytes} bytes; expected {array.nbytes}")
        names, begin, sources = None, 0, []
        for name, offset in zip(places["allocation"], places["offset"].tolist(), strict=True):
            if names is None or (name != names).any():
                names, begin = name, self._map(name.tobytes())
            sources.append(begin + offset)
        to, of = arrays[0].data.ptr, sources[0]
        steps = tuple((x.data.ptr - to, source - of, n) for x, source, n in zip(arrays, sources, sizes, strict=True))
        runtime = self._cuda.runtime
        for target, stride, source, its_stride, nbytes, count in grouped(steps):
            if stride == its_stride == nbytes:
                runtime.memcpyAsync(to + target, of + source, nbytes * count, runtime.memcpyDefault, stream.ptr)
            else:
                where = to + target, stride, of + source, its_stride
                runtime.memcpy2DAsync(*where, nbytes, count, runtime.memcpyDefault, stream.ptr)

    def _allocation(self, address: int) -> tuple[int, int, bytes]:
        """Return where the allocation of an address begins and ends, and what others know it by."""
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        _checked(
            self._driver.cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
        )
        return begin.value, begin.value + size.value, bytes(self._cuda.runtime.ipcGetMemHandle(begin.value))

    def _map(self, allocation: bytes) -> int:
        """Return the address of another rank's allocation, which stays mapped."""
        if allocation not in self._mapped:
            if len(self._mapped) == _MAPPED + self._size:  # those of counts, the first, stay
                self._cuda.runtime.deviceSynchronize()
                for name in [*self._mapped][self._size - 1 :]:
                    self._cuda.runtime.ipcCloseMemHandle(self._mapped.pop(name))
            self._mapped[allocation] = self._cuda.runtime.ipcOpenMemHandle(allocation)
        return self._mapped[allocation]

    def _at(self, peer: int, which: int) -> int:
        return (2 * peer + which) * _COUNT

    def close(self) -> None:
        """End, and let go of others' memory."""
        super().close()
        if not self.failed:
            self._cuda.runtime.deviceSynchronize()
            for address in self._mapped.values():
                self._cuda.runtime.ipcCloseMemHandle(address)
        self._mapped = {}

    def _write(self, stream: Any, address: int, value: int) -> None:
        _checked(self._driver.cuStreamWriteValue32_v2(stream.ptr, address, value, 0))

    def _await(self, stream: Any, address: int, value: int) -> None:
        _checked(self._driver.cuStreamWaitValue32_v2(stream.ptr, address, value, 0))  # or more

    def _end(self) -> None:
        """Let all that waits go on."""
        self._cuda.runtime.memsetAsync(self._counts.ptr, 0x7F, self._counts.size, self._rescue.ptr)


def _by_peer(messages: Messages) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for peer, array in messages:
        found.setdefault(peer, []).append(array)
    return found


Rows = list[tuple[int, int, int, int, int, int]]
"""Copies of rows: target, from row to row, source, from row to row, bytes of a row, rows."""


@functools.lru_cache(maxsize=256)  # the same in call after call
def grouped(copies: Sequence[tuple[int, int, int]]) -> Rows:
    """Return copies (target, source, bytes) as few, of rows at equal distances.

    >>> grouped(((0, 0, 4), (8, 4, 4), (16, 8, 4), (40, 90, 2)))
    [(0, 8, 0, 4, 4, 3), (40, 2, 90, 2, 2, 1)]
    >>> grouped(((0, 0, 4), (20, 4, 4), (100, 8, 4), (120, 12, 4), (200, 16, 4), (220, 20, 4)))
    [(0, 100, 0, 8, 4, 3), (20, 100, 4, 8, 4, 3)]
    """
    found = [list(itertools.chain(*(_in_rows(copies[i::n]) for i in range(n)))) for n in (1, 2, 4)]
    return min(found, key=len)


def _in_rows(copies: Sequence[tuple[int, int, int]]) -> Rows:
    found, i = [], 0
    while i < len(copies):
        target, source, nbytes = copies[i]
        stride = its_stride = nbytes
        count = 1
        if i + 1 < len(copies):
            stride, its_stride = copies[i + 1][0] - target, copies[i + 1][1] - source
            if min(stride, its_stride) >= nbytes and max(stride, its_stride) <= _MOST:
                while i + count < len(copies) and copies[i + count] == (
                    target + count * stride, source + count * its_stride, nbytes
                ):  # fmt: skip
                    count += 1
        if count == 1:
            stride = its_stride = nbytes
        found.append((target, stride, source, its_stride, nbytes, count))
        i += count
    return found


@functools.cache
def _driver() -> Any:
    """Return CUDA's driver, for what CuPy does not have of it."""
    found = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        getattr(found, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return found


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's driver failed with status {status}")
