"""Attention for Hugging Face Transformers: :func:`register`, then ``attn_implementation="cuattn"``.

What a model's tokens may see comes as a function of two positions, with padding beside it.  Those that Transformers
makes (causal, sliding window, chunks, packed sequences, and all of them together) let each key be seen by one run of
rows: so they are a :class:`cuattn.masks.ColumnMask`, made in O(N) where the tensors are.  Any other function becomes a
boolean matrix, as for PyTorch's own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, reduce
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import cuattn.torch
from cuattn.errors import DtypeError, UnsupportedError, shown
from cuattn.masks import ColumnMask

__all__ = ["register"]

_FAR = 2**31 - 1  # beyond every position


def register(name: str = "cuattn") -> None:
    """Make attention of this library known to Transformers, for models of ``attn_implementation=name``.

    Parameters
    ----------
    name : str, default "cuattn"
        What models call it.

    Raises
    ------
    DtypeError
        When `name` is no string.

    See Also
    --------
    cuattn.torch.attention : What models then call.

    Notes
    -----
    It is registered with the functions that compute attention and with those that make masks: without the latter,
    padding would be attended to, without a word.  Models train with it (dropout draws from PyTorch's generator) and
    generate, with grouped heads, sliding windows, caps of the scores, biases of positions and attention sinks, padded
    on either side or packed.  Sequences are packed where ``position_ids`` start anew, with ``use_cache=False`` and
    without an ``attention_mask``.  A row of which padding hides every key is 0.

    Examples
    --------
    >>> import torch, transformers, cuattn.transformers
    >>> cuattn.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="cuattn")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> model(torch.arange(12).reshape(2, 6)).logits.shape
    torch.Size([2, 6, 50])
    """
    if not isinstance(name, str):
        raise DtypeError(f"name is {shown(name)}; expected a string")
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)


class Visible(torch.Tensor):
    """What takes the place of a boolean matrix that is never made: a tensor of its shape without memory.

    Transformers hands it on as it does tensors; nothing can be computed with it.

    Attributes
    ----------
    mask : ColumnMask
        What the matrix would say.
    """

    mask: ColumnMask
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, mask: ColumnMask, shape: tuple[int, ...]) -> Visible:
        """Return what stands for a mask."""
        found = torch.empty(shape, dtype=torch.bool, device="meta").as_subclass(cls)
        found.mask = mask
        return found

    def contiguous(self, *_: Any, **__: Any) -> Visible:
        """Return it as it is."""
        return self

    to = contiguous


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for a layer of a model, as Transformers asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer.
    query, key, value : Tensor, (batch, heads, length, head_dim)
        Key and value may have fewer heads.
    attention_mask : Visible or Tensor or None
        What :func:`make_mask` returned, or the user's own matrix: of booleans, or of floats that are added.
    dropout, scaling, softcap : float, optional
        As :func:`cuattn.torch.attention`'s dropout_p, scale and softcap.
    is_causal : bool, optional
        What None for a mask means; by default as the layer says.
    position_bias : Tensor, optional
        Added to the scores.
    s_aux : Tensor, (heads,), optional
        Attention sinks: the score of a further key, of which the value is 0.
    cache : object, optional
        Of continuous batching, which is not supported.
    **rest : object
        What is said by the mask, too, or is of no importance here.

    Returns
    -------
    o : Tensor, (batch, length, heads, head_dim)
    weights : None
    """
    if rest.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions is True, but weights are never made; expected False, or attn_implementation='eager'"
        )
    if cache is not None:
        raise UnsupportedError(f"cache is {type(cache).__name__}; expected no paged cache (continuous batching)")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias, mask = position_bias, attention_mask
    if isinstance(mask, Visible):
        mask = mask.mask
    elif mask is not None and mask.dtype != torch.bool:
        bias, mask = mask if bias is None else mask + bias, None
    options = {
        "mask": mask,
        "bias": bias,
        "is_causal": "top_left" if causal and attention_mask is None and query.shape[2] > 1 else False,
        "scale": scaling,
        "softcap": softcap,
        "dropout_p": dropout,
        "enable_gqa": True,
    }
    if s_aux is None:
        o = cuattn.torch.attention(query, key, value, **options)
    else:
        o, lse = cuattn.torch.attention(query, key, value, **options, return_lse=True)
        o = o * torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None])[..., None].to(o.dtype)
    return o.transpose(1, 2).contiguous(), None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **rest: Any,
) -> Any:
    """Return what a model's tokens may see, as Transformers asks for it.

    Parameters
    ----------
    batch_size, q_length, kv_length, q_offset, kv_offset : int
        The positions of rows and keys; a static cache has a tensor for `q_offset`.
    mask_function : callable
        Of batch, head and the positions of a row and a key.
    attention_mask : Tensor, (batch, kv_length), optional
        False for padding.
    **rest : object
        Further arguments of the functions that Transformers has for this.

    Returns
    -------
    Visible or Tensor or None
        None where ``is_causal`` of the layer says it all.
    """
    given = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    given |= {"kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask}
    dense = q_length == 1 or isinstance(q_offset, torch.Tensor) or torch.compiler.is_compiling()
    if dense or not _is_known(mask_function):
        return masking_utils.sdpa_mask(**given, **rest)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
        padding = None if padding.all() else padding
    if padding is None and _is_plain(q_length, kv_length, **rest):
        return None
    constant = padding is None and not any(isinstance(value, torch.Tensor) for value in _captured(mask_function))
    keys = torch.arange(kv_length, device="cpu" if constant else rest.get("device", "cpu"))[None] + kv_offset
    first, end = [(bound - q_offset).clamp(0, q_length) for bound in _seen(mask_function, keys)]
    if padding is not None:
        end = torch.where(padding, end, 0)
    bounds = [end, torch.full_like(keys, q_length), torch.zeros_like(keys), first]
    mask = ColumnMask(*[bound[:, None].int() for bound in bounds], n_queries=q_length)
    return Visible.of(_kept(mask) if constant else mask, (batch_size, 1, q_length, kv_length))


@lru_cache(maxsize=32)
def _kept(mask: ColumnMask) -> ColumnMask:
    """Return the first mask that is equal to this one: the tables that it has on a GPU serve again."""
    return mask


def _is_plain(
    q_length: int,
    kv_length: int,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **_: Any,
) -> bool:
    """Whether a layer's ``is_causal`` says what is visible, without padding, as PyTorch's own attention has it."""
    whole = local_size is None or kv_length < local_size
    causal = allow_is_causal_skip and q_length in (1, kv_length)
    return whole and (causal or allow_is_bidirectional_skip)


# Rules for the functions of positions that Transformers makes: which rows see a key, the first and that behind the
# last.  A rule is given the keys' positions, (batch, n_keys) or (1, n_keys), and what the function captures.


def _causal(keys: Any) -> tuple[Any, Any]:
    return keys, keys + _FAR


def _everything(keys: Any) -> tuple[Any, Any]:
    return keys - _FAR, keys + _FAR


def _window(keys: Any, sliding_window: int) -> tuple[Any, Any]:
    return keys - _FAR, keys + sliding_window


def _band(keys: Any, sliding_window: int) -> tuple[Any, Any]:
    return keys - sliding_window, keys + sliding_window + 1


def _chunk(keys: Any, chunk_size: int, left_padding: Any) -> tuple[Any, Any]:
    left = left_padding[:, None]
    start = (keys - left).div(chunk_size, rounding_mode="floor") * chunk_size + left
    return start, start + chunk_size


def _sequence(keys: Any, packed_sequence_mask: Any) -> tuple[Any, Any]:
    ids = packed_sequence_mask.contiguous()  # they ascend
    return torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)


