"""The operators ``torch.ops.cuattn``, which stand for calls in the graphs that PyTorch records.

Everything that enters a graph is a tensor or a scalar: a :class:`~cuattn.ColumnMask` its vectors, stacked, and a score
or mask function the number under which it is known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuattn.masks import BlockMask, ColumnMask
from cuattn.torch import core
from cuattn.torch.core import Call, spread

_OPERANDS = ("q", "k", "v", "bias", "mask", "columns", "seed")
_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? columns, Tensor? seed, Tensor[] scores, "
    "SymInt[] sizes, Scalar[] numbers, int score, int visible, str is_causal, SymInt? left, SymInt? right, str align, "
    "float? scale, float? softcap, float dropout_p, bool enable_gqa, bool? deterministic"
)
_N = len(_OPERANDS)
_MASKS = 16  # that are remembered

_functions: list[tuple[Any, tuple[bool, ...]]] = []
_masks: OrderedDict[Any, Any] = OrderedDict()


def number_of(function: Any, pattern: tuple[bool, ...]) -> int:
    """Return the number of a function, and of which of its arguments are tensors."""
    known = function, pattern
    if known not in _functions:
        _functions.append(known)
    return _functions.index(known)


def _call(columns: Any, mask: Any, scores: Sequence[Any], options: Sequence[Any]) -> tuple[Call, Any]:
    """Return the call that an operator's arguments say, and the mask among its operands."""
    sizes, numbers, score, visible, *options = options
    is_causal, left, right, align, scale, softcap, dropout_p, enable_gqa, deterministic = options
    window = (left, right, align) if align else (left, right)
    kept = {
        "is_causal": {"": False, "True": True}.get(is_causal, is_causal),
        "window": None if window == (None, None) else window,
        "scale": scale,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "enable_gqa": enable_gqa,
    }
    own = None
    if columns is not None:
        own = _mask_of(lambda x, n: ColumnMask(*x, n_queries=n), columns, sizes)
    elif visible >= 0:
        own = _functions[visible][0]
    elif sizes:
        own, mask = _mask_of(BlockMask, mask, sizes), None
    function, pattern = _functions[score] if score >= 0 else (None, ())
    tensors, rest = iter(scores), iter(numbers)
    return Call(kept, own, function, [next(tensors if one else rest) for one in pattern], deterministic), mask


def _mask_of(make: Callable[..., Any], array: Any, sizes: Sequence[int]) -> Any:
    """Return the mask that an array is; that of one seen lately, with its tables, if it has not been written to."""
    if array.is_inference():
        return make(array, *sizes)
    key = array.data_ptr(), array._version, array.shape, array.stride(), array.dtype, array.device, *sizes
    found = _masks.pop(key, None) or (make(array, *sizes), array)
    _masks[key] = found  # with the array, so that its address stays its own
    if len(_masks) > _MASKS:
        _masks.popitem(last=False)
    return found[0]


def _forward(*args: Any) -> tuple[Any, Any, Any]:
    q, k, v, bias, mask, columns, seed, scores, *options = args
    call, mask = _call(columns, mask, scores, options)
    return core.forward(call, q, k, v, bias, mask, seed, *scores)


def _backward(do: Any, dlse: Any, o: Any, l: Any, m: Any, *args: Any) -> list[Any]:
    q, k, v, bias, mask, columns, seed, scores, *options = args
    call, mask = _call(columns, mask, scores, options)
    return list(core.backward(call, do, dlse, o, l, m, q, k, v, bias, mask, seed, *scores))


def _double_backward(do: Any, dlse: Any, cotangents: Sequence[Any], *args: Any) -> list[Any]:
    q, k, v, bias, mask, columns, seed, scores, *options = args
    call, mask = _call(columns, mask, scores, options)
    dq, dk, dv, dbias, _, _, *of_scores = spread(cotangents, bias, scores)
    return list(core.double_backward(call, do, dlse, dq, dk, dv, dbias, *of_scores, q, k, v, bias, mask, seed, *scores))


