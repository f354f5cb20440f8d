"""Hopper's backward kernels on a GPU against the float64 oracle."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

import cuattn
from cuattn import masks
from cuattn.cuda.sm90.backward import Cut
from cuattn.errors import UnsupportedError
from tests.cuda import scores
from tests.cuda.cases import BF16, CASES, F16, Case, bias_of, blocks_of, columns_of, same_bits, sized, to_device
from tests.cuda.gpu import Problem, hostile, made
from tests.cuda.gpu import named as named_among
from tests.cuda.gpu import poisoned_memory as poisoned_memory
from tests.cuda.sm80.test_score_gpu import check, results
from tests.cuda.sm90.test_forward_plan import problem
from tests.cuda.test_graph_gpu import CuPy

pytestmark = pytest.mark.gpu


def some_heads(case: Case, rng: np.random.Generator) -> masks.ColumnMask:
    """Hide the first keys from the second and third of every four heads."""
    hidden = np.zeros((2, *case.batch, case.heads, case.n_keys), np.int32)
    hidden[1, ..., 1::4, :200] = hidden[1, ..., 2::4, :200] = case.n_queries
    return masks.ColumnMask(*hidden, *np.zeros_like(hidden), n_queries=case.n_queries)


def diagonal(case: Case, rng: np.random.Generator) -> masks.ColumnMask:
    """Causality as a mask, which these kernels take as a band."""
    return masks.causal(case.n_queries, case.n_keys)


OWN = [
    sized("long", 2000, 700, 128, batch=(1,)),
    sized("long d64", 2000, 700, batch=(1,)),
    sized("long causal", 1300, 1300, 128, batch=(1,), options={"is_causal": True}),
    sized("many tiles", 200, 130, 128, batch=(3,), heads=60, kv_heads=20),
    sized("many tiles d64", 200, 130, batch=(3,), heads=60, kv_heads=20),
    sized("slabs", 150, 4200, 256, batch=(1,), heads=24, kv_heads=24),
    sized("slabs causal", 300, 4300, 256, batch=(1,), heads=32, kv_heads=16, options={"is_causal": "bottom_right"}),
    sized("slabs window", 4300, 4300, 160, batch=(1,), heads=16, kv_heads=16, options={"window": (70, 40)}),
    Case("d 64 dv 128", head_dim_v=128),
    Case("d 128 dv 64", head_dim=128, head_dim_v=64),
    Case("d 96 dv 40", head_dim=96, head_dim_v=40, options={"is_causal": "bottom_right"}),
    Case("float16 softcap", dtype=F16, head_dim=128, options={"softcap": 3.0, "is_causal": "top_left"}),
    sized("columns", 500, 600, 128, heads=20, kv_heads=20, mask=columns_of),
    sized("columns d64", 500, 600, mask=columns_of),
    sized("columns grouped", 300, 400, 128, heads=8, kv_heads=2, mask=columns_of),
    sized("heads between", 300, 400, 128, heads=8, kv_heads=2, mask=some_heads),
    sized("columns window", 500, 500, mask=columns_of, options={"window": (99, 40, "top_left")}),
    sized("columns softcap", 300, 400, 128, mask=columns_of, options={"softcap": 3.0}),
    sized("diagonal", 300, 400, 128, mask=diagonal,
         options={"window": (250, 7, "bottom_right")}),
    sized("no diagonal", 400, 300, mask=diagonal, options={"is_causal": "top_left"}),
    sized("blocks", 500, 600, 128, mask=blocks_of(128, 128)),
    sized("small blocks", 300, 400, mask=blocks_of(24, 40), options={"dropout_p": 0.3, "rng": 7}),
    sized("dropout", 300, 400, 128, options={"dropout_p": 0.1, "rng": 42}),
    sized("dropout d64", 300, 400, options={"dropout_p": 0.7, "rng": 42}),
    sized("dropout grouped", 500, 600, heads=8, kv_heads=2, mask=some_heads,
         options={"dropout_p": 0.1, "rng": 11, "is_causal": "bottom_right"}),
    Case("d 192 dv 128", head_dim=192, head_dim_v=128, options={"is_causal": True}, n_keys=200),
    sized("d256 grouped", 300, 400, 256, heads=8, kv_heads=2),
    Case("d256 window", head_dim=256, options={"window": (50, 20, "bottom_right"), "scale": -0.05}),
    sized("d256 blocks", 300, 400, 256, mask=blocks_of(24, 40)),
    sized("d256 columns", 300, 400, 256, heads=20, kv_heads=20, mask=columns_of),
    sized("d256 everything", 300, 400, 256, mask=columns_of,
         options={"softcap": 3.0, "dropout_p": 0.3, "rng": 7, "is_causal": "top_left"}),
    # Heads of one group for several blocks.
    sized("dealt out", 600, 600, 128, batch=(), heads=8, kv_heads=1, options={"is_causal": True}),
    sized("dealt out d64", 500, 700, batch=(2,), heads=12, kv_heads=2, dtype=F16),
    sized("dealt out d72 dv 40", 500, 400, 72, head_dim_v=40, batch=(1,), heads=6, kv_heads=1,
         options={"window": (200, 9, "top_left")}),
    sized("dealt out d256", 400, 450, 256, batch=(1,), heads=8, kv_heads=2, options={"is_causal": "bottom_right"}),
    sized("dealt out columns", 400, 450, 128, batch=(1,), heads=8, kv_heads=1, mask=some_heads),
    sized("dealt out dropout", 400, 450, 128, batch=(1,), heads=8, kv_heads=1, options={"dropout_p": 0.1, "rng": 11}),
    sized("sliced", 2000, 2000, 64, batch=(), heads=1, kv_heads=1, options={"is_causal": True}),
    sized("sliced full", 2100, 1100, 128, batch=(), heads=2, kv_heads=1),
    sized("sliced columns", 1500, 1100, 128, batch=(), heads=2, kv_heads=2, mask=columns_of, dtype=F16),
    sized("sliced d256", 1500, 1100, 256, batch=(), heads=1, kv_heads=1, options={"window": (700, 300, "top_left")}),
    sized("sliced blocks", 1500, 1100, 128, batch=(), heads=2, kv_heads=2, mask=blocks_of(128, 64)),
    sized("turns", 900, 900, 128, batch=(1,), heads=6, kv_heads=3),
    sized("turns causal", 900, 900, batch=(1,), heads=4, kv_heads=4, options={"is_causal": True}),
    sized("dropout columns", 300, 400, 128, mask=columns_of,
         options={"dropout_p": 0.1, "rng": 42}),
    sized("d32", 300, 400, 32, heads=6, kv_heads=3),
    sized("d24 dv 64", 300, 400, 24, head_dim_v=64, options={"is_causal": "top_left"}),
    # Many heads of few rows, whose dq a block holds.
    sized("few rows", 256, 256, 32, batch=(70,), heads=4, kv_heads=4),
    sized("very few rows", 49, 49, 32, batch=(80,), heads=4, kv_heads=4),
    sized("few rows window", 200, 300, 24, batch=(70,), heads=4, kv_heads=4, dtype=F16,
         options={"window": (60, 20, "top_left")}),
    sized("few rows columns", 130, 200, 32, batch=(70,), heads=4, kv_heads=4, mask=columns_of),
    sized("few rows bias", 256, 256, 32, batch=(70,), heads=4, kv_heads=4, bias=bias_of(0, 1, 1, 1, dtype=BF16)),
    sized("few rows d64", 256, 256, batch=(70,), heads=4, kv_heads=4),
    sized("few rows d64 causal", 197, 197, batch=(70,), heads=4, kv_heads=4, dtype=F16, options={"is_causal": True}),
    sized("few rows d40 dv 64 columns", 130, 200, 40, head_dim_v=64, batch=(70,), heads=4, kv_heads=4, mask=columns_of),
    # All that rows see is one key tile.
    sized("one key tile", 300, 77, heads=6, kv_heads=3),
    sized("one key tile causal", 128, 128, dtype=F16, options={"is_causal": True}),
    sized("one key tile d40", 200, 100, 40, head_dim_v=64, batch=(3,), heads=60, kv_heads=60),
    sized("one key tile d96", 300, 77, 96, head_dim_v=40, options={"window": (400, 9, "bottom_right")}),
    sized("one key tile sliced", 2000, 70, 128, batch=(1,), heads=2, kv_heads=2),
    # Wide heads whose dK and dV registers hold.
    sized("d 192 dv 128 full", 300, 500, 192, head_dim_v=128, heads=6, kv_heads=3, dtype=F16),
    sized("d 136 dv 64 many tiles", 200, 130, 136, head_dim_v=64, batch=(3,), heads=60, kv_heads=60),
    sized("dealt out d192", 400, 450, 192, head_dim_v=128, batch=(1,), heads=8, kv_heads=2,
         options={"window": (200, 9, "top_left")}),
    sized("softcap", 500, 400, 128, options={"softcap": 3.0, "is_causal": "bottom_right"}),
    # Several blocks share the last key tiles.
    sized("last tiles", 1100, 1100, 128, batch=(5,), heads=3, kv_heads=3),
    sized("last tiles d72", 1100, 1100, 72, head_dim_v=40, batch=(), heads=15, kv_heads=15, dtype=F16),
    # A bias of its own, whose gradient is dS; one that heads or sequences share; loaded ones; one for each key or row.
    *(sized(f"bias d{d}", 300, 400, d, bias=bias_of(1, 1, 1, 1, dtype=BF16)) for d in (64, 128)),
    sized("bias many tiles", 200, 136, 128, batch=(3,), heads=60, kv_heads=60, bias=bias_of(1, 1, 1, 1, dtype=BF16)),
    sized("bias columns", 500, 600, bias=bias_of(1, 1, 1, 1, dtype=BF16), mask=columns_of),
    sized("bias causal", 400, 400, 128, bias=bias_of(1, 1, 1, 1, dtype=BF16), options={"is_causal": True}),
    sized("bias softcap", 300, 400, 128, bias=bias_of(1, 1, 1, 1, dtype=BF16), options={"softcap": 3.0}),
    sized("bias dropout", 300, 400, 128, bias=bias_of(1, 1, 1, 1, dtype=BF16), options={"dropout_p": 0.3, "rng": 7}),
    sized("bias grouped", 300, 400, bias=bias_of(1, 1, 1, 1, dtype=BF16), heads=8),
    sized("bias float16", 300, 400, 128, dtype=F16, bias=bias_of(0, 1, 1, 1, dtype=F16)),
    sized("pair bias", 256, 256, 32, batch=(20,), heads=4, kv_heads=4, bias=bias_of(0, 1, 1, 1, dtype=BF16)),
    sized("bias shared by heads", 500, 600, 128, bias=bias_of(1, 0, 1, 1, dtype=BF16), mask=columns_of),
    sized("bias shared by sequences", 1100, 2048, 128, heads=3, kv_heads=3, bias=bias_of(0, 1, 1, 1, dtype=BF16)),
    sized("bias shared by all", 300, 400, 72, batch=(3,), bias=bias_of(0, 0, 1, 1)),
    sized("bias loaded", 300, 333, 128, bias=bias_of(0, 1, 1, 1)),
    sized("bias loaded d64", 300, 333, bias=bias_of(1, 1, 1, 1), options={"window": (99, 40, "top_left")}),
    sized("bias blocks", 500, 600, 128, bias=bias_of(1, 1, 1, 1, dtype=BF16), mask=blocks_of(128, 128)),
    sized("bias d256", 300, 400, 256, bias=bias_of(1, 1, 1, 1, dtype=BF16)),
    *(sized(f"key bias d{d}", 300, 401, d, bias=bias_of(1, 0, 0, 1)) for d in (64, 128, 256)),
    sized("key bias grouped", 300, 400, 128, heads=8, bias=bias_of(1, 1, 0, 1, dtype=BF16)),
    sized("key bias causal dropout", 400, 400, bias=bias_of(1, 0, 0, 1, dtype=BF16),
         options={"is_causal": True, "dropout_p": 0.3, "rng": 7}),
    sized("key bias softcap", 300, 400, 128, bias=bias_of(0, 1, 0, 1, dtype=BF16), options={"softcap": 3.0}),
    sized("row bias", 300, 400, 128, bias=bias_of(1, 1, 1, 0)),
]  # fmt: skip


def named(name: str) -> Problem:
    return named_among(name, OWN)


@pytest.mark.parametrize("case", [*CASES, *OWN], ids=lambda case: case.name)
def test_oracle(case):
    problem = made(case)
    try:
        actual = problem.backward("sm90")
    except UnsupportedError as error:
        assert case not in OWN
        pytest.skip(str(error))
    problem.check(actual)


# Where turns matter: many key tiles add to a row tile, and masks leave some of them out.
TURNS = [
    "turns", "turns causal", "many tiles", "many tiles d64", "columns", "columns grouped", "columns window",
    "small blocks", "blocks", "dropout", "dropout grouped", "d 96 dv 40", "d256 everything",
    "bias d64", "bias d128", "bias columns", "pair bias", "bias loaded d64", "key bias d64", "key bias d128",
    "bias softcap", "bias dropout", "bias shared by heads", "bias shared by sequences", "bias shared by all",
    "bias loaded", "bias blocks", "bias d256", "key bias d256", "key bias softcap", "row bias", "few rows",
    "few rows d64", "few rows d40 dv 64 columns", "one key tile", "one key tile sliced", "d 192 dv 128 full",
    "few rows columns", "few rows bias", "dealt out", "dealt out d64", "dealt out d256", "dealt out columns",
]  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_deterministic(name):
    problem = named(name)
    first = problem.backward("sm90", deterministic=True)
    problem.check(first)
    for _ in range(5):
        same_bits(first, problem.backward("sm90", deterministic=True))


def prepared(problem: Problem):
    """Return a function of further options that runs a backward; its forward has run."""
    arrays, options = problem.arrays(), {"kernel": "sm90", **problem.options}
    forward = cuattn.forward(*arrays[1:], **options)
    options.pop("rng", None)
    return partial(cuattn.backward, *arrays, forward, **options)


@pytest.mark.parametrize("name", ["turns", "turns causal", "columns"])
def test_a_thousand_runs_are_bitwise_equal(name):
    import cupy

    backward = partial(prepared(named(name)), deterministic=True)
    first = [x.view(np.uint16) for x in backward()[:3]]
    different = cupy.zeros((), np.int64)
    for _ in range(1000):
        for a, b in zip(first, backward()[:3], strict=True):
            different += (a != b.view(np.uint16)).any()
    assert int(different) == 0


BEYOND = [
    sized("dead keys beyond", 200, 333, 128, options={"is_causal": "top_left"}),
    sized("empty rows beyond", 333, 200, 128, options={"is_causal": "bottom_right"}),
]
UNSEEN = ("columns", "columns window", "small blocks", "columns d64", "d256 columns", "d256 blocks")


@pytest.mark.parametrize("case", [*BEYOND, *(case for case in OWN if case.name in UNSEEN)], ids=lambda case: case.name)
def test_what_nobody_sees_may_hold_nan(case):
    made(case).check_unseen("sm90")


@pytest.mark.parametrize("name", ["key bias d64", "key bias d128", "key bias d256", "key bias causal dropout"])
def test_what_a_bias_hides_may_hold_nan(name):
    problem = named(name)
    problem.options["bias"][..., 250:] = -np.inf
    clean = problem.backward("sm90", deterministic=True)
    for x in problem.qkv[1:]:
        x[..., 250:, :] = np.nan
    same_bits(problem.backward("sm90", deterministic=True), clean)


@pytest.mark.parametrize("name", ["bias d64", "bias d128", "key bias d128"])
def test_rows_that_a_bias_empties_may_hold_nan(name):
    problem = named(name)
    bias = problem.options["bias"]
    rows = np.s_[:] if bias.shape[-2] == 1 else np.s_[128:200]
    bias[..., rows, :] = -np.inf
    problem.qkv[0][..., rows, :] = problem.do[..., rows, :] = np.nan
    dq, *rest = problem.backward("sm90")
    assert not dq[..., rows, :].any() and not any(np.isnan(x.astype(np.float32)).any() for x in rest)


SCORED = [
    sized("scored", 300, 400, 128),
    sized("scored d64", 300, 400),
    sized("scored causal", 400, 400, 128, dtype=F16, options={"is_causal": True}),
    sized("scored columns", 300, 400, 128, mask=columns_of),
    sized("scored softcap", 300, 400, options={"softcap": 6.0}),
    sized("scored dropout", 300, 400, 128, options={"dropout_p": 0.25, "rng": 9}),
    sized("scored d256", 300, 400, 256),
    sized("scored grouped", 700, 900, heads=8, kv_heads=2, mask=some_heads),
]


@pytest.mark.parametrize("case", SCORED, ids=lambda case: case.name)
@pytest.mark.parametrize("name", scores.SCORES)
def test_scores(name, case):
    problem, score = made(case), scores.SCORES[name](case)
    if case.options and "dropout_p" in case.options and name not in scores.ADDITIVE:
        with pytest.raises(UnsupportedError, match="by a sign, which a function's slope may change"):
            results(problem, score, kernel="sm90")
    else:
        check(problem, score, results(problem, score, kernel="sm90"))


@pytest.mark.parametrize("name", ["alibi", "relative_table", "gated", "pair_bias", "graph"])
def test_scores_in_a_fixed_order(name):
    problem, score = named("turns"), scores.SCORES[name](named("turns").case)
    first = results(problem, score, True, "sm90")
    check(problem, score, first)
    same_bits(first, results(problem, score, True, "sm90"))


def test_hostile_device_vectors_are_clamped():
    problem, mask = hostile()
    problem.check(problem.backward("sm90", mask=mask))


@pytest.mark.parametrize("layout", ["swapped", "broadcast q", "offset"])
def test_strides(layout):
    problem = twin = made(sized(layout, 170, 250, heads=3, kv_heads=3))
    if layout == "broadcast q":
        problem.qkv[0] = problem.qkv[0][:1]
    else:
        _, twin = problem.strided(layout)
    problem.check(twin.backward("sm90"))


def test_unrounded_o():
    problem = named("long")
    problem.check(problem.backward("sm90", o_dtype="float32"))


@pytest.mark.parametrize("name", ["long", "columns", "long d64"])
def test_delta_cancels_to_its_last_bits(name):
    """Where all values are alike dP is D, whatever P is; no term of D is negative, so that its own error is small."""
    import cupy

    problem = named(name)
    problem.qkv[2][...] = values = np.linspace(0.5, 2, problem.case.head_dim).astype(BF16)
    problem.do[...] = np.abs(problem.do)
    do, q, k, v = problem.arrays()
    forward = cuattn.forward(q, k, v, **problem.options)
    forward.o[...] = to_device(values)  # o that is rounded may be off by a unit
    dq = cuattn.backward(do, q, k, v, forward, kernel="sm90", **problem.options).dq
    delta = do.astype(cupy.float64) @ to_device(values.astype(np.float64))
    bound = 2.0**-18 * delta * abs(k.astype(cupy.float64)).max() / q.shape[-1] ** 0.5
    assert (abs(dq.astype(cupy.float64)) <= bound[..., None]).all()


def test_graph_holds_its_scratch():
    backward = prepared(named("columns"))
    eager = backward()
    result, replay = CuPy().capture(backward)
    for _ in range(2):
        replay()
    same_bits(result[1:3], eager[1:3])
    np.testing.assert_allclose(result[0].get().astype(np.float32), eager[0].get().astype(np.float32), atol=1e-2)


def test_key_gradients_repeat_bit_for_bit():
    """In no order that was asked for, where no two blocks share a key tile."""
    problem = named("columns")
    q, k, v = problem.arrays()[1:]
    assert "share a key tile" not in str(cuattn.plan(q, k, v, direction="backward", kernel="sm90", **problem.options))
    same_bits(*(problem.backward("sm90")[1:3] for _ in range(2)))


@pytest.mark.parametrize("name", ["dealt out", "dealt out d64", "dealt out d256", "dealt out columns"])
def test_parts_of_a_group_add_up(name):
    """To what one head to a block gives: dq bit for bit in a fixed order, dk and dv but for roundings."""
    problem = named(name)
    do, q, k, v = problem.arrays()
    options = {"kernel": "sm90", **problem.options}
    forward = cuattn.forward(q, k, v, **options)
    assert "blocks share a key tile" in " ".join(cuattn.plan(q, k, v, direction="backward", **options).notes)
    gradients = cuattn.backward(do, q, k, v, forward, deterministic=True, **options)
    group = q.shape[-3] // k.shape[-3]
    alone = [x.repeat(group, axis=-3) for x in (k, v)]
    dq, *rest = cuattn.backward(do, q, *alone, forward, deterministic=True, **options)[:3]
    same_bits([gradients.dq], [dq])
    for actual, parts in zip(gradients[1:3], rest, strict=True):
        *batch, heads, rows, columns = actual.shape
        summed = parts.astype(np.float64).reshape(*batch, heads, group, rows, columns).sum(-3)
        error = abs(actual.astype(np.float64) - summed).max()
        assert error <= 2.0**-6 * abs(parts.astype(np.float64)).max() * group**0.5


HOLD = r"""
extern "C" __global__ void hold(volatile unsigned* flags, unsigned long long nanoseconds) {
    if (threadIdx.x != 0) return;
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    flags[1 + blockIdx.x] = 1;
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (flags[0] == 0 && now - start < nanoseconds);
}
"""


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_a_fixed_order_waits_for_no_block_that_has_yet_to_run(options):
    """A kernel on another stream keeps 30 multiprocessors until the gradients are there, or for ten seconds."""
    import cupy
    import cupyx

    blocks, seconds = 30, 10
    rng = cupy.random.default_rng(3)
    arrays = [rng.standard_normal((1, 16, 4096, 128), dtype=np.float32).astype(BF16) for _ in range(4)]
    options = {"kernel": "sm90", **options}
    forward = cuattn.forward(*arrays[1:], **options)
    flags = cupyx.zeros_pinned(1 + blocks, np.uint32)
    hold = cupy.RawKernel(HOLD, "hold")
    hold.max_dynamic_shared_size_bytes = 200 << 10  # nothing of ours fits beside it
    ours, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with ours:
        expected = cuattn.backward(*arrays, forward, deterministic=True, **options)
        ours.synchronize()
    with other:
        hold((blocks,), (32,), (np.uint64(flags.ctypes.data), np.uint64(seconds * 10**9)), shared_mem=200 << 10)
    end = time.monotonic() + seconds / 2
    while not flags[1:].all() and time.monotonic() < end:
        time.sleep(0.001)
    held = flags[1:].all()
    with ours:
        actual = cuattn.backward(*arrays, forward, deterministic=True, **options)
        done = ours.record()
    while not done.done and time.monotonic() < end:
        time.sleep(0.001)
    in_time = done.done
    flags[0] = 1
    cupy.cuda.Device().synchronize()
    assert held and in_time
    same_bits(actual[:3], expected[:3])


@pytest.mark.parametrize("scale", [30.0, -30.0, 3e4, 1e9, 1e30])
@pytest.mark.parametrize(("shape", "head_dim_v", "options"), [
    *(((2, 300, d), d, options) for d in (64, 128, 256) for options in ({}, {"is_causal": True})),
    ((2, 300, 128), 128, {"dropout_p": 0.1, "rng": 1}),
    ((2, 300, 192), 128, {"is_causal": True}),
    ((300, 200, 64), 64, {}),
    ((300, 100, 64), 64, {}),
])  # fmt: skip
def test_scores_of_any_size(shape, head_dim_v, options, scale):
    """Each query sees, in effect, the key that is like it: o is its value, l is 1, dv is do, to the bit, and dq is 0.

    What remains of dq is the rounding of dp and delta and, with dropout, of o.
    """
    rng = np.random.default_rng(8)
    widths = shape[-1], head_dim_v, head_dim_v
    q, v, do = (rng.standard_normal((*shape[:-1], width)).astype(BF16) for width in widths)
    k = q if scale > 0 else -q
    arrays = [to_device(x) for x in (do, q, k, v)]
    options = {"kernel": "sm90", "scale": scale, **options}
    forward = cuattn.forward(*arrays[1:], **options)
    options.pop("rng", None)
    dq, _, dv, _ = cuattn.backward(*arrays, forward, **options)
    np.testing.assert_allclose(forward.l.get(), 1, rtol=2.0**-20)
    sizes = [np.abs(x.astype(np.float64)) for x in (do, v, k)]
    dp_size = (sizes[0] * sizes[1]).sum(-1).max()
    rest = 2.0 ** (-7 if "dropout_p" in options else -16) * dp_size * sizes[2].max() * abs(scale)
    assert (np.abs(dq.get().astype(np.float64)) <= rest).all()
    largest = np.einsum("hid,hid->hi", *[q.astype(np.float64)] * 2) * abs(scale)
    np.testing.assert_allclose(forward.m.get(), largest, rtol=1e-6)
    if "dropout_p" not in options:
        assert forward.o.get().tobytes() == v.tobytes() and dv.get().tobytes() == do.tobytes()
    else:
        kept = forward.o.get().astype(np.float32).any(-1)
        assert (dv.get().astype(np.float32).any(-1) == kept).all() and not kept.all()


@pytest.mark.parametrize("name", ["long d64", "columns", "dropout", "d256 grouped", "d 96 dv 40"])
def test_unrounded_gradients(name):
    backward = partial(prepared(named(name)), deterministic=True)
    rounded, unrounded = backward(), backward(out_dtype=np.float32)
    for a, b in zip(rounded[:3], unrounded[:3], strict=True):
        assert b.dtype == np.float32 and b.astype(a.dtype).get().tobytes() == a.get().tobytes()


@pytest.mark.parametrize(
    "case",
    [
        sized("one head of keys", 1500, 1500, 128, batch=(1,), heads=16, kv_heads=1),
        sized("slices of rows", 3000, 1000, 64, batch=(1,), heads=4, kv_heads=4),
        sized("d 256", 1200, 1200, 256, batch=(1,), heads=8, kv_heads=8),
        sized("short", 200, 300, 64, batch=(10,), heads=30, kv_heads=30),
        sized("causal", 2000, 2000, 128, batch=(1,), heads=9, kv_heads=9, options={"is_causal": True}),
        sized("one key tile", 2000, 100, 128, batch=(1,), heads=9, kv_heads=9),
    ],
    ids=lambda case: case.name,
)
def test_unrounded_gradients_of_every_plan(case):
    """Whoever adds them up, in whatever order."""
    backward = prepared(made(case))
    for a, b in zip(backward()[:3], backward(out_dtype=np.float32)[:3], strict=True):
        largest = float(abs(b).max())
        assert b.dtype == np.float32 and float(abs(a.astype(np.float32) - b).max()) <= 2**-7 * largest


def test_unrounded_gradients_of_key_tiles_that_blocks_share():
    """Those of the last round leave by the launch that converts dq."""
    case = sized("shared tiles", 2000, 2000, 128, batch=(1,), heads=9, kv_heads=9)
    assert Cut(problem(128, batch=(1,), heads=9, kv_heads=9, n_queries=2000, n_keys=2000, operation="backward")).tail
    backward = prepared(made(case))
    rounded, unrounded = backward(), backward(out_dtype=np.float32)
    for a, b in zip(rounded[1:3], unrounded[1:3], strict=True):
        assert b.dtype == np.float32 and b.astype(a.dtype).get().tobytes() == a.get().tobytes()


def test_plan_says_which():
    import cupy

    q = cupy.zeros((1, 8, 2048, 64), np.float32)
    assert any("not the sm90 kernel" in note for note in cuattn.plan(q, q, q, direction="backward").notes)
    for options in ({}, {"mask": masks.causal_document([700, 1348]), "dropout_p": 0.1}):
        assert cuattn.plan(*[q.astype(BF16)] * 3, direction="backward", **options).kernel == "sm90"
