"""The oracle: textbook attention and its gradients in high precision, and the bound on what rounding does to them.

The formulas are :func:`cuattn.reference.textbook.solve`'s, here with SciPy's softmax.  ``dtype=None`` computes in
float64 (long double for float64 inputs) and rounds nothing; with a dtype, every intermediate result is rounded to it,
as a chain of array operations in that dtype would.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from cuattn import rng
from cuattn.reference import textbook
from cuattn.reference.textbook import Solution, sum_heads, sum_to
from cuattn.tracing import SCORE, Program, derivative, evaluate, facts, trace, weights
from cuattn.tracing.graph import order
from cuattn.tracing.proxy import kind_of
from tests.tolerances import eps, roundings

__all__ = ["Floor", "Score", "backward", "dropped", "floors", "forward", "solve", "visible_band", "visible_outside"]


class Floor(NamedTuple):
    """How far roundings move a result: in multiples of eps of the sums, and of eps of 16-bit inputs."""

    wide: Any
    short: Any = 0.0


def visible_band(n_queries: int, n_keys: int, left: int | None, right: int | None, offset: int) -> np.ndarray:
    """Boolean (Nq, Nk): i + offset - left <= j <= i + offset + right, None = open."""
    i = np.arange(n_queries)[:, None] + offset
    j = np.arange(n_keys)[None, :]
    seen = np.ones((n_queries, n_keys), bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def visible_outside(bounds: Any, n_queries: int) -> np.ndarray:
    """Boolean (..., Nq, Nk): row i sees key j unless start <= i < end of an interval; starts and ends come in turn."""
    i = np.arange(n_queries)[:, None]
    bounds = np.asarray(bounds)[..., None, :]
    return ~((bounds[::2] <= i) & (i < bounds[1::2])).any(axis=0)


def dropped(state: Any, p: float, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what dropout keeps of scores of a shape, by the documented bits, and its factor, as `solve` takes them."""
    threshold = rng.threshold(p)
    if not threshold:
        return {}
    state, whole = rng.resolve(state), [(0, n) for n in shape[-2:]]
    kept = [rng.keep(state, threshold, b, *whole) for b in range(math.prod(shape[:-2]))]
    return {"keep": np.array(kept, bool).reshape(shape), "keep_scale": rng.LEVELS / (rng.LEVELS - threshold)}


def solve(*arrays: Any, dtype: Any = None, precision: str | None = None, **options: Any) -> Solution:
    """Return all that the textbook computes from q, k, v and, for gradients, do; on a GPU with CuPy's softmax.

    With a dtype of float32, ``precision="tf32"`` rounds both factors of every product to TF32.
    """
    library = special if isinstance(arrays[0], np.ndarray) else sys.modules["cupyx"].scipy.special
    operand = tf32 if dtype is not None and precision == "tf32" else None
    return textbook.solve(*arrays, **options, low=dtype, operand=operand, softmax=library.softmax)


def tf32(x: Any) -> Any:
    """Round float32 to the 10 bits of mantissa that TF32 keeps."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def forward(q, k, v, *, dtype=None, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return textbook o (..., Nq, dv), l and m (..., Nq); `visible` and `keep` are dense booleans."""
    return solve(q, k, v, dtype=dtype, **options)[:3]


def backward(do, q, k, v, *, dtype=None, **options) -> tuple[np.ndarray, ...]:
    """Return textbook dq, dk, dv, dbias, each of its operand's shape (dbias None without a bias)."""
    return solve(q, k, v, do, dtype=dtype, **options)[3:7]


