"""The portable backward kernels on a GPU against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn.cuda.device import device_of
from tests import oracle
from tests.cuda.cases import (
    BF16,
    CASES,
    WIDE,
    WIDE_HEADS,
    Case,
    case_of,
    columns_of,
    hostile_columns,
    oracle_options,
    same_bits,
    to_device,
    visible,
)
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

NAMES = ("dq", "dk", "dv", "dbias")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Leave NaNs where the calls of a test will find their results and scratch memory."""
    import cupy

    noise = [cupy.full(size, np.nan, np.float32) for size in (1 << 8, 1 << 14, 1 << 18, 1 << 20, 1 << 22)]
    del noise
    yield


def run(do, qkv, options, deterministic=False, o_dtype=None, kernel="sm80", **more):
    """Run ``cuattn.forward`` and ``cuattn.backward``, by default on the portable kernels; NumPy in, NumPy out."""
    options = {name: to_device(value) for name, value in options.items()}
    do, *qkv = map(to_device, (do, *qkv))
    forward = cuattn.forward(*qkv, kernel=kernel, out_dtype=o_dtype, **options)
    options.pop("rng", None)
    gradients = cuattn.backward(do, *qkv, forward, kernel=kernel, deterministic=deterministic, **options, **more)
    return [None if x is None else x.get() for x in gradients]


def expected(case: Case, do, qkv, options, dtype=None):
    """Return the gradients of the oracle, or of the textbook in `dtype`."""
    return oracle.backward(do, *qkv, **oracle_options(case, options), dtype=dtype)


def made(case: Case):
    """Return do, [q, k, v] and the options of a case."""
    arrays, options = case.arrays()
    q, _, v = arrays.values()
    do = np.random.default_rng(11).standard_normal((*q.shape[:-1], v.shape[-1])).astype(case.dtype)
    return do, list(arrays.values()), options


def named(name: str):
    case = case_of(name, CASES + WIDE_HEADS)
    return case, *made(case)


def check(case: Case, actual, do, qkv, options):
    """Compare with the oracle.

    dS is a difference, dP - D.  The plain textbook takes D from the very P and dP that it subtracts it from, so where a
    row sees one key, or as good as one, the two cancel exactly; D from o, which is all that O(N) memory leaves, is off
    by a rounding.  Where the inputs' own rounding does not hide that, the rule has a floor.
    """
    arrays, spelled_out = (*qkv, do), oracle_options(case, options)
    exact, textbook = (oracle.solve(*arrays, **spelled_out, dtype=dtype) for dtype in (None, case.dtype))
    floors = {}
    if case.n_keys == 1 or case.dtype in WIDE:
        floors = oracle.floors(exact, *arrays, **spelled_out)
    for name, a in zip(NAMES, actual, strict=True):
        e, t = getattr(exact, name), getattr(textbook, name)
        if e is not None:
            dtype = case.dtype if floors or name != "dbias" else a.dtype
            assert_close(a, e, t, dtype=dtype, floor=floors.get(name), name=name)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES + WIDE_HEADS, ids=lambda case: case.name)
def test_oracle(case, deterministic):
    do, qkv, options = made(case)
    check(case, run(do, qkv, options, deterministic), do, qkv, options)


@pytest.mark.parametrize(
    "name", ["aligned", "grouped", "dropout column", "bias row", "everything", "d256", "float32 wide d 512"]
)
def test_deterministic_is_bitwise(name):
    _, do, qkv, options = named(name)
    first = run(do, qkv, options, deterministic=True)
    for _ in range(3):
        same_bits(first, run(do, qkv, options, deterministic=True))


@pytest.mark.parametrize("name", ["column", "column d64 causal", "dropout column", "float32 column causal"])
def test_column_mask_equals_boolean_mask_bit_for_bit(name):
    _, do, qkv, options = named(name)
    column = run(do, qkv, options, deterministic=True)
    dense = run(do, qkv, {**options, "mask": options["mask"].dense()}, deterministic=True)
    same_bits(column[:3], dense[:3])


def check_with_nan(case: Case, do, qkv, options, **how):
    """Compare with the oracle, with NaN in keys that no row sees and in rows that see no key.

    Heads are not grouped here, so all arrays have the mask's leading axes.
    """
    seen = np.broadcast_to(visible(case, options), (*case.batch, case.heads, case.n_queries, case.n_keys))
    dead, empty = ~seen.any(-2), ~seen.any(-1)
    assert dead.any() or empty.any()
    for x in qkv[1:]:
        x[dead] = np.nan
    do[empty], qkv[0][empty] = np.nan, np.nan
    actual = run(do, qkv, options, **how)
    assert not actual[0][empty].any() and not actual[1][dead].any() and not actual[2][dead].any()
    clean = [np.nan_to_num(x.astype(np.float32)).astype(case.dtype) for x in (do, *qkv)]
    check(case, actual, clean[0], clean[1:], options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["column", "dense", "small blocks", "more queries than keys", "causal top left"])
def test_what_nobody_sees_may_hold_nan(name, deterministic):
    check_with_nan(*named(name), deterministic=deterministic)


@pytest.mark.parametrize("name", ["bias row", "float32 wide d 288 bias softcap"])
def test_what_a_bias_row_hides_may_hold_nan(name):
    _, do, qkv, options = named(name)
    options["bias"] = options["bias"][..., :1, :].copy()
    options["bias"][..., 30:90] = -np.inf
    clean = run(do, qkv, options, deterministic=True)
    for x in qkv[1:]:
        x[..., 30:90, :] = np.nan
    same_bits(run(do, qkv, options, deterministic=True), clean)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v", "kv heads", "do", "bias", "batch of bias"])
