"""Comms of processes: what those of MPI and of a process group of PyTorch share, and that of an NCCL communicator."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from cuattn.distributed.arrays import gathered
from cuattn.distributed.comm import LOG, TIMEOUT, Closing, DistributedError, Messages
from cuattn.distributed.gpu import Copies, Nccl, OnGpu, load_nccl
from cuattn.distributed.mailbox import LONGEST, Mailbox, shared
from cuattn.masks.device import load_cupy

_HEAD, _SHORT = 8, 1016
"""Bytes of an object's length, and those of it that travel beside it."""
_AWAKE_BESIDE_GPUS = 2e-3  # seconds that hosts do not sleep while GPUs wait for them


def on_gpu(messages: Iterable[tuple[int, Any]]) -> bool:
    """Return whether there are arrays on a GPU among messages."""
    return any(not isinstance(array, np.ndarray) for _, array in messages)


def as_bytes(array: Any) -> Any:
    """Return a contiguous array as one of bytes, over the same memory."""
    return array.reshape(-1).view(np.uint8)


class Process(Closing):
    """What comms of processes share: messages of GPUs by `gpu` where each rank has its own, else through host memory.

    Subclasses send host arrays (`_begin`).  A call that fails, or is interrupted, breaks the comm: what is left of
    its messages would be taken for others'.
    """

    rank: int
    size: int
    local_size = 1
    timeout = TIMEOUT
    _gpus: OnGpu | None = None
    _mailbox: Mailbox | None = None
    _heads: np.ndarray | None = None  # of objects, by rank
    _broken: DistributedError | None = None

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Send and receive, see :class:`cuattn.distributed.Comm`."""
        finish = self.begin(sends, recvs, stream=stream)
        if finish is not None:
            finish()

    def begin(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> Callable[[], None] | None:
        """Do of an exchange what waits for no other host; return what does the rest, if something is left."""
        self.check()
        with self._breaking():
            if not on_gpu((*sends[:1], *recvs[:1])):
                finish = self._tell([(p, as_bytes(x)) for p, x in sends], [(p, as_bytes(x)) for p, x in recvs])
            elif self._gpus is not None:
                finish = self._gpus.begin(sends, recvs, stream=stream)
            else:
                return self._through_host(sends, recvs, stream)
        if finish is None:
            return None

        def end() -> None:
            with self._breaking():
                finish()

        return end

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            known = isinstance(error, DistributedError)
            text = f"{type(error).__name__}: {error}"
            self._broken = error if known else DistributedError("messages failed", {self.rank: text})
            if known or not isinstance(error, Exception):
                raise
            raise self._broken from error

    @property
    def by_copies(self) -> bool:
        """Whether messages of GPUs are no kernels."""
        return isinstance(self._gpus, Copies)

    @property
    def takes_rows(self) -> bool:
        """Whether messages of GPUs may be rows at equal distances, along their first axis, instead of contiguous."""
        return isinstance(self._gpus, Copies)

    def check(self) -> None:
        """Raise if an earlier call failed; of work on GPUs, which fails after the call, also if that has by now."""
        if self._gpus is not None and self._gpus.failed:
            text = f"{self._gpus.name} failed"
            self._broken = self._broken or DistributedError(text, {self.rank: self._gpus.failed})
        if self._broken is not None:
            raise DistributedError("the comm is broken, since an earlier call failed", self._broken.ranks)

    def _through_host(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        stream = stream or load_cupy("array").cuda.get_current_stream()
        ours = [(peer, as_bytes(array).get(stream=stream)) for peer, array in sends]
        theirs = [(peer, np.empty(array.nbytes, np.uint8)) for peer, array in recvs]
        stream.synchronize()
        self._tell(ours, theirs)()
        for (_, array), (_, copy) in zip(recvs, theirs, strict=True):
            as_bytes(array).set(copy, stream=stream)
        stream.synchronize()

    def _tell(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Begin to exchange host arrays of bytes, the short ones through memory that ranks share, if they do."""
        if self._mailbox is None:
            return self._begin(sends, recvs)
        short, long = (
            [[(p, x) for p, x in pairs if (x.nbytes <= LONGEST) == is_short] for pairs in (sends, recvs)]
            for is_short in (True, False)
        )
        finish = self._begin(*long) if any(long) else None
        waits = [self._mailbox.begin(*short), *[finish] * (finish is not None)]
        return lambda: [wait() for wait in waits].clear()

    def _begin(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Begin to exchange host arrays; return what waits for them."""
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

    def share_memory(self) -> None:
        """Let short messages go through memory, if all ranks are on this machine; all ranks call this."""
        if 1 < self.size == self.local_size:
            self._mailbox = shared(self.rank, self.size, self.timeout, self.allgather)

    def use_devices(self, device: int | None) -> None:
        """Let messages of GPUs go from one to the other if every rank has a GPU of its own; all ranks call this."""
        every = self.allgather(None if device is None else _identity(device))
        if None not in every and len(set(every)) == self.size:
            self._gpus = self._copies() or self._by_nccl()
        if self._mailbox is not None and self._gpus is not None:
            self._mailbox.awake = _AWAKE_BESIDE_GPUS
        if device is not None and self._gpus is None:
            LOG.info("no messages from GPU to GPU of its own: not every rank has one for itself, or there is no NCCL")

    def _copies(self) -> Copies | None:
        """Return copies within this machine, if all ranks are on it and can make them."""
        if self.local_size < self.size:
            return None
        made, why = None, ""
        try:
            made = Copies(self.rank, self.size, self._tell, self.timeout)
        except Exception as error:  # CuPy's own, or of a driver that lacks something
            why = str(error)
        for step in (Copies.meet, Copies.works):
            names = self.allgather(made and made.allocation)
            try:
                if made is not None and (None in names or not step(made, names)):
                    made = made.close()
            except Exception as error:
                made, why = made.close(), str(error)
        if all(self.allgather(made is not None)):
            return made
        LOG.info("no copies between GPUs: %s", why or "another rank cannot make them")
        return made and made.close()

    def _by_nccl(self) -> Nccl | None:
        nccl = load_nccl()
        if not all(self.allgather(nccl.available)):
            return None
        key = self.allgather(nccl.get_unique_id() if self.rank == 0 else None)[0]
        return Nccl(nccl.NcclCommunicator(self.size, key, self.rank), self.timeout)

    def close(self) -> None:
        """Free what this comm has made."""
        if self._mailbox is not None:
            self._mailbox.end()
        if self._gpus is not None:
            self._gpus.close()
            self._gpus = None


def _identity(device: int) -> str:
    """Make a GPU the current one; return what tells it from all others."""
    cupy = load_cupy("device")
    cupy.cuda.Device(device).use()
    return bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"]).hex()


class OfNccl(Process):
    """The comm of an `NcclCommunicator` that a caller has made: objects travel through GPU memory."""

    def __init__(self, nccl: Any, timeout: float) -> None:
        self.rank, self.size, self.timeout = nccl.rank_id(), nccl.size(), timeout
        self.local_size, self._gpus = self.size, Nccl(nccl, timeout)

    def _begin(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        cupy = load_cupy("array")
        ours = [(peer, cupy.asarray(array)) for peer, array in sends]
        theirs = [(peer, cupy.empty(array.shape, array.dtype)) for peer, array in recvs]
        self._gpus.begin(ours, theirs)

        def finish() -> None:
            for (_, array), (_, copy) in zip(recvs, theirs, strict=True):
                array[...] = copy.get()

        return finish

    def abort(self) -> None:
        """Let all work of this rank on the GPU end, and that of others by their deadlines."""
        if self._gpus is not None:
            self._gpus.abort("abort() was called")

    def close(self) -> None:
        """Leave the communicator to its owner."""
        if self._gpus is not None:
            self._gpus.close(destroy=False)
            self._gpus = None
