"""The portable forward kernel on a GPU against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn.masks import ColumnMask
from tests import oracle
from tests.cuda.cases import (
    BF16,
    CASES,
    WIDE,
    Case,
    case_of,
    hostile_columns,
    oracle_options,
    same_bits,
    to_device,
    visible,
)
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu


def run(qkv, options, kernel="sm80", **more):
    """Run ``cuattn.forward`` on a kernel, by default the portable one; NumPy in, NumPy out."""
    options = {name: to_device(value) for name, value in options.items()}
    result = cuattn.forward(*map(to_device, qkv), kernel=kernel, **options, **more)
    return result.o.get(), result.l.get(), result.m.get()


def expected(case: Case, qkv, options, dtype=None):
    """Return o, l, m of the oracle, or of the textbook in `dtype`."""
    return oracle.forward(*qkv, **oracle_options(case, options), dtype=dtype)


def check(case: Case, kernel="sm80") -> None:
    """Compare one case with the oracle."""
    arrays, options = case.arrays()
    qkv = tuple(arrays.values())
    actual = run(qkv, options, kernel)
    spelled_out = oracle_options(case, options)
    exact, textbook = (oracle.solve(*qkv, **spelled_out, dtype=dtype) for dtype in (None, case.dtype))
    floors = {}
    if case.dtype in WIDE:  # where the inputs' own rounding does not hide the order of sums
        floors = oracle.floors(exact, *qkv, **spelled_out)
    for name, a, e, t in zip("olm", actual, exact, textbook, strict=False):
        assert_close(a, e, t, dtype=case.dtype, floor=floors.get(name), name=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_oracle(case):
    check(case)


def _case(name: str):
    case = case_of(name)
    arrays, options = case.arrays()
    return case, list(arrays.values()), options


@pytest.mark.parametrize("name", ["aligned", "one query", "dropout", "column"])
def test_same_bits_twice(name):
    _, qkv, options = _case(name)
    first, second = run(qkv, options), run(qkv, options)
    same_bits(first, second)


@pytest.mark.parametrize("name", ["column", "column d64 causal", "dropout column", "one query column"])
def test_column_mask_equals_boolean_mask_bit_for_bit(name):
    _, qkv, options = _case(name)
    column = run(qkv, options)
    dense = run(qkv, {**options, "mask": options["mask"].dense()})
    same_bits(column, dense)


@pytest.mark.parametrize(
    ("dtype", "keys", "head_dim"), [(np.float32, 20000, 64), (np.float64, 3000, 64), (np.float64, 3000, 128)]
)
def test_over_many_keys(dtype, keys, head_dim):
    """Enough heads that the keys are not divided among blocks; all of them read the same arrays."""
    import cupy

    rng = np.random.default_rng(8)
    qkv = [rng.standard_normal((n, head_dim)).astype(dtype) for n in (70, keys, keys)]
    mask = ColumnMask(*np.sort(rng.integers(0, 71, (4, keys)), axis=0), n_queries=70)
    arrays = [cupy.broadcast_to(cupy.asarray(x), (80, *x.shape)) for x in qkv]
    column, dense = run(arrays, {"mask": mask}), run(arrays, {"mask": mask.dense()})
    exact, textbook = (oracle.forward(*qkv, visible=mask.dense(), dtype=dtype) for dtype in (None, qkv[0].dtype))
    for name, a, b, e, t in zip("olm", column, dense, exact, textbook, strict=True):
        assert a.tobytes() == b.tobytes()
        assert_close(a[7], e, t, name=name)


def check_with_nan(case: Case, qkv, options, **how):
    """Check that NaN in keys that no row sees changes no bit; heads are not grouped, so k, v have the mask's axes."""
    clean = run(qkv, options, **how)
    seen = visible(case, options)
    dead = ~np.broadcast_to(seen, (*case.batch, case.heads, case.n_queries, case.n_keys)).any(-2)
    assert dead.any()
    for x in qkv[1:]:
        x[dead] = np.nan
    same_bits(run(qkv, options, **how), clean)


@pytest.mark.parametrize("name", ["column", "dense", "small blocks", "causal top left"])
def test_invisible_keys_may_hold_nan(name):
    check_with_nan(*_case(name))


def test_rows_without_keys_are_empty():
    _, qkv, options = _case("dense")
    o, l, m = run(qkv, options)
    assert not o[..., 5, :].any() and not l[..., 5].any() and (m[..., 5] == -np.inf).all()


