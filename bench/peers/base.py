"""What every runner has in common: a name, what it cannot run and why, and a bound call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench.cases import TOGETHER

__all__ = ["Bound", "Runner", "dense_reason", "half", "is_causal", "names", "scores_bytes", "through_autograd"]


@dataclass
class Bound:
    """A runner bound to the arrays of one case: nothing but the call is left to do.

    Attributes
    ----------
    call : callable
        Enqueues the work; what it returns is dropped when timed.
    convert : callable
        Turns what `call` returned into {"o": ...} or {"dq": ..., "dk": ..., "dv": ...}, each (B, H, N, d).
    scope : callable
        Makes a context manager that has to be active around calls.
    plan : str
        How the runner says it will run.
    alone : bool
        The call works on a stream of its own and waits for it.
    """

    call: Callable[[], Any]
    convert: Callable[[Any], dict[str, Any]]
    scope: Callable[[], Any] = field(default=contextlib.nullcontext)
    plan: str = ""
    alone: bool = False


class Runner:
    """One way to compute attention.

    Attributes
    ----------
    name : str
        How rows call it.
    ours : bool
        Whether it is cuattn, and not a peer.
    compile_seconds : float
        What compiling for a new kind of problem takes, about; 0 where nothing compiled outlives the process.
    """

    name = ""
    ours = False
    compile_seconds = 0.0

    def unsupported_reason(self, case):
        """Return why a case cannot be run, or None."""
        raise NotImplementedError

    def bind(self, case, inputs):
        """Prepare a case: compile, convert masks, run the forward that a backward needs."""
        raise NotImplementedError

    def close(self):
        """Free what the last case left behind."""


def names(direction, values):
    """Name the results of a direction."""
    found = {"forward": ("o",), "backward": ("dq", "dk", "dv"), TOGETHER: ("o", "dq", "dk", "dv")}[direction]
    return dict(zip(found, values, strict=True))


def half(case):
    """Return whether a case computes in 16 bits."""
    return case.dtype in ("float16", "bfloat16")


def scores_bytes(case):
    """Return the bytes of a score matrix, in float32 at least."""
    item = 8 if case.dtype == "float64" else 4
    return case.batch * case.heads * case.n_queries * case.n_keys * item


def dense_reason(case):
    """Return why a peer cannot run a case whose masks it takes only as N x N matrices, which no runner makes."""
    if case.mask not in (None, "full", "causal") or case.bias:
        return "takes a mask only as an N x N matrix"
    return None


def is_causal(case):
    """Return whether a case is causal, by a band or by a mask."""
    return case.causal or case.mask == "causal"


def through_autograd(case, attention, operands, to_heads=lambda x: x):
    """Bind a differentiable PyTorch function.

    Parameters
    ----------
    case : Case
        Says the direction.
    attention : callable
        ``attention(q, k, v) -> o``.
    operands : (q, k, v, do)
        In the function's own layout.
    to_heads : callable
        Turns an array of that layout into (B, H, N, d), where it is another one.
    """
    import torch

    q, k, v, do = operands

    def convert(found):
        return names(case.direction, map(to_heads, found))

    if case.direction == "forward":
        return Bound(lambda: attention(q, k, v), lambda o: convert([o]))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def both():
        o = attention(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    if case.direction == TOGETHER:
        return Bound(both, convert)
    o = attention(*leaves)

    return Bound(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True), convert)
