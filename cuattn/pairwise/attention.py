"""The same sums by attention: for points with many coordinates on a GPU, and for masks there.

With q = (2 x, -|x|^2, 1) and k = (y, 1, -|y|^2) the scores are s = -w = -|x - y|^2, for points relative to their mean
and scaled.  A sum of kernel values is o l exp(m), and those of gradients are a backward's for o = 0, l = 1, m = 0, for
then P = K and D = 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn import api
from cuattn.pairwise.functions import FUNCTIONS
from cuattn.pairwise.pairs import DIRECT_DIM, Pairs, Sums, Wanted
from cuattn.results import Forward

_LOWEST = -1e30  # a score that is as good as hidden, and of which products stay finite


class Attention:
    """The operands of attention for a call's points.

    Parameters
    ----------
    pairs : Pairs
    """

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        xp, x, y = pairs.xp, pairs.spread("x"), pairs.spread("y")
        exact = pairs.dim <= DIRECT_DIM or pairs.function is FUNCTIONS["laplacian"]
        self._work = np.dtype(np.float64) if exact else pairs.work
        self._root = xp.sqrt(xp.asarray(pairs.factor, np.float64))
        centre = y.mean(tuple(range(y.ndim - 1)), dtype=np.float64) if y.size else 0.0
        scaled = [((p.astype(np.float64) - centre) * self._root).astype(self._work) for p in (x, y)]
        self._x, self._y = scaled
        self._squares = [(p * p).sum(-1) for p in scaled]
        self._options: dict[str, Any] = {
            "mask": pairs.given_mask,
            "window": pairs.window,
            "scale": 1.0,
            "precision": "tf32" if pairs.precision == "tf32" else None,
            "score": pairs.function.score,
            "kernel": None if pairs.kernel == "products" else pairs.kernel,
        }

    def _cast(self, array: Any) -> Any:
        return self._pairs.xp.ascontiguousarray(array.astype(self._work, copy=False))

    def _columns(self, key_log: Any = None) -> tuple[Any, Any]:
        """Return q and k, whose products are -w + key_log."""
        xp, (of_x, of_y) = self._pairs.xp, self._squares
        of_key = -of_y if key_log is None else xp.maximum(self._cast(key_log) - of_y, _LOWEST)
        ones = [xp.ones_like(of)[..., None] for of in self._squares]
        q = xp.concatenate([2 * self._x, -of_x[..., None], ones[0]], -1)
        return q, xp.concatenate([self._y, ones[1], of_key[..., None]], -1)

    def _forward(self, v: Any, key_log: Any = None) -> tuple[Any, Any, Any]:
        """Return o, and l and m of the rows' sums l exp(m), with the keys' logarithms as weights.

        What the Gaussian has of keys alone is a bias of them, and of rows alone is added last, so that vectors stay as
        short as points are.
        """
        if self._options["score"] is not None:
            found = api.forward(*self._columns(), v, **self._options)
            return found.o, found.l, found.m
        of_x, of_y = self._squares
        bias = (-of_y if key_log is None else self._cast(key_log) - of_y)[..., None, :]
        found = api.forward(2 * self._x, self._y, v, bias=bias, **self._options)
        return found.o, found.l, found.m - of_x

    def sums(self, v: Any) -> Any:
        """Return sum_j k_ij v_j; the logarithm of l would lose digits where l is large."""
        o, l, m = self._forward(self._cast(v))
        return o * (l * self._pairs.xp.exp(m))[..., None]

    def transposed_sums(self, u: Any) -> Any:
        """Return sum_i k_ij u_i."""
        return self.slopes(u, self._pairs.xp.zeros((*self._y.shape[:-1], u.shape[-1]), self._work))[2]

    def logs(self, key_log: Any) -> Any:
        """Return log sum_j exp(key_log_j - w_ij)."""
        _, l, m = self._forward(self._y[..., :0], key_log)
        with np.errstate(divide="ignore"):
            return m + self._pairs.xp.log(l)

    def slopes(self, u: Any, v: Any, row_log: Any = None, key_log: Any = None) -> tuple[Any, Any, Any, Any]:
        """Return the gradients of sum_ij (u_i . v_j) k_ij by the points and v, and by the logarithm of their scale.

        With logarithms k is multiplied by their exponentials.
        """
        xp, d = self._pairs.xp, self._pairs.dim
        u, v = self._cast(u), self._cast(v)
        shape = self._x.shape[:-1]
        l, m = xp.ones(shape, self._work), xp.zeros(shape, self._work)
        if row_log is not None:  # a row of weight 0 is an empty one
            l = self._cast(row_log > -xp.inf)
            m = xp.where(l > 0, -self._cast(row_log), -xp.inf)
        fwd = Forward(xp.zeros_like(u), l, m, None)
        dq, dk, dv, _ = api.backward(u, *self._columns(key_log), v, fwd, **self._options)
        dx = 2 * (dq[..., :d] - self._x * dq[..., d : d + 1])
        dy = dk[..., :d] - 2 * self._y * dk[..., d + 1 :]
        # The sum depends on the scaled points alone, by their differences: Euler's theorem gives the rest.
        dscale = sum((p.astype(np.float64) * dp).sum() for p, dp in ((self._x, dx), (self._y, dy)))
        return dx * self._root, dy * self._root, dv, dscale


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return what is wanted for the rows of a call's points; only sums are transposed."""
    attention = Attention(pairs)
    if wanted.logs:
        return Sums(logs=attention.logs(wanted.key_log))
    if wanted.slopes:
        return Sums(directions=gradients(pairs, *wanted[:4])[0] / (-2 * pairs.factor))
    return Sums(attention.transposed_sums(wanted.v) if transposed else attention.sums(wanted.v))


def gradients(pairs: Pairs, u: Any, v: Any, row_log: Any = None, key_log: Any = None) -> tuple[Any, Any, Any, Any]:
    """Return the gradients by x, y and v, and by the logarithm of the scale, all of one backward."""
    return Attention(pairs).slopes(u, v, row_log, key_log)