def _shape_of_o(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Return o's shape."""
    if max(q.dim(), k.dim(), v.dim()) == 2:
        return q.shape[0], v.shape[1]
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads, of_keys, of_values = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v))
    if heads == 1:
        heads = of_values if of_keys == 1 else of_keys
    return *batch, heads, q.shape[-2], v.shape[-1]


def _forward_of_fakes(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any, Any]:
    shape = _shape_of_o(q, k, v)
    sums = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(shape), q.new_empty(shape[:-1], dtype=sums), q.new_empty(shape[:-1], dtype=sums)


def _backward_of_fakes(do: Any, dlse: Any, o: Any, l: Any, m: Any, *args: Any) -> list[Any]:
    return [x.new_empty(x.shape) for x in _differentiated(args)]


def _double_backward_of_fakes(do: Any, dlse: Any, cotangents: Any, *args: Any) -> list[Any]:
    given = [do, *_differentiated(args), *[dlse] * (dlse is not None)]
    return [x.new_empty(x.shape) for x in given]


def _differentiated(args: Sequence[Any]) -> list[Any]:
    """Return the operands that have a gradient."""
    own = args[:3] if args[3] is None else args[:4]
    return [*own, *[x for x in args[_N] if x.is_floating_point()]]


def _keep_forward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = inputs[_N + 1 :]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:_N], *inputs[_N])


def _differentiate_forward(ctx: Any, do: Any, _: Any, dlse: Any) -> tuple[Any, ...]:
    o, l, m, *x = ctx.saved_tensors
    operands, scores = x[:_N], x[_N:]
    do = torch.zeros_like(o) if do is None else do
    constant = o.detach(), l, m.detach()  # else the gradient of gradients would come by here again, with zeros
    gradients = torch.ops.cuattn.backward(do, dlse, *constant, *operands, scores, *ctx.options)
    return _arranged(gradients, operands, scores, ctx.options)


def _keep_backward(ctx: Any, inputs: Any, output: Any) -> None:
    do, dlse, _, _, _, *args = inputs
    ctx.options = args[_N + 1 :]
    ctx.save_for_backward(do, dlse, *args[:_N], *args[_N])


def _differentiate_backward(ctx: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    do, dlse, *x = ctx.saved_tensors
    operands, scores = x[:_N], x[_N:]
    ddo, *gradients = torch.ops.cuattn.double_backward(do, dlse, cotangents, *operands, scores, *ctx.options)
    ddlse = None if dlse is None else gradients.pop()
    return ddo, ddlse, None, None, None, *_arranged(gradients, operands, scores, ctx.options)


def _arranged(gradients: Any, operands: Any, scores: Any, options: Any) -> tuple[Any, ...]:
    """Return the gradients in the order of an operator's arguments; an empty list has an empty list of them."""
    dq, dk, dv, dbias, _, _, *of_scores = spread(gradients, operands[3], scores)
    return dq, dk, dv, dbias, None, None, None, of_scores, *[x if x == [] else None for x in options]


def _define(name: str, before: str, returns: str, run: Any, of_fakes: Any) -> None:
    torch.library.define(f"cuattn::{name}", f"({before}{_SCHEMA}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"cuattn::{name}", ("cpu", "cuda"))(run)
    torch.library.register_fake(f"cuattn::{name}")(of_fakes)


_define("forward", "", "(Tensor o, Tensor l, Tensor m)", _forward, _forward_of_fakes)
_define(
    "backward", "Tensor do, Tensor? dlse, Tensor o, Tensor l, Tensor m, ", "Tensor[]", _backward, _backward_of_fakes
)
_define(
    "double_backward", "Tensor do, Tensor? dlse, Tensor[] cotangents, ", "Tensor[]",
    _double_backward, _double_backward_of_fakes,
)  # fmt: skip
torch.library.register_autograd("cuattn::forward", _differentiate_forward, setup_context=_keep_forward)
torch.library.register_autograd("cuattn::backward", _differentiate_backward, setup_context=_keep_backward)
