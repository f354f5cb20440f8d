"""Hopper's backward kernels on a GPU against the float64 oracle."""

from __future__ import annotations

import time

import numpy as np
import pytest

import cuattn
from cuattn import masks
from cuattn.errors import UnsupportedError
from tests.cuda.cases import (
    BF16,
    CASES,
    F16,
    Case,
    blocks_of,
    case_of,
    columns_of,
    hostile_columns,
    same_bits,
    sized,
    to_device,
)
from tests.cuda.sm80.test_backward_gpu import check, check_with_nan, made, poisoned_memory, run  # noqa: F401
from tests.cuda.sm90.test_forward_gpu import hopper  # noqa: F401

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
    Case("d 64 dv 128", head_dim_v=128),
    Case("d 128 dv 64", head_dim=128, head_dim_v=64),
    Case("d 96 dv 40", head_dim=96, head_dim_v=40, options={"is_causal": "bottom_right"}),
    Case("float16 softcap", dtype=F16, head_dim=128, options={"softcap": 3.0, "is_causal": "top_left"}),
    sized("columns", 500, 600, 128, heads=20, kv_heads=20, mask=columns_of),
    sized("columns d64", 500, 600, mask=columns_of),
    sized("columns grouped", 300, 400, 128, heads=8, kv_heads=2, mask=columns_of),
    sized("heads between", 300, 400, 128, heads=8, kv_heads=2, mask=some_heads),
    sized("columns window", 500, 500, mask=columns_of, options={"window": (99, 40)}),
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
    sized("turns", 900, 900, 128, batch=(1,), heads=6, kv_heads=3),
    sized("turns causal", 900, 900, batch=(1,), heads=4, kv_heads=4, options={"is_causal": True}),
    sized("dropout columns", 300, 400, 128, mask=columns_of,
         options={"dropout_p": 0.1, "rng": 42}),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *OWN], ids=lambda case: case.name)
def test_oracle(case):
    do, qkv, options = made(case)
    try:
        actual = run(do, qkv, options, kernel="sm90")
    except UnsupportedError as error:
        assert case not in OWN
        pytest.skip(str(error))
    check(case, actual, do, qkv, options)


# Where turns matter: many key tiles add to a row tile, and masks leave some of them out.
TURNS = [
    "turns", "turns causal", "many tiles", "many tiles d64", "columns", "columns grouped", "columns window",
    "small blocks", "blocks", "dropout", "dropout grouped", "d 96 dv 40", "d256 everything",
]  # fmt: skip


@pytest.mark.parametrize("name", TURNS)
def test_deterministic(name):
    case, do, qkv, options = named(name)
    first = run(do, qkv, options, deterministic=True, kernel="sm90")
    check(case, first, do, qkv, options)
    for _ in range(5):
        same_bits(first, run(do, qkv, options, deterministic=True, kernel="sm90"))


@pytest.mark.parametrize("name", ["turns", "turns causal", "columns"])
def test_a_thousand_runs_are_bitwise_equal(name):
    import cupy

    _, do, qkv, options = named(name)
    options = {"deterministic": True, "kernel": "sm90", **options}
    arrays = [cupy.asarray(x) for x in (do, *qkv)]
    forward_options = {key: value for key, value in options.items() if key not in ("deterministic", "kernel")}
    forward = cuattn.forward(*arrays[1:], **forward_options)
    first = [x.view(np.uint16) for x in cuattn.backward(*arrays, forward, **options)[:3]]
    different = cupy.zeros((), np.int64)
    for _ in range(1000):
        for a, b in zip(first, cuattn.backward(*arrays, forward, **options)[:3], strict=True):
            different += (a != b.view(np.uint16)).any()
    assert int(different) == 0


def named(name: str):
    case = case_of(name, OWN)
    return case, *made(case)


@pytest.mark.parametrize(
    "name", ["columns", "columns window", "small blocks", "columns d64", "d256 columns", "d256 blocks"]
)
def test_what_nobody_sees_may_hold_nan(name):
    check_with_nan(*named(name), kernel="sm90")


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(200, 333), (333, 200)])
def test_beyond_the_causal_band_may_hold_nan(lengths, align):
    """More keys than queries leaves dead keys, more queries than keys empty rows."""
    case = sized("beyond", *lengths, 128)
    do, qkv, _ = made(case)
    check_with_nan(case, do, qkv, {"is_causal": align}, kernel="sm90")


def test_hostile_device_vectors_are_clamped():
    rng = np.random.default_rng(1)
    n, keys = 300, 400
    device, host = hostile_columns(rng, n, keys)
    do, *qkv = [rng.standard_normal((2, m, 64)).astype(BF16) for m in (n, n, keys, keys)]
    case = Case("hostile", batch=(), heads=2, kv_heads=2, n_queries=n, n_keys=keys)
    check(case, run(do, qkv, {"mask": device}, kernel="sm90"), do, qkv, {"mask": host})


