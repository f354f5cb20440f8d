"""Hopper's gradients along tangents on a GPU against the textbook's derivatives."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.cuda.cases import (
    F16,
    Case,
    blocks_of,
    columns_of,
    dense_of,
    oracle_options,
    same_bits,
    sized,
    to_device,
    visible,
)
from tests.derivatives import TANGENTS, Known

pytestmark = pytest.mark.gpu

CAUSAL = {"is_causal": "top_left"}
ONE = {"batch": (1,)}  # the textbook takes seconds of a CPU
CASES = [
    sized("d64", 300, 333, heads=1, kv_heads=1),
    sized("d128", 300, 333, 128, dtype=F16, **ONE),
    sized("d64 causal", 400, 400, options=CAUSAL, **ONE),
    sized("d128 causal", 400, 400, 128, options=CAUSAL, **ONE),
    sized("boolean", 300, 400, mask=dense_of, **ONE),
    sized("columns", 300, 400, 128, mask=columns_of, **ONE),
    sized("grouped", 300, 333, heads=4, kv_heads=2, options={"is_causal": "bottom_right"}, **ONE),
    sized("blocks", 300, 400, 128, mask=blocks_of(24, 40), **ONE),
    Case("d 96 dv 40", head_dim=96, head_dim_v=40, options={"is_causal": "bottom_right", "scale": -0.3}, **ONE),
    sized("dropout", 300, 400, options={"dropout_p": 0.3, "rng": 42}, **ONE),
    sized("columns d64", 300, 400, dtype=F16, mask=columns_of, **ONE),
    sized("d128 dropout", 300, 300, 128, options={"dropout_p": 0.3, "rng": 42, **CAUSAL}, **ONE),
    sized("window", 400, 400, options={"window": (99, 40, "top_left")}, **ONE),
    sized("softcap", 300, 400, options={"softcap": 3.0}, **ONE),
    sized("d128 softcap", 400, 400, 128, dtype=F16, options={"softcap": 3.0, **CAUSAL}, **ONE),
    sized("sharp", 300, 400, options={"scale": 8.0}, **ONE),
]


def arrays_of(case: Case):
    """Return do, q, k, v, tangents of the last three, and options."""
    qkv, options = case.arrays()
    rng = np.random.default_rng(1)
    do_shape = (*qkv["q"].shape[:-1], qkv["v"].shape[-1])
    do, *tangents = (
        rng.standard_normal(shape).astype(case.dtype) for shape in (do_shape, *(x.shape for x in qkv.values()))
    )
    return [do, *qkv.values()], tangents, options


def double_backward(args, tangents, options, **more):
    """Return ddo, dq, dk, dv as NumPy arrays."""
    options = {name: to_device(x) for name, x in options.items()}
    args, tangents = ([None if x is None else to_device(x) for x in some] for some in (args, tangents))
    fwd = cuattn.forward(*args[1:], **options)
    options.pop("rng", None)
    return [x.get() for x in cuattn.double_backward(*tangents, *args, fwd, kernel="sm90", **options, **more)[:4]]


def check(case: Case, args, tangents, options, *, ways=({},)):
    group = case.heads // case.kv_heads
    names = "do", "q", "k", "v", "tq", "tk", "tv"
    whole = {
        name: np.repeat(x, group, axis=-3) if x is not None and name[-1] in "kv" else x
        for name, x in zip(names, (*args, *tangents), strict=True)
    }
    known = Known(whole, oracle_options(case, options), samples=1)
    for part in ("exact", "rough") if group > 1 else ():
        sums = {name: getattr(known, part)._asdict()[name] for name in ("tdk", "tdv")}
        sums = {name: x.reshape(*x.shape[:-3], case.kv_heads, group, *x.shape[-2:]).sum(-3) for name, x in sums.items()}
        setattr(known, part, getattr(known, part)._replace(**sums))
    for way in ways:
        found = double_backward(args, tangents, options, **way)
        known.check(("to", *TANGENTS[:3]), found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_double_backward(case):
    check(case, *arrays_of(case), ways=[{"deterministic": x} for x in (False, True)])


@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tangents_that_are_not_given(head_dim, given):
    case = sized("some", 200, 260, head_dim, **ONE)
    args, tangents, options = arrays_of(case)
    check(case, args, [x if name in given else None for name, x in zip("qkv", tangents, strict=True)], options)


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[5], CASES[11]], ids=lambda case: case.name)
def test_results_are_the_same_every_time(case):
    args, tangents, options = arrays_of(case)
    runs = [double_backward(args, tangents, options, deterministic=True) for _ in range(3)]
    same_bits(runs[0], runs[1])
    same_bits(runs[0], runs[2])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("options", "mask"),
    [({"is_causal": "top_left"}, None), ({"window": (30, 30, "top_left")}, None), ({}, columns_of), ({}, dense_of)],
    ids=["causal", "window", "columns", "boolean"],
)
def test_what_nobody_sees_does_not_matter(head_dim, options, mask):
    """Keys that no row sees, and rows that see nothing, hold NaN."""
    for n, m in ((200, 400), (400, 200)):
        case = sized("hidden", n, m, head_dim, options=options, mask=mask)
        args, tangents, options = arrays_of(case)
        clean = double_backward(args, tangents, options)
        seen = visible(case, options).reshape(-1, n, m)
        lost = {"q": ~seen.any((0, 2)), "k": ~seen.any((0, 1))}
        assert n > m or lost["k"].any()
        for name, arrays in (("q", (args[0], args[1], tangents[0])), ("k", (args[2], args[3], *tangents[1:]))):
            for x in arrays:
                x[..., lost[name], :] = np.nan
        poisoned = double_backward(args, tangents, options, deterministic=False)
        for a, b in zip(clean, poisoned, strict=True):
            assert np.isfinite(b.astype(np.float32)).all()
            np.testing.assert_allclose(b.astype(np.float32), a.astype(np.float32), rtol=0.05, atol=0.05)
