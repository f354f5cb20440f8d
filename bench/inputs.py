"""The arrays of a case: made once, shared by every runner, checked against one reference."""

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import score_samples
from bench.cases import Case
from bench.mask_samples import Sample, column_mask, samples
from bench.reference import Head, Reference, weights
from cuattn import masks, rng

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
        Standard normal, contiguous; those of v and do may be of another width.
    samples : tuple of Sample
        What each sequence may see; empty without a mask.
    mask : Mask or None
        The same as one mask; that of the case's function.
    rho : float
        Share of fully hidden 128 x 128 tiles.
    visible : tensor, optional
        (Nq, Nk) bool: the mask "random".
    formula : Formula, optional
        The function that the case names, for tensors.
    arrays, given : dict of str to tensor
        What it reads: floats, and integers and booleans.
    """

    case: Case
    q: Any
    k: Any
    v: Any
    do: Any
    samples: tuple[Sample, ...] = ()
    mask: Any = None
    rho: float = 0.0
    visible: Any = None
    formula: Any = None
    arrays: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def functions(self, arrays):
        """Return the formula's functions of (s, b, h, i, j), with these float arrays, and of (b, h, i, j); or None."""
        if self.formula is None:
            return None, None
        (score, visible, *_), given = self.formula, self.given
        arrays = {**arrays, **given}
        return (
            score and (lambda s, b, h, i, j: score(s, b, h, i, j, **arrays)),
            visible and (lambda b, h, i, j: visible(b, h, i, j, **given)),
        )

    @property
    def operands(self):
        """The arrays q, k, v and do."""
        return self.q, self.k, self.v, self.do


def make(case, device, blank=False):
    """Make the operands of a case on a device.

    Parameters
    ----------
    case : Case
        What to make.
    device : {"cuda", "cpu"}
        Where.
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

    def normal(*shape):
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def zeros(*shape):
        return memory[: math.prod(shape)].view(shape).detach()

    if blank:
        memory = torch.zeros(max(map(math.prod, case.shapes)), dtype=dtype, device=device)
    q, k, v, do = ((zeros if blank else normal)(*shape) for shape in case.shapes)
    more = {}
    if case.mask == "random":
        shape = (case.n_queries, case.n_keys)
        more["visible"] = torch.rand(shape, device=device, generator=generator) < RANDOM_SHARE
    elif case.mask is not None:
        drawn = samples(case.mask, case.n_keys, case.batch)
        mask = column_mask(drawn)
        more |= {"samples": drawn, "mask": mask, "rho": mask.block_sparsity(128, 128)}
    if case.score:
        found = score_samples.formula(case, torch)
        precision = dtype if found.option == "bias" else torch.float32
        more |= {
            "formula": found,
            "arrays": {name: (normal(*x) * found.size).to(precision) for name, x in found.shapes(case).items()},
            "given": {name: torch.from_numpy(x).to(device) for name, x in found.given.items()},
        }
        if found.visible:
            mask = mask_of(case)
            more |= {"mask": mask, "rho": mask.block_sparsity(128, 128)}
    return Inputs(case, q, k, v, do, **more)


def mask_of(case):
    """Return a case's function of what is visible as a mask on the host."""
    found = score_samples.formula(case)
    visible = functools.partial(found.visible, **found.given)
    return masks.from_function(visible, case.n_queries, case.n_keys, batch=case.batch, heads=case.heads)


