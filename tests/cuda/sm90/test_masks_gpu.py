"""Masks on Hopper: boolean ones give the bits of the column masks that say the same, and hide what they hide."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import cuattn
from cuattn import masks
from cuattn.masks import AllOf, BooleanMask, ColumnMask
from tests import oracle
from tests.cuda.cases import same_bits, to_device
from tests.cuda.test_masks_gpu import BANDS, BATCH, HEADS, KEYS, NAMES, QUERIES, arrays, band_of, columns
from tests.cuda.test_masks_gpu import solved as of_kernel
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

solved = partial(of_kernel, "sm90")

MADE = {
    "columns": lambda rng: columns(rng, HEADS),
    "columns of each": lambda rng: columns(rng, BATCH, HEADS),
    "documents": lambda rng: masks.document([100, 33, 200]),
    "causal documents": lambda rng: masks.causal_document([100, 33, 200]),
    "causal": lambda rng: masks.causal(QUERIES, KEYS),
    "full": lambda rng: masks.full(QUERIES, KEYS),
    "empty": lambda rng: ColumnMask(*np.array([[0], [QUERIES], [0], [0]]).repeat(KEYS, 1), n_queries=QUERIES),
}


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.2, "rng": 7}], ids=["", "dropout"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("made", MADE)
def test_boolean_masks_give_the_bits_of_column_masks(made, head_dim, options):
    rng = np.random.default_rng([len(made), head_dim])
    mask = MADE[made](rng)
    given = arrays(rng, head_dim, mask.n_queries, mask.n_keys)
    seen = np.ascontiguousarray(mask.dense())
    expected = solved(*given, mask, **options)
    for twin in (to_device(seen), BooleanMask(seen)):
        same_bits(solved(*given, twin, **options), expected)


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
    dense = BooleanMask(np.ascontiguousarray(mask.dense()))
    same_bits(*(cuattn.forward(*given, mask=x, kernel="sm90")[:3] for x in (dense, mask)))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("made", ["columns", "causal", "full"])
def test_boolean_masks_give_the_bits_of_column_masks_to_grouped_heads(made, head_dim):
    rng = np.random.default_rng([len(made), head_dim])
    mask = MADE[made](rng)
    q, k, v, do = arrays(rng, head_dim, mask.n_queries, mask.n_keys)
    given = q, k[:, :1].copy(), v[:, :1].copy(), do
    same_bits(solved(*given, mask), solved(*given, to_device(mask.dense())))


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
    same_bits(solved(q, k, v, do, to_device(seen)), solved(q, k, v, do, given))


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
