"""The core's operations as functions of tensors, which is what PyTorch's machinery works on.

Each is a function of a :class:`Call`, which holds all that is no tensor, and of tensors or None in a fixed order.
*Operands* are ``q, k, v, bias, mask, seed, *scores``: with a boolean mask, dropout's seed, and the tensors among
``score_args``.  *Tangents*, or cotangents of gradients, are those of ``q, k, v, bias, *scores``.  *Gradients* are of
the same, without those that there are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import cuattn
from cuattn.rng import RNGState

Tensors = tuple[Any, ...]

_TENSOR = object()  # stands for a tensor in score_args, which autograd keeps


class Call:
    """What is no tensor in a call.

    Parameters
    ----------
    options : dict
        Keywords that every operation of the core takes.
    mask : object
        A mask that is no tensor, or None.
    score, score_args : object
        As the caller gave them.
    deterministic : bool | None
        None: as PyTorch is set when gradients are computed.
    """

    __slots__ = ("_args", "_deterministic", "mask", "options", "score")

    def __init__(
        self, options: dict[str, Any], mask: Any, score: Any, score_args: Sequence[Any], deterministic: bool | None
    ) -> None:
        self.options, self.mask, self.score, self._deterministic = options, mask, score, deterministic
        self._args = score_args and [_TENSOR if isinstance(x, torch.Tensor) else x for x in score_args]

    @property
    def n_scores(self) -> int:
        """Number of the tensors among `score_args`."""
        return sum(x is _TENSOR for x in self._args)

    @property
    def counts(self) -> bool:
        """Whether functions of heads and leading axes are part of it, which count these."""
        return (
            self.score is not None
            or callable(self.mask)
            or any(part.kind == "function" for part in getattr(self.mask, "parts", ()))
        )

    def keywords(self, bias: Any, mask: Any, scores: Tensors) -> dict[str, Any]:
        """Return the core's keywords of a forward."""
        found = {**self.options, "bias": bias, "mask": self.mask if mask is None else mask}
        if self.score is not None or self._args:
            found["score"], found["score_args"] = self.score, self._filled(scores, numbers=True)
        return found

    def of_backward(self, bias: Any, mask: Any, scores: Tensors) -> dict[str, Any]:
        """Return the core's keywords of what computes gradients."""
        wanted = self._deterministic
        found = self.keywords(bias, mask, scores)
        found["deterministic"] = torch.are_deterministic_algorithms_enabled() if wanted is None else wanted
        return found

    def tangents(self, tangents: Tensors, names: Sequence[str] = ("tq", "tk", "tv", "tbias", "tscore_args")) -> dict:
        """Return the core's keywords of tangents."""
        found = dict(zip(names[:4], tangents, strict=False))
        return found | {names[4]: self._filled(tangents[4:])} if self.score is not None else found

    def _filled(self, tensors: Tensors, numbers: bool = False) -> tuple:
        rest = iter(tensors)
        return tuple([next(rest) if x is _TENSOR else x if numbers else None for x in self._args])


def forward(call: Call, q: Any, k: Any, v: Any, bias: Any, mask: Any, seed: Any, *scores: Any) -> Tensors:
    """Return o, l, m."""
    return cuattn.forward(q, k, v, rng=state_of(seed), **call.keywords(bias, mask, scores))[:3]


def backward(
    call: Call, do: Any, dlse: Any, o: Any, l: Any, m: Any,
    q: Any, k: Any, v: Any, bias: Any, mask: Any, seed: Any, *scores: Any,
) -> Tensors:  # fmt: skip
    """Return the gradients."""
    fwd = o, l, m, state_of(seed)
    return _present(cuattn.backward(do, q, k, v, fwd, dlse=dlse, **call.of_backward(bias, mask, scores)))


def jvp(call: Call, *tensors: Any) -> Tensors:
    """Return o, l, m and the tangents of o and lse, given tangents and operands."""
    tangents, (q, k, v, bias, mask, seed, *scores) = divided(call, tensors)
    found = _jvp(call, tangents, q, k, v, bias, mask, seed, scores)
    return *found[:3], *found[4:]


def backward_jvp(call: Call, do: Any, dlse: Any, tdo: Any, tdlse: Any, *tensors: Any) -> Tensors:
    """Return the gradients, and then their tangents, given tangents and operands."""
    tangents, (q, k, v, bias, mask, seed, *scores) = divided(call, tensors)
    known = _jvp(call, tangents, q, k, v, bias, mask, seed, scores, torch.promote_types(q.dtype, torch.float32))
    keywords = call.of_backward(bias, mask, scores)
    do = torch.zeros_like(known[0], dtype=q.dtype) if do is None else do
    pair = cuattn.backward_jvp(do, q, k, v, known, tdo=tdo, dlse=dlse, **call.tangents(tangents), **keywords)
    gradients, moved = map(_present, pair)
    if tdlse is not None:  # the backward is linear in dlse
        more = _present(cuattn.backward(torch.zeros_like(do), q, k, v, known[:4], dlse=tdlse, **keywords))
        moved = tuple([one + other for one, other in zip(moved, more, strict=True)])
    return *gradients, *moved


def double_backward(call: Call, do: Any, dlse: Any, *tensors: Any) -> Tensors:
    """Return the gradients by do, by q, k, v, ... and, where it is given, by dlse; given cotangents and operands."""
    cotangents, (q, k, v, bias, mask, seed, *scores) = divided(call, tensors)
    given = call.tangents(cotangents, ("gdq", "gdk", "gdv", "gdbias", "gdscore"))
    firsts = [given.pop(name) for name in ("gdq", "gdk", "gdv")]
    fwd, keywords = (None, None, None, state_of(seed)), call.of_backward(bias, mask, scores)
    found = cuattn.double_backward(*firsts, do, q, k, v, fwd, dlse=dlse, **given, **keywords)
    return _present(found) if dlse is None else (*_present(found), found.ddlse)


def _jvp(
    call: Call, tangents: Tensors, q: Any, k: Any, v: Any, bias: Any, mask: Any, seed: Any, scores: Any, wide=None
):
    given = call.tangents(tangents) | call.keywords(bias, mask, tuple(scores))
    return cuattn.jvp(q, k, v, rng=state_of(seed), out_dtype=wide, **given)


def _present(found: Any) -> Tensors:
    """Return all gradients that there are."""
    return tuple([x for x in (*found, *found.dscore) if x is not None])


def divided(call: Call, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Divide tensors into tangents and operands."""
    n = 4 + call.n_scores
    return tensors[:n], tensors[n:]


def spread(gradients: Sequence[Any], bias: Any, scores: Sequence[Any]) -> Tensors:
    """Return the gradients that there are in the order of the operands, with None where there is none."""
    rest = iter(gradients)
    own = [next(rest), next(rest), next(rest), None if bias is None else next(rest), None, None]
    return (*own, *[next(rest) if x.is_floating_point() else None for x in scores])


def state_of(seed: Any) -> RNGState | None:
    """Return dropout's state from its seed: a number on the host or, where a CUDA graph is captured, on the device."""
    if seed is None:
        return None
    return RNGState(0, seed) if seed.is_cuda else RNGState(int(seed))