def reference(inputs, gradients, dropped):
    """Compute the exact results of the first and the last head (of very long sequences, of the last rows of one).

    Of an array with a single number per head or sequence the gradients by all heads are computed.

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
    arrays = inputs.formula.arrays.values() if case.learned else ()
    axes = "".join(arrays)
    small = case.n_queries * case.n_keys <= SMALL
    every = list(itertools.product(range(case.batch), range(case.heads)))
    places = every[: MOST_HEADS if small else 1]
    if case.n_keys <= TWO_HEADS_UP_TO:
        places.append((case.batch - 1, case.heads - 1))
    if axes:  # a gradient of an array is a sum over all b, over all h, or both
        lengths = (("b", case.batch), ("h", case.heads))
        places = itertools.product(*([n - 1] if axis in axes else range(n) for axis, n in lengths))
    first = 0 if case.n_keys <= ALL_ROWS_UP_TO else max(case.n_queries - LAST_ROWS, 0)
    heads = {place: _head(inputs, *place, gradients, dropped, first) for place in places}
    numbers = gradients and any(set(x) <= {*"bh1"} for x in arrays)  # of which a head has a single one
    beside = {place: _head(inputs, *place, True, dropped, first) for place in every if numbers and place not in heads}
    return Reference(heads, inputs.q.dtype, pooled=small, beside=beside)


def _head(inputs, b, h, gradients=False, dropped=False, first=0):
    """Return one head, from row `first` on."""
    case = inputs.case
    group = case.heads // case.kv_heads
    learned = _learned(inputs, b, h)
    score, visible = _score(inputs, b, h, learned), _visible(inputs, b, h)

    def see(start, stop):
        rows = first + start, first + stop
        return score and functools.partial(score, *rows), visible(*rows), _factor(inputs, b, h, rows) if dropped else 1

    do = inputs.do[b, h, first:] if gradients else None
    part = first > 0 or group > 1
    return Head(inputs.q[b, h, first:], inputs.k[b, h // group], inputs.v[b, h // group], do, see, part, learned)


def _learned(inputs, b, h):
    """Return the arrays to be differentiated, in double precision, and the part of each that one head reads."""
    one, case = {"b": b, "h": h}, inputs.case
    return {
        name: (inputs.arrays[name].double().requires_grad_(), tuple(one.get(axis, slice(None)) for axis in axes))
        for name, axes in (inputs.formula.arrays.items() if case.learned else ())
    }


def _grid(inputs, b, h, start, stop):
    """Return b, h, a column of rows and a row of keys, as tensors."""
    import torch

    place = [torch.tensor(x, device=inputs.q.device) for x in (b, h)]
    rows, keys = (torch.arange(*ends, device=inputs.q.device) for ends in ((start, stop), (0, inputs.case.n_keys)))
    return *place, rows[:, None], keys


def _score(inputs, b, h, learned):
    """Return the function of the first row, the one behind the last and the rows' scores; None if they stay."""
    score = inputs.functions(inputs.arrays | {name: array for name, (array, _) in learned.items()})[0]
    return score and (lambda start, stop, s: score(s, *_grid(inputs, b, h, start, stop)))


def _visible(inputs, b, h):
    """Return the function of the first row and the one behind the last: which keys they see, or None for all."""
    import torch

    if inputs.samples:
        mask = inputs.samples[b].column_mask()
        bounds = torch.from_numpy(np.stack([mask.lts, mask.lte, mask.uts, mask.ute])).to(inputs.q.device)

        def visible(b, h, i, j):
            lts, lte, uts, ute = bounds
            return ~(((i >= lts) & (i < lte)) | ((i >= uts) & (i < ute)))

    elif inputs.visible is not None:
        return lambda start, stop: inputs.visible[start:stop]
    else:
        visible = inputs.functions({})[1] or (inputs.case.causal and (lambda b, h, i, j: i >= j))
    return lambda start, stop: visible(*_grid(inputs, b, h, start, stop)) if visible else None


def _factor(inputs, b, h, rows):
    """Return the factor by which cuattn's dropout multiplies the weights of some rows."""
    import torch

    case = inputs.case
    threshold = rng.threshold(case.dropout)
    kept = rng.keep(rng.RNGState(*DROPOUT_STATE), threshold, b * case.heads + h, rows, (0, case.n_keys))
    return torch.from_numpy(kept).to(inputs.q.device).double() * (rng.LEVELS / (rng.LEVELS - threshold))


def dropout_noise(inputs, exact, o):
    """Return how strongly dropout disturbs `o`, over the disturbance that the case's probability predicts.

    With p the probability, each weight is multiplied by 0 or 1 / (1 - p), so that the mean square of the change is
    p / (1 - p) times the sum of the squared weights times the squared values.
    """
    changes = predicted = 0.0
    for place, results in exact.exact.items():
        head = _head(inputs, *place)
        q, k, v = (x.double() for x in head[:3])
        seen = head.see(0, len(q))[1]
        predicted += (weights(q @ k.T * q.shape[-1] ** -0.5, seen) ** 2 @ v**2).sum().item()
        changes += ((o[place].double() - results["o"]) ** 2).sum().item()
    return changes / predicted * (1 - inputs.case.dropout) / inputs.case.dropout if predicted else 0.0
