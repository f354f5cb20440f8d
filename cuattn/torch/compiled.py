"""Calls that PyTorch records: for ``torch.compile`` and ``torch.export``, and for modes that watch operators."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import torch

from cuattn.masks import BlockMask, ColumnMask
from cuattn.torch import eager
from cuattn.torch.autograd import transforms
from cuattn.torch.operators import number_of

_run = torch.compiler.disable(
    eager.attention,
    reason="a graph takes cuattn.torch.attention outside transforms of torch.func, with masks that are tensors or (on "
    "the host) ColumnMasks or BlockMasks, and with functions (mask=, score=) that capture only globals and have their "
    "arrays in score_args; this call breaks it",
)


@torch.compiler.assume_constant_result
def _number(function: Any, pattern: tuple[bool, ...]) -> int:
    """Return under which number operators know a function; -1 of one that is not told by its code alone."""
    own = type(function) is FunctionType
    plain = own and not (function.__closure__ or function.__defaults__ or function.__kwdefaults__)
    return number_of(function, pattern) if plain else -1


@torch.compiler.assume_constant_result
def _transformed() -> bool:
    """Return whether transforms are at work, or tensors may carry tangents, for which operators have no rules."""
    return transforms()


def attention(
    q: Any, k: Any, v: Any, options: dict[str, Any],
    mask: Any, bias: Any, score: Any, score_args: Any, deterministic: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """Record attention as an operator of a graph; see :func:`cuattn.torch.attention`."""
    array = columns = None
    sizes, visible, number = [], -1, -1
    pattern = tuple([isinstance(x, torch.Tensor) for x in score_args])
    if isinstance(mask, torch.Tensor):
        array = mask
    elif isinstance(mask, ColumnMask) and isinstance(mask._array, np.ndarray):
        columns, sizes = torch.as_tensor(mask._array), [mask.n_queries]
    elif isinstance(mask, BlockMask) and isinstance(mask._array, np.ndarray):
        array, sizes = torch.as_tensor(mask._array), [mask.block_m, mask.block_n]
    elif mask is not None:
        visible = _number(mask, ()) if callable(mask) else -1
    if score is not None:
        number = _number(score, pattern)
    known = (visible >= 0 or mask is None or array is not None or columns is not None) and (
        number >= 0 or (score is None and not score_args)
    )
    if not known or _transformed():
        return _run(q, k, v, options, mask, bias, score, score_args, deterministic, return_lse)
    is_causal = options["is_causal"]
    seed = eager.seed_for(options["dropout_p"]) if options["dropout_p"] else None
    left, right, align = (*(options["window"] or ()), None, None, None)[:3]
    o, l, m = torch.ops.cuattn.forward(
        q, k, v, bias, array, columns, seed,
        [x for x in score_args if isinstance(x, torch.Tensor)], sizes,
        [x for x in score_args if not isinstance(x, torch.Tensor)], number, visible,
        is_causal if isinstance(is_causal, str) else "True" if is_causal else "", left, right, align or "",
        options["scale"], options["softcap"], options["dropout_p"], options["enable_gqa"], deterministic,
    )  # fmt: skip
    return (o, m + l.detach().log()) if return_lse else o
