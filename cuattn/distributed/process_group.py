"""The comm of a process group of PyTorch, whose backend sends host arrays (gloo), arrays on GPUs (nccl), or both."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from cuattn.distributed.comm import DistributedError, Messages
from cuattn.distributed.host import Process, as_bytes
from cuattn.masks.device import load_cupy


class OfProcessGroup(Process):
    """The comm of a process group; one of NCCL alone, and what else goes by NCCL, have the group's own deadlines."""

    def __init__(self, group: Any, timeout: float) -> None:
        import torch

        self._torch, self._group, self.timeout = torch, group, timeout
        self.rank, self.size = group.rank(), group.size()
        self._backend = str(torch.distributed.get_backend(group))
        self._takes_gpus = "nccl" in self._backend
        if "gloo" in self._backend and self._takes_gpus:
            machines = self.allgather(_machine())
            self.local_size = machines.count(machines[self.rank])
            self.share_memory()
            self.use_devices(torch.cuda.current_device())

    def _by_nccl(self) -> None:
        """Leave messages to the group's own NCCL."""

    def _through_host(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        if not self._takes_gpus:
            return super()._through_host(sends, recvs, stream)
        stream = stream or load_cupy("array").cuda.get_current_stream()
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream.ptr)):
            for work in self._begun(*([(peer, as_bytes(x)) for peer, x in pairs] for pairs in (sends, recvs))):
                work.wait()

    def _begin(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        begun = self._begun(sends, recvs)

        def finish() -> None:
            end, failed = time.monotonic() + self.timeout, {}
            for (peer, _), work in zip((*sends, *recvs), begun, strict=True):
                try:
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
                except RuntimeError as error:
                    failed[peer] = str(error)
            if failed:
                raise DistributedError(f"messages failed, or did not arrive within {self.timeout:g} s", failed)

        return finish

    def _begun(self, sends: Messages, recvs: Messages) -> list[Any]:
        """Begin to send and to receive; return what waits for it, of host arrays by message."""
        found = self._torch.distributed
        ranks = found.get_process_group_ranks(self._group)
        operations = [
            found.P2POp(call, self._torch.as_tensor(array), ranks[peer], self._group)
            for call, messages in ((found.isend, sends), (found.irecv, recvs))
            for peer, array in messages
        ]
        return found.batch_isend_irecv(operations) if operations else []

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        if self._backend != "nccl":
            return super().allgather(obj)
        every = [None] * self.size
        self._torch.distributed.all_gather_object(every, obj, self._group)
        return every

    def abort(self) -> None:
        """Let work that is under way fail; over gloo that of others does at their deadlines."""
        self._broken = self._broken or DistributedError("abort() was called", {self.rank: "called abort()"})
        if self._mailbox is not None:
            self._mailbox.end()
        self._group.abort()


def _machine() -> str:
    """Return what tells this machine from others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else socket.gethostname()
