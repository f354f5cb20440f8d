"""What a result must equal: textbook attention of single heads in float64, and how far the textbook itself strays.

The rule is the test suite's: the largest error may be at most twice that of the textbook computation in the same
precision, plus one rounding.  The same is asked of the distance in the Frobenius norm, which sees errors that are small
beside the largest value but large beside their own row.

Everything is computed on PyTorch tensors where the inputs are, some rows at a time, so that a sequence of 128K fits.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

CHUNK_ELEMENTS = 1 << 26  # score elements in flight, in float64
BLOCK = 32  # terms of a short block; a head dimension of 64 or a sequence of 4096 has many
FACTOR = 2.0  # times the textbook's error that a result may have
RMS_ROUNDING = 0.25  # root mean square of one rounding's relative error, in units of the spacing at 1, from above
PEER_FACTOR = 4.0  # peers may round more often than the textbook: what they get wrong is seen, not how they round


class Head(NamedTuple):
    """The operands of one head, and what its rows see.

    Attributes
    ----------
    q, k, v, do : tensor, (Nq, d), (Nk, d), (Nk, dv), (Nq, dv)
        do may be None where no gradient is asked for.
    see : callable
        Given the first row and the one behind the last: the function of the rows' scores, or None; which keys the rows
        see, bool (rows, Nk) or None for all; and the factor by which dropout multiplies each weight.
    part : bool
        These are the last rows of a longer sequence, or one head of a group: dk and dv are not those of the whole.
    learned : dict of str to (tensor, tuple)
        Arrays that the function of the scores reads and that are differentiated, and the part of each to look at.
    """

    q: Any
    k: Any
    v: Any
    do: Any = None
    see: Callable = lambda start, stop: (None, None, 1)
    part: bool = False
    learned: Mapping[str, tuple[Any, tuple]] = MappingProxyType({})


def textbook(head, rounded_to=None):
    """Compute textbook attention of one head and its gradients.

    Parameters
    ----------
    head : Head
        The operands.
    rounded_to : torch dtype, optional
        Round every step to this dtype, computing between in float32 (float64 for float64).  None computes in float64
        and, where the operands are float64 already, sums in short blocks, which lose less.

    Returns
    -------
    dict of str to tensor
        ``o`` and, with do, ``dq``, ``dk``, ``dv`` and ``dNAME`` of learned arrays, in the precision computed in.
    """
    import torch

    work = torch.float64 if rounded_to in (None, torch.float64) else torch.float32
    product = _blocked if rounded_to is None and head.q.dtype == torch.float64 else torch.matmul

    def step(x):
        return x.to(rounded_to or work).to(work)

    q, k, v = (x.to(work) for x in head[:3])
    result = {"o": q.new_empty(len(q), v.shape[-1])}
    if head.do is not None:
        do = head.do.to(work)
        result |= {"dq": torch.empty_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
        result |= {f"d{name}": torch.zeros_like(array[index]) for name, (array, index) in head.learned.items()}
    rows = max(1, CHUNK_ELEMENTS // len(k))
    for start in range(0, len(q), rows):
        part = slice(start, min(start + rows, len(q)))
        score, seen, factor = head.see(part.start, part.stop)
        raw = step(step(product(q[part], k.T)) * q.shape[-1] ** -0.5)
        with torch.enable_grad():
            s = score(raw.requires_grad_()) if score else raw
        p = step(weights(s.detach(), seen))
        dropped = step(p * factor)
        result["o"][part] = step(product(dropped, v))
        if head.do is None:
            continue
        result["dv"] += product(dropped.T, do[part])
        dp = step(step(product(do[part], v.T)) * factor)
        ds = step(p * (dp - step((p * dp).sum(-1, keepdim=True))))
        if score:
            leaves = [raw, *(array for array, _ in head.learned.values())]
            ds, *found = torch.autograd.grad(s, leaves, ds.to(s.dtype))
            ds = step(ds)
            for (name, (_, index)), gradient in zip(head.learned.items(), found, strict=True):
                result[f"d{name}"] += gradient[index]
        ds = ds * q.shape[-1] ** -0.5
        result["dq"][part] = step(product(ds, k))
        result["dk"] += product(ds.T, q[part])
    return {name: step(x) for name, x in result.items()}


def weights(s, seen):
    """Return the softmax of some rows' scores, 0 where a row sees nothing."""
    return (s if seen is None else s.masked_fill(~seen, -np.inf)).softmax(-1).nan_to_num_(0.0)


def _blocked(a, b):
    """Multiply matrices, summing the products of short blocks: rounding errors grow with the length of a sum."""
    return sum(x @ y for x, y in zip(a.split(BLOCK, dim=1), b.split(BLOCK), strict=True))


