"""The public functions against the oracle; every body runs on NumPy arrays and, on a GPU, on CuPy arrays."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.errors import DtypeError
from tests import oracle
from tests.conftest import Host
from tests.reference.cases import check_derivatives
from tests.strategies import BFLOAT16, DTYPES, cases, normal
from tests.tolerances import assert_close, assert_same

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FLOAT32 = np.dtype(np.float32)
GRADIENTS = ("dq", "dk", "dv", "dbias")


def random(seed, count, *shape, dtype=FLOAT32):
    """Return arrays of one shape; their numbers depend on the seed alone."""
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for _ in range(count)]


def run(case, xp):
    """Return a case's forward, and a function that computes its gradients, as NumPy arrays."""
    arrays, options = case.arguments(xp.put)
    fwd = cuattn.forward(*arrays, **options)

    def backward():
        replayed = {name: value for name, value in options.items() if name != "rng"}
        grads = cuattn.backward(xp.put(case.do), *arrays, fwd, **replayed)
        return cuattn.Gradients(*(g if g is None else xp.get(g) for g in grads))

    return cuattn.Forward(*map(xp.get, fwd[:3]), fwd.rng_state), backward


def check(case, results, names="olm"):
    """Hold results of a case to the rule, row by row."""
    arrays = (case.q, case.k, case.v) if names == "olm" else (case.q, case.k, case.v, case.do)
    options, low = case.reference(), case.q.dtype
    exact, textbook = (oracle.solve(*arrays, **options, dtype=dtype) for dtype in (None, low))
    floors = oracle.floors(exact, *arrays, **options)
    for name, actual in zip(names, results, strict=True):
        e, t = getattr(exact, name), getattr(textbook, name)
        assert (actual is None) == (e is None)
        if e is not None:
            assert_close(actual, e, t, dtype=low, floor=floors[name], name=name)


def close(xp, names, results, exact, textbook, dtype=None):
    """Hold results to the plain rule."""
    for name, actual, e, t in zip(names, results, exact, textbook, strict=False):
        assert_close(xp.get(actual), e, t, dtype=dtype, name=name)


def same(xp, results, others):
    """Assert that results are equal bit for bit."""
    for a, b in zip(results, others, strict=True):
        np.testing.assert_array_equal(xp.get(a), xp.get(b))


@dtypes
@pytest.mark.parametrize("is_causal", [False, True])
def test_accuracy(xp, dtype, is_causal):
    """The plain rule, on a problem so large that no textbook is right by luck.

    Gradients in float64 on a GPU take D from o, as does the textbook that they are compared with: taken from the very P
    and dP that it is subtracted from, D errs less, but needs all of P.
    """
    q, k, v, do = random(11, 4, 4, 520, 64, dtype=dtype)
    put = [xp.put(x) for x in (q, k, v)]
    fwd = cuattn.forward(*put, is_causal=is_causal)
    grads = cuattn.backward(xp.put(do), *put, fwd, is_causal=is_causal)
    visible = oracle.visible_band(520, 520, None, 0, 0) if is_causal else None
    from_o = xp.name == "cupy" and dtype == np.float64
    exact = oracle.solve(q, k, v, do, visible=visible)
    textbook = oracle.solve(q, k, v, do, visible=visible, dtype=dtype, delta_from_o=from_o)
    close(xp, "olm", fwd, exact, textbook, dtype)
    close(xp, GRADIENTS, grads[:3], exact[3:], textbook[3:], dtype)


@given(case=cases())
def test_forward_matches_the_oracle(xp, case):
    fwd, _ = run(case, xp)
    assert fwd.o.dtype == case.q.dtype
    assert fwd.l.dtype == fwd.m.dtype == (np.float64 if case.q.dtype == np.float64 else np.float32)
    check(case, fwd[:3])


@given(case=cases())
def test_backward_matches_the_oracle(xp, case):
    grads = run(case, xp)[1]()
    for grad, like in zip(grads, (case.q, case.k, case.v, case.bias), strict=True):
        assert (grad is None) == (like is None)
        assert like is None or (grad.shape == like.shape and grad.dtype == like.dtype)
    check(case, grads, GRADIENTS)


