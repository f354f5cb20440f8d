"""What a result must equal: textbook attention of single heads in float64, and how far the textbook itself strays.

The rule is the test suite's: the largest error may be at most twice that of the textbook computation in the same
precision, plus one rounding.  The same is asked of the distance in the Frobenius norm, which sees errors that are small
beside the largest value but large beside their own row.

Everything is computed on PyTorch tensors where the inputs are, some rows at a time, so that a sequence of 128K fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Reference", "Visible", "compare", "distance", "textbook"]

CHUNK_ELEMENTS = 1 << 26  # score elements in flight, in float64
BLOCK = 32  # terms of a short block; a head dimension of 64 or a sequence of 4096 has many
FACTOR = 2.0  # times the textbook's error that a result may have
RMS_ROUNDING = 0.25  # root mean square of one rounding's relative error, in units of the spacing at 1, from above
PEER_FACTOR = 4.0  # peers may round more often than the textbook: what they get wrong is seen, not how they round


@dataclass(frozen=True)
class Visible:
    """What the rows of one head may see.

    Attributes
    ----------
    causal : bool
        Keys j <= i only.
    first_row : int
        Index of row 0 in the whole sequence, when only its last rows are looked at.
    bounds : tensor, optional
        (4, Nk) int32: the vectors of a column mask.
    keep : callable, optional
        (start, stop) -> bool tensor (stop - start, Nk): what dropout keeps, together with `keep_scale`.
    dense : tensor, optional
        (Nq, Nk) bool.
    bias : tensor, optional
        (Nq or 1, Nk), added to the scores.
    """

    causal: bool = False
    first_row: int = 0
    bounds: Any = None
    keep: Any = None
    keep_scale: float = 1.0
    dense: Any = None
    bias: Any = None

    def rows(self, start, stop, n_keys, device):
        """Return which keys rows start ... stop - 1 see, (stop - start, Nk) bool, or None for all."""
        import torch

        i = self.first_row + torch.arange(start, stop, device=device)[:, None]
        seen = i >= torch.arange(n_keys, device=device) if self.causal else None
        if self.bounds is not None:
            lts, lte, uts, ute = self.bounds
            open_ = ~(((i >= lts) & (i < lte)) | ((i >= uts) & (i < ute)))
            seen = open_ if seen is None else seen & open_
        return seen if self.dense is None else self.dense[start:stop]


def textbook(q, k, v, do, visible, rounded_to=None):
    """Compute textbook attention of one head and its gradients.

    Parameters
    ----------
    q, k, v, do : tensor, (Nq, d), (Nk, d), (Nk, d), (Nq, d)
        One head; do may be None.
    visible : Visible
        What is visible and what dropout keeps.
    rounded_to : torch dtype, optional
        Round every step to this dtype, computing between in float32 (float64 for float64).  None computes in float64
        and, where the operands are float64 already, sums in short blocks, which lose less.

    Returns
    -------
    dict of str to tensor
        ``o`` and, with `do`, ``dq``, ``dk``, ``dv``, in the precision computed in.
    """
    import torch

    work = torch.float64 if rounded_to in (None, torch.float64) else torch.float32
    low = rounded_to not in (None, work)

    def step(x):
        return x.to(rounded_to).to(work) if low else x

    product = _blocked if rounded_to is None and q.dtype == torch.float64 else torch.matmul
    scale = q.shape[-1] ** -0.5
    q, k, v = (x.to(work) for x in (q, k, v))
    rows = max(1, CHUNK_ELEMENTS // k.shape[0])
    result = {"o": torch.empty_like(q)}
    if do is not None:
        do = do.to(work)
        result |= {"dq": torch.empty_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    for start in range(0, q.shape[0], rows):
        part = slice(start, min(start + rows, q.shape[0]))
        s = step(step(product(q[part], k.T)) * scale)
        if visible.bias is not None:
            s = step(s + (visible.bias if len(visible.bias) == 1 else visible.bias[part]).to(work))
        seen = visible.rows(part.start, part.stop, k.shape[0], q.device)
        if seen is not None:
            s = s.masked_fill_(~seen, -torch.inf)
        p = step(torch.softmax(s, dim=-1).nan_to_num_(0.0))
        del s
        z = None if visible.keep is None else visible.keep(part.start, part.stop).to(work) * visible.keep_scale
        pd = p if z is None else step(p * z)
        result["o"][part] = step(product(pd, v))
        if do is None:
            continue
        result["dv"] += product(pd.T, do[part])
        dp = step(product(do[part], v.T))
        dp = dp if z is None else step(dp * z)
        ds = step(p * (dp - step((p * dp).sum(-1, keepdim=True))))
        result["dq"][part] = step(scale * product(ds, k))
        result["dk"] += scale * product(ds.T, q[part])
    return {name: step(x) for name, x in result.items()}


def _blocked(a, b):
    """Multiply matrices, summing the products of short blocks: rounding errors grow with the length of a sum."""
    total = a[:, :0] @ b[:0]
    for start in range(0, b.shape[0], BLOCK):
        total += a[:, start : start + BLOCK] @ b[start : start + BLOCK]
    return total


class Reference:
    """Exact results of a few heads of a problem, and the error that each result may have.

    Parameters
    ----------
    heads : dict of (int, int) to (q, k, v, do, Visible)
        One-head operands by (batch, query head).  With a `first_row`, q and do are the last rows alone, and o and dq
        of those rows are what is checked.
    dtype : torch dtype
        Precision that the textbook rounds to.
    gradients : bool
        Compute gradients too.
    pooled : bool
        Compare all heads as one: the textbook's error in the few numbers of a small head is luck.
    """

    def __init__(self, heads, dtype, gradients, pooled=False):
        self.pooled = pooled
        self.exact = {}
        self.rough = {}
        self.dtype = dtype
        for place, (q, k, v, do, visible) in heads.items():
            operands = (q, k, v, do if gradients else None, visible)
            self.exact[place] = textbook(*operands)
            self.rough[place] = textbook(*operands, rounded_to=dtype)
            if visible.first_row:
                for name in ("dk", "dv"):
                    self.exact[place].pop(name, None)

    def errors(self, results, peer):
        """Compare results with the reference.

        Parameters
        ----------
        results : dict of str to tensor, (B, H, N, d)
            Any of o, dq, dk, dv.
        peer : bool
            Apply the wider rule for peers.

        Returns
        -------
        dict
            Per name, for the worst head: ``max``, the largest absolute error; ``distance``, relative, in the
            Frobenius norm; and ``of_allowed``, the larger share of the two in what is allowed, at most 1 if right.
        """
        import torch

        worst = {}
        for heads in [list(self.exact)] if self.pooled else [[head] for head in self.exact]:
            for name in [name for name in results if name in self.exact[heads[0]]]:
                exact, rough = (torch.stack([of[head][name] for head in heads]) for of in (self.exact, self.rough))
                x = torch.stack([results[name][head][-exact.shape[1] :] for head in heads])
                found = compare(x, exact, rough, self.dtype, peer)
                if name not in worst or not found["of_allowed"] <= worst[name]["of_allowed"]:
                    worst[name] = found
        return worst

    def spread(self, names):
        """Return the textbook's largest relative distance from the exact results, over heads and `names`."""
        pairs = [(self.rough[place][name], x[name]) for place, x in self.exact.items() for name in names if name in x]
        return max((distance(rough, exact) for rough, exact in pairs), default=0.0)


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

    x, y = (x, y) if x.ndim == 4 else (x[None], y[None])
    difference = norm = 0.0
    for a, b in zip(x, y, strict=True):
        wide = torch.float64 if b.dtype == torch.float64 else torch.float32
        difference += (a.to(wide) - b.to(wide)).norm().item() ** 2
        norm += b.to(wide).norm().item() ** 2
    return (difference / norm) ** 0.5 if norm else difference**0.5
