"""Exact attention over many GPUs and machines: every mask, dropout, forward and backward.

Each rank holds some rows and some keys of one problem (a :class:`Layout`), and every rank calls the same function::

    o = cuattn.distributed.attention(q, k, v, comm=comm, layout=layout, is_causal=True)

:func:`spawn` starts ranks as threads of this process, :func:`connect` joins those that a launcher has started.  The
guide is ``cuattn/distributed/README.md``.
"""

from cuattn.distributed.api import attention, backward, forward, plan
from cuattn.distributed.comm import Comm, DistributedError
from cuattn.distributed.connecting import connect
from cuattn.distributed.layout import Layout
from cuattn.distributed.model import DistributedPlan
from cuattn.distributed.threads import spawn

__all__ = [
    "Comm",
    "DistributedError",
    "DistributedPlan",
    "Layout",
    "attention",
    "backward",
    "connect",
    "forward",
    "plan",
    "spawn",
]
