"""Draw one random problem: its arrays, its arguments, and what they mean as dense matrices.

A problem is drawn in two steps, each from a generator of its own.  The `Variant` holds what a GPU compiles for (dtype,
head dimensions, which features are on), the rest (lengths, heads, values, strides, masks) is the `Problem`'s.  On a CPU
every problem draws its variant, on a GPU it picks one of a pool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import cuattn
from bench.fuzz import masking, sharding
from cuattn import rng as contract

__all__ = ["Problem", "Variant", "draw_problem", "draw_variant"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))
WORK = 6e6  # multiplications of one product of a problem, at most; a hundredth of it in long double
LENGTHS = ((0.02, 0, 1), (0.08, 1, 2), (0.30, 2, 20), (0.40, 20, 80), (0.17, 80, 200), (0.03, 200, 600))
BIAS_KINDS = ("matrix", "row", "column", "scalar", "whole", "heads", "padding", "holes")
COMPILED_CHECKS = {"deterministic": 0.25, "shards": 0.2, "dlse": 0.15, "gradients in out_dtype": 0.5}
CHECKS = {"attention": 0.15, "twice": 0.15, "boolean": 0.2, "out": 0.15, "plan": 0.03, "mask on the device": 0.3}
VALUES = ("normal", "normal", "normal", "normal", "large", "tiny", "constant", "saturated", "zero")


@dataclass(frozen=True)
class Variant:
    """What a GPU compiles a kernel for.

    `rows` and `aligned` matter where variants are shared: few rows have kernels of their own, as have strides and
    addresses that are no multiples of 16 bytes.
    """

    dtype: np.dtype
    head_dim: int
    head_dim_v: int
    mask: str = "none"
    band: str = "none"
    bias: np.dtype | None = None
    softcap: float | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    out_dtype: np.dtype | None = None
    precision: str | None = None
    checks: frozenset[str] = frozenset()
    rows: tuple[int, int] = (1, 300)
    aligned: bool = True


@dataclass
class Problem:
    """One problem; arrays are clean and contiguous, `layouts` and `poison` say how the library gets them."""

    variant: Variant
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    bias: np.ndarray | None = None
    dlse: np.ndarray | None = None
    mask: Any = None
    visible: np.ndarray | None = None
    options: dict[str, Any] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    plan: sharding.Plan | None = None
    poison: float | None = None
    checks: set[str] = field(default_factory=set)
    features: set[str] = field(default_factory=set)

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes of o."""
        return self.do.shape[:-2]

    def keep(self, state: Any) -> tuple[np.ndarray | None, float]:
        """Return what dropout keeps, dense, by the documented bits, and its factor."""
        level = contract.threshold(self.variant.dropout_p)
        if not level:
            return None, 1.0
        sizes = self.q.shape[-2], self.k.shape[-2]
        kept = [contract.keep(state, level, b, (0, sizes[0]), (0, sizes[1])) for b in range(math.prod(self.lead))]
        return np.array(kept, bool).reshape(*self.lead, *sizes), 65536 / (65536 - level)

    def describe(self) -> str:
        """Say in one line what the problem is."""
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "bias")}
        shapes = ", ".join(f"{name} {x.shape} {x.dtype}" for name, x in arrays.items() if x is not None)
        mask = f"array {self.mask.shape}" if isinstance(self.mask, np.ndarray) else repr(self.mask)
        return f"{shapes}, mask {mask}, {self.options}, {self.layouts}, {sorted(self.features)}"


def draw_variant(rng: np.random.Generator) -> Variant:
    """Draw what a GPU compiles for."""
    dtype = DTYPES[rng.choice(4, p=(0.25, 0.25, 0.3, 0.2))]
    head_dim = _width(rng)
    head_dim_v = head_dim if rng.random() < 0.5 else 0 if rng.random() < 0.03 else _width(rng)
    kinds = ("none", "boolean", "column", "constructor", "block", "and")
    mask = str(rng.choice(kinds, p=(0.4, 0.12, 0.14, 0.14, 0.1, 0.1)))
    band = str(rng.choice(("none", "causal", "left", "right", "window"), p=(0.55, 0.2, 0.05, 0.05, 0.15)))
    bias = None if rng.random() < 0.7 else dtype if rng.random() < 0.5 else np.dtype(np.float32)
    scales = (0.3, -0.2, 0.0, 1.0, 1e-6, 4.0)
    return Variant(
        dtype,
        head_dim,
        head_dim_v,
        mask,
        band,
        bias,
        softcap=float(rng.choice((0.5, 5.0, 30.0))) if rng.random() < 0.15 else None,
        scale=float(rng.choice(scales)) if rng.random() < 0.4 else None,
        dropout_p=float(rng.choice((0.1, 0.5, 0.9, 2e-5))) if rng.random() < 0.25 else 0.0,
        out_dtype=np.dtype(np.float32) if dtype != np.float64 and rng.random() < 0.15 else None,
        precision="tf32" if dtype == np.float32 and rng.random() < 0.03 else None,
        checks=frozenset(name for name, share in COMPILED_CHECKS.items() if rng.random() < share),
        rows=((1, 17), (17, 65), (65, 400))[rng.choice(3, p=(0.15, 0.15, 0.7))],
        aligned=bool(rng.random() < 0.85),
    )


