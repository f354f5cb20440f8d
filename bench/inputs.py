"""The arrays of a case: made once, shared by every runner, checked against one reference."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.cases import Case
from bench.mask_samples import Sample, column_mask, samples
from bench.reference import Reference, Visible

__all__ = ["DROPOUT_STATE", "Inputs", "dropout_noise", "make", "reference"]

SEED = 1234
DROPOUT_STATE = (0x5EED, 7)  # seed and offset of cuattn's dropout
TWO_HEADS_UP_TO = 65536  # longer sequences are checked on one head
ALL_ROWS_UP_TO = 131072  # and still longer ones on its last rows
LAST_ROWS = 4096
SMALL, MOST_HEADS = 4096, 32  # scores of a head up to which this many heads are checked together
RANDOM_SHARE = 0.6  # of a random matrix that is visible


@dataclass(frozen=True)
class Inputs:
    """Operands of one problem.

    Attributes
    ----------
    case : Case
        The problem (its direction does not matter).
    q, k, v, do : tensor, (B, H, N, d)
        Standard normal, contiguous.
    samples : tuple of Sample
        What each sequence may see; empty without a mask.
    mask : cuattn.masks.ColumnMask or None
        The same as one mask.
    rho : float
        Share of fully hidden 128 x 128 tiles.
    blank : bool
        All operands are zeros in the same memory: made to compile for, not to compute.
    bias : tensor, optional
        (B, 1, 1, Nk) or (1, 1, Nq, Nk).
    visible : tensor, optional
        (Nq, Nk) bool: the mask "random".
    """

    case: Case
    q: Any
    k: Any
    v: Any
    do: Any
    samples: tuple[Sample, ...]
    mask: Any
    rho: float
    blank: bool = False
    bias: Any = None
    visible: Any = None


def make(case, device, shared_mask=False, blank=False):
    """Make the operands of a case on a device.

    Parameters
    ----------
    case : Case
        What to make.
    device : {"cuda", "cpu"}
        Where.
    shared_mask : bool, optional
        Let all sequences have the first one's mask.
    blank : bool, optional
        Make operands of zeros that share their memory, so that many processes can compile at a time.

    Returns
    -------
    Inputs
        The same values at every call on the same device.
    """
    import torch

    dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device=device).manual_seed(SEED)

    def normal(heads, n):
        shape = (case.batch, heads, n, case.head_dim)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def zeros(heads, n):
        shape = (case.batch, heads, n, case.head_dim)
        return memory[: math.prod(shape)].view(shape).detach()

    if blank:
        sizes = case.heads * case.n_queries, case.kv_heads * case.n_keys
        memory = torch.zeros(case.batch * max(sizes) * case.head_dim, dtype=dtype, device=device)
    array = zeros if blank else normal
    q, do = array(case.heads, case.n_queries), array(case.heads, case.n_queries)
    k, v = array(case.kv_heads, case.n_keys), array(case.kv_heads, case.n_keys)
    bias = visible = None
    if case.bias:
        shape = (case.batch, 1, 1, case.n_keys) if case.bias == "keys" else (1, 1, case.n_queries, case.n_keys)
        bias = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    if case.mask == "random":
        visible = torch.rand((case.n_queries, case.n_keys), device=device, generator=generator) < RANDOM_SHARE
    if case.mask in (None, "random"):
        return Inputs(case, q, k, v, do, (), None, 0.0, blank, bias, visible)
    drawn = samples(case.mask, case.n_keys, 1 if shared_mask else case.batch, case.documents)
    drawn = drawn * case.batch if shared_mask else drawn
    mask = column_mask(drawn)
    return Inputs(case, q, k, v, do, drawn, mask, mask.block_sparsity(128, 128), blank, bias)


def reference(inputs, gradients, dropped):
    """Compute the exact results of the first and the last head (of very long sequences, of the last rows of one).

    Parameters
    ----------
    inputs : Inputs
        The problem.
    gradients : bool
        Compute gradients too.
    dropped : bool
        Drop what cuattn's random state drops; else the reference is without dropout.
    """
    case = inputs.case
    places = [(0, 0)]
    small = case.n_queries * case.n_keys <= SMALL
    if small:
        places = list(itertools.islice(itertools.product(range(case.batch), range(case.heads)), MOST_HEADS))
    if case.n_keys <= TWO_HEADS_UP_TO:
        places.append((case.batch - 1, case.heads - 1))
    group = case.heads // case.kv_heads
    first = 0 if case.n_keys <= ALL_ROWS_UP_TO else max(case.n_queries - LAST_ROWS, 0)
    heads = {
        (b, h): (
            inputs.q[b, h, first:], inputs.k[b, h // group], inputs.v[b, h // group], inputs.do[b, h, first:],
            _visible(inputs, b, h, dropped, first),
        )
        for b, h in dict.fromkeys(places)
    }  # fmt: skip
    if gradients and group > 1:
        raise ValueError(f"{case.name}: gradients of grouped heads are sums over heads, which no single head shows")
    return Reference(heads, inputs.q.dtype, gradients, pooled=small)


def _visible(inputs, b, h, dropped, first=0):
    import torch

    case, device = inputs.case, inputs.q.device
    bounds = None
    if inputs.samples:
        mask = inputs.samples[b].column_mask()
        bounds = torch.from_numpy(np.stack([mask.lts, mask.lte, mask.uts, mask.ute])).to(device)
    bias = None if inputs.bias is None else inputs.bias[b % len(inputs.bias), 0]
    seen = Visible(case.causal, first, bounds, dense=inputs.visible, bias=bias)
    if not (dropped and case.dropout):
        return seen
    from cuattn import rng

    threshold = rng.threshold(case.dropout)

    def keep(start, stop):
        state = rng.RNGState(*DROPOUT_STATE)
        bits = rng.keep(state, threshold, b * case.heads + h, (first + start, first + stop), (0, case.n_keys))
        return torch.from_numpy(bits).to(device)

    return replace(seen, keep=keep, keep_scale=rng.LEVELS / (rng.LEVELS - threshold))


def dropout_noise(inputs, exact, o):
    """Return how strongly dropout disturbs `o`, over the disturbance that the case's probability predicts.

    With p the probability, each weight is multiplied by 0 or 1 / (1 - p), so that the mean square of the change is
    p / (1 - p) times the sum of the squared weights times the squared values.
    """
    import torch

    odds = inputs.case.dropout / (1 - inputs.case.dropout)
    changes = predicted = 0.0
    for (b, h), results in exact.exact.items():
        group = inputs.case.heads // inputs.case.kv_heads
        q, k, v = (x.double() for x in (inputs.q[b, h], inputs.k[b, h // group], inputs.v[b, h // group]))
        s = q @ k.T * q.shape[-1] ** -0.5
        seen = _visible(inputs, b, h, False).rows(0, q.shape[0], k.shape[0], q.device)
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
        weights = torch.softmax(s, dim=-1).nan_to_num(0.0)
        predicted += (weights**2 @ v**2).sum().item() * odds
        changes += ((o[b, h].double() - results["o"]) ** 2).sum().item()
    return changes / predicted if predicted else 0.0