def floors(exact: Solution, q, k, v, do=None, *, scale=None, softcap=None, bias=None, keep=None, keep_scale=1.0,
           dlse=None, visible=None, halves=False, precision=None, score=None) -> dict[str, Floor]:  # fmt: skip
    """Bound, to first order, what the roundings of any algorithm in the sums' precision do to each result.

    A score that is a sum of large products is known to eps times the sum of their absolute values, S_ij, and nothing
    computed in that precision knows it better; so a saturated softmax cannot be held to the textbook's luck.  With p
    the softmax, S'_i = sum_j p_ij S_ij, z dropout's factor, A_ij = z |do_i| . |v_j| and D_i = sum_j p_ij dp_ij, one
    rounding of every sum's terms moves

        m   by S at the maximum                     l   by l (1 + S' + S at the maximum)
        p   by E = p (1 + S + S'), the 1 for l      o   by sum_j E z |v|
        D   by sum_j E A                            ds  by E |dp - D| + p (A + that of D)
        dv  by sum_i E z |do|                       dq  by |scale| sum_j (that of ds + |ds|) |k|, dk likewise

    A sum of n terms counts 2 sqrt(n) times (n at most), as if roundings were random, and twice that in scores and in l,
    whose terms may be alike and round one way.  Weights p below eps**3 count as 0.  For 16-bit inputs, their eps times
    this is added: p |v| and p |do| (P is rounded before it is multiplied), |do . o| in D (o was rounded), |ds| |k| and
    |ds| |q| (so was dS).  Their capped scores may be cap - 2 cap / (1 + e^2x), the difference of terms of up to 2 cap.
    What moves ds is multiplied by the slope of the soft cap as it is computed, for ds itself may be 0.  P and dS are
    rounded without dropout's factor and dS behind the cap, so that the coarse numbers near 0 are not made finer by its
    slope, but coarser by that factor.

    With `halves`, weights of float32 are pairs of float16, as the portable kernels have them, whose least bit is a part
    of the largest in their tile.  The forward's are 2^14 p and have a least bit of 2^-24, half of which is 2^-39 of p;
    rows of v are brought to the tile's largest exponent, so that this counts for up to twice the largest |v|.  The
    backward's have 2^-50 of the largest in their block, P's at most 1, and as much is lost with the product of both low
    halves: 2^-39 of the largest times 2^-11 of the other factor.  A row of which dropout leaves only small
    weights, and a key with no others, cannot be known better; what is lost of a weight is no more than itself.

    ``precision="tf32"`` rounds both factors of every product by 2^-11, so that a term may be wrong by t = 2^-10 + 2^-22
    of itself, and all terms alike: S, p, A and ds above get t / eps more.  Scores then move by more than 1, where the
    first order is too little, and a capped one back over the bend of its cap; so do capped ones of large products in
    any precision.  A weight becomes at most p exp(the move of s + the mean move) and at most 1, and loses p (the move +
    what all others gain) at most.  Weights of halves are then one float16, of 2^-39 of the largest in their block.

    Parameters
    ----------
    exact : Solution
        Of `solve` for the arguments that follow.

    Returns
    -------
    dict of str to Floor
        By the names of the results.
    """
    given = {"scale": scale, "softcap": softcap, "bias": bias, "keep": keep, "keep_scale": keep_scale, "score": score}
    bound = _Bound(exact, q, k, v, given, halves, precision)
    return bound.forward() if do is None else {**bound.forward(), **bound.backward(do, bias, dlse)}


