"""Calls that run at once."""

from __future__ import annotations

from typing import Any

import torch

import cuattn
from cuattn.rng import threshold
from cuattn.torch.autograd import Attention, Recorded, transforms
from cuattn.torch.core import Call, state_of


def attention(
    q: Any, k: Any, v: Any, options: dict[str, Any],
    mask: Any, bias: Any, score: Any, score_args: Any, deterministic: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """Compute attention; see :func:`cuattn.torch.attention`."""
    tensors = (q, k, v, bias, *score_args)
    differentiated = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)
    transformed = transforms()
    seed = seed_for(q, options["dropout_p"])
    if not differentiated and not transformed:
        keywords = dict(options, mask=mask, bias=bias, score=score, score_args=score_args, rng=state_of(seed))
        if not return_lse:
            return cuattn.attention(q, k, v, **keywords)
        o, l, m, _ = cuattn.forward(q, k, v, **keywords)
    else:
        array = mask if isinstance(mask, torch.Tensor) else None
        call = Call(options, None if array is not None else mask, score, score_args, deterministic)
        scores = [x for x in score_args if isinstance(x, torch.Tensor)]
        o, l, m = (Attention if transformed else Recorded).apply(call, q, k, v, bias, array, seed, *scores)
    return (o, m + l.log()) if return_lse else o


def seed_for(q: Any, dropout_p: Any) -> torch.Tensor | None:
    """Return a seed from PyTorch's generator: on the host, or on the GPU where a graph is captured, to be replayed."""
    if not (dropout_p and threshold(dropout_p)):
        return None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**32, (), device=q.device)
    return torch.randint(2**63 - 1, ())
