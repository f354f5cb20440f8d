"""Attention as functions that PyTorch differentiates: each names its derivatives, of which the core has all up to two.

=============  ===============  ==============
function       in reverse       forward
=============  ===============  ==============
Attention      Backward         Jvp
Backward       DoubleBackward   BackwardJvp
Jvp            BackwardJvp      none
BackwardJvp    none             none
DoubleBackward none             none
=============  ===============  ==============

l is constant to all of them, and m stands for lse, so that ``m + log(l)`` has the derivatives of lse.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from cuattn.errors import UnsupportedError
from cuattn.torch import core
from cuattn.torch.batching import batched
from cuattn.torch.core import Tensors, divided, spread

_OPERANDS = ("q", "k", "v", "bias", "mask", "seed")
_TANGENTS = ("tq", "tk", "tv", "tbias")
_GRADIENTS = ("q", "k", "v", "bias")


def transforms() -> bool:
    """Whether transforms of torch.func are at work, or tensors may carry tangents."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def innermost() -> str | None:
    """Return what the innermost transform of torch.func is."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name


class _Operation(Function):
    """A function of a call and of tensors."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __init_subclass__(cls) -> None:
        run = cls.forward

        def forward(*inputs: Any) -> Tensors:
            return run(*inputs)

        vars(forward)["__signature__"] = inspect.signature(forward)  # which `apply` asks for, and waits for, each time
        cls.forward = staticmethod(forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(
            "q, k, v, bias, score_args: a third derivative of attention was asked for, or one of a derivative that is "
            "already of second order; cuattn has them up to the second, in any mix of reverse and forward mode"
        )

    jvp = backward

    @classmethod
    def vmap(cls, info: Any, dims: Any, call: Any, *tensors: Any) -> tuple[Tensors, int]:
        """Apply it to each element of an axis."""
        apply = functools.partial(cls.apply, call)
        return batched(apply, cls.inputs, cls.outputs, call.counts, info.batch_size, dims[1:], tensors), 0


class _Differentiated:
    """The derivatives of attention."""

    @staticmethod
    def backward(ctx: Any, do: Any, _: Any = None, dlse: Any = None) -> Tensors:
        o, l, m, *x = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        if not (torch.is_grad_enabled() or transforms()):
            gradients = core.backward(ctx.call, do, dlse, o, l, m, *x)
        else:  # constant to it: else the gradient of gradients would come by here again, with zeros
            gradients = Backward.apply(ctx.call, do, dlse, o.detach(), l, m.detach(), *x)
        return None, *spread(gradients, x[3], x[6:])


def _keep(ctx: Any, inputs: Tensors, output: Tensors) -> None:
    """Keep what the derivatives of o and m need."""
    ctx.call, *tensors = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


class Output(_Differentiated, Function):
    """o alone, without transforms, which takes a fifth of the time of :class:`Attention`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """Return o."""
        ctx.call, *tensors = inputs
        output = core.forward(*inputs)
        ctx.save_for_backward(*output, *tensors)
        return output[0]


class Statistics(_Differentiated, Function):
    """o, l and m, without transforms."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensors:
        """Return o, l and m."""
        output = core.forward(*inputs)
        _keep(ctx, inputs, output)
        return output


class Attention(_Differentiated, _Operation):
    """o, l and m."""

    inputs, outputs = _OPERANDS, ("o", "l", "m")
    forward = staticmethod(core.forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Tensors:
        *_, to, tlse = Jvp.apply(ctx.call, *of_operands(tangents), *ctx.saved_tensors)
        return to, None, tlse


class Backward(_Operation):
    """Gradients; o, l and m are constant."""

    inputs, outputs = ("do", "dlse", "o", "l", "m", *_OPERANDS), _GRADIENTS
    forward = staticmethod(core.backward)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Tensors:
        do, dlse, _, _, _, *x = ctx.saved_tensors
        ddo, *gradients = DoubleBackward.apply(ctx.call, do, dlse, *_by_operand(cotangents, x), *x)
        ddlse = None if dlse is None else gradients.pop()
        return None, ddo, ddlse, None, None, None, *spread(gradients, x[3], x[6:])

    @staticmethod
    def jvp(ctx: Any, _: Any, tdo: Any, tdlse: Any, *rest: Any) -> Tensors:
        do, dlse, _, _, _, *x = ctx.saved_tensors
        found = BackwardJvp.apply(ctx.call, do, dlse, tdo, tdlse, *of_operands(rest[3:]), *x)
        return found[len(found) // 2 :]


class Jvp(_Operation):
    """o, l, m and the tangents of o and lse."""

    inputs, outputs = (*_TANGENTS, *_OPERANDS), ("o", "l", "m", "to", "tlse")
    forward = staticmethod(core.jvp)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Operation.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, do: Any, _: Any, dlse: Any, dto: Any, dtlse: Any) -> Tensors:
        tangents, x = divided(ctx.call, ctx.saved_tensors)
        found = BackwardJvp.apply(ctx.call, dto, dtlse, do, dlse, *tangents, *x)
        half = len(found) // 2
        by_tangents, by_operands = (spread(part, x[3], x[6:]) for part in (found[:half], found[half:]))
        given = zip(of_operands(by_tangents), tangents, strict=True)
        return None, *[None if t is None else gradient for gradient, t in given], *by_operands


class _Last(_Operation):
    """One that cannot be differentiated."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""


class BackwardJvp(_Last):
    """Gradients and their tangents."""

    inputs, outputs = ("do", "dlse", "tdo", "tdlse", *_TANGENTS, *_OPERANDS), _GRADIENTS * 2
    forward = staticmethod(core.backward_jvp)


class DoubleBackward(_Last):
    """The gradients of gradients."""

    inputs, outputs = ("do", "dlse", *_TANGENTS, *_OPERANDS), ("do", *_GRADIENTS, "dlse")
    forward = staticmethod(core.double_backward)


def of_operands(tangents: Tensors) -> Tensors:
    """Return tangents without those of mask and seed, which have none."""
    return *tangents[:4], *tangents[6:]


def _by_operand(cotangents: Tensors, x: Any) -> Tensors:
    """Return the cotangents of gradients, which are there or not, in the order of tangents."""
    return of_operands(spread(cotangents, x[3], x[6:]))


# What ``apply`` does after it has asked about transforms.
record_output, record_statistics = super(Function, Output).apply, super(Function, Statistics).apply