def test_broadcast(which, deterministic):
    """A broadcast operand's gradient is the sum over the axes it was broadcast along."""
    import cupy

    rng = np.random.default_rng(3)
    case = Case(which, batch=(2, 3), heads=4, kv_heads=4, n_queries=70, n_keys=150)
    shapes = {"q": (2, 3, 4, 70, 64), "k": (2, 3, 4, 150, 64), "v": (2, 3, 4, 150, 64), "do": (2, 3, 4, 70, 64)}
    if which in shapes:
        shapes[which] = (2, 1, *shapes[which][2:])
    if which == "kv heads":
        shapes["k"] = shapes["v"] = (1, 3, 1, 150, 64)
    arrays = {name: rng.standard_normal(shape).astype(BF16) for name, shape in shapes.items()}
    options = {}
    if "bias" in which:
        options["bias"] = rng.standard_normal((2, 1, 4, 70, 150) if which == "bias" else (1, 150)).astype(np.float32)
    do = arrays.pop("do")
    full = np.broadcast_to(do, (2, 3, 4, 70, 64))
    qkv = list(arrays.values())
    actual = run(cupy.broadcast_to(cupy.asarray(do), full.shape), qkv, options, deterministic)
    for gradient, array in zip(actual, qkv, strict=False):
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
    check(case, actual, full, qkv, options)


@pytest.mark.parametrize("layout", ["swapped", "negative", "odd stride", "batch axes apart"])
def test_strides(layout):
    import cupy

    rng = np.random.default_rng(5)
    batch = (2, 3) if layout == "batch axes apart" else (2,)
    case = Case(layout, batch=batch, heads=3, kv_heads=3, n_queries=70, n_keys=150, head_dim=64)
    arrays = [rng.standard_normal((*batch, 3, n, 64)).astype(BF16) for n in (70, 70, 150, 150)]
    if layout == "swapped":
        device = [cupy.asarray(np.ascontiguousarray(x.swapaxes(-2, -3))).swapaxes(-2, -3) for x in arrays]
    elif layout == "negative":
        device = [cupy.asarray(np.ascontiguousarray(x[..., ::-1, :]))[..., ::-1, :] for x in arrays]
    elif layout == "odd stride":
        device = [cupy.asarray(np.concatenate([x, x[..., :3]], -1))[..., :64] for x in arrays]
    else:
        device = [cupy.asarray(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1) for x in arrays]
    check(case, run(device[0], device[1:], {}), arrays[0], arrays[1:], {})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rows", "head_dim"), [("float32", 9000, 64), ("float64", 1500, 64), ("float64", 1500, 128)]
)
def test_over_many_rows(dtype, rows, head_dim, masked, deterministic):
    """Two heads share a key head, whose gradients are sums over all their rows."""
    case = Case("rows", np.dtype(dtype), (), 2, 1, rows, 70, head_dim, mask=columns_of if masked else None)
    do, qkv, options = made(case)
    actual = run(do, qkv, options, deterministic)
    check(case, actual, do, qkv, options)
    if masked:
        dense = run(do, qkv, {**options, "mask": options["mask"].dense()}, deterministic)
        first = 0 if deterministic else 1
        same_bits(actual[first:3], dense[first:3])


@pytest.mark.parametrize(("group", "n_keys"), [(1, 64), (2, 40)])
def test_blocks_share_the_last_keys(group, n_keys):
    """One key tile more than there are multiprocessors: many blocks have a few rows of it each."""
    heads = device_of(0).multiprocessors + 1
    case = Case("shared", np.dtype(np.float64), (), heads * group, heads, 1040, n_keys, 128)
    do, qkv, options = made(case)
    assert "several blocks" in str(cuattn.plan(*map(to_device, qkv), direction="backward", **options))
    do_q, kv = slice(-2 * group, None), slice(-2, None)
    actual = [x[part] for x, part in zip(run(do, qkv, options), (do_q, kv, kv), strict=False)]
    few = case._replace(heads=2 * group, kv_heads=2)
    check(few, [*actual, None], do[do_q], [x[part] for x, part in zip(qkv, (do_q, kv, kv), strict=True)], options)


def test_unrounded_o_and_one_head_matrices():
    case = Case("rank 2", batch=(), heads=1, kv_heads=1, n_queries=130, n_keys=70)
    do, qkv, options = made(case)
    actual = run(do[0], [x[0] for x in qkv], options, o_dtype="float32")
    check(case, [x if x is None else x[None] for x in actual], do, qkv, options)


def test_hostile_device_vectors_are_clamped():
    rng = np.random.default_rng(1)
    n, keys = 300, 400
    device, host = hostile_columns(rng, n, keys)
    do, *qkv = [rng.standard_normal((2, m, 64)).astype(BF16) for m in (n, n, keys, keys)]
    found = [run(do, qkv, {"mask": mask}, deterministic=True)[:3] for mask in (device, host)]
    same_bits(*found)


def test_graph_holds_its_scratch():
    import cupy

    _, do, qkv, options = named("grouped")
    arrays = [cupy.asarray(x) for x in qkv]
    upstream = cupy.asarray(do)
    forward = cuattn.forward(*arrays, kernel="sm80", **options)
    call = {"kernel": "sm80", "deterministic": True, **options}
    eager = cuattn.backward(upstream, *arrays, forward, **call)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        result = cuattn.backward(upstream, *arrays, forward, **call)
        graph = stream.end_capture()
        noise = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(4)]
        graph.launch(stream)
        same_bits(result[:3], eager[:3])
    del noise
