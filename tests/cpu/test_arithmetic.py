"""Exponentials, references and the bound of scores (cuattn.cpu.arithmetic)."""

import math

import numpy as np
import pytest

from cuattn.cpu.arithmetic import WINDOW, exponential, exponentiate, hide, longest_of, lowest, relative, row_weights


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponentials_err_by_the_rounding_of_their_argument(dtype):
    x = np.linspace(-WINDOW, WINDOW, 1001).astype(dtype)
    eps = np.finfo(dtype).eps
    error = np.abs(exponential(x) / np.exp(x.astype(np.longdouble)) - 1)
    assert (error <= eps * (2 + np.abs(x))).all()
    np.testing.assert_array_equal(exponential(x), exponentiate(x.copy()))
    assert exponential(dtype(0)) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_lowest_score_has_a_normal_exponential_next_to_nothing(dtype):
    value = float(exponential(dtype(lowest(np.dtype(dtype)))))
    tiny = float(np.finfo(dtype).tiny)
    assert tiny <= value < 1e3 * tiny


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_far_below_their_reference_weigh_nothing_and_others_what_they_ever_do(dtype):
    x = np.array([-np.inf, -1e30, lowest(np.dtype(dtype)) - 1, -50, -3, 0, WINDOW], dtype)
    found = relative(x.copy())
    np.testing.assert_array_equal(found[:3], 0)
    np.testing.assert_array_equal(found[3:], exponential(x[3:]))
    assert np.isnan(relative(np.array([np.nan], dtype))).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("exponent", [-300, -30, 0, 18])
def test_a_length_is_never_less_than_the_true_one(dtype, exponent):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((200, 64)) * 10.0**exponent).astype(dtype)
    true = float(np.sqrt((x.astype(np.longdouble) ** 2).sum(1)).max())
    found = longest_of(x)
    assert true <= found <= 1.001 * true + 10 * math.sqrt(np.finfo(dtype).tiny)
    for bad in (np.nan, np.inf):
        x[3, 5] = bad
        assert not math.isfinite(longest_of(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hiding_selects_whatever_the_hidden_elements_hold(dtype):
    rng = np.random.default_rng(0)
    seen = rng.random((32, 16)) < 0.5
    shown = np.where(seen, -1, 0).astype(f"i{np.dtype(dtype).itemsize}").view(f"u{np.dtype(dtype).itemsize}")
    tiles = rng.standard_normal((3, 32, 16)).astype(dtype)
    for value in (-86.0, -np.inf, 0.0):
        hidden = np.where(seen, tiles, np.nan)
        hide(hidden, shown, value)
        np.testing.assert_array_equal(hidden, np.where(seen, tiles, dtype(value)))


def test_row_weights_make_probabilities_of_exponentials():
    m, l = np.array([[3.0, 100.0, -np.inf, -90.0]], np.float32), np.array([[2.0, 1.0, 0.0, 5.0]], np.float32)
    do, o = np.ones((1, 4, 2), np.float32), np.full((1, 4, 2), 0.5, np.float32)
    do[0, 2] = np.nan
    found = row_weights({"do": do, "o": o, "l": l, "m": m, "dlse": np.full((1, 4), 0.25, np.float32)})
    np.testing.assert_array_equal(found.reference, [[0, 100, 0, -90]])
    np.testing.assert_array_equal(found.empty, [[False, False, True, False]])
    np.testing.assert_allclose(found.factors * exponential(m - found.reference) * l, [[1, 1, 0, 1]], rtol=1e-6)
    np.testing.assert_array_equal(found.delta, [[0.75, 0.75, 0, 0.75]])
    plain = row_weights({"do": do[:, :1], "o": o[:, :1], "l": l[:, :1], "m": m[:, :1]})
    assert plain.reference is None and plain.empty is None