class _Bound:
    """What the floors are made of; S is `size`, E is `moved`."""

    def __init__(self, exact: Solution, q, k, v, given: dict[str, Any], halves: bool, precision: Any) -> None:
        self.exact = exact
        self.xp = xp = np if isinstance(q, np.ndarray) else sys.modules["cupy"]
        self.shapes, lead, low = (q.shape, k.shape, v.shape), exact.p.shape[:-2], q.dtype
        self.unit = unit = _unit(low)
        self.grain = eps(low, smallest=True) / eps(low)  # 16-bit numbers near 0 are this coarse
        self.grain_ds = self.grain * given["keep_scale"]
        self.factors = factors = ((1 + 2.0**-11) ** 2 - 1) / unit if precision == "tf32" else 0.0
        terms = (q.shape[-1], v.shape[-1], *exact.p.shape[-2:])
        width, self.width_v, self.rows, self.keys = map(roundings, terms)
        self.rows *= max(math.prod(lead), 1) ** 0.5  # of all heads that may share a key
        self.q = xp.abs(q.astype(np.float64))
        self.k, self.v = (textbook.repeat_heads(xp.abs(x.astype(np.float64)), q) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if given["scale"] is None else given["scale"]
        self.scale = abs(scale)
        raw = (2 * width + factors) * self.scale * (self.q @ self.k.swapaxes(-1, -2))
        nearest = None
        self.far = bool(factors) or (given["softcap"] is not None and raw.size > 0 and float(raw.max()) * unit > 1)
        if self.far:
            signed = q.astype(np.float64) @ textbook.repeat_heads(k, q).swapaxes(-1, -2)
            nearest = xp.abs(self.scale * signed) - unit * raw
        short = eps(low) > unit
        size, self.slope, self.bend = _scores(xp, exact, raw, given["softcap"], short, unit, nearest)
        self.before = size
        if given["score"] is not None:
            natural = scale * (q.astype(np.float64) @ textbook.repeat_heads(k, q).astype(np.float64).swapaxes(-1, -2))
            size, self.slope, self.bend = _scored(given["score"], given["softcap"], natural, (size, self.bend), unit)
        if given["bias"] is not None:
            bias = xp.abs(given["bias"].astype(np.float64))
            size = xp.minimum(size + xp.where(bias < np.inf, bias, 0), 1e150)
        seen = exact.s > -np.inf
        size = xp.where(seen, size, 0)
        self.p = exact.p.astype(np.float64)
        self.mean = (self.p * size).sum(-1)
        self.top = _at_maximum(xp, exact, size, unit)
        self.z = 1.0 if given["keep"] is None else xp.where(given["keep"], given["keep_scale"], 0.0)
        self.moved = self.p * (self.keys + size + self.mean[..., None]) + xp.where(seen, unit**2, 0)
        self.spread = self.mean
        if self.far:
            self._move_far(size, seen)
        self.of_largest = (2.0**-16 if factors else 2.0**-26) if halves else 0.0
        self.coarse = xp.minimum(self.p / unit, self.of_largest)
        coarse = xp.minimum(self.p / unit, 2.0**-15 if halves else 0.0) * self.z
        self.coarse_o = coarse.sum(-1, keepdims=True) * _largest(xp, self.v)
        self.short_p = xp.where(seen, self.p + self.grain, 0) * self.z

    def _move_far(self, size, seen) -> None:
        """Let weights grow by exp(what their scores move by) to at most 1, where the first order is too little."""
        xp, exact, unit, p = self.xp, self.exact, self.unit, self.p
        with np.errstate(all="ignore"):
            log_p = xp.where(seen, exact.s - (exact.m + xp.log(exact.l))[..., None], -np.inf).astype(np.float64)
        grown, most = (
            (xp.exp(xp.minimum(log_p + unit * x, 0)) - p) / unit for x in (size, size + self.mean[..., None])
        )
        self.spread = xp.maximum(grown.sum(-1), self.mean)
        least = p * xp.minimum(size + self.spread[..., None], 1 / unit)
        self.moved = xp.maximum(self.moved, xp.maximum(most, least))
        self.p = p + unit * self.moved

    def forward(self) -> dict[str, Floor]:
        l = self.exact.l.astype(np.float64)
        move = self.spread + self.top
        if self.far:
            visible = (self.exact.s > -np.inf).sum(-1)
            move = self.xp.minimum(self.xp.expm1(self.xp.minimum(self.unit * move, 99)), visible) / self.unit
        return {
            "o": Floor(
                ((self.moved + (self.keys + self.factors) * self.p) * self.z) @ self.v + self.coarse_o,
                self.short_p @ self.v,
            ),
            "l": Floor(l * (2 * self.keys + move)),
            "m": Floor(self.top),
        }

    def backward(self, do, bias, dlse) -> dict[str, Floor]:
        xp, exact, p, t = self.xp, self.exact, self.p, self.factors
        do, ds, o = (xp.abs(x.astype(np.float64)) for x in (do, exact.ds, exact.o))
        a = self.z * (do @ self.v.swapaxes(-1, -2))
        gap = exact.dp.astype(np.float64) - (exact.p * exact.dp).sum(-1, keepdims=True).astype(np.float64)
        wide = p * ((self.width_v + t) * a + ((self.moved + (self.keys + t) * p) * a).sum(-1, keepdims=True))
        wide = wide + p * self.coarse_o * do.sum(-1, keepdims=True)
        if dlse is not None:
            gap = gap + dlse[..., None]
            wide = wide + p * xp.abs(dlse[..., None])
        wide = wide + self.moved * xp.abs(gap)
        rounded_p = xp.where(p > 0, p + self.grain, 0)
        short_delta = p * ((do * (o + self.grain)).sum(-1) + (rounded_p * a).sum(-1))[..., None]
        slope = self.slope + self.unit * self.bend
        short = (short_delta + ds) * slope + xp.where(exact.s > -np.inf, self.grain_ds, 0)
        for_rows, for_keys = (wide * slope + ds * (self.bend + (n + t) * self.slope) for n in (self.keys, self.rows))
        held = ds + self.unit * wide
        held = xp.minimum(held / self.unit, _largest(xp, held) * self.of_largest)
        for_rows, for_keys = for_rows + held, for_keys + held
        q_shape, k_shape, v_shape = self.shapes
        found = {
            "dq": [sum_to(self.scale * (x @ self.k), q_shape) for x in (for_rows, short)],
            "dk": [sum_heads(self.scale * (x.swapaxes(-1, -2) @ self.q), k_shape) for x in (for_keys, short)],
            "dv": [
                sum_heads(x.swapaxes(-1, -2) @ do, v_shape)
                for x in ((self.moved + (self.rows + t) * p) * self.z + self.coarse * self.z, self.short_p)
            ],
        }
        if bias is not None:
            found["dbias"] = [sum_to(x, bias.shape) for x in (wide + self.rows * ds, short_delta)]
        found |= {"ds": [wide + self.rows * ds, short_delta], "score": [self.before]}
        return {name: Floor(*parts) for name, parts in found.items()}


def _scores(xp, exact, raw, softcap, short, unit, nearest):
    """Return S, the slope of the soft cap, and by how much that slope moves.

    `nearest` is how small a score's size may become, negative on the other side of 0; None to the first order.
    """
    size, slope, bend = raw, 1.0, 0.0
    if softcap is not None:
        slope = exact.slope.astype(np.float64)
        capped = softcap * xp.sqrt(xp.maximum(1 - slope, 0))
        size = slope * raw + (2 * softcap if short else capped)
        bend = 2 * (1 + (slope * raw + capped) / softcap)
        if nearest is not None:
            size = xp.maximum(size, (capped - softcap * xp.tanh(nearest / softcap)) / unit + capped)
            steepest = 1 - xp.tanh(xp.maximum(nearest, 0) / softcap) ** 2
            slope, bend = steepest, bend + xp.maximum(steepest - slope, 0) / unit
    return size, slope, bend


def _scored(score, softcap, s, moved, unit):
    """Return S, the slope and its move behind a score function: what it rounds is known from the sums' precision."""
    capped, of_cap = s, 1.0
    if softcap is not None:
        capped = softcap * np.tanh(s / softcap)
        of_cap = 1 - (capped / softcap) ** 2
    (size, bend), slope = moved, np.nan_to_num(np.abs(score(capped)[1]), posinf=0)
    value, slope_moves = (score.moves(root, capped, size, unit) for root in (score.root, score.slope))
    return value, slope * of_cap, slope * bend + of_cap * slope_moves


class Score:
    """A score function as the textbook takes it: of all scores at once, by plain NumPy.

    Parameters
    ----------
    function, args
        As the library's ``score`` and ``score_args``; arrays of NumPy.
    shape : tuple of int
        Of the scores.
    """

    def __init__(self, function, args, shape) -> None:
        *lead, n_queries, n_keys = shape
        heads = lead[-1] if lead else 1
        places = np.arange(math.prod(lead)).reshape(*lead, 1, 1) if lead else np.zeros((), int)
        indices = places // max(heads, 1), places % max(heads, 1), np.arange(n_queries)[:, None], np.arange(n_keys)
        self._function, self._args, self._shape = function, args, tuple(shape)
        self._wide = [
            x.astype(np.float64) if getattr(x, "ndim", -1) >= 0 and kind_of(x.dtype) == "f" else x for x in args
        ]
        self._names = {name: x.astype(np.int32) for name, x in zip("bhij", indices, strict=True)}
        self._bound = trace(function, SCORE, args).bind(args)
        self.root = self._bound.root
        self.slope = derivative(self.root)

    def __call__(self, s):
        with np.errstate(all="ignore"):
            value = self._function(s, *(x.astype(np.int64) for x in self._names.values()), *self._wide)
        return np.broadcast_to(value, self._shape).astype(s.dtype), self._of(self.slope, s)

    def _of(self, root, s):
        work = np.float32 if s.dtype == np.float32 else np.float64
        found = evaluate(self._bound.of(root), {**self._names, "s": s.astype(work)}, work)
        return np.broadcast_to(found, self._shape)

    def before(self, q, k, scale=None, softcap=None):
        """Return the scores that the function is given, in float64."""
        s = q.astype(np.float64) @ textbook.repeat_heads(k, q).astype(np.float64).swapaxes(-1, -2)
        s = np.broadcast_to(s * (q.shape[-1] ** -0.5 if scale is None else scale), self._shape)
        return s if softcap is None else softcap * np.tanh(s / softcap)

    def moves(self, root, s, size, unit):
        """Return by how much roundings move a number made of s, if s moves by `size`, in multiples of a unit."""
        sums = np.float32 if unit > eps(np.float64) else np.float64
        largest = Program(tuple(x for x in order(root) if x.kind == "f"), np.dtype(np.float64), facts(self._bound))
        on_the_way = largest({**self._names, "s": s}, self._bound)
        value, slope = self._of(root, s), self._of(derivative(root), s)
        with np.errstate(all="ignore"):
            rounded = value - self._of(root, s.astype(sums))
            *on_the_way, slope, rounded = (
                np.nan_to_num(np.abs(x), posinf=0) for x in (*on_the_way, value, slope, rounded)
            )
        return slope * size + functools.reduce(np.maximum, on_the_way) + 4 * rounded / unit

    def gradients(self, s, ds, dtype=np.float64, moved=None):
        """Return the gradients of the arguments from the scores before and derivatives after; of floats alone.

        With `moved`, what the scores before move by and the unit, by how much they are moved: ds is then a pair, how
        large it is and by how much it is moved.
        """
        found = []
        for array, wide in zip(self._args, self._wide, strict=True):
            slots = [slot for slot, x in enumerate(self._bound.arrays) if x is array]
            is_float = getattr(wide, "dtype", None) == np.float64
            total = np.zeros(array.shape, dtype) if is_float else None
            for weight in weights(self.root, slots[0]) if is_float and slots else ():
                factors = [self._of(weight.weight, s)]
                if moved:
                    factors = self.moves(weight.weight, s, *moved), np.abs(*factors)
                terms = [np.where(x == 0, 0, x * y) for x, y in zip(ds if moved else (ds,), factors, strict=True)]
                at = np.broadcast_to(evaluate(self._bound.of(weight.offset), self._names), self._shape)
                np.add.at(total.reshape(-1), at, sum(terms).astype(dtype))
            found.append(total)
        return found

    def judged(self, gradients, s, exact, rough, floors):
        """Yield of each argument its gradient, the exact one, the textbook's and the floor; s are scores before."""
        ds, moved = exact.ds.astype(np.float64), (floors["score"].wide, _unit(rough.ds.dtype))
        wanted = [self.gradients(s, ds), self.gradients(s, rough.ds, rough.ds.dtype)]
        wide, short = np.broadcast_arrays(*floors["ds"])
        least = [self.gradients(s, x, moved=moved) for x in ((np.abs(ds), wide), (np.zeros_like(ds), short))]
        for actual, e, t, *parts in zip(gradients, *wanted, *least, strict=True):
            yield actual, e, t, e if e is None else Floor(*parts)


def _unit(dtype):
    """Return eps of the sums."""
    return eps(np.float64 if dtype == np.float64 else np.float32)


def _largest(xp, x):
    """Return the largest element of every matrix; CuPy's maximum of nothing is an error whatever it should be."""
    return x.max((-2, -1), keepdims=True) if x.size else xp.zeros((*x.shape[:-2], 1, 1))


def _at_maximum(xp, exact, size, unit):
    """Return the largest S among the scores of a row that may be its maximum."""
    if not size.shape[-1]:
        return xp.zeros(size.shape[:-1])
    s, m = exact.s.astype(np.float64), exact.m.astype(np.float64)[..., None]
    reach = xp.where(s + unit * size >= m, size, 0).max(-1, keepdims=True)
    return xp.where(s + unit * (size + reach) >= m, size, 0).max(-1)
