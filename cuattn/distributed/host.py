"""Comms of processes: by MPI, by a process group of PyTorch, and NCCL for what lies on GPUs."""

from __future__ import annotations

import importlib
import pickle
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from cuattn.distributed.arrays import gathered
from cuattn.distributed.comm import LOG, TIMEOUT, Closing, DistributedError, Messages
from cuattn.masks.device import load_cupy

_HEAD, _SHORT = 8, 1016
"""Bytes of an object's length, and those of it that travel beside it."""


def load_nccl() -> Any:
    """Return CuPy's NCCL, a module that CuPy itself does not import; its `available` says whether it can be used."""
    load_cupy("array")
    return importlib.import_module("cupy.cuda.nccl")


def on_gpu(messages: Iterable[tuple[int, Any]]) -> bool:
    """Return whether there are arrays on a GPU among messages."""
    return any(not isinstance(array, np.ndarray) for _, array in messages)


def as_bytes(array: Any) -> Any:
    """Return a contiguous array as one of bytes, over the same memory."""
    return array.reshape(-1).view(np.uint8)


class Process(Closing):
    """What comms of processes share: messages of GPUs by NCCL where each rank has its own, else through host memory.

    Subclasses send host arrays (`_exchange`).  A call that fails, or is interrupted, breaks the comm: what is left of
    its messages would be taken for others'.
    """

    rank: int
    size: int
    local_size = 1
    timeout = TIMEOUT
    _nccl: Nccl | None = None
    _heads: np.ndarray | None = None  # of objects, by rank
    _broken: DistributedError | None = None

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Send and receive, see :class:`cuattn.distributed.Comm`."""
        self.check()
        try:
            if not on_gpu((*sends[:1], *recvs[:1])):
                self._exchange([(p, as_bytes(x)) for p, x in sends], [(p, as_bytes(x)) for p, x in recvs])
            elif self._nccl is not None:
                self._nccl.exchange(sends, recvs, stream=stream)
            else:
                self._through_host(sends, recvs, stream)
        except BaseException as error:
            known = isinstance(error, DistributedError)
            text = f"{type(error).__name__}: {error}"
            self._broken = error if known else DistributedError("messages failed", {self.rank: text})
            if known or not isinstance(error, Exception):
                raise
            raise self._broken from error

    def check(self) -> None:
        """Raise if an earlier call failed; with NCCL, which fails after the call, also if that has by now."""
        if self._nccl is not None and self._nccl.failed:
            self._broken = self._broken or DistributedError("NCCL failed", {self.rank: self._nccl.failed})
        if self._broken is not None:
            raise DistributedError("the comm is broken, since an earlier call failed", self._broken.ranks)

    def _through_host(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        stream = stream or load_cupy("array").cuda.get_current_stream()
        ours = [(peer, as_bytes(array).get(stream=stream)) for peer, array in sends]
        theirs = [(peer, np.empty(array.nbytes, np.uint8)) for peer, array in recvs]
        stream.synchronize()
        self._exchange(ours, theirs)
        for (_, array), (_, copy) in zip(recvs, theirs, strict=True):
            as_bytes(array).set(copy, stream=stream)
        stream.synchronize()

    def _exchange(self, sends: Messages, recvs: Messages) -> None:
        raise NotImplementedError

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank: by messages, so that it is known who does not answer.

        A message of a fixed size has an object's length and, if it is short, the object itself.
        """
        content, others = pickle.dumps(obj), [peer for peer in range(self.size) if peer != self.rank]
        if self._heads is None:
            self._heads = np.empty((self.size, _HEAD + _SHORT), np.uint8)
        heads = self._heads
        heads[self.rank, :_HEAD].view(np.int64)[0] = len(content)
        heads[self.rank, _HEAD:][: len(content)] = np.frombuffer(content[:_SHORT], np.uint8)
        self.exchange([(peer, heads[self.rank]) for peer in others], [(peer, heads[peer]) for peer in others])
        sizes = heads[:, :_HEAD].view(np.int64)[:, 0].tolist()
        rests = [b""] * self.size
        if max(sizes) > _SHORT:
            rest = np.frombuffer(bytearray(content[_SHORT:]), np.uint8)  # libraries want to be able to write to it
            rests = gathered(self, rest, [(max(size - _SHORT, 0),) for size in sizes])
        parts = zip(sizes, heads[:, _HEAD:], rests, strict=True)
        return [pickle.loads(head[:size].tobytes() + bytes(rest)) for size, head, rest in parts]

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self.allgather(None)

    def use_devices(self, device: int | None) -> None:
        """Let messages of GPUs go by NCCL if every rank has a GPU of its own; all ranks call this."""
        found = None if device is None else _identity(device)
        every = self.allgather(found)
        if None in every or len(set(every)) < self.size:
            if device is not None:
                LOG.info("no NCCL: ranks without a GPU of their own; messages of GPUs go through host memory")
            return
        nccl = load_nccl()
        key = self.allgather(nccl.get_unique_id() if self.rank == 0 else None)[0]
        self._nccl = Nccl(nccl.NcclCommunicator(self.size, key, self.rank), self.timeout)

    def close(self) -> None:
        """Free what this comm has made."""
        if self._nccl is not None:
            self._nccl.close()
            self._nccl = None


