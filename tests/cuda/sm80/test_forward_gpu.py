"""The portable forward kernel on a GPU against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn.masks import ColumnMask
from tests import oracle
from tests.cuda.cases import BF16, CASES, F16, Case, same_bits, sized, to_device
from tests.cuda.gpu import hostile, made, named
from tests.cuda.test_graph_gpu import CuPy
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu


# Teams of warps that own 32 rows each, where there is room for four.
TEAMS = [
    sized("teams", 8, 2000, 128, heads=8, kv_heads=2),
    sized("teams causal", 8, 2000, 128, heads=8, kv_heads=2, options={"is_causal": "bottom_right"}),
    sized("teams float16", 31, 4100, 72, dtype=F16),
    sized(
        "teams of many keys",
        5,
        9001,
        64,
        batch=(1,),
        heads=6,
        kv_heads=1,
        options={"window": (5000, 0, "bottom_right")},
    ),
]


@pytest.mark.parametrize("case", [*CASES, *TEAMS], ids=lambda case: case.name)
def test_oracle(case):
    problem = made(case)
    problem.check(problem.forward())


@pytest.mark.parametrize("name", ["aligned", "one query", "dropout", "column"])
def test_same_bits_twice(name):
    problem = named(name)
    same_bits(problem.forward(), problem.forward())


@pytest.mark.parametrize("name", ["column", "column d64 causal", "dropout column", "one query column"])
def test_column_mask_equals_boolean_mask_bit_for_bit(name):
    problem = named(name)
    same_bits(problem.forward(), problem.forward(mask=problem.options["mask"].dense()))


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
    found = [cuattn.forward(*arrays, kernel="sm80", mask=seen)[:3] for seen in (mask, to_device(mask.dense()))]
    exact, textbook = (oracle.forward(*qkv, visible=mask.dense(), dtype=dtype) for dtype in (None, qkv[0].dtype))
    for name, a, b, e, t in zip("olm", *found, exact, textbook, strict=True):
        assert a.get().tobytes() == b.get().tobytes()
        assert_close(a[7].get(), e, t, name=name)


@pytest.mark.parametrize("name", ["column", "dense", "small blocks", "causal top left"])
def test_invisible_keys_may_hold_nan(name):
    named(name).check_unseen_keys()


def test_rows_without_keys_are_empty():
    o, l, m = named("dense").forward()
    assert not o[..., 5, :].any() and not l[..., 5].any() and (m[..., 5] == -np.inf).all()


@pytest.mark.parametrize("layout", ["swapped", "negative", "broadcast", "odd stride", "batch axes apart"])
def test_strides(layout):
    batch = (2, 3) if layout == "batch axes apart" else (2,)
    problem, twin = made(Case(layout, batch=batch, heads=3, kv_heads=3, n_queries=70, n_keys=150)).strided(layout)
    problem.check(twin.forward())


def test_hostile_device_vectors_are_clamped():
    problem, mask = hostile()
    same_bits(problem.forward(), problem.forward(mask=mask))


def test_out_dtype_and_merge():
    problem = named("aligned")
    _, q, k, v = problem.arrays()
    parts = [
        cuattn.forward(q, k[..., a:b, :], v[..., a:b, :], out_dtype="float32")
        for a, b in ((0, 100), (100, 101), (101, 512))
    ]
    for result in (cuattn.forward(q, k, v, out_dtype="float32"), cuattn.merge(*parts)):
        assert result.o.dtype == np.float32
        problem.check([x.get() for x in result[:3]], np.float32)


def test_tf32_is_as_good_as_inputs_rounded_to_tf32():
    problem = named("float32 d64")
    rounded = [oracle.tf32(x) for x in problem.qkv]
    exact, textbook = oracle.forward(*problem.qkv), oracle.forward(*rounded, dtype=np.float32)
    for name, a, e, t in zip("olm", problem.forward(precision="tf32"), exact, textbook, strict=True):
        assert_close(a, e, t, name=name)


def test_device_offset_and_graph():
    """Torch's offsets are signed, those of CuPy need not be."""
    import cupy

    problem, library = named("dropout"), CuPy()
    _, *qkv = problem.arrays()
    offset = cupy.zeros((), np.uint64)
    call = {"dropout_p": 0.1, "rng": cuattn.RNGState(3, offset), "kernel": "sm80"}
    cuattn.forward(*qkv, **call)  # compiles and loads
    result, replay = library.capture(lambda: cuattn.forward(*qkv, **call))
    for i in range(2):
        offset[...] = i
        replay()
        same_bits([result.o.get()], problem.forward(rng=cuattn.RNGState(3, i))[:1])


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