def _width(rng: np.random.Generator) -> int:
    usual = (16, 32, 64, 64, 64, 80, 96, 128, 128, 192, 256)
    return int(rng.choice(usual)) if rng.random() < 0.6 else int(rng.integers(1, 40 if rng.random() < 0.8 else 300))


def draw_problem(variant: Variant, rng: np.random.Generator, shared: bool = False) -> Problem:
    """Draw lengths, heads, values and everything else of a problem of this variant, which others may share."""
    n_queries = int(rng.integers(*variant.rows)) if shared else _length(rng)
    n_keys = n_queries if rng.random() < 0.5 else _length(rng)
    shapes = _shapes(variant, rng, n_queries, n_keys)
    values = str(rng.choice(VALUES))
    q, k, v = (_values(rng, values, shape, variant.dtype) for shape in shapes[:3])
    if values == "saturated" and q.shape == k.shape:
        k = q.copy()
    do = _values(rng, "normal", shapes[3], variant.dtype)
    problem = Problem(variant, q, k, v, do)
    problem.features = {variant.dtype.name, f"values {values}", *shapes[4]}
    if variant.head_dim != variant.head_dim_v:
        problem.features.add("d != dv")
    if 0 in (*q.shape, *k.shape, *v.shape):
        problem.features.add("zero size")
    masking.draw(problem, rng)
    _draw_bias(problem, rng)
    _draw_options(problem, rng)
    _draw_presentation(problem, rng, not shared or not variant.aligned)
    return problem


def _length(rng: np.random.Generator) -> int:
    shares, low, high = zip(*LENGTHS, strict=True)
    row = rng.choice(len(LENGTHS), p=shares)
    return int(rng.integers(low[row], high[row]))


def _shapes(variant: Variant, rng: np.random.Generator, n_queries: int, n_keys: int) -> tuple:
    """Return the shapes of q, k, v and do, and what is special about them."""
    room = WORK / 100 if variant.dtype == np.float64 else WORK
    room /= max(n_queries * n_keys * max(variant.head_dim, variant.head_dim_v), 1)
    d, dv = variant.head_dim, variant.head_dim_v
    kind = str(rng.choice(("rank 2", "heads", "batch", "grouped", "broadcast"), p=(0.1, 0.25, 0.25, 0.25, 0.15)))
    if room < 2:
        kind = "rank 2"

    def most(limit: int) -> int:
        return int(max(1, min(rng.integers(1, limit + 1), room)))

    heads = most(5) if rng.random() > 0.01 else 0
    batch = tuple(most(3) for _ in range(rng.integers(0, 3))) if heads * 9 < room else ()
    if kind == "rank 2":
        lead = lead_k = lead_v = ()
    elif kind == "grouped":
        kv_heads = most(3)
        lead, lead_k = (*batch, kv_heads * most(4)), (*batch, kv_heads)
        lead_v = lead_k
    elif kind == "broadcast":
        lead = (*batch, heads)
        lead_k, lead_v = (_broadcast(rng, lead) for _ in "kv")
        if rng.random() < 0.3:
            lead, lead_k = lead_k, lead
    else:
        lead = lead_k = lead_v = (heads,) if kind == "heads" else (*batch, heads)
    whole = (*batch, lead[-1]) if kind == "grouped" else np.broadcast_shapes(lead, lead_k, lead_v)
    shapes = (*lead, n_queries, d), (*lead_k, n_keys, d), (*lead_v, n_keys, dv), (*whole, n_queries, dv)
    return (*shapes, {kind})


