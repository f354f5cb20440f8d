"""Bounds of tiles hold for every element, and resolve what they should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.tracing.extremes import described
from cuattn.tracing.functions import MASK, trace
from cuattn.tracing.graph import constant
from cuattn.tracing.ranges import Interval, point
from cuattn.tracing.tiles import bounds, tile_states
from cuattn.tracing.values import evaluate
from tests.tracing import expressions as ex


def tiles(n, block):
    first = np.arange(0, n, block)
    return first, np.minimum(first + block, n) - 1


def by_tile(dense, rows, keys, ufunc):
    return np.array(
        [
            [ufunc(dense[..., a : b + 1, c : d + 1]) for c, d in zip(*keys, strict=True)]
            for a, b in zip(*rows, strict=True)
        ]
    )


@given(random=st.randoms(use_true_random=False), block_m=st.integers(1, 9), block_n=st.integers(1, 9))
def test_states_are_sound(random, block_m, block_n):
    text = ex.condition(random, 3, numbers=True)
    rows, keys = tiles(ex.N_QUERIES, block_m), tiles(ex.N_KEYS, block_n)
    bound, variables = ex.traced(text, MASK), ex.grid()
    for dtype in (np.float32, np.float64):
        dense = np.broadcast_to(evaluate(bound, variables, dtype), ex.LIMITS)
        for b, h in np.ndindex(ex.N_BATCH, ex.N_HEADS):
            states = tile_states(bound, rows, keys, b, h)
            some, every = (by_tile(dense[b, h], rows, keys, f) for f in (np.any, np.all))
            assert not some[states == 0].any(), text
            assert every[states == 2].all(), text


@given(random=st.randoms(use_true_random=False), block=st.integers(1, 9))
def test_every_value_lies_within_its_bounds(random, block):
    text = ex.number(random, 4)
    rows, keys = tiles(ex.N_QUERIES, block), tiles(ex.N_KEYS, block)
    bound, variables = ex.traced(text), ex.grid()
    i, j = (
        Interval(*(np.asarray(x, float).reshape(shape) for x in t)) for t, shape in ((rows, (-1, 1)), (keys, (1, -1)))
    )
    s = Interval(np.float64(variables["s"].min()), np.float64(variables["s"].max()))
    arrays = [described(x) for x in bound.arrays]
    for dtype in (np.float32, np.float64):
        dense = np.broadcast_to(evaluate(bound, variables, dtype), ex.LIMITS).astype(float)
        for b, h in np.ndindex(ex.N_BATCH, ex.N_HEADS):
            ranges = {"s": s, "b": point(b), "h": point(h), "i": i, "j": j}
            found = bounds([bound.root], ranges, arrays, bound.numbers)[bound.root]
            assert found.nan or not np.isnan(dense[b, h]).any(), text
            assert (by_tile(dense[b, h], rows, keys, np.nanmin) >= found.lo).all(), text
            assert (by_tile(dense[b, h], rows, keys, np.nanmax) <= found.hi).all(), text


@pytest.mark.parametrize("value", [0.1, -0.7, float(np.tanh(0.75)), 0.25, 3.0])
def test_numbers_that_float32_rounds_lie_within_their_bounds(value):
    found = bounds([constant(value)], {})[constant(value)]
    assert found.lo <= min(value, float(np.float32(value))) and max(value, float(np.float32(value))) <= found.hi
    assert (found.lo == found.hi) == (value in (0.25, 3.0))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: i / 3 - j / 3 <= 0,
        lambda b, h, i, j: i * 0.1 - j * 0.1 > 0,
        lambda b, h, i, j: (i + 1 / 3) - (j + 1 / 3) <= 0,
        lambda b, h, i, j: 1.0 / 3 - (i + 1) / (3 * (j + 1)) < 0,
        lambda b, h, i, j: np.logaddexp(i * 0.01 - 0.7, j * 0.01 - 0.7) > 0,
        lambda b, h, i, j: np.exp(np.log(i + 1.0)) <= j + 1,
        lambda b, h, i, j: np.floor((i + 0.1) * 10) == np.floor((j + 0.1) * 10),
        lambda b, h, i, j: (i * 0.3) // 0.1 == (j * 0.3) // 0.1,
    ],
)
def test_roundings_are_allowed_for(function):
    """Where numbers meet, float32 and float64 decide as they round; tiles of single elements are left open there."""
    i = np.arange(150, dtype=np.int32)
    bound = trace(function, MASK).bind()
    states = tile_states(bound, (i, i), (i, i))
    for dtype in (np.float32, np.float64):
        dense = np.broadcast_to(evaluate(bound, {"i": i[:, None], "j": i}, dtype), (150, 150))
        assert not dense[states == 0].any() and dense[states == 2].all()


WINDOW = 16
DOC = np.repeat(np.arange(8), 32)


@pytest.mark.parametrize(
    ("function", "open_tiles"),
    [
        (lambda b, h, i, j: i >= j, 16),
        (lambda b, h, i, j: abs(i - j) < WINDOW, 3 * 16),
        (lambda b, h, i, j: DOC[i] == DOC[j], 0),
        (lambda b, h, i, j: (i // WINDOW == j // WINDOW) & (i % WINDOW < 16), 0),
        (lambda b, h, i, j: i // WINDOW % 3 == j // WINDOW % 3, 0),
        (lambda b, h, i, j: (i // WINDOW - j // WINDOW) ** 2 + 3 * (j // WINDOW) < 40, 0),
        (lambda b, h, i, j: np.where(j < 64, True, i < j), 12),
    ],
)
def test_masks_are_resolved(function, open_tiles):
    """Tiles of 16 x 16 that stay open are those that a look at the elements leaves open, or hardly more."""
    rows = keys = tiles(256, 16)
    bound = trace(function, MASK).bind()
    states = tile_states(bound, rows, keys)
    i = np.arange(256, dtype=np.int32)
    dense = np.broadcast_to(evaluate(bound, {"i": i[:, None], "j": i}), (256, 256))
    truth = by_tile(dense, rows, keys, np.any).astype(int) + by_tile(dense, rows, keys, np.all)
    assert (states == 1).sum() <= max(open_tiles, (truth == 1).sum())
    assert ((states == truth) | (states == 1)).all()


def test_ranges_of_arrays():
    rng = np.random.default_rng(0)
    for shape in ((37,), (5, 37), (3, 11, 4)):
        array = rng.normal(size=shape)
        lo = [rng.integers(-n, n, 50) for n in shape]
        hi = [np.minimum(a + rng.integers(0, n, 50), n + 3) for a, n in zip(lo, shape, strict=True)]
        lo[0], hi[0] = (lo[0], hi[0]) if len(shape) == 1 else (lo[0][:1], hi[0][:1])
        found = described(array)([Interval(a.astype(float), b.astype(float)) for a, b in zip(lo, hi, strict=True)])
        for tile in range(50):
            index = []
            for a, b, n in zip(lo, hi, shape, strict=True):
                k = np.arange(a[tile % len(a)], b[tile % len(b)] + 1)
                index.append(np.clip(np.where(k < 0, k + n, k), 0, n - 1))
            box = array[np.ix_(*index)]
            assert np.broadcast_to(found.lo, 50)[tile] <= box.min() and np.broadcast_to(found.hi, 50)[tile] >= box.max()
    pair = rng.normal(size=(20, 30))
    boxes = pair.reshape(4, 5, 6, 5)
    rows, keys = np.arange(0, 20, 5.0)[:, None], np.arange(0, 30, 5.0)[None]
    for array, order in ((pair, (rows, keys)), (pair.T, (keys, rows))):  # of rows and keys, or of keys and rows
        found = described(array)([Interval(first, first + 4) for first in order])
        np.testing.assert_array_equal(found.lo, boxes.min((1, 3)))
        np.testing.assert_array_equal(found.hi, boxes.max((1, 3)))
    nan = described(np.array([1, np.nan]))([point(0)])
    assert nan.nan and nan.lo == -np.inf


def test_integers_that_float64_rounds_leave_tiles_open():
    large, first = np.array([2**53 + 1, 2**53, 5]), np.arange(3)
    bound = trace(lambda b, h, i, j: large[i] <= large[j], MASK).bind()
    shown = evaluate(bound, {"i": first[:, None].astype(np.int32), "j": first.astype(np.int32)})
    states = tile_states(bound, (first, first), (first, first))
    assert (shown[states == 2]).all() and not shown[states == 0].any()