@given(case=cases(plain=True, mask_kinds=("none",), dtypes=DTYPES[2:]), cut=st.floats(0, 1))
def test_merge_joins_disjoint_keys(xp, case, cut):
    n = round(case.k.shape[-2] * cut)
    parts = [
        cuattn.forward(*map(xp.put, (case.q, case.k[..., part, :], case.v[..., part, :])), out_dtype=case.q.dtype)
        for part in (slice(0, n), slice(n, None))
    ]
    both = [cuattn.merge(*order)[:3] for order in (parts, parts[::-1])]
    for merged in both:
        check(case, map(xp.get, merged))
    same(xp, *both)
    same(xp, cuattn.merge(parts[0])[:3], parts[0][:3])


def test_merge_of_float32_parts_rounds_once(xp):
    q, k, v = random(1, 3, 2, 40, 16, dtype=BFLOAT16)
    parts = [
        cuattn.forward(xp.put(q), xp.put(k[:, s]), xp.put(v[:, s]), out_dtype=np.float32)
        for s in (slice(0, 11), slice(11, 40))
    ]
    # On the CPU all steps are in float32; tensor cores take p in the input's precision.
    textbook = oracle.forward(q, k, v, dtype=np.float32 if xp.name == "numpy" else BFLOAT16)
    close(xp, "olm", cuattn.merge(*parts), oracle.forward(q, k, v), textbook, np.float32)


def test_merge_keeps_the_rng_state_when_all_agree(xp):
    q = xp.put(np.ones((4, 8), np.float32))
    a, b = (cuattn.forward(q, q, q, dropout_p=0.5, rng=seed) for seed in (3, 4))
    assert cuattn.merge(a, a).rng_state == a.rng_state == cuattn.RNGState(3, 0)
    assert cuattn.merge(a, b).rng_state is None
    for state, kept in ((3, a.rng_state), ((3, 0), a.rng_state), (4, None), (None, None)):
        assert cuattn.merge(a, (*a[:3], state)).rng_state == kept
    with pytest.raises(DtypeError, match=r"parts\[1\]\.rng_state has type str"):
        cuattn.merge(a, (*a[:3], "3"))


def test_empty_rows_are_the_identity_of_merge(xp):
    q, k, v = random(2, 3, 3, 20, 16)
    whole, nothing = (cuattn.forward(xp.put(q), xp.put(k[:, :n]), xp.put(v[:, :n])) for n in (20, 0))
    assert not xp.get(nothing.o).any() and not xp.get(nothing.l).any() and (xp.get(nothing.m) == -np.inf).all()
    for merged in (cuattn.merge(whole, nothing), cuattn.merge(nothing, whole)):
        same(xp, merged[:3], whole[:3])


@given(case=cases(plain=True, mask_kinds=("none",)))
def test_permuting_keys_changes_nothing_but_rounding(xp, case):
    order = np.random.default_rng(0).permutation(case.k.shape[-2])
    shuffled = dataclasses.replace(case, k=case.k[..., order, :], v=case.v[..., order, :])
    check(case, run(shuffled, xp)[0][:3])


@dtypes
def test_grouped_heads_equal_repeated_heads(xp, dtype):
    rng = np.random.default_rng(3)
    q, do, k, v = (
        normal(rng, (2, heads, n, d), dtype) for heads, n, d in ((6, 37, 16), (6, 37, 24), (2, 45, 16), (2, 45, 24))
    )
    results = []
    for repeats in (1, 3):
        arrays = [xp.put(x) for x in (q, *(np.repeat(x, repeats, axis=1) for x in (k, v)))]
        fwd = cuattn.forward(*arrays, enable_gqa=True)
        results.append([*fwd[:3], cuattn.backward(xp.put(do), *arrays, fwd, enable_gqa=True, deterministic=True).dq])
    same(xp, *results)


@given(case=cases(dtypes=DTYPES[3:], max_length=9, head_dims=(1, 3)))
def test_gradients_match_finite_differences(case):
    arrays, options = case.arguments()
    grads = run(case, Host)[1]()
    if case.bias is not None and case.bias.dtype == np.float64:
        arrays += (options.pop("bias"),)

    def forward(q, k, v, *bias):
        return cuattn.attention(q, k, v, **options, **dict(zip(["bias"], bias, strict=False)))

    check_derivatives(arrays, case.do, forward, grads[: len(arrays)])