def _identity(device: int) -> str | None:
    """Make a GPU the current one; return what tells it from all others, or None where there is no NCCL."""
    cupy = load_cupy("device")
    cupy.cuda.Device(device).use()
    if not load_nccl().available:
        return None
    return bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"]).hex()


class Nccl:
    """Messages of GPUs, in one group each.

    Parameters
    ----------
    nccl : cupy.cuda.nccl.NcclCommunicator
    timeout : float
        Seconds that work on the GPU may take; then the communicator is aborted, which ends it.

    Attributes
    ----------
    failed : str
        Why the communicator was aborted, and cannot be used again; else empty.
    """

    def __init__(self, nccl: Any, timeout: float) -> None:
        self._nccl, self._timeout, self.failed = nccl, timeout, ""
        self._cuda, self._library = load_cupy("array").cuda, load_nccl()
        self._device: Any = None
        self._free: list[Any] = []  # events
        self._pending: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="cuattn-nccl", daemon=True).start()

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Enqueue messages."""
        cuda, nccl, kind = self._cuda, self._library, self._library.NCCL_UINT8
        stream, self._device = stream or cuda.get_current_stream(), self._device or cuda.Device()
        done = self._free.pop() if self._free else cuda.Event(disable_timing=True)
        enqueued: list[bool] = []  # which waits for peers, too, when they first meet
        self._pending.put((enqueued, done, time.monotonic() + self._timeout))
        nccl.groupStart()
        try:
            for call, messages in ((self._nccl.send, sends), (self._nccl.recv, recvs)):
                for peer, array in messages:
                    call(array.data.ptr, array.nbytes, kind, peer, stream.ptr)
        finally:
            nccl.groupEnd()
        done.record(stream)
        enqueued.append(True)

    def _watch(self) -> None:
        """Abort what is not done in time."""
        while (item := self._pending.get()) is not None:
            enqueued, event, end = item
            with self._device:
                while not (done := enqueued and event.done) and time.monotonic() < end and self._sound():
                    time.sleep(1e-2)
            if not done:
                return self.abort(f"NCCL failed, or did not finish within {self._timeout:g} s")
            self._free.append(event)

    def _sound(self) -> bool:
        """Return whether NCCL knows of no error."""
        try:
            self._nccl.check_async_error()
        except Exception:  # CuPy's NcclError, which only a build with NCCL has
            return False
        return True

    def abort(self, why: str) -> None:
        """End all work of this rank on the GPU."""
        if not self.failed:
            self.failed = why
            LOG.error("%s: aborted", why)
            self._nccl.abort()

    def close(self, *, destroy: bool = True) -> None:
        """End, and free the communicator."""
        self._pending.put(None)
        if destroy and not self.failed:
            self._nccl.destroy()


class OfNccl(Process):
    """The comm of an `NcclCommunicator` that a caller has made: objects travel through GPU memory."""

    def __init__(self, nccl: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = nccl.rank_id(), nccl.size(), timeout
        self.local_size, self._nccl = self.size, Nccl(nccl, timeout)

    def _exchange(self, sends: Messages, recvs: Messages) -> None:
        cupy = load_cupy("array")
        ours = [(peer, cupy.asarray(array)) for peer, array in sends]
        theirs = [(peer, cupy.empty(array.shape, array.dtype)) for peer, array in recvs]
        self._nccl.exchange(ours, theirs)
        for (_, array), (_, copy) in zip(recvs, theirs, strict=True):
            array[...] = copy.get()

    def abort(self) -> None:
        """Let all work of this rank on the GPU end, and that of others by their deadlines."""
        if self._nccl is not None:
            self._nccl.abort("abort() was called")

    def close(self) -> None:
        """Leave the communicator to its owner."""
        if self._nccl is not None:
            self._nccl.close(destroy=False)
            self._nccl = None
