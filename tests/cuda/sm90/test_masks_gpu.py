"""Masks on Hopper: boolean ones give the bits of the column masks that say the same, and hide what they hide."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import masks
from cuattn.masks import AllOf, BooleanMask, ColumnMask
from tests import oracle
from tests.cuda.cases import F16, to_device
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

BATCH, HEADS, QUERIES, KEYS = 2, 3, 333, 421
NAMES = "o", "l", "m", "dq", "dk", "dv"


def columns(rng, *leading, n_queries=QUERIES, n_keys=KEYS):
    bounds = np.sort(rng.integers(0, n_queries + 1, (4, *leading, n_keys)), axis=0)
    bounds[0, ..., 40:60], bounds[1, ..., 40:60] = 0, n_queries  # seen by no row
    return ColumnMask(*bounds, n_queries=n_queries)


def arrays(rng, head_dim, n_queries=QUERIES, n_keys=KEYS, dtype=F16):
    q, do = (rng.standard_normal((BATCH, HEADS, n_queries, head_dim)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((BATCH, HEADS, n_keys, head_dim)).astype(dtype) for _ in range(2))
    return q, k, v, do


def solved(q, k, v, do, mask, rng_=None, **options):
    """Return o, l, m, dq, dk, dv of the Hopper kernels, the gradients in a fixed order."""
    given = [to_device(x) for x in (q, k, v)]
    random = {} if rng_ is None else {"dropout_p": 0.2}
    fwd = cuattn.forward(*given, mask=mask, kernel="sm90", rng=rng_, **random, **options)
    grads = cuattn.backward(
        to_device(do), *given, fwd, mask=mask, kernel="sm90", deterministic=True, **random, **options
    )
    return [x.get() for x in (*fwd[:3], *grads[:3])]


MADE = {
    "columns": lambda rng: columns(rng, HEADS),
    "columns of each": lambda rng: columns(rng, BATCH, HEADS),
    "documents": lambda rng: masks.document([100, 33, 200]),
    "causal documents": lambda rng: masks.causal_document([100, 33, 200]),
    "causal": lambda rng: masks.causal(QUERIES, KEYS),
    "full": lambda rng: masks.full(QUERIES, KEYS),
    "empty": lambda rng: ColumnMask(*np.array([[0], [QUERIES], [0], [0]]).repeat(KEYS, 1), n_queries=QUERIES),
}


@pytest.mark.parametrize("rng_", [None, 7], ids=["", "dropout"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("made", MADE)
def test_boolean_masks_give_the_bits_of_column_masks(made, head_dim, rng_):
    rng = np.random.default_rng([len(made), head_dim])
    mask = MADE[made](rng)
    given = arrays(rng, head_dim, mask.n_queries, mask.n_keys)
    seen = np.ascontiguousarray(mask.dense())
    expected = solved(*given, mask, rng_)
    for twin in (to_device(seen), BooleanMask(seen)):
        for name, x, y in zip(NAMES, expected, solved(*given, twin, rng_), strict=True):
            assert x.tobytes() == y.tobytes(), name


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("made", ["columns", "documents", "eviction"])
def test_long_rows_give_the_bits_of_a_boolean_mask(made, head_dim):
    rng, n = np.random.default_rng([len(made), head_dim]), 1300
    mask = {
        "columns": lambda: columns(rng, HEADS, n_queries=n, n_keys=n),
        "documents": lambda: masks.causal_document([700, 1, 599]),
        "eviction": lambda: masks.random_eviction(n, 500, 0),
    }[made]()
    given = [to_device(x) for x in arrays(rng, head_dim, n, n)[:3]]
    expected, found = (
        cuattn.forward(*given, mask=x, kernel="sm90") for x in (BooleanMask(np.ascontiguousarray(mask.dense())), mask)
    )
    for name, x, y in zip(NAMES, expected[:3], found[:3], strict=False):
        assert x.get().tobytes() == y.get().tobytes(), name


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("made", ["columns", "causal", "full"])
def test_boolean_masks_give_the_bits_of_column_masks_to_grouped_heads(made, head_dim):
    rng = np.random.default_rng([len(made), head_dim])
    mask = MADE[made](rng)
    q, k, v, do = arrays(rng, head_dim, mask.n_queries, mask.n_keys)
    given = q, k[:, :1].copy(), v[:, :1].copy(), do
    for name, x, y in zip(NAMES, solved(*given, mask), solved(*given, to_device(mask.dense())), strict=True):
        assert x.tobytes() == y.tobytes(), name


BANDS = {"none": {}, "causal": {"is_causal": "bottom_right"}, "window": {"window": (100, 30, "top_left")}}
BESIDE = {
    "rows and heads": lambda rng: [rng.random((HEADS, QUERIES, KEYS)) < 0.7],
    "blocks": lambda rng: [np.repeat(np.repeat(rng.random((6, 7)) < 0.5, 64, 0), 64, 1)[:QUERIES, :KEYS]],
    "padding": lambda rng: [np.arange(KEYS) < np.array([KEYS - 150, 77])[:, None, None, None]],
    "rows": lambda rng: [rng.random((QUERIES, 1)) < 0.5],
    "one": lambda rng: [np.ones((1, 1), bool)],
    "columns": lambda rng: [rng.random((QUERIES, KEYS)) < 0.7, columns(rng, BATCH, 1)],
    "padding and columns": lambda rng: [
        np.arange(KEYS) < np.array([300, 77])[:, None, None, None],
        columns(rng, HEADS),
    ],
}


def check(q, k, v, do, seen, found, dead):
    exact, textbook = (oracle.solve(q, k, v, do, visible=seen, dtype=low) for low in (None, q.dtype))
    for name, array in zip(NAMES, found, strict=True):
        assert_close(array, getattr(exact, name), getattr(textbook, name), dtype=q.dtype, name=name)
    assert not found[4][dead].any() and not found[5][dead].any()


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("made", BESIDE)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_masks_together(made, band, head_dim):
    from tests.cuda.test_masks_gpu import band_of

    rng = np.random.default_rng([len(made), head_dim])
    parts = BESIDE[made](rng)
    mask = to_device(parts[0]) if len(parts) == 1 else AllOf(parts)
    dense = parts[0] if len(parts) == 1 else mask.dense(QUERIES, KEYS)
    seen = np.broadcast_to(dense & band_of(BANDS[band]), (BATCH, HEADS, QUERIES, KEYS))
    q, k, v, do = arrays(rng, head_dim)
    dead = ~seen.any(axis=-2)
    poisoned = [np.where(dead[..., None], np.nan, x).astype(x.dtype) for x in (k, v)]
    check(q, k, v, do, seen, solved(q, *poisoned, do, mask, **BANDS[band]), dead)


@pytest.mark.parametrize("layout", ["transposed", "every other", "reversed", "odd"])
def test_strides(layout):
    rng = np.random.default_rng(len(layout))
    q, k, v, do = arrays(rng, 64)
    seen = rng.random((HEADS, QUERIES, KEYS)) < 0.3
    given = {
        "transposed": lambda: to_device(np.ascontiguousarray(seen.swapaxes(1, 2))).swapaxes(1, 2),
        "every other": lambda: to_device(seen.repeat(2, axis=2))[..., ::2],
        "reversed": lambda: to_device(np.ascontiguousarray(seen[:, ::-1, ::-1]))[:, ::-1, ::-1],
        "odd": lambda: to_device(np.pad(seen, ((0, 0), (0, 0), (3, 0))))[..., 3:],
    }[layout]()
    expected = solved(q, k, v, do, to_device(seen))
    for name, x, y in zip(NAMES, expected, solved(q, k, v, do, given), strict=True):
        assert x.tobytes() == y.tobytes(), name


def test_a_callers_array_may_change():
    rng = np.random.default_rng(3)
    q, k, v, _ = map(to_device, arrays(rng, 64))
    mask = to_device(rng.random((QUERIES, KEYS)) < 0.5)
    first = cuattn.attention(q, k, v, mask=mask, kernel="sm90")
    mask[...] = ~mask
    second = cuattn.attention(q, k, v, mask=mask, kernel="sm90")
    assert (first != second).any()
    again = cuattn.attention(q, k, v, mask=BooleanMask(mask), kernel="sm90")
    assert (second == again).all()
