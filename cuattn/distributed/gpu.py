"""Messages between GPUs, each of a process: within a machine by their copy engines, else by NCCL."""

from __future__ import annotations

import ctypes
import functools
import importlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuattn.distributed.comm import LOG, DistributedError, Messages
from cuattn.masks.device import load_cupy

_HANDLE = 8  # words of what CUDA knows an allocation by in other processes
_NUMBERS = ("offset", "nbytes", "rows", "stride")
_PLACE = np.dtype([("allocation", np.int64, _HANDLE + 1), *((name, np.int64) for name in _NUMBERS)])
"""Where a message lies: the name of its allocation, the place in it, and its rows of so many bytes, a stride apart."""
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_COUNT = 4  # bytes of a count
_MAPPED, _NAMES = 64, 1024  # allocations of others, and names of own ones, that are kept at most
_TRIAL = _PARTING = 10.0  # seconds
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
        self._watcher = threading.Thread(target=self._watch, name="cuattn-messages", daemon=True)
        self._watcher.start()

    def begin(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> Callable[[], None] | None:
        """Enqueue messages; return what does the rest, if that waits for other hosts."""
        cuda = self._cuda
        stream, self._device = stream or cuda.get_current_stream(), self._device or cuda.Device()
        done = self._free.pop() if self._free else cuda.Event(disable_timing=True)
        enqueued: list[bool] = []  # which waits for peers, too, when they first meet
        self._pending.put((enqueued, done, time.monotonic() + self._timeout))
        rest: Callable[[], None] | None = None

        def finish() -> None:
            try:
                if rest is not None:
                    rest()
            finally:  # what failed is not waited for
                done.record(stream)
                enqueued.append(True)

        try:
            rest = self._enqueue(sends, recvs, stream)
        finally:
            if rest is None:
                finish()
        return None if rest is None else finish

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
        """End, and free what this has made: here, not in a thread that may do so while the program ends."""
        self._pending.put(None)
        self._watcher.join(_PARTING)

    @abstractmethod
    def _enqueue(self, sends: Messages, recvs: Messages, stream: Any) -> Callable[[], None] | None:
        """Let messages be sent and received in the order of a stream; return what is left to do."""

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
        ``tell(sends, recvs)`` begins to exchange host arrays, and returns what waits for them.
    timeout : float
    """

    name = "copying between GPUs"

    def __init__(
        self, rank: int, size: int, tell: Callable[[Messages, Messages], Callable[[], None]], timeout: float
    ) -> None:
        super().__init__(timeout)
        self._rank, self._size, self._tell, self._driver = rank, size, tell, _driver()
        runtime = self._cuda.runtime
        self._counts = self._cuda.Memory(2 * size * _COUNT)
        runtime.memset(self._counts.ptr, 0, self._counts.size)
        runtime.deviceSynchronize()
        self._rescue = self._cuda.Stream(non_blocking=True)
        self._theirs: dict[int, int] = {}  # addresses of peers' counts
        self._mapped: dict[bytes, tuple[int, int]] = {}  # by handle: the allocation's number, its address here
        self._names: dict[tuple[int, int], bytes | None] = {}  # of this rank's allocations
        self._ready, self._taken = [1] * size, [1] * size  # groups that this rank has sent, and fetched
        self._begun: deque[Callable[[], None]] = deque()
        self.allocation = self._name(self._counts.ptr)

    def meet(self, allocations: Sequence[bytes]) -> bool:
        """Map all peers' counts, given all ranks' allocations; return whether that is done, or raise."""
        others = [(peer, np.frombuffer(x, np.int64)) for peer, x in enumerate(allocations) if peer != self._rank]
        self._theirs = {peer: self._map(name) for peer, name in others}
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

    def _enqueue(self, sends: Messages, recvs: Messages, stream: Any) -> Callable[[], None]:
        ours, targets = _by_peer(sends), _by_peer(recvs)
        mine = {peer: self._places(arrays, stream) for peer, arrays in ours.items()}
        for peer in ours:
            self._ready[peer] += 1
            self._write(stream, self._theirs[peer] + self._at(self._rank, 0), self._ready[peer])
        for peer in targets:
            self._taken[peer] += 1
        ready, taken = [*self._ready], [*self._taken]
        theirs = {peer: np.empty(len(arrays), _PLACE) for peer, arrays in targets.items()}
        sent = [(peer, places.view(np.uint8)) for peer, (places, _) in mine.items()]
        told = self._tell(sent, [(peer, places.view(np.uint8)) for peer, places in theirs.items()])

        def fetch() -> None:
            told()
            for peer, arrays in targets.items():
                self._await(stream, self._counts.ptr + self._at(peer, 0), taken[peer])
                self._fetch(arrays, theirs[peer], stream)
                self._write(stream, self._theirs[peer] + self._at(self._rank, 1), taken[peer])
            for peer in ours:
                self._await(stream, self._counts.ptr + self._at(peer, 1), ready[peer])
            mine.clear()  # copies are freed once the stream has come here

        def fetch_in_order() -> None:
            """Fetch what was begun before, too: counts say how many groups were taken, and not which."""
            while fetch in self._begun:
                self._begun.popleft()()

        self._begun.append(fetch)
        return fetch_in_order

    def _places(self, arrays: Sequence[Any], stream: Any) -> tuple[np.ndarray, list[Any]]:
        """Return where arrays lie, or copies of those that other processes cannot find; and the copies."""
        found, kept, begin, end = np.empty(len(arrays), _PLACE), [], 0, 0
        for place, array in zip(found, arrays, strict=True):
            address, (nbytes, rows, stride) = array.data.ptr, _rows_of(array)
            if not begin <= address < end:
                begin, end = self._allocation(address)
            name = self._name(begin)
            if name is None:
                copy = self._cuda.Memory(nbytes * rows)
                self._copy(copy.ptr, nbytes, address, stride, nbytes, rows, stream)
                kept.append(copy)
                name, begin, end, address, stride = self._name(copy.ptr) or b"", 0, 0, 0, nbytes
            place["allocation"] = np.frombuffer(name, np.int64)
            for what, number in zip(_NUMBERS, (address - begin, nbytes, rows, stride), strict=True):
                place[what] = number
        return found, kept

    def _fetch(self, arrays: Sequence[Any], places: np.ndarray, stream: Any) -> None:
        """Copy what lies somewhere to arrays."""
        for array, place in zip(arrays, places, strict=True):
            (nbytes, rows, stride), (its_nbytes, its_rows, its_stride) = _rows_of(array), place.item()[2:]
            if nbytes * rows != its_nbytes * its_rows:
                raise DistributedError(f"a message has {its_nbytes * its_rows} bytes; expected {nbytes * rows}")
            if rows == 1:  # one that is contiguous has as many as the other
                nbytes, rows, stride = its_nbytes, its_rows, its_nbytes
            elif its_rows == 1:
                its_stride = nbytes
            of = self._map(place["allocation"]) + int(place["offset"])
            self._copy(array.data.ptr, stride, of, its_stride, nbytes, rows, stream)

    def _copy(self, to: int, stride: int, of: int, its_stride: int, nbytes: int, rows: int, stream: Any) -> None:
        """Copy rows of bytes that are a stride apart."""
        runtime, kind = self._cuda.runtime, self._cuda.runtime.memcpyDefault
        if stride == its_stride == nbytes:
            runtime.memcpyAsync(to, of, nbytes * rows, kind, stream.ptr)
        elif max(stride, its_stride) <= _MOST:
            runtime.memcpy2DAsync(to, stride, of, its_stride, nbytes, rows, kind, stream.ptr)
        else:
            for row in range(rows):
                runtime.memcpyAsync(to + row * stride, of + row * its_stride, nbytes, kind, stream.ptr)

    def _allocation(self, address: int) -> tuple[int, int]:
        """Return where the allocation of an address begins and ends."""
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        get = self._driver.cuMemGetAddressRange_v2
        _checked(get(ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address)))
        return begin.value, begin.value + size.value

    def _name(self, begin: int) -> bytes | None:
        """Return the name of an allocation, None of one that other processes cannot find (of pools of CUDA's own).

        It is a handle, which may be that of an earlier allocation in the same place, and the allocation's number.
        """
        number = ctypes.c_uint64()
        _checked(self._driver.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(begin)))
        key = begin, number.value
        if key not in self._names:
            if len(self._names) >= _NAMES:
                self._names.clear()
            try:
                self._names[key] = bytes(self._cuda.runtime.ipcGetMemHandle(begin)) + bytes(number)
            except self._cuda.runtime.CUDARuntimeError:
                self._names[key] = None
        return self._names[key]

    def _map(self, name: Any) -> int:
        """Return the address of another rank's allocation, which stays mapped until there are others in its place."""
        runtime, handle, number = self._cuda.runtime, name[:_HANDLE].tobytes(), int(name[_HANDLE])
        known, address = self._mapped.get(handle, (number, 0))
        if known != number or (not address and len(self._mapped) >= _MAPPED):
            runtime.deviceSynchronize()
            counts = [*self._theirs.values()]
            for other, (_, where) in [*self._mapped.items()]:
                if where not in counts:
                    runtime.ipcCloseMemHandle(where)
                    del self._mapped[other]
            address = 0
        if not address:
            address = runtime.ipcOpenMemHandle(handle)
            self._mapped[handle] = number, address
        return address

    def _at(self, peer: int, which: int) -> int:
        return (2 * peer + which) * _COUNT

    def close(self) -> None:
        """End, and let go of others' memory."""
        super().close()
        if not self.failed:
            self._cuda.runtime.deviceSynchronize()
            for _, address in self._mapped.values():
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


def _rows_of(array: Any) -> tuple[int, int, int]:
    """Return an array's bytes of a row, its rows, and what is between their beginnings; its first axis has the rows."""
    if array.flags.c_contiguous:
        return array.nbytes, 1, array.nbytes
    rows = array.shape[0]
    return array.nbytes // rows, rows, array.strides[0]


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
