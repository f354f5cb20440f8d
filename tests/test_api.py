"""The public functions against the oracle; every body runs on NumPy arrays and, on a GPU, on CuPy arrays."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from tests import oracle
from tests.strategies import BFLOAT16, DTYPES, cases, normal
from tests.tolerances import assert_close

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run_forward(case, xp, **extra):
    (q, k, v), options = case.arguments(xp.put)
    fwd = cuattn.forward(q, k, v, **options, **extra)
    return fwd, cuattn.Forward(xp.get(fwd.o), xp.get(fwd.l), xp.get(fwd.m), fwd.rng_state)


def run_backward(case, xp, fwd, **extra):
    (q, k, v), options = case.arguments(xp.put)
    options.pop("rng", None)
    grads = cuattn.backward(xp.put(case.do), q, k, v, fwd, **options, **extra)
    return cuattn.Gradients(*(g if g is None else xp.get(g) for g in grads))


def check_forward(case, fwd):
    arrays, options, low = (case.q, case.k, case.v), case.reference(), case.q.dtype
    exact, textbook = (oracle.solve(*arrays, **options, dtype=dtype) for dtype in (None, low))
    floors = oracle.floors(exact, *arrays, **options)
    for name, actual in zip("olm", fwd[:3], strict=True):
        e, t = getattr(exact, name), getattr(textbook, name)
        assert_close(actual, e, t, dtype=low, floor=floors[name], name=name)


def check_backward(case, grads):
    arrays, options, low = (case.q, case.k, case.v, case.do), case.reference(), case.q.dtype
    exact, textbook = (oracle.solve(*arrays, **options, dtype=dtype) for dtype in (None, low))
    floors = oracle.floors(exact, *arrays, **options)
    for name, actual in zip(("dq", "dk", "dv", "dbias"), grads, strict=True):
        e, t = getattr(exact, name), getattr(textbook, name)
        if e is None:
            assert actual is None
        else:
            assert_close(actual, e, t, dtype=low, floor=floors[name], name=name)


@dtypes
@pytest.mark.parametrize("is_causal", [False, True])
def test_accuracy(xp, dtype, is_causal):
    """The plain rule, on a problem so large that no textbook is right by luck.

    Gradients in float64 on a GPU take D from o, as does the textbook that they are compared with: taken from the very P
    and dP that it is subtracted from, D errs less, but needs all of P.
    """
    rng = np.random.default_rng(11)
    q, k, v, do = (normal(rng, (4, 520, 64), dtype) for _ in range(4))
    visible = oracle.visible_band(520, 520, None, 0, 0) if is_causal else None
    fwd = cuattn.forward(xp.put(q), xp.put(k), xp.put(v), is_causal=is_causal)
    grads = cuattn.backward(xp.put(do), xp.put(q), xp.put(k), xp.put(v), fwd, is_causal=is_causal)
    for names, actual, function, arrays in (
        ("olm", fwd[:3], oracle.forward, (q, k, v)),
        (("dq", "dk", "dv"), grads[:3], oracle.backward, (do, q, k, v)),
    ):
        exact, textbook = (function(*arrays, visible=visible, dtype=d)[:3] for d in (None, dtype))
        if xp.name == "cupy" and dtype == np.float64 and function is oracle.backward:
            textbook = oracle.backward(*arrays, visible=visible, dtype=dtype, delta_from_o=True)[:3]
        for name, a, e, t in zip(names, actual, exact, textbook, strict=True):
            assert_close(xp.get(a), e, t, dtype=dtype, name=name)


@given(case=cases())
def test_forward_matches_the_oracle(xp, case):
    _, fwd = run_forward(case, xp)
    assert fwd.o.dtype == case.q.dtype
    assert fwd.l.dtype == fwd.m.dtype == (np.float64 if case.q.dtype == np.float64 else np.float32)
    check_forward(case, fwd)


@given(case=cases())
def test_backward_matches_the_oracle(xp, case):
    fwd, _ = run_forward(case, xp)
    grads = run_backward(case, xp, fwd)
    for name, like in zip(("dq", "dk", "dv", "dbias"), (case.q, case.k, case.v, case.bias), strict=True):
        grad = getattr(grads, name)
        assert (grad is None) == (like is None)
        assert like is None or (grad.shape == like.shape and grad.dtype == like.dtype), name
    check_backward(case, grads)


@given(case=cases(plain=True, mask_kinds=("none",), dtypes=DTYPES[2:]), cut=st.floats(0, 1))
def test_merge_joins_disjoint_keys(xp, case, cut):
    n = round(case.k.shape[-2] * cut)
    put = xp.put
    parts = [
        cuattn.forward(put(case.q), put(case.k[..., part, :]), put(case.v[..., part, :]), out_dtype=case.q.dtype)
        for part in (slice(0, n), slice(n, None))
    ]
    for order in (parts, parts[::-1]):
        merged = cuattn.merge(*order)
        check_forward(case, [xp.get(x) for x in merged[:3]])
    one = cuattn.merge(parts[0])
    for a, b in zip(one[:3], parts[0][:3], strict=True):
        np.testing.assert_array_equal(xp.get(a), xp.get(b))
    both = (cuattn.merge(*parts), cuattn.merge(*parts[::-1]))
    for a, b in zip(both[0][:3], both[1][:3], strict=True):
        np.testing.assert_array_equal(xp.get(a), xp.get(b))


def test_merge_of_float32_parts_rounds_once(xp):
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (2, 40, 16), BFLOAT16) for _ in range(3))
    parts = [
        cuattn.forward(xp.put(q), xp.put(k[:, s]), xp.put(v[:, s]), out_dtype=np.float32)
        for s in (slice(0, 11), slice(11, 40))
    ]
    merged = cuattn.merge(*parts)
    exact = oracle.forward(q, k, v)
    # On the CPU all steps are in float32; tensor cores take p in the input's precision.
    textbook = oracle.forward(q, k, v, dtype=np.float32 if xp.name == "numpy" else BFLOAT16)
    for name, actual, e, t in zip("olm", merged[:3], exact, textbook, strict=True):
        assert_close(xp.get(actual), e, t, dtype=np.float32, name=name)


def test_merge_keeps_the_rng_state_when_all_agree(xp):
    q = xp.put(np.ones((4, 8), np.float32))
    a = cuattn.forward(q, q, q, dropout_p=0.5, rng=3)
    b = cuattn.forward(q, q, q, dropout_p=0.5, rng=4)
    assert cuattn.merge(a, a).rng_state == a.rng_state == cuattn.RNGState(3, 0)
    assert cuattn.merge(a, b).rng_state is None


def test_empty_rows_are_the_identity_of_merge(xp):
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, (3, 20, 16), np.dtype(np.float32)) for _ in range(3))
    whole = cuattn.forward(xp.put(q), xp.put(k), xp.put(v))
    nothing = cuattn.forward(xp.put(q), xp.put(k[:, :0]), xp.put(v[:, :0]))
    assert not xp.get(nothing.o).any() and not xp.get(nothing.l).any() and (xp.get(nothing.m) == -np.inf).all()
    for merged in (cuattn.merge(whole, nothing), cuattn.merge(nothing, whole)):
        for a, b in zip(merged[:3], whole[:3], strict=True):
            np.testing.assert_array_equal(xp.get(a), xp.get(b))


@given(case=cases(plain=True, mask_kinds=("none",)))
def test_permuting_keys_changes_nothing_but_rounding(xp, case):
    order = np.random.default_rng(0).permutation(case.k.shape[-2])
    shuffled = dataclasses.replace(case, k=case.k[..., order, :], v=case.v[..., order, :])
    _, fwd = run_forward(shuffled, xp)
    check_forward(case, fwd)


@dtypes
def test_grouped_heads_equal_repeated_heads(xp, dtype):
    rng = np.random.default_rng(3)
    q, do = normal(rng, (2, 6, 37, 16), dtype), normal(rng, (2, 6, 37, 24), dtype)
    k, v = normal(rng, (2, 2, 45, 16), dtype), normal(rng, (2, 2, 45, 24), dtype)
    put = xp.put
    grouped = cuattn.forward(put(q), put(k), put(v), enable_gqa=True)
    wide = [put(np.repeat(x, 3, axis=1)) for x in (k, v)]
    repeated = cuattn.forward(put(q), *wide)
    for a, b in zip(grouped[:3], repeated[:3], strict=True):
        np.testing.assert_array_equal(xp.get(a), xp.get(b))
    dq = cuattn.backward(put(do), put(q), put(k), put(v), grouped, enable_gqa=True, deterministic=True).dq
    np.testing.assert_array_equal(
        xp.get(dq), xp.get(cuattn.backward(put(do), put(q), *wide, repeated, deterministic=True).dq)
    )


@given(case=cases(dtypes=DTYPES[3:], max_length=9, head_dims=(1, 3)), seed=st.integers(0, 99))
def test_gradients_match_finite_differences(case, seed):
    """Directional derivatives of sum(o * do) by central differences in float64."""
    rng = np.random.default_rng(seed)
    (q, k, v), options = case.arguments()
    bias = options.pop("bias", None)
    fwd = cuattn.forward(q, k, v, bias=bias, **options)
    state = {name: value for name, value in options.items() if name != "rng"}
    grads = cuattn.backward(case.do, q, k, v, fwd, bias=bias, **state)
    operands = {"q": q, "k": k, "v": v}
    if bias is not None and bias.dtype == np.float64:
        operands["bias"] = bias
    for name, x in operands.items():
        step = rng.standard_normal(x.shape)
        h = 1e-5

        def loss(t, name=name, x=x, step=step):
            moved = {"q": q, "k": k, "v": v, "bias": bias, name: x + t * step}
            arrays = [moved.pop(key) for key in ("q", "k", "v")]
            return float((cuattn.attention(*arrays, **moved, **options) * case.do).sum())

        numeric = (loss(h) - loss(-h)) / (2 * h)
        analytic = float((getattr(grads, "d" + name) * step).sum())
        scale = float(np.abs(getattr(grads, "d" + name) * step).sum()) + float(np.abs(case.do).sum())
        assert abs(numeric - analytic) <= 1e-6 * (1 + scale), name


@dtypes
@pytest.mark.parametrize("deterministic", [False, True])
def test_same_seed_same_bits(xp, dtype, deterministic):
    rng = np.random.default_rng(4)
    q, k, v, do = (xp.put(normal(rng, (2, 130, 32), dtype)) for _ in range(4))
    runs = []
    for _ in range(2):
        fwd = cuattn.forward(q, k, v, dropout_p=0.2, rng=cuattn.RNGState(7, 1))
        grads = cuattn.backward(do, q, k, v, fwd, dropout_p=0.2, deterministic=deterministic)
        runs.append([xp.get(x) for x in (*fwd[:3], *(grads[:3] if deterministic else ()))])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    other = cuattn.forward(q, k, v, dropout_p=0.2, rng=8)
    assert (xp.get(other.o) != runs[0][0]).any()
    np.testing.assert_array_equal(xp.get(other.l), runs[0][1])


def test_rng_state_is_returned(xp):
    q = xp.put(np.ones((4, 8), np.float32))
    assert cuattn.forward(q, q, q).rng_state is None
    assert cuattn.forward(q, q, q, rng=5).rng_state is None
    assert cuattn.forward(q, q, q, dropout_p=0.5, rng=5).rng_state == cuattn.RNGState(5, 0)
    fresh = [cuattn.forward(q, q, q, dropout_p=0.5).rng_state for _ in range(2)]
    assert fresh[0] != fresh[1]
    drawn = [cuattn.forward(q, q, q, dropout_p=0.5, rng=np.random.default_rng(1)).rng_state for _ in range(2)]
    assert drawn[0] == drawn[1] and isinstance(drawn[0].seed, int)


@dtypes
def test_column_mask_equals_the_same_boolean_mask_bit_for_bit(xp, dtype):
    rng = np.random.default_rng(5)
    mask = cuattn.masks.share_question([(40, [30, 25]), (60, [50]), (10, [5, 5, 5])])
    n = mask.n_keys
    q, k, v, do = (xp.put(normal(rng, (2, n, 32), dtype)) for _ in range(4))
    dense = xp.put(mask.dense())
    kernel = cuattn.plan(q, k, v, mask=dense).kernel
    results = []
    for m in (mask, dense):
        fwd = cuattn.forward(q, k, v, mask=m, kernel=kernel)
        grads = cuattn.backward(do, q, k, v, fwd, mask=m, kernel=kernel, deterministic=True)
        results.append([xp.get(x) for x in (*fwd[:3], *grads[:3])])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@dtypes
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("form", ["column", "dense", "block", "window"])
def test_invisible_keys_and_empty_rows_never_leak(xp, dtype, poison, form):
    """Keys that nobody sees and rows that see nothing hold NaN or inf; everything else is as if they held 0."""
    rng = np.random.default_rng(6)
    n, used = 150, 96
    visible = np.zeros((n, n), bool)
    visible[:used, :used] = oracle.visible_band(used, used, None, 0, 0)
    options = {
        "column": {"mask": cuattn.ColumnMask.from_dense(visible)},
        "dense": {"mask": visible},
        "block": {"mask": cuattn.BlockMask(np.array([[True, False], [False, False]]), used, used), "is_causal": True},
        "window": {"mask": (np.arange(n) < used)[None, :] & (np.arange(n) < used)[:, None], "window": (None, 0)},
    }[form]
    q, k, v, do = (normal(rng, (2, n, 32), dtype) for _ in range(4))
    outcomes = []
    for value in (0, poison):
        for x in (q, k, v, do):
            x[:, used:] = value
        args = [xp.put(x.copy()) for x in (q, k, v)]
        kwargs = {name: xp.put(value) for name, value in options.items()}
        fwd = cuattn.forward(*args, **kwargs)
        grads = cuattn.backward(xp.put(do.copy()), *args, fwd, **kwargs, deterministic=True)
        outcomes.append([xp.get(x) for x in (*fwd[:3], *grads[:3])])
    for clean, poisoned in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(clean, poisoned)
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
    q, k, v = (np.ones((batch, heads, n, e), dtype) for n, e in ((nq, 8), (nk, 8), (nk, dv)))
    bias = np.ones((nq, nk), np.float32)
    for options in ({}, {"bias": xp.put(bias)}, {"is_causal": "top_left"}, {"dropout_p": 0.5, "rng": 1}):
        fwd = cuattn.forward(xp.put(q), xp.put(k), xp.put(v), **options)
        assert fwd.o.shape == (batch, heads, nq, dv) and fwd.l.shape == fwd.m.shape == (batch, heads, nq)
        if nk == 0:
            assert not xp.get(fwd.o).any() and not xp.get(fwd.l).any() and (xp.get(fwd.m) == -np.inf).all()
        options.pop("rng", None)
        grads = cuattn.backward(xp.put(np.ones(fwd.o.shape, dtype)), xp.put(q), xp.put(k), xp.put(v), fwd, **options)
        for grad, like in zip(grads[:3], (q, k, v), strict=True):
            assert grad.shape == like.shape and not np.isnan(xp.get(grad).astype(np.float32)).any()


def test_lse(xp):
    rng = np.random.default_rng(7)
    q, k, v = (normal(rng, (2, 9, 8), np.dtype(np.float64)) for _ in range(3))
    fwd = cuattn.forward(xp.put(q), xp.put(k), xp.put(v), is_causal=True)
    _, l, m = oracle.forward(q, k, v, visible=oracle.visible_band(9, 9, None, 0, 0))
    exact = m + np.log(l)
    assert_close(xp.get(fwd.lse), exact, exact.astype(np.float64))
    nothing = cuattn.forward(xp.put(q), xp.put(k[:, :0]), xp.put(v[:, :0]))
    assert (xp.get(nothing.lse) == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_out_dtype_float32_keeps_o_unrounded(xp, dtype):
    rng = np.random.default_rng(8)
    q, k, v, do = (normal(rng, (3, 70, 32), dtype) for _ in range(4))
    fwd = cuattn.forward(xp.put(q), xp.put(k), xp.put(v), out_dtype=np.float32)
    o = xp.get(fwd.o)
    assert o.dtype == np.float32
    plain = xp.get(cuattn.attention(xp.put(q), xp.put(k), xp.put(v)))
    np.testing.assert_array_equal(o.astype(dtype), plain)
    grads = cuattn.backward(xp.put(do), xp.put(q), xp.put(k), xp.put(v), fwd)
    exact, textbook = (oracle.backward(do, q, k, v, dtype=d) for d in (None, dtype))
    for actual, e, t in zip(grads[:3], exact[:3], textbook[:3], strict=True):
        assert_close(xp.get(actual), e, t)


def test_backward_of_a_shard_uses_merged_statistics(xp):
    rng = np.random.default_rng(9)
    q, k, v, do = (normal(rng, (2, 48, 16), np.dtype(np.float32)) for _ in range(4))
    halves = (slice(0, 20), slice(20, 48))
    put = xp.put
    merged = cuattn.merge(*(cuattn.forward(put(q), put(k[:, s]), put(v[:, s])) for s in halves))
    shards = [cuattn.backward(put(do), put(q), put(k[:, s]), put(v[:, s]), merged) for s in halves]
    exact, textbook = (oracle.backward(do, q, k, v, dtype=d) for d in (None, q.dtype))
    joined = (
        sum(xp.get(s.dq) for s in shards),
        np.concatenate([xp.get(s.dk) for s in shards], 1),
        np.concatenate([xp.get(s.dv) for s in shards], 1),
    )
    for actual, e, t in zip(joined, exact[:3], textbook[:3], strict=True):
        assert_close(actual, e, t)


def test_bias_of_minus_infinity_is_invisible(xp):
    rng = np.random.default_rng(10)
    q, k, v = (normal(rng, (40, 16), np.dtype(np.float32)) for _ in range(3))
    visible = oracle.visible_band(40, 40, None, -3, 0)  # the first rows see nothing
    bias = np.where(visible, 0, -np.inf).astype(np.float32)
    fwd = cuattn.forward(xp.put(q), xp.put(k), xp.put(v), bias=xp.put(bias))
    exact = oracle.forward(q, k, v, visible=visible)
    textbook = oracle.forward(q, k, v, visible=visible, dtype=q.dtype)
    for name, actual, e, t in zip("olm", fwd[:3], exact, textbook, strict=True):
        assert_close(xp.get(actual), e, t, name=name)


def test_plan_is_readable_and_free(xp):
    q = xp.put(np.zeros((2, 4, 256, 64), np.float32))
    plan = cuattn.plan(q, q, q, is_causal=True, direction="backward", deterministic=True)
    assert isinstance(plan, cuattn.Plan) and plan.reason and plan.kernel in str(plan)
    assert plan.kernel == "cpu" if xp.name == "numpy" else plan.kernel in ("sm80", "sm90")
