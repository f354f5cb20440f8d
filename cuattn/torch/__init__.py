"""Attention for PyTorch: :func:`cuattn.attention` with gradients, of first and second order, and a drop-in for SDPA.

Tested with PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuattn.errors import ArgumentError, DtypeError
from cuattn.interop import type_name
from cuattn.torch import eager, operators  # noqa: F401 (PyTorch knows operators from now on)

__all__ = ["attention", "scaled_dot_product_attention"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Any = None,
    bias: torch.Tensor | None = None,
    is_causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    score: Callable[..., Any] | None = None,
    score_args: Sequence[Any] = (),
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute exact attention as a function that PyTorch differentiates.

    Parameters
    ----------
    q, k, v : Tensor
        Queries (..., Hq, Nq, d), keys (..., Hkv, Nk, d) and values (..., Hkv, Nk, dv), on the CPU or a GPU.
    mask, bias, is_causal, window, scale, softcap : optional
        As :func:`cuattn.attention` takes them; a mask may be a boolean tensor.  A bias is differentiated, too.
    dropout_p : float, default 0
        Probability of dropping each attention weight.  The seed is drawn from PyTorch's default generator, so that
        ``torch.manual_seed`` sets it and activation checkpointing draws the same again.
    enable_gqa, score, score_args : optional
        As :func:`cuattn.attention` takes them.  The tensors of floats in `score_args` are differentiated, too; one that
        `score` captures is constant.
    deterministic : bool, optional
        Make gradients bitwise reproducible; by default as ``torch.use_deterministic_algorithms`` says when they are
        computed.
    return_lse : bool, default False
        Return lse, too.

    Returns
    -------
    o : Tensor, (..., Hq, Nq, dv)
        The output, of q's dtype.  A row that sees no key is 0.
    lse : Tensor, (..., Hq, Nq), float32 | float64
        With `return_lse`: log of the sum of the exponentials of each row's scores, differentiable; -inf where there is
        no key.

    Raises
    ------
    CuattnError
        As :func:`cuattn.attention`.

    See Also
    --------
    scaled_dot_product_attention : With PyTorch's signature.

    Notes
    -----
    Differentiable twice, in any mix of reverse and forward mode: ``torch.autograd.grad(create_graph=True)``,
    ``torch.func.grad``, ``jvp``, ``vjp``, ``hessian`` and ``vmap``.  Under autocast all are cast as for PyTorch's own
    attention.  ``torch.compile`` and ``torch.export`` take it into one graph, of any shapes, with masks that are
    tensors, host ``ColumnMask`` or ``BlockMask``, and functions that capture only globals; other calls break it.

    Examples
    --------
    >>> import torch, cuattn.torch
    >>> q, k, v = torch.randn(3, 2, 4, 128, 32).requires_grad_()
    >>> o = cuattn.torch.attention(q, k, v, is_causal=True)
    >>> o.sum().backward()

    A product with the Hessian, by forward mode over reverse:

    >>> def energy(k):
    ...     return cuattn.torch.attention(q.detach(), k, v.detach()).square().sum()
    >>> way = torch.randn_like(k)
    >>> _, product = torch.func.jvp(torch.func.grad(energy), (k.detach(),), (way,))
    >>> product.shape == k.shape
    True
    """
    if not isinstance(q, torch.Tensor):
        raise DtypeError(f"q is {type_name(q)}; expected a torch.Tensor")
    if not isinstance(score_args, (tuple, list)):
        raise DtypeError(f"score_args is {type_name(score_args)}; expected a tuple of tensors and numbers, as (x,)")
    if torch._C._is_any_autocast_enabled():
        q, k, v, bias = _cast(q, k, v, bias)
    options = {
        "is_causal": is_causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "enable_gqa": enable_gqa,
    }
    run = eager.attention
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        from cuattn.torch import compiled

        run = compiled.attention
    return run(q, k, v, options, mask, bias, score, score_args, deterministic, return_lse)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention with the signature and the meaning of PyTorch's function of this name.

    Parameters
    ----------
    query, key, value : Tensor
        As :func:`attention`'s q, k, v.
    attn_mask : Tensor, optional
        Of booleans, True where a key takes part; of floats, which are added to the scores; or a
        ``torch.nn.attention.bias.CausalBias``.
    dropout_p : float, default 0
        As :func:`attention`'s.
    is_causal : bool, default False
        Row i sees keys j <= i, whatever the lengths; not together with `attn_mask`.
    scale : float, optional
        Factor of the scores, by default ``query.shape[-1] ** -0.5``.
    enable_gqa : bool, default False
        Allow fewer heads in key and value than in query.

    Returns
    -------
    Tensor, (..., Hq, Nq, dv)
        The output, of q's dtype.

    Raises
    ------
    CuattnError
        As :func:`attention`.

    See Also
    --------
    attention : Knows more masks, windows, a softcap, score functions.

    Examples
    --------
    >>> import torch, cuattn.torch
    >>> q, k, v = torch.randn(3, 2, 4, 64, 16, dtype=torch.float64)
    >>> o = cuattn.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    True
    """
    if is_causal and attn_mask is not None:
        raise ArgumentError("attn_mask is given and is_causal is True; expected one of them")
    align: str | bool = "top_left" if is_causal else False
    corner = getattr(attn_mask, "variant", None)  # of torch.nn.attention.bias.CausalBias
    if corner is not None:
        attn_mask, align = None, "top_left" if corner.name == "UPPER_LEFT" else "bottom_right"
    mask = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
    return attention(
        query,
        key,
        value,
        mask=mask,
        bias=attn_mask if mask is None else None,
        is_causal=align,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
    )


def _cast(*tensors: Any) -> list[Any]:
    """Return tensors as PyTorch's attention gets them under autocast."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]
