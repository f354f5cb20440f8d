"""Derivatives against finite differences in float64, again differentiated, and what is chosen away."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.tracing.bound import Bound
from cuattn.tracing.derivatives import addend, along, derivative, split_visible, weights
from cuattn.tracing.functions import SCORE, trace
from cuattn.tracing.graph import order, variable
from cuattn.tracing.values import evaluate
from tests.tracing import expressions as ex

randoms = st.randoms(use_true_random=False)
STEP = 2.0**-14


def slope_of(f, x):
    """Return (f(x + t) - f(x - t)) / 2 t, extrapolated, and an estimate of its error."""
    with np.errstate(all="ignore"):
        half, whole = ((f(x + t) - f(x - t)) / (2 * t) for t in (STEP / 2, STEP))
        size = np.abs(f(x)) + np.abs(half) + 1
        return half + (half - whole) / 3, np.abs(half - whole) + 64 * np.finfo(float).eps / STEP * size


def agrees(found, f, x, text):
    """Assert that a derivative is what finite differences say, but for few elements at which a kink may lie."""
    wanted, error = slope_of(f, x)
    found = np.broadcast_to(found, wanted.shape)
    near = (np.abs(found - wanted) <= error) | ~np.isfinite(wanted)
    assert near.mean() > 0.995, (text, found[~near][:3], wanted[~near][:3])
    assert not np.isnan(found[np.isfinite(wanted)]).any(), text


@given(random=randoms)
def test_slopes_and_their_slopes_are_those_of_finite_differences(random):
    text = ex.number(random, 3)
    variables, bound = ex.grid(np.float64), ex.traced(text)
    root = bound.root
    for _ in range(2):
        at = lambda s, root=root: evaluate(bound.of(root), {**variables, "s": s}, np.float64)  # noqa: E731
        root = derivative(root)
        found = evaluate(bound.of(root), variables, np.float64)
        agrees(found, at, variables["s"] + np.zeros(ex.LIMITS), text)


@given(random=randoms)
def test_weights_give_the_gradients_of_arrays(random):
    """The sum of a cotangent times the weights, by element, is the derivative along any change of the array."""
    text = f"{ex.number(random, 3)} + s * table[h, i - j + 16]"
    variables, bound = ex.grid(np.float64), ex.traced(text)
    cotangent = np.random.default_rng(1).normal(size=ex.LIMITS)
    for slot, array in enumerate(bound.arrays):
        if array.dtype.kind != "f":
            continue
        gradient = np.zeros(array.shape)
        for _, indices, weight in weights(bound.root, slot):
            places = [evaluate(bound.of(x), variables, np.float64) for x in indices]
            values = cotangent * evaluate(bound.of(weight), variables, np.float64)
            np.add.at(gradient, tuple(np.broadcast_to(x, ex.LIMITS) for x in places), values)
        direction = np.random.default_rng(2).normal(size=array.shape)

        def moved(t, slot=slot, array=array, direction=direction):
            arrays = [array + t * direction if k == slot else x for k, x in enumerate(bound.arrays)]
            return (cotangent * evaluate(Bound(bound.root, tuple(arrays), bound.numbers), variables, np.float64)).sum()

        wanted, _ = slope_of(moved, 0.0)
        size = np.abs(gradient * direction).sum() + 1
        assert abs((gradient * direction).sum() - wanted) < 1e-4 * size, text
        tangent = along(bound.root, {slot: len(bound.arrays)})
        both = Bound(tangent, (*bound.arrays, direction), bound.numbers)
        total = (cotangent * evaluate(both, variables, np.float64)).sum()
        np.testing.assert_allclose(total, (gradient * direction).sum(), rtol=1e-9, atol=1e-9 * size)


@pytest.mark.parametrize(
    ("text", "slope"),
    [
        ("np.where(i > 5, np.sqrt(s), s)", 1),
        ("np.sqrt(np.where(i > 5, s, 0))", 0),
        ("np.where(i > 5, s / s, 2) * s", 2),
        ("np.maximum(s, 0)", 1),
        ("np.maximum(0, s)", 0),
        ("np.minimum(s, 0) * 2", 2),
        ("abs(s)", 0),
        ("np.clip(s, 0, 1)", 1),
        ("np.floor(s) + np.rint(s) + np.sign(s)", 0),
        ("s ** 0", 0),
        ("s ** 1", 1),
        ("np.power(s, 2)", 0),
        ("np.hypot(s, 0)", 0),
        ("np.logaddexp(s, 0)", 0.5),
        ("np.logaddexp(s, -np.inf)", 1),
        ("s % 3", 1),
        ("-s - s", -2),
        ("np.select([i > 3, i < 9], [s, 3 * s])", 3),
    ],
)
def test_at_zero(text, slope):
    """What is not chosen does not count, and ties are decided as documented: s = 0, i = 0."""
    bound = ex.traced(text)
    found = evaluate(bound.of(derivative(bound.root)), {"s": np.zeros(1), "i": np.zeros(1, np.int32)}, np.float64)
    assert float(np.ravel(found)[0]) == slope


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("s + heads[h] * (j - i)", "heads[h] * (j - i)"),
        ("1 - (heads[h] - s)", "1 - heads[h]"),
        ("s", "0.0"),
        ("np.where(i > j, s + 1, s - i)", "np.where(i > j, 1, -i)"),
        ("2 * s", None),
        ("s * 1 + np.tanh(s)", None),
        ("np.maximum(s, 0)", None),
        ("0.5 * s + 0.5 * s", None),
        ("h * 0.0", None),
    ],
)
def test_what_is_added_is_known(text, rest):
    bound, found = ex.traced(text), addend(ex.traced(text).root)
    assert (found is None) == (rest is None)
    if rest is not None:
        variables = ex.grid(np.float64)
        wanted = ex.plain(rest, **variables)
        np.testing.assert_allclose(evaluate(bound.of(found), variables, np.float64) + 0 * wanted, wanted + 0 * wanted)
        assert "s" not in [node.value for node in order(found) if node.op == "variable"]


def test_a_root_that_hides_is_split_off():
    bound = ex.traced("np.where(i < j, -np.inf, np.where(doc[b, i] == 2, s / 2, -np.inf))")
    visible, score = split_visible(bound.root)
    assert score is ex.traced("s / 2").root
    assert visible is not None and visible.kind == "b"
    assert (
        split_visible(ex.traced("np.where(s > 0, s, -np.inf)").root)[0] is None
    )  # a condition on s is part of the score
    assert split_visible(score) == (None, score)


def test_a_thousand_choices_are_no_trouble():
    def score(s, b, h, i, j):
        for k in range(1100):
            s = np.where(i == k, s * 1.5, np.where(j == k, 0.0, s))
        return np.tanh(s)

    bound = trace(score).bind()
    found = evaluate(
        bound.of(derivative(bound.root)), {"s": np.ones(1), "i": np.array([7]), "j": np.array([8])}, np.float64
    )
    assert found == 0


def test_derivatives_by_parameters_are_not_taken():
    traced = trace(lambda s, b, h, i, j, p: p * s, SCORE, (2.0,))
    assert derivative(traced.root) is traced.root.args[0]
    assert derivative(variable("s")).value == 1.0