@pytest.mark.parametrize("layout", ["swapped", "negative", "broadcast", "odd stride", "batch axes apart"])
def test_strides(layout):
    import cupy

    rng = np.random.default_rng(5)
    batch = (2, 3) if layout == "batch axes apart" else (2,)
    case = Case(layout, batch=batch, heads=3, kv_heads=3, n_queries=70, n_keys=150, head_dim=64)
    qkv = [rng.standard_normal((*batch, 3, n, 64)).astype(BF16) for n in (70, 150, 150)]
    if layout == "swapped":
        arrays = [cupy.asarray(np.ascontiguousarray(x.swapaxes(-2, -3))).swapaxes(-2, -3) for x in qkv]
    elif layout == "negative":
        arrays = [cupy.asarray(np.ascontiguousarray(x[..., ::-1, :]))[..., ::-1, :] for x in qkv]
    elif layout == "broadcast":
        qkv[1:] = [np.broadcast_to(x[:1, :1], x.shape) for x in qkv[1:]]
        arrays = [cupy.asarray(qkv[0])] + [cupy.broadcast_to(cupy.asarray(x[:1, :1]), x.shape) for x in qkv[1:]]
    elif layout == "odd stride":
        arrays = [cupy.asarray(np.concatenate([x, x[..., :3]], -1))[..., :64] for x in qkv]
    else:
        arrays = [cupy.asarray(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1) for x in qkv]
    actual = run(arrays, {})
    exact, textbook = expected(case, qkv, {}), expected(case, qkv, {}, BF16)
    for name, a, e, t in zip("olm", actual, exact, textbook, strict=True):
        assert_close(a, e, t, dtype=BF16, name=name)


def test_hostile_device_vectors_are_clamped():
    rng = np.random.default_rng(1)
    n, keys = 300, 400
    device, host = hostile_columns(rng, n, keys)
    qkv = [rng.standard_normal((2, m, 64)).astype(BF16) for m in (n, keys, keys)]
    same_bits(run(qkv, {"mask": device}), run(qkv, {"mask": host}))


def test_out_dtype_and_merge():
    import cupy

    case, (q, k, v), _ = _case("aligned")
    exact, textbook = expected(case, (q, k, v), {}), expected(case, (q, k, v), {}, case.dtype)
    parts = [
        cuattn.forward(*map(cupy.asarray, (q, k[..., a:b, :], v[..., a:b, :])), out_dtype="float32")
        for a, b in ((0, 100), (100, 101), (101, 512))
    ]
    for result in (cuattn.forward(*map(cupy.asarray, (q, k, v)), out_dtype="float32"), cuattn.merge(*parts)):
        assert result.o.dtype == np.float32
        for name, a, e, t in zip("olm", result[:3], exact, textbook, strict=True):
            assert_close(a.get(), e, t, dtype=np.float32, name=name)


def test_tf32_is_as_good_as_inputs_rounded_to_tf32():
    _, qkv, options = _case("float32 d64")
    case = case_of("float32 d64")
    actual = run(qkv, {**options, "precision": "tf32"})
    rounded = [oracle.tf32(x) for x in qkv]
    exact, textbook = expected(case, qkv, options), expected(case, rounded, options, np.float32)
    for name, a, e, t in zip("olm", actual, exact, textbook, strict=True):
        assert_close(a, e, t, name=name)


def test_device_offset_and_graph():
    import cupy

    _, qkv, _ = _case("dropout")
    arrays = [cupy.asarray(x) for x in qkv]
    offset = cupy.zeros((), np.uint64)
    state = cuattn.RNGState(3, offset)
    call = {"dropout_p": 0.1, "rng": state, "kernel": "sm80"}
    eager = [run(qkv, {"dropout_p": 0.1, "rng": cuattn.RNGState(3, i)})[0] for i in range(2)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuattn.forward(*arrays, **call)  # compiles and loads
        stream.begin_capture()
        result = cuattn.forward(*arrays, **call)
        graph = stream.end_capture()
        for i in range(2):
            offset[...] = i
            graph.launch(stream)
            assert result.o.get().tobytes() == eager[i].tobytes()


def test_graph_with_split_keys():
    import cupy

    _, qkv, _ = _case("one query")
    arrays = [cupy.asarray(x) for x in qkv]
    plan = cuattn.plan(*arrays, kernel="sm80")
    assert plan.workspace_bytes > 0 and "parts" in str(plan)
    eager = run(qkv, {})[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        cuattn.forward(*arrays, kernel="sm80")
        stream.begin_capture()
        result = cuattn.forward(*arrays, kernel="sm80")
        graph = stream.end_capture()
        noise = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(4)]
        graph.launch(stream)
        assert result.o.get().tobytes() == eager.tobytes()
    del noise


def test_more_than_two_to_the_31_elements():
    import cupy

    rows = (2**31 + 2**20) // 64
    k = cupy.zeros((rows, 64), np.uint16).view(BF16)  # a view: CuPy cannot fill bfloat16 quickly
    tail = cupy.asarray(np.random.default_rng(0).standard_normal((300, 64)).astype(BF16))
    k[-300:] = tail
    q = tail[:32]
    result = cuattn.forward(q, k, k, window=(31, None, "bottom_right"), kernel="sm80")
    last, queries = tail.get(), q.get()
    seen = oracle.visible_band(32, 300, 31, None, 300 - 32)
    exact, textbook = (oracle.forward(queries, last, last, visible=seen, dtype=dtype) for dtype in (None, BF16))
    for name, a, e, t in zip("olm", result[:3], exact, textbook, strict=True):
        assert_close(a.get(), e, t, dtype=BF16, name=name)
