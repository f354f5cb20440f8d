"""Calls that run at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

import cuattn
from cuattn.rng import threshold
from cuattn.torch import core
from cuattn.torch.autograd import Attention, Jvp, innermost, of_operands, record_output, record_statistics, transforms
from cuattn.torch.core import Call, Tensors, state_of


def attention(
    q: Any, k: Any, v: Any, options: dict[str, Any],
    mask: Any, bias: Any, score: Any, score_args: Any, deterministic: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """Compute attention; see :func:`cuattn.torch.attention`."""
    differentiated = torch.is_grad_enabled() and (
        q.requires_grad or any(getattr(x, "requires_grad", False) for x in (k, v, bias, *score_args))
    )
    transformed = transforms()
    seed = seed_for(options["dropout_p"], q) if options["dropout_p"] else None
    if not differentiated and not transformed:
        keywords = dict(options, mask=mask, bias=bias, score=score, score_args=score_args, rng=state_of(seed))
        if not return_lse:
            return cuattn.attention(q, k, v, **keywords)
        o, l, m, _ = cuattn.forward(q, k, v, **keywords)
    else:
        array, mask = (mask, None) if isinstance(mask, torch.Tensor) else (None, mask)
        call = Call(options, mask, score, score_args, deterministic)
        operands = q, k, v, bias, array, seed
        if score_args:
            operands += tuple([x for x in score_args if isinstance(x, torch.Tensor)])
        if not transformed:
            if not return_lse:
                return record_output(call, *operands)
            o, l, m = record_statistics(call, *operands)
        # A gradient of tensors with tangents has one, too, which the one pass of both does not know.
        elif innermost() == "Jvp" or (innermost() is None and not differentiated):
            o, l, m = _along_tangents(call, operands)
        else:
            o, l, m = Attention.apply(call, *operands)
    return (o, m + l.log()) if return_lse else o


def _along_tangents(call: Call, operands: Tensors) -> Tensors:
    """Return o, l and m; where operands carry tangents, with theirs, all by one pass."""
    pairs = [x if x is None else forward_ad.unpack_dual(x) for x in operands]
    tangents = of_operands([pair and pair.tangent for pair in pairs])
    if all(tangent is None for tangent in tangents):
        return Attention.apply(call, *operands)
    jvp = core.jvp if innermost() is None else Jvp.apply
    o, l, m, to, tlse = jvp(call, *tangents, *[pair and pair.primal for pair in pairs])
    return forward_ad.make_dual(o, to), l, forward_ad.make_dual(m, tlse)


def seed_for(dropout_p: Any, q: Any = None) -> torch.Tensor | None:
    """Return a seed from PyTorch's generator: on the host, or on q's GPU where a graph is captured, to be replayed."""
    if not threshold(dropout_p):
        return None
    if q is not None and q.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.randint(2**32, (), device=q.device)
    return torch.randint(2**63 - 1, (), device="cpu")