def _within_sequence(keys: Any, mask_function: Any, position_ids: Any) -> tuple[Any, Any]:
    first, end = _seen(mask_function, position_ids)
    return first + keys - position_ids, end + keys - position_ids


def _all(keys: Any, mask_functions: Any) -> tuple[Any, Any]:
    firsts, ends = zip(*[_seen(function, keys) for function in mask_functions], strict=True)
    return reduce(torch.maximum, firsts), reduce(torch.minimum, ends)


_MAKERS = {  # by name: what Transformers makes them with, which its versions have or have not; and the rule
    "causal_mask_function": (None, _causal),
    "bidirectional_mask_function": (None, _everything),
    "sliding_window_overlay": ((1,), _window),
    "sliding_window_bidirectional_overlay": ((1,), _band),
    "chunked_overlay": ((1, None), _chunk),
    "packed_sequence_mask_function": ((None,), _sequence),
    "remap_positions_for_packed_sequence": ((None, None), _within_sequence),
    "and_masks": ((), _all),
}


def _code(name: str, args: Any) -> Any:
    """Return the code of the functions of positions that Transformers has or makes by this name; None without."""
    found = getattr(masking_utils, name, None)
    return found and (found if args is None else found(*args)).__code__


_RULES = {_code(name, args): rule for name, (args, rule) in _MAKERS.items()}


def _seen(function: Any, keys: Any) -> tuple[Any, Any]:
    """Return which rows see each key: positions of the first, and of that behind the last."""
    return _RULES[function.__code__](keys, **_variables(function))


def _variables(function: Any) -> dict[str, Any]:
    """Return what a function captures by name."""
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _captured(function: Any) -> Iterator[Any]:
    """Yield what a function captures, and what functions among that capture in turn."""
    for value in _variables(function).values():
        for item in value if isinstance(value, tuple) else (value,):
            yield item
            if callable(item) and hasattr(item, "__code__"):
                yield from _captured(item)


def _is_known(function: Any) -> bool:
    """Whether there are rules for a function and for those that it is made of."""
    functions = [function, *filter(callable, _captured(function) if hasattr(function, "__code__") else ())]
    return all(getattr(each, "__code__", None) in _RULES for each in functions)