class Reference:
    """Exact results of a few heads of a problem, and the error that each result may have.

    Parameters
    ----------
    heads : dict of (int, int) to Head
        By (batch, query head).  Gradients of learned arrays are sums over those that read the same part of them.
    dtype : torch dtype
        Precision that the textbook rounds to.
    pooled : bool
        Compare all heads as one: the textbook's error in the few numbers of a small head is luck.
    beside : dict of (int, int) to Head, optional
        Further heads, of which only the gradients of learned arrays are looked at: all parts of an array are compared
        as one, since the textbook's error in a single number is luck, too.
    """

    def __init__(self, heads, dtype, pooled=False, beside=MappingProxyType({})):
        self.dtype, self.pooled = dtype, pooled
        self.exact, self.rough, self.sums = {}, {}, {}
        for place, head in {**heads, **beside}.items():
            exact, rough = textbook(head), textbook(head, dtype)
            self._add(head.learned, exact, rough)
            if place in heads:
                whole = {name: x for name, x in exact.items() if not head.part or name in ("o", "dq")}
                self.exact[place], self.rough[place] = whole, rough

    def _add(self, learned, exact, rough):
        """Add a head's gradients of arrays to others of the same part; and their errors, which do not cancel."""
        for name in [name for name in learned if f"d{name}" in exact]:
            index, parts = learned[name][1], self.sums.setdefault(f"d{name}", {})
            gradient = exact.pop(f"d{name}")
            error = (rough.pop(f"d{name}") - gradient).abs()
            _, before, errors = parts.get(str(index), (index, 0.0, 0.0))
            parts[str(index)] = index, before + gradient, errors + error

    def gradient(self, name):
        """Return which parts of an array heads read, these gradients side by side, and the same with their errors."""
        import torch

        indices, exact, errors = zip(*self.sums[name].values(), strict=True)
        exact = torch.stack(exact)
        return indices, exact, exact + torch.stack(errors)

    def errors(self, results, peer):
        """Compare results with the reference.

        Parameters
        ----------
        results : dict of str to tensor
            Any of o, dq, dk, dv, each (B, H, N, d), and of the gradients of learned arrays.
        peer : bool
            Apply the wider rule for peers.

        Returns
        -------
        dict
            Per name, for the worst head: ``max``, the largest absolute error; ``distance``, relative, in the
            Frobenius norm; and ``of_allowed``, the larger share of the two in what is allowed, at most 1 if right.
        """
        import torch

        groups = [list(self.exact)] if self.pooled else [[place] for place in self.exact]
        found = {}
        for name in [name for name in self.sums if name in results]:
            indices, *pair = self.gradient(name)
            x = torch.stack([results[name][index] for index in indices])
            found[name] = compare(x, *pair, self.dtype, peer)
        for name in [name for name in results if name in self.exact[groups[0][0]]]:
            errors = []
            for places in groups:
                exact, rough = (torch.stack([of[place][name] for place in places]) for of in (self.exact, self.rough))
                x = torch.stack([results[name][place][-exact.shape[1] :] for place in places])
                errors.append(compare(x, exact, rough, self.dtype, peer))
            found[name] = max(errors, key=lambda error: np.nan_to_num(error["of_allowed"], nan=np.inf))
        return found

    def spread(self, names):
        """Return the textbook's largest relative distance from the exact results, over heads and `names`."""
        pairs = [(x[name], self.rough[place][name]) for place, x in self.exact.items() for name in names if name in x]
        pairs += [self.gradient(name)[1:] for name in self.sums if name in names]
        return max((distance(rough, exact) for exact, rough in pairs), default=0.0)


def compare(x, exact, rough, dtype, peer=False):
    """Apply the acceptance rule to the result of one head or of some; NaN never passes."""
    import torch

    eps, factor = torch.finfo(dtype).eps, PEER_FACTOR if peer else FACTOR
    x, rough = x.to(exact.dtype), rough.to(exact.dtype)
    largest = (x - exact).abs().max().item()
    largest_allowed = factor * (rough - exact).abs().max().item() + eps * exact.abs().max().item()
    apart = distance(x, exact)
    apart_allowed = factor * distance(rough, exact) + RMS_ROUNDING * eps
    shares = [largest / largest_allowed if largest_allowed else largest, apart / apart_allowed]
    return {"max": largest, "distance": apart, "of_allowed": float(np.max(shares))}


def distance(x, y):
    """Return the relative distance ``|x - y| / |y|`` in the Frobenius norm, one batch element at a time."""
    import torch

    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    difference = norm = 0.0
    for a, b in zip(x, y, strict=True) if y.ndim == 4 else [(x, y)]:
        difference += (a.to(wide) - b.to(wide)).norm().item() ** 2
        norm += b.to(wide).norm().item() ** 2
    return (difference / norm) ** 0.5 if norm else difference**0.5
