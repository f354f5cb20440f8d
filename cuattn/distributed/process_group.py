"""The comm of a process group of PyTorch, whose backend sends host arrays (gloo), arrays on GPUs (nccl), or both."""

from __future__ import annotations

from typing import Any

from cuattn.distributed.comm import Messages
from cuattn.distributed.host import Process, as_bytes
from cuattn.masks.device import load_cupy


class OfProcessGroup(Process):
    """The comm of a process group, which has its own deadlines."""

    def __init__(self, group: Any, timeout: float) -> None:
        import torch

        self._torch, self._group, self.timeout = torch, group, timeout
        self.rank, self.size = group.rank(), group.size()
        self._takes_gpus = "nccl" in str(torch.distributed.get_backend(group))

    def _through_host(self, sends: Messages, recvs: Messages, stream: Any) -> None:
        if not self._takes_gpus:
            return super()._through_host(sends, recvs, stream)
        stream = stream or load_cupy("array").cuda.get_current_stream()
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream.ptr)):
            self._exchange(*([(peer, as_bytes(x)) for peer, x in pairs] for pairs in (sends, recvs)))

    def _exchange(self, sends: Messages, recvs: Messages) -> None:
        found = self._torch.distributed
        ranks = found.get_process_group_ranks(self._group)
        operations = [
            found.P2POp(call, self._torch.as_tensor(array), ranks[peer], self._group)
            for call, messages in ((found.isend, sends), (found.irecv, recvs))
            for peer, array in messages
        ]
        for work in found.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        every = [None] * self.size
        self._torch.distributed.all_gather_object(every, obj, self._group)
        return every

    def abort(self) -> None:
        """Let work that is under way fail."""
        if hasattr(self._group, "abort"):
            self._group.abort()
