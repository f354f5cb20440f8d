"""Several masks in one call of the portable kernels: as one boolean mask, also with NaN in keys that no row sees."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import cuattn
from cuattn import dispatch, masks
from cuattn.errors import UnsupportedError
from cuattn.masks import AllOf, BlockMask, BooleanMask, ColumnMask
from tests import oracle
from tests.cuda.cases import F16, same_bits, to_device
from tests.oracle import visible_band
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
BATCH, HEADS, QUERIES, KEYS = 2, 3, 333, 421
NAMES = "o", "l", "m", "dq", "dk", "dv"


def columns(rng, *leading, n_queries=QUERIES, n_keys=KEYS):
    bounds = np.sort(rng.integers(0, n_queries + 1, (4, *leading, n_keys)), axis=0)
    bounds[0, ..., 40:60], bounds[1, ..., 40:60] = 0, n_queries  # seen by no row
    return ColumnMask(*bounds, n_queries=n_queries)


def arrays(rng, head_dim, n_queries=QUERIES, n_keys=KEYS, dtype=F16):
    """Draw q, k, v, do."""
    q, do = (rng.standard_normal((BATCH, HEADS, n_queries, head_dim)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((BATCH, HEADS, n_keys, head_dim)).astype(dtype) for _ in range(2))
    return q, k, v, do


def blocks(rng, *leading, size=(64, 48)):
    shape = -(-QUERIES // size[0]), -(-KEYS // size[1])
    return BlockMask(rng.random((*leading, *shape)) < 0.6, *size)


def boolean(rng, *shape):
    return BooleanMask(rng.random((*shape,)) < 0.8)


MADE = {
    "two columns": lambda rng: [columns(rng, HEADS), columns(rng, BATCH, 1)],
    "four columns": lambda rng: [columns(rng) for _ in range(4)],
    "column and block": lambda rng: [columns(rng, BATCH, 1), blocks(rng, HEADS)],
    "two columns and block": lambda rng: [columns(rng), columns(rng, HEADS), blocks(rng)],
    "column and boolean": lambda rng: [columns(rng), boolean(rng, HEADS, QUERIES, KEYS)],
    "column and padding": lambda rng: [columns(rng), boolean(rng, BATCH, 1, 1, KEYS)],
    "block and boolean": lambda rng: [blocks(rng, BATCH, HEADS), boolean(rng, QUERIES, KEYS)],
    "block and row": lambda rng: [blocks(rng, size=(16, 16)), boolean(rng, 1, KEYS)],
    "all": lambda rng: [columns(rng, HEADS), columns(rng), blocks(rng), boolean(rng, BATCH, 1, QUERIES, KEYS)],
}
BANDS = {"none": {}, "causal": {"is_causal": "bottom_right"}, "window": {"window": (100, 30, "top_left")}}


def solved(kernel, q, k, v, do, mask, deterministic=True, **options):
    """Return o, l, m, dq, dk, dv, by default the gradients in a fixed order."""
    q, k, v, do = map(to_device, (q, k, v, do))
    fwd = cuattn.forward(q, k, v, mask=mask, kernel=kernel, **options)
    options.pop("rng", None)
    grads = cuattn.backward(do, q, k, v, fwd, mask=mask, kernel=kernel, deterministic=deterministic, **options)
    return [x.get() for x in (*fwd[:3], *grads[:3])]


def problem(rng, seen, dtype, head_dim):
    """Draw q, k, v, do; keys that no row sees hold NaN."""
    q, k, v, do = arrays(rng, head_dim, dtype=dtype)
    dead = ~seen.any(axis=-2)
    return (q, k, v), (q, *(np.where(dead[..., None], np.nan, x).astype(dtype) for x in (k, v))), do


def band_of(options):
    if "window" in options:
        return visible_band(QUERIES, KEYS, 100, 30, 0)
    return visible_band(QUERIES, KEYS, None, 0, KEYS - QUERIES) if options else np.ones((QUERIES, KEYS), bool)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(("dtype", "head_dim"), [(F16, 64), (F16, 128), (F16, 512), (F32, 64), (F64, 64)])
def test_several_masks(made, band, dtype, head_dim):
    rng = np.random.default_rng([len(made), head_dim])
    mask, options = AllOf(MADE[made](rng)), BANDS[band]
    seen = np.broadcast_to(mask.dense(QUERIES, KEYS) & band_of(options), (BATCH, HEADS, QUERIES, KEYS))
    clean, poisoned, do = problem(rng, seen, dtype, head_dim)
    found = solved("sm80", *poisoned, do, mask, deterministic=False, **options)
    exact, textbook = (oracle.solve(*clean, do, visible=seen, dtype=low) for low in (None, dtype))
    floors = oracle.floors(exact, *clean, do, visible=seen)
    for name, array in zip(NAMES, found, strict=True):
        e, t = getattr(exact, name), getattr(textbook, name)
        assert_close(array, e, t, dtype=dtype, floor=floors[name], name=name)


ONE = {
    "column": lambda rng: columns(rng, HEADS),
    "block": blocks,
    "boolean": lambda rng: boolean(rng, QUERIES, KEYS),
}
PARTS = {
    "rows ahead": (np.arange(QUERIES) + 400, np.arange(KEYS)),
    "keys ahead": (np.arange(QUERIES), np.arange(KEYS) + 64),
    "both": (np.arange(QUERIES) + 640, np.arange(KEYS) + 400),
    "runs": (np.r_[:160, 480 : 480 + QUERIES - 160], np.r_[:160, 320 : 320 + KEYS - 160]),
}


def place_of(rows, keys):
    """Return the origin of a part whose rows and keys these are."""
    runs = (
        tuple((int(n), int(of[n])) for n in np.flatnonzero(np.diff(of, prepend=of[0] - 2) != 1)) for of in (rows, keys)
    )
    return cuattn.Origin(**dict(zip(("row", "key"), runs, strict=True)))


@pytest.mark.parametrize("kernel", [None, "sm80"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("band", ["causal", "window"])
@pytest.mark.parametrize("made", [*ONE, "two columns and block"])
def test_a_part_of_a_band(made, band, part, kernel):
    """What tables say of a part's keys and tiles is of its place in the whole; in several parts, also of one mask."""
    rng = np.random.default_rng(len(made))
    mask = AllOf(MADE[made](rng)) if made in MADE else ONE[made](rng)
    for rows, keys in (PARTS[part], (np.arange(QUERIES), np.arange(KEYS))):
        ahead = rows[:, None] - keys
        options = {"is_causal": True} if band == "causal" else {"window": (100, 30)}
        shown = ahead >= 0 if band == "causal" else (ahead <= 100) & (ahead >= -30)
        seen = np.broadcast_to(mask.dense(QUERIES, KEYS) & shown, (BATCH, HEADS, QUERIES, KEYS))
        clean, poisoned, do = problem(rng, seen, F16, 64)
        found = solved(kernel, *poisoned, do, mask, origin=place_of(rows, keys), **options)
        exact, textbook = (oracle.solve(*clean, do, visible=seen, dtype=low) for low in (None, F16))
        floors = oracle.floors(exact, *clean, do, visible=seen)
        for name, array in zip(NAMES, found, strict=True):
            e, t = getattr(exact, name), getattr(textbook, name)
            assert_close(array, e, t, dtype=F16, floor=floors[name], name=name)