def _broadcast(rng: np.random.Generator, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to `lead`."""
    shape = tuple(1 if rng.random() < 0.5 else n for n in lead)
    cut = rng.integers(0, len(shape) + 1) if rng.random() < 0.3 else 0
    return shape[cut:]


def _values(rng: np.random.Generator, kind: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if kind in ("constant", "zero"):
        return np.full(shape, 0.0 if kind == "zero" else round(rng.standard_normal(), 2), dtype)
    x = rng.standard_normal(shape, np.float32)
    if kind == "normal":
        x = np.where(rng.random(shape, np.float32) < 0.02, 4 * x, x) + 0.2 * rng.integers(0, 2)
    factor = {"large": 10.0 ** rng.integers(0, 3 if dtype == np.float16 else 5), "tiny": 1e-4, "saturated": 3.0}
    return (x * np.float32(factor.get(kind, 1.0))).clip(-6e4 if dtype == np.float16 else None, 6e4).astype(dtype)


def _draw_bias(problem: Problem, rng: np.random.Generator) -> None:
    dtype = problem.variant.bias
    if dtype is None:
        return
    lead, n_queries, n_keys = problem.lead, problem.q.shape[-2], problem.k.shape[-2]
    kind = str(rng.choice(BIAS_KINDS))
    first = lead[:-1] if lead else ()
    shape = {
        "matrix": (n_queries, n_keys), "row": (1, n_keys), "column": (n_queries, 1), "scalar": (1, 1),
        "whole": (*lead, n_queries, n_keys), "heads": (*lead[-1:], n_queries, n_keys),
        "padding": (*first, *(1 for _ in lead[-1:]), 1, n_keys), "holes": (*lead, n_queries, n_keys),
    }[kind]  # fmt: skip
    bias = rng.standard_normal(shape).astype(dtype)
    if kind == "padding":
        lowest = ml_dtypes.finfo(dtype).min if dtype == BFLOAT16 else np.finfo(dtype).min
        lengths = rng.integers(0, n_keys + 1, (*shape[:-1], 1))
        bias = np.where(np.arange(n_keys) < lengths, bias.dtype.type(0), rng.choice([lowest, -np.inf])).astype(dtype)
    elif kind == "holes" or rng.random() < 0.3:
        bias[rng.random(shape) < 0.2] = -np.inf
    problem.bias = bias
    problem.features.add(f"bias {kind}")


def _draw_options(problem: Problem, rng: np.random.Generator) -> None:
    variant, options = problem.variant, problem.options
    for name in ("softcap", "scale", "out_dtype", "precision"):
        if getattr(variant, name) is not None:
            options[name] = getattr(variant, name)
            problem.features.add(name if name != "scale" else f"scale {variant.scale:g}")
    if "grouped" in problem.features:
        options["enable_gqa"] = True
    if variant.dropout_p:
        seed = int(rng.integers(0, 2**63))
        state = cuattn.RNGState(seed, int(rng.integers(0, 2**32)))
        options["dropout_p"] = variant.dropout_p
        options["rng"] = (seed, state, np.random.default_rng(seed))[rng.integers(3)]
        problem.features.add("dropout")


def _draw_presentation(problem: Problem, rng: np.random.Generator, unaligned: bool) -> None:
    """Draw strides, poison, and what else is looked at beside the results."""
    for name in ("q", "k", "v", "do", "bias", "mask"):
        x = getattr(problem, name)
        if isinstance(x, np.ndarray) and rng.random() < 0.25:
            kind = str(rng.choice(("swapped", "negative", "step", "fortran", "spread", "unaligned")[: 5 + unaligned]))
            if kind == "spread" and x.ndim > 2 and name != "mask":
                x[...] = x[..., :1, :, :]
            problem.layouts[name] = kind
            problem.features.add(f"strides {kind}")
    if rng.random() < 0.3:
        problem.poison = float(rng.choice((np.nan, np.inf, -np.inf)))
    problem.checks = {*problem.variant.checks, *(name for name, share in CHECKS.items() if rng.random() < share)}
    problem.features.update(problem.checks - {"gradients in out_dtype", "mask on the device"})
    if "dlse" in problem.checks:
        dtype = np.float64 if problem.variant.dtype == np.float64 else np.float32
        problem.dlse = rng.standard_normal(problem.do.shape[:-1]).astype(dtype)
    if "shards" in problem.checks:
        problem.plan = sharding.draw_plan(problem, rng)