@dtypes
@pytest.mark.parametrize("deterministic", [False, True])
def test_same_seed_same_bits(xp, dtype, deterministic):
    q, k, v, do = map(xp.put, random(4, 4, 2, 130, 32, dtype=dtype))
    runs = []
    for _ in range(2):
        fwd = cuattn.forward(q, k, v, dropout_p=0.2, rng=cuattn.RNGState(7, 1))
        grads = cuattn.backward(do, q, k, v, fwd, dropout_p=0.2, deterministic=deterministic)
        runs.append([*fwd[:3], *(grads[:3] if deterministic else ())])
    same(xp, *runs)
    other = cuattn.forward(q, k, v, dropout_p=0.2, rng=8)
    assert (xp.get(other.o) != xp.get(runs[0][0])).any()
    same(xp, [other.l], runs[0][1:2])


def test_rng_state_is_returned(xp):
    q = xp.put(np.ones((4, 8), np.float32))

    def state(**options):
        return cuattn.forward(q, q, q, **options).rng_state

    assert state() is None
    assert state(rng=5) is None
    assert state(dropout_p=0.5, rng=5) == cuattn.RNGState(5, 0)
    assert state(dropout_p=0.5) != state(dropout_p=0.5)
    drawn = [state(dropout_p=0.5, rng=np.random.default_rng(1)) for _ in range(2)]
    assert drawn[0] == drawn[1] and isinstance(drawn[0].seed, int)


@dtypes
def test_column_mask_equals_the_same_boolean_mask_bit_for_bit(xp, dtype):
    mask = cuattn.masks.share_question([(40, [30, 25]), (60, [50]), (10, [5, 5, 5])])
    q, k, v, do = map(xp.put, random(5, 4, 2, mask.n_keys, 32, dtype=dtype))
    dense = xp.put(mask.dense())
    kernel = cuattn.plan(q, k, v, mask=dense).kernel
    results = []
    for m in (mask, dense):
        fwd = cuattn.forward(q, k, v, mask=m, kernel=kernel)
        grads = cuattn.backward(do, q, k, v, fwd, mask=m, kernel=kernel, deterministic=True)
        results.append([*fwd[:3], *grads[:3]])
    same(xp, *results)


PADDED, USED = 150, 96  # rows and keys, and those that see something, or are seen
poisons = pytest.mark.parametrize("poison", [np.nan, np.inf])


def padded(form, dtype):
    """Return options that say in some form that the first rows and keys are causal, and that the others are padding."""
    visible, inside = np.zeros((PADDED, PADDED), bool), np.arange(PADDED) < USED
    visible[:USED, :USED] = oracle.visible_band(USED, USED, None, 0, 0)
    return {
        "column": {"mask": cuattn.ColumnMask.from_dense(visible)},
        "dense": {"mask": visible},
        "block": {"mask": cuattn.BlockMask(np.array([[True, False], [False, False]]), USED, USED), "is_causal": True},
        "window": {"mask": inside & inside[:, None], "window": (None, 0)},
        "bias": {
            "mask": inside[:, None],
            "bias": np.where(inside, 0, -np.inf)[None].astype(dtype),
        },  # without causality
    }[form]


@dtypes
@poisons
@pytest.mark.parametrize("form", ["column", "dense", "block", "window"])
def test_invisible_keys_and_empty_rows_never_leak(xp, dtype, poison, form):
    """Keys that nobody sees and rows that see nothing hold NaN or inf; everything else is as if they held 0."""
    options, used = padded(form, dtype), USED
    arrays = random(6, 4, 2, PADDED, 32, dtype=dtype)
    outcomes = []
    for value in (0, poison):
        for x in arrays:
            x[:, used:] = value
        *args, do = (xp.put(x.copy()) for x in arrays)
        kwargs = {name: xp.put(value) for name, value in options.items()}
        fwd = cuattn.forward(*args, **kwargs)
        grads = cuattn.backward(do, *args, fwd, **kwargs, deterministic=True)
        outcomes.append([xp.get(x) for x in (*fwd[:3], *grads[:3])])
    assert_same(*outcomes)
    o, l, m, *grads = outcomes[0]
    assert not o[:, used:].any() and not l[:, used:].any() and (m[:, used:] == -np.inf).all()
    for grad in grads:
        assert np.isfinite(grad.astype(np.float32)).all() and not grad[:, used:].any()