@pytest.mark.parametrize("layout", ["swapped", "broadcast q", "offset"])
def test_strides(layout):
    import cupy

    rng = np.random.default_rng(5)
    case = Case(layout, heads=3, kv_heads=3, n_queries=170, n_keys=250)
    arrays = [rng.standard_normal((2, 3, n, 64)).astype(BF16) for n in (170, 170, 250, 250)]
    if layout == "swapped":
        device = [cupy.asarray(np.ascontiguousarray(x.swapaxes(-2, -3))).swapaxes(-2, -3) for x in arrays]
    elif layout == "broadcast q":
        arrays[1] = arrays[1][:1]
        device = [cupy.asarray(np.ascontiguousarray(x)) for x in arrays]
    else:
        device = [cupy.asarray(np.pad(x, ((0, 0), (0, 0), (0, 0), (8, 24))))[..., 8:72] for x in arrays]
    check(case, run(device[0], device[1:], {}, kernel="sm90"), arrays[0], arrays[1:], {})


def test_unrounded_o():
    case, do, qkv, options = named("long")
    check(case, run(do, qkv, options, kernel="sm90", o_dtype="float32"), do, qkv, options)


@pytest.mark.parametrize("name", ["long", "columns", "long d64"])
def test_delta_cancels_to_its_last_bits(name):
    """Where all values are alike dP is D, whatever P is; no term of D is negative, so that its own error is small."""
    import cupy

    _, do, (q, k, v), options = named(name)
    v[...] = values = np.linspace(0.5, 2, v.shape[-1]).astype(v.dtype)
    do, q, k, v = map(to_device, (np.abs(do), q, k, v))
    forward = cuattn.forward(q, k, v, **options)
    forward.o[...] = to_device(values)  # o that is rounded may be off by a unit
    dq = cuattn.backward(do, q, k, v, forward, kernel="sm90", **options).dq
    delta = do.astype(cupy.float64) @ to_device(values.astype(np.float64))
    bound = 2.0**-18 * delta * abs(k.astype(cupy.float64)).max() / q.shape[-1] ** 0.5
    assert (abs(dq.astype(cupy.float64)) <= bound[..., None]).all()


def test_graph_holds_its_scratch():
    import cupy

    _, do, qkv, options = named("columns")
    arrays = [cupy.asarray(x) for x in qkv]
    upstream = cupy.asarray(do)
    forward = cuattn.forward(*arrays, **options)
    call = {"kernel": "sm90", **options}
    eager = cuattn.backward(upstream, *arrays, forward, **call)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        result = cuattn.backward(upstream, *arrays, forward, **call)
        graph = stream.end_capture()
        noise = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(4)]
        for _ in range(2):
            graph.launch(stream)
        same_bits(result[1:3], eager[1:3])
        np.testing.assert_allclose(result[0].get().astype(np.float32), eager[0].get().astype(np.float32), atol=1e-2)
    del noise


def test_key_gradients_repeat_bit_for_bit():
    _, do, qkv, options = named("columns grouped")
    first, second = (run(do, qkv, options, kernel="sm90")[1:3] for _ in range(2))
    same_bits(first, second)


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
@pytest.mark.parametrize(("head_dim", "options"), [
    (64, {}), (64, {"is_causal": True}), (128, {}), (128, {"is_causal": True}), (128, {"dropout_p": 0.1, "rng": 1}),
    (256, {}), (256, {"is_causal": True}),
])  # fmt: skip
def test_scores_of_any_size(head_dim, options, scale):
    """Each query sees, in effect, the key that is like it: o is its value, l is 1, dv is do, to the bit, and dq is 0.

    What remains of dq is the rounding of dp and delta and, with dropout, of o.
    """
    rng = np.random.default_rng(8)
    q, v, do = (rng.standard_normal((2, 300, head_dim)).astype(BF16) for _ in range(3))
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
    _, do, qkv, options = named(name)
    options = {"kernel": "sm90", "deterministic": True, **options}
    arrays = [to_device(x) for x in (do, *qkv)]
    forward_options = {key: value for key, value in options.items() if key != "deterministic"}
    forward = cuattn.forward(*arrays[1:], **forward_options)
    options.pop("rng", None)
    rounded = cuattn.backward(*arrays, forward, **options)
    unrounded = cuattn.backward(*arrays, forward, out_dtype=np.float32, **options)
    for a, b in zip(rounded[:3], unrounded[:3], strict=True):
        assert b.dtype == np.float32 and b.astype(a.dtype).get().tobytes() == a.get().tobytes()


def test_plan_says_which():
    import cupy

    q = cupy.zeros((1, 8, 2048, 64), np.float32)
    assert any("not the sm90 kernel" in note for note in cuattn.plan(q, q, q, direction="backward").notes)
    halves = [q.astype(BF16)] * 3
    assert cuattn.plan(*halves, direction="backward").kernel == "sm90"
    assert (
        cuattn.plan(*halves, direction="backward", mask=masks.causal_document([700, 1348]), dropout_p=0.1).kernel
        == "sm90"
    )