@pytest.mark.parametrize("made", ["two columns", "four columns", "column and boolean", "column and padding"])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_the_same_bits_as_one_boolean_mask(made, dtype):
    rng = np.random.default_rng(len(made))
    mask = AllOf(MADE[made](rng))
    seen = np.broadcast_to(mask.dense(QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS))
    given = arrays(rng, 64, dtype=dtype)
    same_bits(*(solved("sm80", *given, x) for x in (mask, to_device(np.ascontiguousarray(seen)))))


def test_device_masks_are_combined_without_being_read():
    rng = np.random.default_rng(7)
    a, b = (columns(rng).to_device() for _ in range(2))
    mask = a & b
    assert isinstance(mask, AllOf) and mask.on_device
    expected = a.to_host().dense() & b.to_host().dense()
    np.testing.assert_array_equal(mask.dense().get(), expected)
    np.testing.assert_array_equal(mask.tile_states(32, 32).get(), AllOf([a.to_host(), b.to_host()]).tile_states(32, 32))
    q, k, v = (to_device(rng.standard_normal((1, n, 64)).astype(F32)) for n in (QUERIES, KEYS, KEYS))
    o = cuattn.attention(q, k, v, mask=mask).get()
    exact, textbook = (oracle.forward(*(x.get() for x in (q, k, v)), visible=expected, dtype=t)[0] for t in (None, F32))
    assert_close(o, exact, textbook, dtype=F32, name="o")


def test_too_many_masks():
    q, k = (to_device(np.zeros((1, n, 64), F16)) for n in (QUERIES, KEYS))
    rng = np.random.default_rng(0)
    with pytest.raises(UnsupportedError, match="mask holds 5 column masks; expected at most 4"):
        cuattn.attention(q, k, k, mask=AllOf([columns(rng) for _ in range(5)]))
    with pytest.raises(UnsupportedError, match="mask holds 2 block masks; expected at most 1"):
        cuattn.attention(q, k, k, mask=AllOf([blocks(rng), blocks(rng, size=(32, 32))]))


def test_tables_are_bounded_and_reused():
    """A window that varies from call to call makes tables, of which a mask keeps a few."""
    import cupy

    n = 1 << 16
    mask = masks.full(64, n)
    q = cupy.zeros((1, 64, 64), F16)
    k = cupy.zeros((1, n, 64), F16)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    for width in range(40):
        with streams[width % 3]:
            cuattn.attention(q, k, k, mask=mask, window=(n - width, None, "top_left"), kernel="sm80")
    tables, calls = mask._cache["tables", cupy.cuda.Device().id], mask._cache[dispatch._epoch]
    gc.collect()
    assert 0 < len(tables) <= 16
    assert 0 < calls.cache_info().currsize <= 32
    del mask, tables, calls
    gc.collect()
    cupy.cuda.Device().synchronize()


@pytest.mark.parametrize("shape", [((1 << 25) + 70000, 8), (1 << 17, 300)])
def test_long_boolean_masks(shape):
    """A grid's second axis would end at 33.5 million rows."""
    import cupy

    n_queries, n_keys = shape
    seen = cupy.zeros((n_queries, n_keys), bool)
    seen[-1, 1] = True  # the only key that is seen, by the last row
    q = cupy.ones((n_queries, 8), F16)
    k, v = cupy.full((n_keys, 8), np.nan, F16), cupy.full((n_keys, 8), np.nan, F16)
    k[1], v[1] = 1, 3
    o = cuattn.attention(q, k, v, mask=seen, kernel="sm80")
    assert (o[-1] == 3).all() and not o[:-1].any()