@pytest.mark.parametrize(
    "nq,nk,batch,heads,dv",
    [(0, 5, 1, 2, 8), (5, 0, 1, 2, 8), (5, 5, 0, 2, 8), (5, 5, 1, 0, 8), (5, 4, 1, 2, 0), (0, 0, 0, 0, 0)],
)
@dtypes
def test_zero_sizes(xp, dtype, nq, nk, batch, heads, dv):
    arrays = [xp.put(np.ones((batch, heads, n, e), dtype)) for n, e in ((nq, 8), (nk, 8), (nk, dv))]
    bias = xp.put(np.ones((nq, nk), np.float32))
    for options in ({}, {"bias": bias}, {"is_causal": "top_left"}, {"dropout_p": 0.5, "rng": 1}):
        fwd = cuattn.forward(*arrays, **options)
        assert fwd.o.shape == (batch, heads, nq, dv) and fwd.l.shape == fwd.m.shape == (batch, heads, nq)
        if nk == 0:
            assert not xp.get(fwd.o).any() and not xp.get(fwd.l).any() and (xp.get(fwd.m) == -np.inf).all()
        options.pop("rng", None)
        grads = cuattn.backward(xp.put(np.ones(fwd.o.shape, dtype)), *arrays, fwd, **options)
        for grad, like in zip(grads[:3], arrays, strict=True):
            assert grad.shape == like.shape and not np.isnan(xp.get(grad).astype(np.float32)).any()


def test_lse(xp):
    q, k, v = random(7, 3, 2, 9, 8, dtype=DTYPES[3])
    fwd = cuattn.forward(xp.put(q), xp.put(k), xp.put(v), is_causal=True)
    _, l, m = oracle.forward(q, k, v, visible=oracle.visible_band(9, 9, None, 0, 0))
    exact = m + np.log(l)
    assert_close(xp.get(fwd.lse), exact, exact.astype(np.float64))
    nothing = cuattn.forward(xp.put(q), xp.put(k[:, :0]), xp.put(v[:, :0]))
    assert (xp.get(nothing.lse) == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_out_dtype_float32_keeps_o_unrounded(xp, dtype):
    q, k, v, do = random(8, 4, 3, 70, 32, dtype=dtype)
    arrays = [xp.put(x) for x in (q, k, v)]
    fwd = cuattn.forward(*arrays, out_dtype=np.float32)
    assert fwd.o.dtype == np.float32
    np.testing.assert_array_equal(xp.get(fwd.o).astype(dtype), xp.get(cuattn.attention(*arrays)))
    grads = cuattn.backward(xp.put(do), *arrays, fwd)
    close(xp, GRADIENTS, grads[:3], *(oracle.backward(do, q, k, v, dtype=d) for d in (None, dtype)))


def test_backward_of_a_shard_uses_merged_statistics(xp):
    q, k, v, do = random(9, 4, 2, 48, 16)
    halves = [[xp.put(x[:, s]) for x in (k, v)] for s in (slice(0, 20), slice(20, 48))]
    merged = cuattn.merge(*(cuattn.forward(xp.put(q), *half) for half in halves))
    shards = [cuattn.backward(xp.put(do), xp.put(q), *half, merged) for half in halves]
    joined = [sum(xp.get(s.dq) for s in shards)]
    joined += [np.concatenate([xp.get(getattr(s, name)) for s in shards], 1) for name in ("dk", "dv")]
    exact, textbook = (oracle.backward(do, q, k, v, dtype=d) for d in (None, q.dtype))
    for actual, e, t in zip(joined, exact[:3], textbook[:3], strict=True):
        assert_close(actual, e, t)


def test_bias_of_minus_infinity_is_invisible(xp):
    q, k, v = random(10, 3, 40, 16)
    visible = oracle.visible_band(40, 40, None, -3, 0)  # the first rows see nothing
    bias = np.where(visible, 0, -np.inf).astype(np.float32)
    fwd = cuattn.forward(*map(xp.put, (q, k, v)), bias=xp.put(bias))
    close(xp, "olm", fwd, *(oracle.forward(q, k, v, visible=visible, dtype=d) for d in (None, q.dtype)))


def test_plan_is_readable_and_free(xp):
    q = xp.put(np.zeros((2, 4, 256, 64), np.float32))
    plan = cuattn.plan(q, q, q, is_causal=True, direction="backward", deterministic=True)
    assert isinstance(plan, cuattn.Plan) and plan.reason and plan.kernel in str(plan)
    assert plan.kernel == "cpu" if xp.name == "numpy" else plan.kernel in ("sm80", "sm90")
