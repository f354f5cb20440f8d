"""Score functions in the portable kernels on a GPU against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests import oracle
from tests.cuda import scores
from tests.cuda.cases import BF16, F16, Case, columns_of, oracle_options, same_bits, to_device
from tests.cuda.gpu import made
from tests.cuda.gpu import poisoned_memory as poisoned_memory
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
PLAIN = Case("plain", n_queries=150, n_keys=200)
DROPPED = {"dropout_p": 0.25, "rng": 9}
CASES = [
    PLAIN,
    PLAIN._replace(name="float16 d128 causal", dtype=F16, head_dim=128, options={"is_causal": "bottom_right"}),
    PLAIN._replace(name="column dropout", head_dim=128, mask=columns_of, options=DROPPED),
    PLAIN._replace(name="grouped window", heads=4, options={"window": (60, 20, "top_left")}),
    PLAIN._replace(name="softcap", options={"softcap": 6.0}),
    PLAIN._replace(name="d256", head_dim=256),
    Case("packed", heads=8, kv_heads=2, n_queries=3, n_keys=1500, head_dim=128),
    Case("one query", heads=4, kv_heads=4, n_queries=1, n_keys=4000, head_dim=128),
    PLAIN._replace(name="float32", dtype=FLOAT32),
    PLAIN._replace(name="float32 column dropout", dtype=FLOAT32, mask=columns_of, options=DROPPED),
    PLAIN._replace(name="float32 wide", dtype=FLOAT32, head_dim=300),
    PLAIN._replace(name="float64", dtype=FLOAT64),
    PLAIN._replace(name="float64 d128 causal dropout", dtype=FLOAT64, head_dim=128,
                   options={**DROPPED, "is_causal": "bottom_right"}),
]  # fmt: skip
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
either_order = pytest.mark.parametrize("deterministic", [False, True])


def results(problem, score, deterministic=False, kernel="sm80", **more):
    """Return o, l, m and the gradients, those by the function's arrays behind the others."""
    do, *qkv = problem.arrays()
    args = tuple(map(to_device, score.args))
    options = {name: to_device(value) for name, value in {**problem.options, **more}.items()}
    call = {**options, "kernel": kernel, "score": score.function, "score_args": args}
    forward = cuattn.forward(*qkv, **call)
    call.pop("rng", None)
    gradients = cuattn.backward(do, *qkv, forward, deterministic=deterministic, **call)
    found = [*forward[:3], *gradients[:3], *(gradients.dscore or ())]
    return [None if x is None else x.get() for x in found]


def check(problem, score, actual, **places):
    """Compare o, l, m and, if they are there, gradients with the oracle; it takes D from o, as O(N) memory asks."""
    case = problem.case
    spelled_out = {**oracle_options(case, problem.options), "score": score.of_scores(case, **places)}
    arrays = (*problem.qkv, problem.do)
    exact, textbook = (oracle.solve(*arrays, **spelled_out, dtype=low, delta_from_o=True) for low in (None, case.dtype))
    for given, name in zip(actual, ("o", "l", "m", "dq", "dk", "dv"), strict=False):
        e, t = getattr(exact, name), getattr(textbook, name)
        size = float(np.abs(e[np.isfinite(e)]).max(initial=0))
        assert_close(given, e, t, dtype=case.dtype, magnitude=64 * size, name=name)
    if len(actual) == 3:
        return
    spelled_out.pop("score")
    before = [oracle.solve(*arrays[:3], **spelled_out, dtype=low).s for low in (None, case.dtype)]
    wanted = [score.gradients(case, s, x.ds, **places) for s, x in zip(before, (exact, textbook), strict=True)]
    sizes = score.gradients(case, before[0], exact.ds, True, **places)
    for index, (e, t, size) in enumerate(zip(*wanted, sizes, strict=True)):
        if e is not None:
            # Terms of 16 bits are rounded to 2^-8 of themselves, of some thousands at random to 2^-13 of their sum.
            units = 2**10 if case.dtype.itemsize == 2 else 32
            assert_close(actual[6 + index], e, t, magnitude=units * size.max(initial=0), name=f"dscore[{index}]")


@either_order
@by_case
@pytest.mark.parametrize("name", scores.SCORES)
def test_oracle(name, case, deterministic):
    problem, score = made(case), scores.SCORES[name](case)
    check(problem, score, results(problem, score, deterministic))


@pytest.mark.parametrize("name", ["alibi", "relative_table", "row_temperature", "key_bias", "grid"])
@by_case
def test_deterministic_is_bitwise(name, case):
    problem, score = made(case), scores.SCORES[name](case)
    first = results(problem, score, True)
    same_bits(first, results(problem, score, True))


@pytest.mark.parametrize("case", [PLAIN, PLAIN._replace(dtype=FLOAT32)], ids=["bfloat16", "float32"])
def test_invisible_values_and_slopes_may_be_nan(case):
    problem = made(case._replace(n_queries=200, options={"is_causal": True}))
    score = scores.roots(problem.case)
    check(problem, score, results(problem, score))


def test_both_directions_make_the_same_scores():
    """Where every row sees one key its probability is 1, if the backward finds the very score that was the maximum."""
    case = Case("diagonal", FLOAT32, n_queries=150, n_keys=150, options={"window": (0, 0)})
    problem, table = made(case), np.random.default_rng(3).normal(size=299)
    for function in (
        lambda s, b, h, i, j, t: s * 1e4 + t[i - j + 149] * 1e5 * (i + 1.5),
        lambda s, b, h, i, j, t: s + t[i - j + 149] * 1e5 * (i + 1.5),
        lambda s, b, h, i, j, t: 1e5 * np.tanh(s * t[i - j + 149]) + s * s * (j + 0.3),
    ):
        found = results(problem, scores.Score(function, (table.astype(np.float32),)), True)
        np.testing.assert_allclose(found[5], problem.do, rtol=1e-6)


def test_a_number_changes_without_another_kernel():
    problem = made(PLAIN)
    for cap in (2.0, 8.0, 2.0):
        score = scores.softcap(PLAIN)._replace(args=(cap,))
        check(problem, score, results(problem, score))


def test_dtypes_of_arguments():
    for dtype in (F16, BF16, FLOAT32, FLOAT64):
        problem, score = made(PLAIN), scores.alibi(PLAIN)
        score = score._replace(args=(score.args[0].astype(dtype),))
        actual = results(problem, score)
        assert actual[6].dtype == dtype
        check(problem, score, actual)


def test_a_part_has_global_indices():
    """A part of a batch, of the heads, rows and keys; and one whose rows and keys come in pieces."""
    case = Case("part", n_queries=64, n_keys=96, batch=(2,), heads=2)
    problem = made(case)
    whole = case._replace(n_queries=500, n_keys=500, heads=5, batch=(4,))
    for name in ("relative_table", "key_bias", "row_temperature", "alibi"):
        score = scores.SCORES[name](whole)
        origin = cuattn.Origin(batch=2, head=3, heads=5, row=100, key=300)
        found = results(problem, score, origin=origin)
        check(problem, score, found, rows=100, keys=300, batch=2, head=3)
        pieces = cuattn.Origin(row=((0, 7), (30, 200)), key=((0, 5), (50, 301)))
        rows = np.r_[7:37, 200:234].astype(np.int32)
        keys = np.r_[5:55, 301:347].astype(np.int32)
        check(problem, score, results(problem, score, origin=pieces), rows=rows, keys=keys)
