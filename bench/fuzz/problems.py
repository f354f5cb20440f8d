"""Draw one random problem: its arrays, its arguments, and what they mean as dense matrices.

Two generators draw it.  `fixed` chooses what a GPU compiles for (dtype, widths, which features are on), `rng` the rest
(lengths, heads, values, strides, what masks show): problems that share `fixed` share their compiled kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cuattn
from bench.fuzz import masking, scoring, sharding
from bench.fuzz.masking import broadcastable, pick

__all__ = ["Problem", "draw_problem"]

WORK = 3e6  # multiplications of one product of a problem, about, at most; a hundredth of it in long double
# What may be drawn, and how often.
DTYPES = {np.dtype(np.float16): 0.25, np.dtype(ml_dtypes.bfloat16): 0.25, np.dtype("f4"): 0.3, np.dtype("f8"): 0.2}
LENGTHS = {(0, 1): 0.02, (1, 2): 0.08, (2, 20): 0.3, (20, 80): 0.4, (80, 200): 0.17, (200, 600): 0.03}
WIDTHS = 16, 32, 64, 64, 64, 80, 96, 128, 128, 192, 256
KINDS = {"rank 2": 0.1, "heads": 0.25, "batch": 0.25, "grouped": 0.25, "broadcast": 0.15}
VALUES = "normal", "normal", "normal", "normal", "large", "tiny", "constant", "saturated", "zero"
BIASES = {  # the axes that are not 1: batch, heads, rows, keys
    "matrix": "rk", "row": "k", "column": "r", "scalar": "", "whole": "bhrk", "heads": "hrk", "padding": "bk",
    "holes": "bhrk",
}  # fmt: skip
LAYOUTS = ("swapped", "step", "spread", "fortran", "negative", "unaligned")
# The share of problems that have an option, its values, and the sizes of the dtypes that it is for.
OPTIONS = {
    "softcap": (0.15, (0.5, 5.0, 30.0), (2, 4, 8)),
    "scale": (0.4, (0.3, -0.2, 0.0, 1.0, 1e-6, 4.0), (2, 4, 8)),
    "dropout_p": (0.25, (0.1, 0.5, 0.9, 2e-5), (2, 4, 8)),
    "out_dtype": (0.15, (np.dtype("f4"),), (2, 4)),
    "precision": (0.05, ("tf32",), (4,)),
}
# The share of problems that are looked at in another way, too; the first have kernels of their own.
COMPILED_CHECKS = {
    "deterministic": 0.25, "shards": 0.2, "dlse": 0.15, "gradients in out_dtype": 0.5, "attention": 0.15,
    "boolean": 0.2, "tangents": 0.1,
}  # fmt: skip
SCORED = 0.01, 0.15  # the shares of problems with a score function: on a GPU each is compiled for its shapes
CHECKS = {"twice": 0.15, "out": 0.15, "plan": 0.03, "mask on the device": 0.3}


@dataclass
class Problem:
    """One problem; arrays are clean and contiguous, `layouts` and `poison` say how the library gets them.

    Attributes
    ----------
    arrays : dict of str to array
        q, k, v, do and, where there are, bias and dlse.
    mask, visible : mask or None, bool array or None
        What the library gets, and what mask and band show, spelled out.
    options : dict
        Other keyword arguments of the API.
    tangents : set of str
        Operands that have tangents, where derivatives along these are looked at.
    """

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    checks: set[str]
    features: set[str]
    mask: Any = None
    visible: np.ndarray | None = None
    layouts: dict[str, str] = field(default_factory=dict)
    poison: float | None = None
    parts: list[list[sharding.Part]] = field(default_factory=list)
    tangents: set[str] = field(default_factory=set)

    @property
    def dtype(self):
        """Of q, k, v and do."""
        return self.arrays["q"].dtype

    @property
    def stat_dtype(self):
        """Of l, m and unrounded results."""
        return max(self.dtype, np.dtype("f4"), key=lambda dtype: dtype.itemsize)

    @property
    def shape(self):
        """Of the scores."""
        return (*self.arrays["do"].shape[:-1], self.arrays["k"].shape[-2])

    def describe(self):
        """Say in one line what the problem is."""
        shapes = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in self.arrays.items())
        mask = f"array {self.mask.shape}" if isinstance(self.mask, np.ndarray) else repr(self.mask)
        return f"{shapes}, mask {mask}, {self.options}, {self.layouts}, {sorted(self.features)}"


def draw_problem(fixed, rng, hopper=False):
    """Draw a problem: its features from one generator, all else from another; `hopper`: what family sm90 takes."""
    dtype, kind = str(fixed.choice(("float16", "bfloat16"))) if hopper else pick(fixed, DTYPES), pick(fixed, KINDS)
    dtype = np.dtype(dtype)
    d, other, same = _width(fixed), _width(fixed), fixed.random()
    if hopper:
        d, other = (min(-(-n // 8) * 8, 256) for n in (d, other))
    widths = d, d if same < 0.5 else other if same < 0.98 else 0
    options = {name: values[fixed.integers(len(values))] for name, (share, values, sizes) in OPTIONS.items()
               if fixed.random() < share and dtype.itemsize in sizes}  # fmt: skip
    checks = {name for name, share in COMPILED_CHECKS.items() if fixed.random() < share}
    checks |= {name for name, share in CHECKS.items() if rng.random() < share}
    n_queries, n_keys = (int(rng.integers(*pick(source, LENGTHS))) for source in (fixed, rng))
    n_queries = max(n_queries, int(hopper))
    lengths = n_queries, n_queries if rng.random() < 0.5 else n_keys
    shapes = _shapes(rng, kind, lengths, widths, dtype)
    values = str(rng.choice(VALUES))
    arrays = {name: _values(rng, values, shape, dtype) for name, shape in shapes.items()}
    if values == "saturated" and shapes["q"] == shapes["k"]:
        arrays["k"] = arrays["q"].copy()
    arrays["do"] = _values(rng, "normal", shapes["do"], dtype)
    features = {dtype.name, kind, f"values {values}", *checks}
    features |= {f"scale {value:g}" if name == "scale" else name.removesuffix("_p") for name, value in options.items()}
    features |= {"d != dv"} if widths[0] != widths[1] else set()
    features |= {"zero size"} if any(0 in shape for shape in shapes.values()) else set()
    problem = Problem(arrays, options, checks, features)
    masking.draw(problem, fixed, rng, hopper)
    if fixed.random() < 0.3 and not hopper:
        _add_bias(problem, dtype if fixed.random() < 0.5 else np.dtype("f4"), str(fixed.choice(list(BIASES))), rng)
    if rng.random() < SCORED[fixed is rng] and values != "large":
        scoring.draw(problem, fixed, rng)
    if kind == "grouped":
        options["enable_gqa"] = True
    if "dropout_p" in options:
        seed, offset = int(rng.integers(2**63)), int(rng.integers(2**32))
        options["rng"] = (seed, cuattn.RNGState(seed, offset), np.random.default_rng(seed))[rng.integers(3)]
    if "dlse" in checks:
        arrays["dlse"] = rng.standard_normal(problem.shape[:-1]).astype(problem.stat_dtype)
    _lay_out(problem, rng, LAYOUTS[:3] if hopper else LAYOUTS if fixed.random() < 0.4 else LAYOUTS[:-1])
    if "tangents" in checks:
        problem.tangents = {name for name in ("q", "k", "v", "do", "bias") if fixed.random() < 0.7}
    if "shards" in checks:
        problem.parts = sharding.draw_parts(problem, rng)
    return problem


def _width(fixed):
    return int(fixed.choice(WIDTHS) if fixed.random() < 0.6 else fixed.integers(1, 40 if fixed.random() < 0.8 else 300))


def _shapes(rng, kind, lengths, widths, dtype):
    """Return the shapes of q, k, v and do."""
    room = WORK / (100 if dtype == np.float64 else 1) / max(math.prod(lengths) * max(*widths, 32), 1)
    lead = tuple(rng.integers(1, 6, {"rank 2": 0, "heads": 1}.get(kind, rng.integers(1, 4))).tolist())
    while math.prod(lead) > max(room, 1):
        lead = tuple((n + 1) // 2 for n in lead)
    if lead and rng.random() < 0.01:
        lead = (*lead[:-1], 0)
    leads = dict.fromkeys(("q", "k", "v"), lead)
    if kind == "grouped":
        leads["q"] = lead = (*lead[:-1], lead[-1] * int(rng.integers(1, 5)))
    elif kind == "broadcast":
        leads |= {name: broadcastable(rng, lead) for name in rng.permutation(("q", "k", "v"))[:2].tolist()}
    (n_queries, n_keys), (d, dv) = lengths, widths
    inner = {"q": (n_queries, d), "k": (n_keys, d), "v": (n_keys, dv), "do": (n_queries, dv)}
    return {name: (*leads.get(name, lead), *shape) for name, shape in inner.items()}


def _values(rng, kind, shape, dtype):
    x = rng.standard_normal(() if kind == "constant" else shape, np.float32)
    if kind == "normal":
        x = np.where(rng.random(shape, np.float32) < 0.02, 4 * x, x) + np.float32(0.2 * rng.integers(0, 2))
    large = 10.0 ** rng.integers(0, 3 if dtype == np.float16 else 5)
    factor = {"large": large, "tiny": 1e-4, "saturated": 3.0, "zero": 0.0}.get(kind, 1.0)
    return np.broadcast_to((x * np.float32(factor)).clip(-6e4, 6e4), shape).astype(dtype)


def _add_bias(problem, dtype, kind, rng):
    axes = "bbhrk"[-len(problem.shape) :]
    shape = tuple(n if axis in BIASES[kind] else 1 for axis, n in zip(axes, problem.shape, strict=True))
    shape = shape if "b" in BIASES[kind] else shape[-1 - len(BIASES[kind] or "r") :]
    bias = rng.standard_normal(shape).astype(dtype)
    if kind == "padding":
        lengths = rng.integers(0, shape[-1] + 1, (*shape[:-1], 1))
        hidden = rng.choice((float(ml_dtypes.finfo(dtype).min), -np.inf))
        bias = np.where(np.arange(shape[-1]) < lengths, 0, hidden).astype(dtype)
    elif kind == "holes" or rng.random() < 0.3:
        bias[rng.random(shape) < 0.2] = -np.inf
    problem.arrays["bias"] = bias
    problem.features.add(f"bias {kind}")


def _lay_out(problem, rng, kinds):
    """Draw strides and poison."""
    for name in ("q", "k", "v", "do", "bias", "mask"):
        x = {**problem.arrays, "mask": problem.mask}.get(name)
        if isinstance(x, np.ndarray) and rng.random() < 0.25:
            kind = str(rng.choice(kinds))
            if kind == "spread" and x.ndim > 2 and name != "mask":
                x[...] = x[:1]
            problem.layouts[name] = kind
            problem.features.add(f"strides {kind}")
    if rng.random() < 0.3:
        problem.poison = float(rng.choice((np.nan, np.inf, -np.inf)))
