"""The portable backward kernels on a GPU against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from cuattn.cuda.device import device_of
from tests.cuda.cases import CASES, WIDE_HEADS, Case, bias_of, columns_of, dense_of, same_bits, sized, to_device
from tests.cuda.gpu import hostile, made, named
from tests.cuda.gpu import poisoned_memory as poisoned_memory
from tests.cuda.test_graph_gpu import CuPy, replays_bit_for_bit

pytestmark = pytest.mark.gpu
either_order = pytest.mark.parametrize("deterministic", [False, True])


# One tile holds all rows and keys.
FEW = [
    sized("few rows and keys", 49, 49, batch=(40,), heads=8, kv_heads=4),
    sized("few rows and keys causal columns", 64, 60, mask=columns_of, options={"is_causal": "top_left"}),
    sized("few rows and keys dense dropout", 7, 64, 40, mask=dense_of, options={"dropout_p": 0.2, "rng": 3}),
    sized("few rows and keys bias softcap", 60, 50, 32, bias=bias_of(1, 1, 1, 1), options={"softcap": 5.0}),
]


@either_order
@pytest.mark.parametrize("case", CASES + WIDE_HEADS + FEW, ids=lambda case: case.name)
def test_oracle(case, deterministic):
    problem = made(case)
    problem.check(problem.backward(deterministic=deterministic))


@pytest.mark.parametrize(
    "name", ["aligned", "grouped", "dropout column", "bias row", "everything", "d256", "float32 wide d 512"]
)
def test_deterministic_is_bitwise(name):
    problem = named(name)
    first = problem.backward(deterministic=True)
    for _ in range(3):
        same_bits(first, problem.backward(deterministic=True))


@pytest.mark.parametrize("name", ["column", "column d64 causal", "dropout column", "float32 column causal"])
def test_column_mask_equals_boolean_mask_bit_for_bit(name):
    problem = named(name)
    dense = problem.backward(deterministic=True, mask=problem.options["mask"].dense())
    same_bits(problem.backward(deterministic=True)[:3], dense[:3])


@either_order
@pytest.mark.parametrize("name", ["column", "dense", "small blocks", "more queries than keys", "causal top left"])
def test_what_nobody_sees_may_hold_nan(name, deterministic):
    named(name).check_unseen(deterministic=deterministic)


@pytest.mark.parametrize("name", ["bias row", "float32 wide d 288 bias softcap"])
def test_what_a_bias_row_hides_may_hold_nan(name):
    problem = named(name)
    bias = problem.options["bias"] = problem.options["bias"][..., :1, :].copy()
    bias[..., 30:90] = -np.inf
    clean = problem.backward(deterministic=True)
    for x in problem.qkv[1:]:
        x[..., 30:90, :] = np.nan
    same_bits(problem.backward(deterministic=True), clean)


@either_order
@pytest.mark.parametrize("which", ["q", "k", "v", "kv heads", "do", "bias", "batch of bias"])
def test_broadcast(which, deterministic):
    """A broadcast operand's gradient is the sum over the axes it was broadcast along."""
    import cupy

    problem = made(Case(which, batch=(2, 3), heads=4, kv_heads=4, n_queries=70, n_keys=150))
    do, qkv, options = problem[1:]
    if which in ("q", "k", "v"):
        qkv["qkv".index(which)] = qkv["qkv".index(which)][:, :1]
    if which == "kv heads":
        qkv[1:] = [x[:1, :, :1] for x in qkv[1:]]
    if "bias" in which:
        shape = (2, 1, 4, 70, 150) if which == "bias" else (1, 150)
        options["bias"] = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    given = problem
    if which == "do":
        problem = problem._replace(do=np.broadcast_to(do[:, :1], do.shape))
        given = problem._replace(do=cupy.broadcast_to(to_device(do[:, :1]), do.shape))
    actual = given.backward(deterministic=deterministic)
    for gradient, array in zip(actual, qkv, strict=False):
        assert gradient.shape == array.shape and gradient.dtype == array.dtype
    problem.check(actual)


@pytest.mark.parametrize("layout", ["swapped", "negative", "odd stride", "batch axes apart"])
def test_strides(layout):
    batch = (2, 3) if layout == "batch axes apart" else (2,)
    problem, twin = made(Case(layout, batch=batch, heads=3, kv_heads=3, n_queries=70, n_keys=150)).strided(layout)
    problem.check(twin.backward())


@either_order
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rows", "head_dim"), [("float32", 9000, 64), ("float64", 1500, 64), ("float64", 1500, 128)]
)
def test_over_many_rows(dtype, rows, head_dim, masked, deterministic):
    """Two heads share a key head, whose gradients are sums over all their rows."""
    case = Case("rows", np.dtype(dtype), (), 2, 1, rows, 70, head_dim, mask=columns_of if masked else None)
    problem = made(case)
    actual = problem.backward(deterministic=deterministic)
    problem.check(actual)
    if masked:
        dense = problem.backward(deterministic=deterministic, mask=problem.options["mask"].dense())
        first = 0 if deterministic else 1
        same_bits(actual[first:3], dense[first:3])


@pytest.mark.parametrize(("group", "n_keys"), [(1, 64), (2, 40)])
def test_blocks_share_the_last_keys(group, n_keys):
    """One key tile more than there are multiprocessors: many blocks have a few rows of it each."""
    heads = device_of(0).multiprocessors + 1
    case = Case("shared", np.dtype(np.float64), (), heads * group, heads, 1040, n_keys, 128)
    problem = made(case)
    do, qkv, options = problem[1:]
    assert "several blocks" in str(cuattn.plan(*map(to_device, qkv), direction="backward", **options))
    parts = slice(-2 * group, None), slice(-2, None), slice(-2, None)
    actual = [x[part] for x, part in zip(problem.backward(), parts, strict=False)]
    few = problem._replace(
        case=case._replace(heads=2 * group, kv_heads=2),
        do=do[parts[0]],
        qkv=[x[part] for x, part in zip(qkv, parts, strict=True)],
    )
    few.check([*actual, None])


def test_unrounded_o_and_one_head_matrices():
    problem = made(Case("rank 2", batch=(), heads=1, kv_heads=1, n_queries=130, n_keys=70))
    matrices = problem._replace(do=problem.do[0], qkv=[x[0] for x in problem.qkv])
    *actual, dbias = matrices.backward(o_dtype="float32")
    problem.check([*(x[None] for x in actual), dbias])


def test_hostile_device_vectors_are_clamped():
    problem, mask = hostile()
    same_bits(problem.backward(deterministic=True), problem.backward(deterministic=True, mask=mask))


def test_graph_holds_its_scratch():
    problem = named("grouped")
    arrays = problem.arrays()
    call = {"kernel": "sm80", **problem.options}
    forward = cuattn.forward(*arrays[1:], **call)
    assert replays_bit_for_bit(CuPy(), lambda: cuattn.backward(*arrays, forward, deterministic=True, **call))
