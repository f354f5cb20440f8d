"""The bound on scores, and the forward's way through chunks that it spares the search for a maximum."""

import importlib
import math
import warnings
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.cpu.bound import WINDOW, longest
from cuattn.cpu.exponent import UNIT
from cuattn.cpu.scores import Scores
from tests.cpu.sizes import block_sizes, forced
from tests.strategies import DTYPES, cases, normal
from tests.test_api import check_forward

forward_module = importlib.import_module("cuattn.cpu.forward")
BLIND = mock.patch.object(Scores, "span", lambda self, reach: math.inf)  # no bound is ever known


def searches():
    """Count the chunks whose maxima decide about references, in ``.call_count``."""
    return mock.patch.object(forward_module._Worker, "_move", autospec=True, side_effect=forward_module._Worker._move)


def arguments(case):
    (q, k, v), options = case.arguments()
    if options.get("dropout_p"):
        options["rng"] = cuattn.RNGState(5, 0)
    return (q, k, v), options


@settings(max_examples=60)
@given(case=cases(max_length=200), sizes=block_sizes)
def test_the_bound_changes_no_bit(case, sizes):
    arrays, options = arguments(case)
    with forced(*sizes):
        bounded = cuattn.forward(*arrays, **options)
        alone = cuattn.attention(*arrays, **options)
        with BLIND:
            searched = cuattn.forward(*arrays, **options)
            searched_alone = cuattn.attention(*arrays, **options)
    for a, b in zip(bounded[:3], searched[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(alone, bounded.o)
    np.testing.assert_array_equal(alone, searched_alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("factor", "looks"), [(0.99, False), (1.01, True), (40.0, True)])
def test_both_sides_of_the_border_keep_the_rule(dtype, factor, looks):
    """One row and one key reach the bound exactly: their score is as long as Cauchy and Schwarz let it be."""
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (2, 90, 16), dtype) for _ in range(3))
    q[:, 7] = k[:, 11] = 6
    lengths = (float(np.sqrt((x.astype(np.float64) ** 2).sum(-1).max())) for x in (q, k))
    scale = factor * WINDOW / (math.prod(lengths) * UNIT)
    case = Case(q, k, v, scale)
    with forced(16, 32, 2, 2, 100), searches() as move:
        fwd = cuattn.forward(q, k, v, scale=scale)
    assert (move.call_count > 0) == looks
    check_forward(case, fwd)
    np.testing.assert_array_equal(cuattn.attention(q, k, v, scale=scale), cuattn.forward(q, k, v, scale=scale).o)


@pytest.mark.parametrize(("chunks_of_panel", "n_keys"), [(100, 192), (100, 190), (1, 192)])
def test_all_keys_in_one_list_of_calls_change_no_bit(chunks_of_panel, n_keys):
    """One panel of whole tiles is gone through without a look between its chunks."""
    rng = np.random.default_rng(4)
    q, k, v, do = (normal(rng, (2, n, 16), np.float32) for n in (150, n_keys, n_keys, 150))
    with forced(16, 32, 3, 2, chunks_of_panel, workers=2):
        alone, fwd = cuattn.attention(q, k, v), cuattn.forward(q, k, v)
        grads = cuattn.backward(do, q, k, v, fwd)
        with BLIND:
            searched = cuattn.forward(q, k, v)
            searched_grads = cuattn.backward(do, q, k, v, fwd)
    np.testing.assert_array_equal(alone, searched.o)
    for a, b in zip((*fwd[:3], *grads[:3]), (*searched[:3], *searched_grads[:3]), strict=True):
        np.testing.assert_array_equal(a, b)


class Case:
    """As much of a case of the strategies as the check of a forward needs."""

    def __init__(self, q, k, v, scale):
        self.q, self.k, self.v, self._scale = q, k, v, scale

    def reference(self):
        return {"scale": self._scale}


def test_keys_that_grow_from_panel_to_panel_end_the_bound():
    """The first panels are bounded, the last is not: references move after chunks that nobody looked at."""
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, (1, 300, 16), np.float32) for _ in range(3))
    k[:, 200:] *= 25
    visible = rng.random((300, 300)) < 0.5
    visible[40:60, :200] = False  # rows that see nothing before
    visible[70:80] = False  # or nothing at all
    with forced(32, 32, 2, 1, 2), searches() as move:
        fwd = cuattn.forward(q, k, v, mask=visible)
    assert move.call_count > 0
    with forced(32, 32, 2, 1, 2), BLIND:
        other = cuattn.forward(q, k, v, mask=visible)
    for a, b in zip(fwd[:3], other[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    case = Case(q, k, v, None)
    case.reference = lambda: {"visible": visible}
    check_forward(case, fwd)


@given(
    where=st.sampled_from("qkv"),
    value=st.sampled_from((np.nan, np.inf, -np.inf, 1e30, -3e38, 1e-30)),
    softcap=st.sampled_from((None, 10.0)),
    masked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_not_a_common_number_takes_the_same_way_as_ever(where, value, softcap, masked, seed):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal((2, 70, 8)).astype(np.float32) for name in "qkv"}
    arrays[where][0, rng.integers(70), rng.integers(8)] = value
    visible = rng.random((70, 70)) < 0.7
    visible[5:9] = False
    options = {"softcap": softcap, "mask": visible if masked else None}
    with forced(16, 16, 2, 2, 1), warnings.catch_warnings():
        warnings.simplefilter("error")
        fwd = cuattn.forward(*arrays.values(), **options)
        alone = cuattn.attention(*arrays.values(), **options)
        with BLIND:
            other = cuattn.forward(*arrays.values(), **options)
    for a, b in zip(fwd[:3], other[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(alone, fwd.o)
    if masked:
        assert not fwd.l[:, 5:9].any() and (fwd.m[:, 5:9] == -np.inf).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("exponent", [-300, -30, 0, 18])
def test_a_length_is_never_less_than_the_true_one(dtype, exponent):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((200, 64)) * 10.0**exponent).astype(dtype)
    true = float(np.sqrt((x.astype(np.longdouble) ** 2).sum(1)).max())
    found = longest(np.einsum("ij,ij->i", x, x), 64)
    assert true <= found <= 1.001 * true + 10 * math.sqrt(np.finfo(dtype).tiny)
    for bad in (np.nan, np.inf):
        x[3, 5] = bad
        assert not math.isfinite(longest(np.einsum("ij,ij->i", x, x), 64))
