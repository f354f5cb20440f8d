"""Calls that run at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

import cuattn
from cuattn.rng import threshold
from cuattn.torch.autograd import Attention, Jvp, Recorded, innermost, of_operands, transforms
from cuattn.torch.core import Call, Tensors, state_of


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
        operands = q, k, v, bias, array, seed, *[x for x in score_args if isinstance(x, torch.Tensor)]
        if transformed:
            # A gradient of tensors with tangents has one, too, which the one pass of both does not know.
            alone = innermost() == "Jvp" or (innermost() is None and not differentiated)
            o, l, m = _along_tangents(call, operands) if alone else Attention.apply(call, *operands)
        else:
            o, l, m = Recorded.apply(call, *operands)
    return (o, m + l.log()) if return_lse else o


def _along_tangents(call: Call, operands: Tensors) -> Tensors:
    """Return o, l and m; where operands carry tangents, with theirs, all by one pass."""
    pairs = [x if x is None else forward_ad.unpack_dual(x) for x in operands]
    tangents = of_operands([pair and pair.tangent for pair in pairs])
    if all(tangent is None for tangent in tangents):
        return Attention.apply(call, *operands)
    o, l, m, to, tlse = Jvp.apply(call, *tangents, *[pair and pair.primal for pair in pairs])
    return forward_ad.make_dual(o, to), l, forward_ad.make_dual(m, tlse)


def seed_for(q: Any, dropout_p: Any) -> torch.Tensor | None:
    """Return a seed from PyTorch's generator: on the host, or on the GPU where a graph is captured, to be replayed."""
    if not (dropout_p and threshold(dropout_p)):
        return None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**32, (), device=q.device)
    return torch.randint(2**63 - 1, ())
