"""Hopper's forward kernel on a GPU against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn import dispatch, masks
from cuattn.cuda.sm90 import forward
from cuattn.errors import UnsupportedError
from cuattn.masks import ColumnMask
from cuattn.problem import FORWARD, Options
from tests.cuda.cases import (
    BF16,
    CASES,
    F16,
    Case,
    bias_of,
    blocks_of,
    columns_of,
    dense_of,
    same_bits,
    sized,
    to_device,
)
from tests.cuda.gpu import made, named
from tests.cuda.test_graph_gpu import CuPy, replays_bit_for_bit

pytestmark = pytest.mark.gpu


def patches_of(case: Case, rng: np.random.Generator) -> ColumnMask:
    """Show every 100 keys to some of the 64-row strips, so that warpgroups of one tile see different key tiles."""
    n, strips = case.n_queries, -(-case.n_queries // 64)
    ends = np.sort(rng.integers(0, strips + 1, (2, *case.batch, case.heads, -(-case.n_keys // 100))), axis=0) * 64
    first, end = np.minimum(np.repeat(ends, 100, axis=-1)[..., : case.n_keys], n)
    return ColumnMask(np.zeros_like(first), first, end, np.full_like(first, n), n_queries=n)


# Few row tiles of many keys: these are divided into parts.
PARTS = [
    sized("hopper parts", 700, 4200, 128, batch=(1,)),
    sized("hopper parts d64", 200, 2900),
    sized("hopper parts float16", 100, 1700, 96, dtype=F16, options={"scale": -0.2}),
    sized("hopper parts tail", 2100, 1700, 128, heads=4, kv_heads=2, batch=(2,)),  # 136 row tiles, 132 blocks
    sized("hopper parts causal", 1500, 1500, 128, batch=(1,), options={"is_causal": True}),
    sized("hopper parts causal d64", 1500, 1500, batch=(1,), options={"is_causal": True}),
    sized("hopper parts causal cut", 1300, 1777, batch=(1,), options={"is_causal": "bottom_right"}),
]
OWN = [
    sized("hopper long", 700, 4200, 128, batch=(1,)),
    sized("hopper long causal", 2300, 2300, batch=(1,), options={"is_causal": True}),
    sized("hopper rows before the first", 440, 440, heads=40, kv_heads=40, options={"is_causal": True}),
    sized("hopper rows before the first d128", 300, 350, 128, options={"window": (200, 9, "bottom_right")}),
    sized("hopper many tiles", 260, 130, 128, batch=(3,), heads=60, kv_heads=20),
    sized("hopper many tiles d64", 400, 130, batch=(3,), heads=60, kv_heads=20),
    sized("hopper many tiles d256", 260, 90, 256, batch=(3,), heads=60, kv_heads=20),
    Case("hopper 192 128", head_dim=192, head_dim_v=128),
    *PARTS,
    sized("hopper corners", 1200, 1328, 128, batch=(3,), heads=40, kv_heads=8, options={"is_causal": "bottom_right"}),
    sized("hopper corners above", 1400, 1144, 128, options={"is_causal": "bottom_right"}),
    sized("hopper corners below", 1300, 1056, 128, heads=4, options={"is_causal": "top_left"}),
    sized("hopper packed", 24, 2500, 128, heads=8, kv_heads=2),
    sized("hopper packed d64", 40, 700, heads=12, kv_heads=2, dtype=F16),
    sized("hopper packed one query", 1, 3000, heads=8, kv_heads=2),
    Case("hopper float16 softcap", dtype=F16, head_dim=128, options={"softcap": 3.0, "is_causal": "top_left"}),
    sized("hopper columns", 700, 900, 128, heads=40, kv_heads=40, mask=columns_of),
    sized("hopper columns d256", 300, 400, 256, mask=columns_of),
    sized("hopper patches", 700, 1100, 128, heads=40, kv_heads=40, mask=patches_of),
    sized("hopper patches d64", 700, 1100, heads=40, kv_heads=40, mask=patches_of),
    sized("hopper long columns", 500, 9000, batch=(1,), mask=patches_of),
    sized("hopper one strip of a tile", 200, 2500, heads=40, kv_heads=40),
    # Tiles of 256 rows; one that has all keys.
    sized("hopper four warpgroups", 500, 1100, batch=(2,), heads=32, kv_heads=8),
    sized("hopper four warpgroups float16", 500, 600, 40, head_dim_v=64, batch=(8,), heads=40, kv_heads=40, dtype=F16),
    sized("hopper few keys", 900, 77, heads=30, kv_heads=30, options={"softcap": 3.0}),
    sized("hopper few keys columns", 500, 90, heads=8, kv_heads=8, mask=columns_of),
    sized(
        "hopper few keys causal dropout", 500, 110, options={"is_causal": "bottom_right", "dropout_p": 0.3, "rng": 7}
    ),
    sized("hopper three warpgroups d72", 729, 729, 72, heads=8, kv_heads=8),
    sized("hopper three warpgroups d96", 200, 1000, 96, heads=40, kv_heads=40),
    sized("hopper narrow window", 900, 900, options={"window": (20, 3)}),
    sized("hopper columns window", 500, 500, mask=columns_of, options={"window": (99, 40)}),
    sized("hopper blocks", 500, 600, 128, mask=blocks_of(128, 128)),
    sized("hopper small blocks", 500, 600, mask=blocks_of(24, 40), options={"dropout_p": 0.3, "rng": 7}),
    sized("hopper dropout", 300, 400, 128, options={"dropout_p": 0.1, "rng": 42}),
    sized("hopper dropout d256", 300, 400, 256, options={"dropout_p": 0.7, "rng": 42}),
    # A bias in tiles: rows of whole 16 bytes.
    *(sized(f"hopper bias d{d}", 300, 408, d, bias=bias_of(1, 1, 1, 1, dtype=BF16)) for d in (32, 64, 96, 192, 256)),
    # Tiles of 256 rows, one after another in a block.
    sized("hopper bias wide", 200, 1032, batch=(2,), heads=100, kv_heads=50, bias=bias_of(0, 1, 1, 1, dtype=BF16)),
    sized("hopper bias long", 300, 2504, 128, heads=40, kv_heads=40, bias=bias_of(0, 1, 1, 1, dtype=BF16)),
    sized(
        "hopper bias causal",
        440,
        440,
        heads=40,
        kv_heads=8,
        bias=bias_of(1, 0, 1, 1, dtype=BF16),
        options={"is_causal": True},
    ),
    sized(
        "hopper bias float16",
        200,
        1200,
        128,
        dtype=F16,
        bias=bias_of(1, 1, 1, 1, dtype=F16),
        options={"softcap": 3.0, "window": (200, 150, "top_left")},
    ),
    sized(
        "hopper bias columns dropout",
        500,
        504,
        128,
        mask=columns_of,
        bias=bias_of(1, 1, 1, 1, dtype=BF16),
        options={"dropout_p": 0.2, "rng": 3},
    ),
    sized("hopper bias blocks", 500, 600, 128, mask=blocks_of(128, 128), bias=bias_of(1, 1, 1, 1, dtype=BF16)),
    Case("hopper bias 192 128", head_dim=192, head_dim_v=128, n_keys=400, bias=bias_of(1, 1, 1, 1, dtype=BF16)),
    # Of all queries together, or of all keys; by ordinary loads.
    *(sized(f"hopper key bias d{d}", 300, 1001, d, bias=bias_of(1, 0, 0, 1)) for d in (64, 128, 256)),
    sized("hopper key bias long", 300, 2504, 128, heads=40, kv_heads=40, bias=bias_of(1, 1, 0, 1)),
    sized("hopper key bias columns", 500, 505, 128, mask=columns_of, bias=bias_of(1, 1, 0, 1, dtype=BF16)),
    sized(
        "hopper key bias causal dropout",
        440,
        440,
        heads=40,
        kv_heads=40,
        bias=bias_of(1, 1, 0, 1),
        options={"is_causal": True, "dropout_p": 0.2, "rng": 3, "scale": -0.2},
    ),
    sized("hopper row bias", 440, 440, 128, bias=bias_of(1, 1, 1, 0), options={"is_causal": True}),
    sized("hopper loaded bias", 440, 441, bias=bias_of(1, 1, 1, 1, dtype=BF16), options={"is_causal": "top_left"}),
    sized("hopper loaded bias dropout", 300, 333, 256, bias=bias_of(1, 1, 1, 1), options={"dropout_p": 0.2, "rng": 3}),
]


# Of the tiles that short sequences take, with more row tiles than there are blocks, and what is done to scores.
FEATURES = {
    "plain": dict(batch=(90,), heads=8, kv_heads=2),
    "causal": dict(batch=(30,), heads=20, kv_heads=20, options={"is_causal": True}),
    "window": dict(options={"window": (30, 20, "bottom_right")}),
    "columns": dict(batch=(9,), heads=40, kv_heads=40, mask=columns_of),
    "columns causal": dict(mask=columns_of, options={"is_causal": "top_left"}),
    "dense": dict(batch=(9,), heads=40, kv_heads=40, mask=dense_of),
    "dense dropout": dict(mask=dense_of, options={"dropout_p": 0.2, "rng": 3}),
    "blocks": dict(mask=blocks_of(16, 48)),
    "softcap float16": dict(dtype=F16, options={"softcap": 3.0}),
    "dropout negative": dict(options={"dropout_p": 0.1, "rng": 42, "scale": -0.2}),
}
SHORT = [
    sized(f"hopper short {n} d{d} {name}", n, n, d, **more)
    for d, n in ((32, 49), (32, 250), (24, 120), (64, 60), (64, 100), (48, 197), (64, 256), (80, 257))
    for name, more in FEATURES.items()
]


@pytest.mark.parametrize("case", [*CASES, *OWN, *SHORT], ids=lambda case: case.name)
def test_oracle(case):
    problem = made(case)
    try:
        actual = problem.forward("sm90")
    except UnsupportedError as error:
        assert case not in (*OWN, *SHORT)
        pytest.skip(str(error))
    problem.check(actual)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lowest", [-np.inf, -3.3895314e38, -1e30])
@pytest.mark.parametrize("shape", [(1, 0, 0, 1), (1, 1, 1, 1), (1, 1, 1, 0)])
@pytest.mark.parametrize(("dtype", "n_keys"), [(BF16, 408), (np.dtype(np.float32), 1608)])
def test_padding_by_a_bias(head_dim, lowest, shape, dtype, n_keys):
    """A bias of -inf hides, and the lowest numbers do as well as; throughout a row these give the mean of v."""
    problem = made(sized("padding", 200, n_keys, head_dim, bias=bias_of(*shape, dtype=dtype)))
    bias, end = problem.options["bias"], n_keys - 158
    if shape[-1]:
        bias[..., : n_keys // 9], bias[..., end:] = lowest, lowest
    if shape[-2]:
        bias[..., 5, :], bias[..., 64:140, :] = lowest, lowest
    elif lowest == -np.inf:  # keys that no query sees
        for x in problem.qkv[1:]:
            x[..., : n_keys // 9, :] = x[..., end:, :] = np.nan
        seen = problem._replace(qkv=[problem.qkv[0], *(np.nan_to_num(x) for x in problem.qkv[1:])])
        actual = problem.forward("sm90")
        same_bits(actual, seen.forward("sm90"))
        return seen.check(actual)
    actual = problem.forward("sm90")
    if shape[-2] and lowest == -np.inf:
        assert not actual[0][..., 5, :].any() and not actual[1][..., 5].any() and (actual[2][..., 5] == -np.inf).all()
    problem.check(actual)


def test_padding_in_wide_tiles(monkeypatch):
    """Rows and keys that a dense bias of -inf hides, in tiles of four warpgroups."""
    monkeypatch.setattr(forward, "MULTIPROCESSORS", 1)
    problem = made(sized("wide", 500, 1096, bias=bias_of(1, 1, 1, 1, dtype=BF16)))
    bias = problem.options["bias"]
    bias[..., 900:] = bias[..., 5, :] = bias[..., 64:140, :200] = bias[..., 300:, 130:400] = -np.inf
    problem.check(problem.forward("sm90"))


def test_nothing_is_seen_through_a_bias():
    problem = made(sized("all hidden", 200, 333, 128))
    problem.qkv[2][:] = np.nan
    o, l, m = problem.forward("sm90", bias=np.full((1, 1, 1, 333), -np.inf, np.float32))
    assert not o.any() and not l.any() and (m == -np.inf).all()


@pytest.mark.parametrize(
    "name", ["hopper long", "hopper many tiles", "hopper patches d64", "hopper small blocks", "hopper bias long"]
)
def test_same_bits_twice(name):
    problem = named(name, OWN)
    same_bits(problem.forward("sm90"), problem.forward("sm90"))


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.name)
def test_parts_of_keys(case):
    """Also of large scores, whose rows look at a few keys, and the same bits each time."""
    problem = made(case)
    plan = cuattn.plan(*problem.arrays()[1:], kernel="sm90", **problem.options)
    assert any("keys of a row in parts" in note for note in plan.notes)
    problem.options["scale"] = 40 * problem.options.get("scale", case.head_dim**-0.5)
    actual = problem.forward("sm90")
    problem.check(actual)
    same_bits(actual, problem.forward("sm90"))


@pytest.mark.parametrize("n_keys", [1150, 4000])
def test_parts_hold_nan_that_no_query_sees(n_keys):
    case = sized("hopper parts unseen", 1100, n_keys, 128, batch=(1,), options={"is_causal": "top_left"})
    made(case).check_unseen_keys("sm90")


@pytest.mark.parametrize("name", ["hopper long", "hopper four warpgroups"])
def test_float32_output_is_the_rounded_one(name):
    problem = named(name, OWN)
    exact = problem.forward("sm90", out_dtype=np.float32)[0]
    assert exact.dtype == np.float32
    np.testing.assert_array_equal(exact.astype(problem.case.dtype), problem.forward("sm90")[0])


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_column_masks_equal_causality_bit_for_bit(head_dim):
    """A mask that is known to be a band is taken as one; of vectors that come from the device nobody knows."""
    n = 440  # the flag's row tiles end with the last 64 queries, the mask's begin with the first
    problem = made(sized(f"bits {head_dim}", n, n, head_dim, heads=20, kv_heads=20))
    for mask, option in (
        (masks.causal(n), {"is_causal": True}),
        (masks.sliding_window(n, 77), {"is_causal": True, "window": (76, None)}),
    ):
        unknown = ColumnMask(*map(to_device, (mask.lts, mask.lte, mask.uts, mask.ute)), n_queries=n)
        assert mask.to_device().reach == mask.reach is not None is unknown.reach
        band = problem.forward("sm90", **option)
        for given in (unknown, mask):
            same_bits(problem.forward("sm90", mask=given), band)


@pytest.mark.parametrize("name", ["hopper columns", "hopper columns window", "hopper small blocks", "causal top left"])
def test_invisible_keys_may_hold_nan(name):
    named(name, CASES + OWN).check_unseen_keys("sm90")


def test_empty_rows_are_zero_whatever_the_values_hold():
    n = 300
    start = np.full(n, 100)
    mask = ColumnMask(start, np.full(n, 140), np.zeros(n, int), np.zeros(n, int), n_queries=n)
    problem = made(sized("empty rows", n, n))
    problem.qkv[2][..., 7, :] = np.nan
    o, l, m = problem.forward("sm90", mask=mask)
    assert not o[..., 100:140, :].any() and not l[..., 100:140].any() and (m[..., 100:140] == -np.inf).all()


@pytest.mark.parametrize("layout", ["swapped", "broadcast batch", "offset"])
def test_strides(layout):
    problem, twin = made(sized(layout, 300, 500, heads=3, kv_heads=3)).strided(layout)
    same_bits(twin.forward("sm90"), problem.forward("sm90"))


def test_captured_in_a_graph():
    _, *qkv = made(Case("graph", heads=80, kv_heads=80)).arrays()
    assert replays_bit_for_bit(CuPy(), lambda: cuattn.forward(*qkv, kernel="sm90"))


def test_plan_says_why_not():
    import cupy

    q = cupy.zeros((1, 8, 2048, 64), np.float32)
    assert any("not the sm90 kernel" in note for note in cuattn.plan(q, q, q).notes)
    assert cuattn.plan(*[q.astype(BF16)] * 3).kernel == "sm90"


@pytest.mark.parametrize("rows", [700, 2100, 3])  # whole, in parts, and few enough for a tile of several heads
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_results_that_are_parts_of_larger_arrays(rows, dtype):
    """They are written where they belong, by a first call and by a warm one, and nothing beside them is."""
    import cupy

    rng = np.random.default_rng(rows)
    q, k, v = (to_device(rng.standard_normal((2, 4, n, 64)).astype(dtype)) for n in (rows, 900, 900))
    right = cuattn.forward(q, k, v, is_causal="bottom_right")
    for _ in range(3):
        whole = {"o": cupy.full((2, 4, rows + 48, 64), 7, dtype)}
        whole |= {name: cupy.full((2, 4, rows + 48), 7, np.float32) for name in "lm"}
        call = dispatch.Call(FORWARD, {"q": q, "k": k, "v": v}, Options(is_causal="bottom_right"))
        call.into = {name: x[:, :, 16 : 16 + rows] for name, x in whole.items()}
        results, _ = dispatch.compute(call)
        for name, found in zip("olm", results, strict=True):
            assert found is call.into[name]
            same_bits(found, getattr(right, name))
            x = whole[name]
            assert (x[:, :, :16] == 7).all() and (x[:, :, 16 + rows :] == 7).all()
