"""Graphs on NumPy: the function's own values, in the accumulator's precision, without leaks."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.tracing.bound import ANY_LENGTH, facts
from cuattn.tracing.functions import MASK, SCORE, trace
from cuattn.tracing.values import Program, evaluate
from tests.tolerances import assert_close
from tests.tracing import expressions as ex

randoms = st.randoms(use_true_random=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(random=randoms)
def test_scores_hold_the_rule(dtype, random):
    text = ex.number(random, 4)
    variables = ex.grid(dtype)
    exact = np.broadcast_to(ex.plain(text, **variables), ex.LIMITS)
    rounded, largest = ex.textbook(text, dtype, **variables)
    for limits in (ex.LIMITS, ANY_LENGTH):
        found = evaluate(ex.traced(text), variables, dtype, limits)
        assert found.dtype == dtype
        actual, wanted = np.broadcast_to(found, ex.LIMITS), np.broadcast_to(rounded, ex.LIMITS)
        assert_close(actual, exact, wanted, magnitude=4 * largest, name=text)


@given(random=randoms)
def test_integers_and_booleans_are_exact(random):
    text = ex.condition(random, 3)
    variables = ex.grid()
    del variables["s"]
    exact = np.broadcast_to(ex.plain(text, MASK, **variables), ex.LIMITS)
    for limits in (ex.LIMITS, ANY_LENGTH):
        found = evaluate(ex.traced(text, MASK), variables, limits=limits)
        assert found.dtype == bool
        np.testing.assert_array_equal(np.broadcast_to(found, ex.LIMITS), exact, text)


@given(random=randoms)
def test_operands_are_left_alone_and_results_written_where_wanted(random):
    text = f"s + {ex.number(random, 3)}"
    variables = ex.grid()
    bound, before = ex.traced(text), variables["s"].copy()
    found = evaluate(bound, variables)
    np.testing.assert_array_equal(variables["s"], before)
    out = np.empty_like(before)
    assert evaluate(bound, variables, out=out) is out
    np.testing.assert_array_equal(out, found)
    assert evaluate(bound, variables, out=variables["s"]) is variables["s"]  # scores are replaced in place
    np.testing.assert_array_equal(variables["s"], found)


def test_what_is_not_chosen_leaves_nothing(recwarn):
    def score(s, b, h, i, j):
        return np.where(i > j, np.log(j - i) / (i - i), np.where(i == j, s, np.exp(1e9 * s * s + 1e9)))

    found = evaluate(
        trace(score).bind(), {"s": np.ones((2, 2), np.float32), "i": np.array([[0], [1]]), "j": np.array([0, 1])}
    )
    assert np.isnan(found[1, 0]) and found[0, 0] == found[1, 1] == 1 and found[0, 1] == np.inf
    assert not recwarn


def test_integers_beyond_int32_are_exact():
    i = np.array([2**31 - 1], np.int32)
    for text, wanted in (
        ("i + i", 2**32 - 2),
        ("i * i", (2**31 - 1) ** 2),
        ("(i * i) % 1000", (2**31 - 1) ** 2 % 1000),
    ):
        bound = ex.traced(f"({text}) == {wanted}", MASK)
        assert evaluate(bound, {"i": i}).all(), text
    wrapped = ((2**31 - 1) ** 3 + 2**63) % 2**64 - 2**63
    assert evaluate(ex.traced(f"i * i * i == {wrapped}", MASK), {"i": i}).all()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("i // (i - i)", 0),
        ("i % (i - i)", 0),
        ("np.fmod(i, i - i)", 0),
        ("-7 // (j - 1)", -4),
        ("-7 % (j - 1)", 1),
        ("(-i - 2) // 3", -3),
        ("1 << (i + 60)", 0),
        ("-1 >> (i + 60)", -1),
        ("(s * 0 - 2.5).astype(int)", -2),
        ("((i - 4) * 41 / 41.0).astype(int) + ((i - 4) * 47 / 47).astype(int)", 2),
        ("(s / (j - j)).astype(int) - 1", 2147483646),
        ("((s - s) / (j - j)).astype(int)", 0),
        ("(i > 2).astype(int)", 1),
        ("np.where(i > 2, 3, 4)", 3),
        ("2 ** (i - 3)", 4),
    ],
)
def test_integers_have_one_meaning(text, wanted):
    variables = {"s": np.float32(1), "i": np.array([5]), "j": np.array([3])}
    assert evaluate(ex.traced(f"({text}) + 0.0"), variables) == wanted


def test_indices_wrap_and_are_clamped():
    row = np.arange(4.0)
    bound = trace(lambda s, b, h, i, j: s + row[i - 9]).bind()
    i = np.arange(20, dtype=np.int32)
    wanted = row[np.clip(np.where(i - 9 < 0, i - 9 + 4, i - 9), 0, 3)]
    for limits in (ANY_LENGTH, (1, 1, 20, 1)):
        np.testing.assert_array_equal(evaluate(bound, {"s": np.float32(0), "i": i}, limits=limits), wanted)


def test_short_arrays_are_read_in_the_accumulator():
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        table = np.array([0.5, 1.25, 3]).astype(dtype)
        for made in (
            trace(lambda s, b, h, i, j, t: s + t[h], SCORE, (table,)).bind((table,)),
            trace(lambda s, b, h, i, j, t=table: s + t[h]).bind(),
        ):
            found = evaluate(made, {"s": np.ones(3, np.float32), "h": np.arange(3)})
            assert found.dtype == np.float32 and found.tolist() == [1.5, 2.25, 4]


def test_an_array_without_elements_reads_as_zero():
    nothing = np.zeros((0, 3))
    bound = trace(lambda s, b, h, i, j: s + nothing[i, j]).bind()
    assert evaluate(bound, {"s": np.ones(2, np.float32)}).tolist() == [1, 1]


def test_parameters_are_rounded_once():
    """What depends on parameters alone is computed in float64: 1 / (3 * p) here."""
    bound = trace(lambda s, b, h, i, j, p: s / (3 * p), SCORE, (0.1,)).bind((0.1,))
    assert evaluate(bound, {"s": np.float32(1)}) == np.float32(1 / (3 * 0.1))


def test_several_roots_share_their_parts():
    bound = ex.traced("np.tanh(s) * i")
    tanh = bound.root.args[0]
    program = Program((bound.root, tanh), np.dtype(np.float32), facts(bound, ex.LIMITS))
    variables = ex.grid()
    product, factor = program(variables, bound)
    np.testing.assert_array_equal(product, factor * variables["i"].astype(np.float32))
