"""Mask functions on a GPU: the bits of the boolean mask that says the same, on every kernel, beside other masks."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import dispatch, masks
from cuattn.cuda.sm90 import tensor_map
from cuattn.masks import AllOf, BooleanMask, FunctionMask, from_function
from tests.cuda.cases import F16, same_bits, to_device
from tests.cuda.test_masks_gpu import BANDS, BATCH, HEADS, KEYS, NAMES, QUERIES, solved
from tests.cuda.test_masks_gpu import arrays as drawn
from tests.tracing import recipes

pytestmark = pytest.mark.gpu

GROUPS = np.random.default_rng(0).integers(0, 4, max(QUERIES, KEYS))
KEPT = np.random.default_rng(4).random((HEADS, 6, 7)) < 0.4
SLOPE = np.array([2, 5, 3], np.int32)

FUNCTIONS = {
    "neighbours": lambda b, h, i, j: (abs(i // 20 - j // 20) <= 3) & (abs(i % 20 - j % 20) <= 3),
    "dilated by heads": lambda b, h, i, j: (i - j) % SLOPE[h] == b,
    "groups": lambda b, h, i, j: (GROUPS[i] == GROUPS[j]) & ((j < 200) | (GROUPS[j] == 1)),
    "dead keys": lambda b, h, i, j: (j < 300) & (abs(i - j) % 5 < 3) & (j % 7 != 3),
    "blocks": lambda b, h, i, j: KEPT[h, i // 64, j // 64],
    "numbers": lambda b, h, i, j: np.sin(0.1 * i) > np.cos(0.05 * j) - 0.3 * h,
}


@pytest.fixture(params=["sm80", "sm90", "sm90-asked"])
def kernel(request, monkeypatch):
    """A kernel; Hopper's with a function's elements computed ahead, and with the function asked in the kernel."""
    need(request.param[:4])
    if request.param.endswith("asked"):
        monkeypatch.setattr(tensor_map, "takes_few_bits", lambda *_: False)
        dispatch.forget()
    yield request.param[:4]
    dispatch.forget()


def need(kernel):
    import cupy

    if kernel == "sm90" and cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")


def arrays(head_dim, dead=None):
    q, k, v, do = drawn(np.random.default_rng(1), head_dim)
    if dead is not None:
        k[dead], v[dead] = np.nan, np.nan
    return [to_device(x) for x in (q, k, v, do)]


def same(one, other):
    same_bits(one, other)
    assert all(name in "lm" or np.isfinite(x).all() for name, x in zip(NAMES, one, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_of_a_boolean_mask(name, head_dim, kernel):
    mask = from_function(FUNCTIONS[name], QUERIES, KEYS, batch=BATCH, heads=HEADS)
    assert isinstance(mask, FunctionMask)
    seen = np.broadcast_to(mask.dense(), (BATCH, HEADS, QUERIES, KEYS))
    given = arrays(head_dim, ~seen.any(axis=-2))
    expected = solved(kernel, *given, to_device(np.ascontiguousarray(seen)))
    same(solved(kernel, *given, mask), expected)
    same(solved(kernel, *given, FUNCTIONS[name]), expected)


def _gated(s, b, h, i, j):
    return s / (1 + np.exp(-s))


def _graph(s, b, h, i, j, distance, x):
    return s + x[distance[i, j], h]


@pytest.mark.parametrize("options", ["softcap", "dropped softcap", "bias", "gated", "graph"])
def test_passes_beside_the_main_kernel(options, kernel):
    """Those of dq behind slopes, of a bias that sequences share, and of arrays read at data."""
    rng = np.random.default_rng(3)
    bias, x = rng.standard_normal((1, HEADS, QUERIES, KEYS)).astype(F16), rng.standard_normal((9, HEADS)).astype("f")
    distance = rng.integers(0, 9, (QUERIES, KEYS)).astype(np.int32)
    given = {
        "softcap": {"softcap": 9.0},
        "dropped softcap": {"softcap": 9.0, "dropout_p": 0.2, "rng": 3},
        "bias": {"bias": to_device(bias)},
        "gated": {"score": _gated},
        "graph": {"score": _graph, "score_args": (to_device(distance), to_device(x))},
    }[options]
    mask = from_function(FUNCTIONS["neighbours"], QUERIES, KEYS)
    found = []
    for seen in (mask, to_device(np.ascontiguousarray(mask.dense()))):
        q, k, v, do = arrays(128 if "softcap" in options else 64)
        fwd = cuattn.forward(q, k, v, mask=seen, kernel=kernel, **given)
        known = {name: x for name, x in given.items() if name != "rng"}
        grads = cuattn.backward(do, q, k, v, fwd, mask=seen, kernel=kernel, deterministic=options != "graph", **known)
        parts = [*fwd[:3], *grads[:3], *(part for part in (grads.dbias, *(grads.dscore or ())) if part is not None)]
        found.append([part.get() for part in parts])
    same_bits(*found)


@pytest.mark.parametrize("options", BANDS.values(), ids=BANDS)
def test_beside_other_masks(options, kernel):
    rng = np.random.default_rng(2)
    bounds = np.sort(rng.integers(0, QUERIES + 1, (4, HEADS, KEYS)), axis=0)
    column, boolean = masks.ColumnMask(*bounds, n_queries=QUERIES), BooleanMask(rng.random((QUERIES, KEYS)) < 0.7)
    function = from_function(FUNCTIONS["neighbours"], QUERIES, KEYS)
    for parts in ([function, column], [boolean, function], [column, function, boolean]):
        mask = AllOf(parts)
        seen = np.broadcast_to(mask.dense(QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS))
        given = arrays(64)
        same(
            solved(kernel, *given, mask, **options),
            solved(kernel, *given, to_device(np.ascontiguousarray(seen)), **options),
        )


def test_arrays_on_the_gpu_are_read_in_every_call():
    import cupy

    group = cupy.asarray(GROUPS)
    q, k, v, _ = arrays(64)

    def visible(b, h, i, j):
        return (group[i] == group[j]) & (i != j)

    found = []
    for _ in range(2):
        o = cuattn.attention(q, k, v, mask=visible)
        i, j = np.arange(QUERIES)[:, None], np.arange(KEYS)
        dense = (group.get()[i] == group.get()[j]) & (i != j)
        expected = cuattn.attention(q, k, v, mask=to_device(dense))
        assert o.get().tobytes() == expected.get().tobytes()
        found.append(o)
        group[:200] = group[:200][::-1].copy()
    assert (found[0] != found[1]).any()


@pytest.mark.parametrize("recipe", recipes.MASKS, ids=lambda recipe: recipe.name)
def test_recipes(recipe):
    rng = np.random.default_rng(3)
    q, k, v = (to_device(rng.standard_normal((recipes.BATCH, recipes.HEADS, recipes.N, 64)).astype(F16)) for _ in "qkv")
    mask = from_function(recipe.function, recipes.N, args=recipe.args, batch=recipes.BATCH, heads=recipes.HEADS)
    dense = np.ascontiguousarray(
        np.broadcast_to(recipe.formula(), (recipes.BATCH, recipes.HEADS, recipes.N, recipes.N))
    )
    for kernel in ("sm80", "sm90"):
        need(kernel)
        one, other = (cuattn.attention(q, k, v, mask=m, kernel=kernel).get() for m in (mask, to_device(dense)))
        assert one.tobytes() == other.tobytes()


def test_parts_of_the_whole():
    """Rows and keys of a mask that was cut, and of a bare function at an origin, are those of the whole."""
    q, k, v, _ = arrays(64)
    mask = from_function(FUNCTIONS["groups"], QUERIES, KEYS)
    part = mask.restrict([(10, 90), (200, 333)], slice(33, 400))
    rows = np.r_[10:90, 200:333]
    given = q[:, :, rows], k[:, :, 33:400], v[:, :, 33:400]
    found = cuattn.attention(*given, mask=part)
    expected = cuattn.attention(*given, mask=to_device(part.dense()))
    assert found.get().tobytes() == expected.get().tobytes()
    at = cuattn.attention(q[:, :, 100:], *given[1:], mask=FUNCTIONS["groups"], origin=cuattn.Origin(row=100, key=33))
    cut = mask.restrict(slice(100, QUERIES), slice(33, 400)).dense()
    assert at.get().tobytes() == cuattn.attention(q[:, :, 100:], *given[1:], mask=to_device(cut)).get().tobytes()


def test_long_masks_take_little_memory():
    import cupy

    n = 1 << 17
    mask = from_function(lambda b, h, i, j: (abs(i // 512 - j // 512) <= 2) & (abs(i % 512 - j % 512) < 9), n)
    q = cupy.zeros((1, n, 64), F16)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    o = cuattn.attention(q, q, q, mask=mask.to_device())
    assert pool.used_bytes() - before - o.nbytes < 100e6
