"""Hopper's kernel along tangents on a GPU against the float64 textbook."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.errors import UnsupportedError
from tests.cuda.cases import BF16, CASES, F16, Case, columns_of, oracle_options, same_bits, sized, to_device
from tests.derivatives import JVP, Known, results_of, tangents_of
from tests.strategies import cases
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu


OWN = [
    sized("long", 150, 2200, 128, batch=(1,)),
    sized("long causal", 900, 900, batch=(1,), heads=1, kv_heads=1, options={"is_causal": True}),
    sized("many tiles", 130, 140, 128, batch=(1,), heads=70, kv_heads=35),
    sized("many tiles column", 140, 150, batch=(1,), heads=70, kv_heads=70, mask=columns_of),
    sized("rows before the first", 180, 180, batch=(1,), heads=70, kv_heads=70, options={"is_causal": True}),
    Case("dv 128", head_dim_v=128),
    Case("d 128 dv 32", head_dim=128, head_dim_v=32),
]
TAKEN = [
    case
    for case in CASES
    if case.dtype in (BF16, F16)
    and max(case.head_dim, case.head_dim_v or 0) <= 128
    and (case.head_dim_v or case.head_dim) % 8 == 0
    and case.n_keys
    and case.head_dim_v != 0
] + OWN


def solved(case, names=("q", "k", "v", "bias"), **more):
    """Return the results of a case and what they are compared with."""
    arrays, options = case.arrays()
    operands = {**arrays, "bias": options.get("bias")}
    tangents = tangents_of(operands, names)
    given = {name: to_device(x) for name, x in {**options, **tangents}.items()}
    found = cuattn.jvp(*map(to_device, arrays.values()), kernel="sm90", **given, **more)
    return results_of(found), Known({**operands, "do": None, **tangents}, oracle_options(case, options))


@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_results_match_the_textbook(case):
    found, known = solved(case)
    known.check(JVP, found)


@settings(max_examples=12)  # each is compiled for its features
@given(case=cases(dtypes=(BF16, F16)), names=st.sets(st.sampled_from(("q", "k", "v", "bias")), min_size=1))
def test_any_problem_matches_the_textbook(case, names):
    operands = {"q": case.q, "k": case.k, "v": case.v, "bias": case.bias}
    tangents = tangents_of(operands, names)
    given = {name: to_device(x) for name, x in {**operands, **tangents, **case.options}.items()}
    try:
        found = cuattn.jvp(*[given.pop(name) for name in "qkv"], kernel="sm90", **given)
    except UnsupportedError:
        assume(False)
    Known({**operands, "do": None, **tangents}, case.reference()).check(JVP, results_of(found))


@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "kv"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_each_tangent(names, head_dim):
    found, known = solved(Case("tangents", head_dim=head_dim, options={"is_causal": "top_left"}), names)
    known.check(JVP, found)


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_tangents_that_hardly_differ_along_rows(shift):
    """Keys that move alike move no weights: what is weighed is told apart from their common tangent."""
    import cupy

    rng = np.random.default_rng(3)
    q, k, v, t = (rng.standard_normal((1, 2, 500, 64)).astype(F16) for _ in range(4))
    tk = (t + shift).astype(F16)
    arrays = {"q": q, "k": k, "v": v, "do": None, "bias": None, "tk": tk}
    found = cuattn.jvp(*map(cupy.asarray, (q, k, v)), tk=cupy.asarray(tk), kernel="sm90")
    Known(arrays, {}).check(JVP, results_of(found))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_score_functions_whose_arguments_move(head_dim):
    """Against the CPU in float64."""
    arrays, _ = Case("scored", n_queries=150, n_keys=200, head_dim=head_dim).arrays()
    arrays |= tangents_of(arrays, "qkv")
    rng = np.random.default_rng(2)
    args = [rng.standard_normal(n) for n in ((2, 150), (2, 81), (2, 150), (2, 81))]

    def score(s, b, h, i, j, rows, table):
        t = table[h, np.clip(i - j, -40, 40) + 40]
        return s * (1 + 0.5 * np.tanh(rows[h, i])) + t * t

    def results(put, dtype, **options):
        given = {name: put(x.astype(dtype)) for name, x in arrays.items()}
        kind = np.float64 if dtype == np.float64 else np.float32
        args_, tangents = (tuple(put(x.astype(kind)) for x in args[n : n + 2]) for n in (0, 2))
        found = cuattn.jvp(
            *[given.pop(name) for name in "qkv"],
            **given,
            score=score,
            score_args=args_,
            tscore_args=tangents,
            **options,
        )
        return [found.o, found.to, found.tlse]

    exact, rough = (results(lambda x: x, dtype) for dtype in (np.float64, BF16))
    for e, r, x in zip(exact, rough, results(to_device, BF16, kernel="sm90"), strict=True):
        assert_close(x.get(), e, r, magnitude=64 * float(np.abs(e).max()))


def test_unrounded_results():
    found, known = solved(Case("unrounded", head_dim=128), out_dtype=np.float32)
    known.check(JVP, found, dtype=BF16)


def test_hidden_keys_leak_nothing():
    import cupy

    rng = np.random.default_rng(0)
    arrays = [cupy.asarray(rng.standard_normal((1, 2, 300, 64)).astype(np.float16)) for _ in range(6)]
    visible = cupy.asarray(np.arange(300) < 200)[None, None, None]
    visible = cupy.broadcast_to(visible, (1, 1, 300, 300))
    plain = cuattn.jvp(*arrays[:3], tq=arrays[3], tk=arrays[4], tv=arrays[5], mask=visible, kernel="sm90")
    for x in (arrays[1], arrays[2], arrays[4], arrays[5]):
        x[:, :, 200:] = np.nan
    again = cuattn.jvp(*arrays[:3], tq=arrays[3], tk=arrays[4], tv=arrays[5], mask=visible, kernel="sm90")
    same_bits(results_of(plain), results_of(again))
