"""Forward and backward on the CPU, by tiles of any sizes and by whole heads (cuattn.cpu's call, forward, backward)."""

import gc
import math
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import cuattn
from cuattn.cpu.arithmetic import WINDOW
from cuattn.cpu.forward import ForwardWalk
from cuattn.cpu.walk import Walk
from tests import oracle
from tests.cpu.problems import plain
from tests.cpu.sizes import block_sizes, tiled, ways, whole_heads
from tests.strategies import DTYPES, cases, normal
from tests.test_api import FLOAT32, GRADIENTS, check, dtypes
from tests.tolerances import assert_close, assert_same, eps, max_error

THREE_WAYS = [tiled, lambda: whole_heads(1), whole_heads]
in_each_way = pytest.mark.parametrize("way", THREE_WAYS, ids=["tiles", "head by head", "whole heads"])


def both(case, do=None):
    """Return the forward and the gradients of a case; no warning may escape."""
    (q, k, v), options = case.arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fwd = cuattn.forward(q, k, v, **options)
        options.pop("rng", None)
        return fwd, cuattn.backward(case.do if do is None else do, q, k, v, fwd, **options)


@settings(max_examples=60)
@given(case=cases(max_length=200), sizes=block_sizes)
def test_every_way_matches_the_oracle(case, sizes):
    for way in ways(sizes):
        with way():
            fwd, grads = both(case)
        check(case, fwd[:3])
        check(case, grads, GRADIENTS)


@pytest.mark.parametrize(("head_dim", "width"), [(64, 1), (16, 2), (16, 5), (64, 8), (64, 64), (32, 128)])
@pytest.mark.parametrize("n_keys", [128, 384, 777, 2304])
def test_long_sums_keep_the_rule(n_keys, head_dim, width):
    """Rows that see all keys about alike, and values of one sign: sums as long as they get, which roundings fill."""
    rng = np.random.default_rng(n_keys * width)
    q, k = 0.01 * normal(rng, (1, 256, head_dim), FLOAT32), normal(rng, (1, n_keys, head_dim), FLOAT32)
    v = rng.uniform(1, 1.3, (1, n_keys, width)).astype(np.float32)
    fwd = cuattn.forward(q, k, v)
    check(plain(q, k, v), fwd[:3])
    np.testing.assert_array_equal(cuattn.attention(q, k, v), fwd.o)


@given(case=cases(max_length=200), sizes=block_sizes)
def test_the_number_of_threads_changes_no_bit(case, sizes):
    for way in range(2):
        results = []
        for workers in (1, 3):
            with ways(sizes, workers)[way]():
                fwd, grads = both(case)
            results.append((*fwd[:3], *grads))
        assert_same(*results)


@given(case=cases(max_length=200, mask_kinds=("column", "document")), sizes=block_sizes)
def test_a_column_mask_and_its_boolean_array_give_the_same_bits(case, sizes):
    mask = case.options.get("mask")
    if mask is None:
        return
    for way in ways(sizes):
        results = []
        for form in (mask, mask.dense()):
            case.options["mask"] = form
            with way():
                fwd, grads = both(case)
            results.append((*fwd[:3], *grads))
        assert_same(*results)


@dtypes
def test_skipped_tiles_change_no_bit(dtype):
    """A mask whose bounds hide how empty its tiles are is visited tile by tile, to the same bits."""
    rng = np.random.default_rng(3)
    n = 300
    q, k, v, do = (normal(rng, (2, n, 32), dtype) for _ in range(4))
    start, j = np.arange(n) // 60 * 60, np.arange(n)
    exact = cuattn.ColumnMask(np.minimum(start + 60, n), np.full(n, n), np.zeros(n, int), start, n_queries=n)
    # The same visibility, but in every other column the two intervals change places, so that min and max see nothing.
    swap = j % 2 == 1
    lower, upper = (exact.lts, exact.lte), (exact.uts, exact.ute)
    bounds = [np.where(swap, b, a) for a, b in zip((*lower, *upper), (*upper, *lower), strict=True)]
    vague = cuattn.ColumnMask(*bounds, n_queries=n)
    np.testing.assert_array_equal(exact.dense(), vague.dense())
    assert (exact.tile_states(16, 16) == 0).sum() > (vague.tile_states(16, 16) == 0).sum()
    results = []
    for mask in (exact, vague):
        with tiled(16, 16, 1, step=2):
            fwd = cuattn.forward(q, k, v, mask=mask)
            grads = cuattn.backward(do, q, k, v, fwd, mask=mask)
        results.append((*fwd[:3], *grads))
    assert_same(*results)


@dtypes
def test_grouped_heads_equal_repeated_heads(dtype):
    rng = np.random.default_rng(5)
    q, do = (normal(rng, (2, 6, 70, 16), dtype) for _ in range(2))
    k, v = (normal(rng, (2, 2, 90, 16), dtype) for _ in range(2))
    with tiled(16, 32, 1, 2, 2, 1, workers=2):
        fwd = cuattn.forward(q, k, v, enable_gqa=True)
        grads = cuattn.backward(do, q, k, v, fwd, enable_gqa=True)
        repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
        other = cuattn.forward(q, *repeated)
        assert_same(fwd[:3], other[:3])
        others = cuattn.backward(do, q, *repeated, other)
    np.testing.assert_array_equal(grads.dq, others.dq)
    wide = np.float64 if dtype == np.float64 else np.float32
    for name, one, many in zip(("dk", "dv"), grads[1:3], others[1:3], strict=True):
        summed = many.astype(wide).reshape(2, 2, 3, 90, 16).sum(2)
        assert max_error(one, summed) <= 4 * eps(dtype) * float(np.abs(summed).max()), name


@in_each_way
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("form", ["column", "dense", "window", "bias"])
def test_what_is_invisible_never_leaks(poison, form, softcap, way):
    rng = np.random.default_rng(7)
    n, lengths = 150, 110  # keys and rows beyond 110 are padding
    q, k, v, do = (rng.standard_normal((2, n, 16)).astype(FLOAT32) for _ in range(4))
    if form == "window":  # the last keys see the band end before them
        options = {"window": (None, 0, "top_left")}
        q, do = q[:, :lengths], do[:, :lengths]
    visible = np.zeros((n, n), bool)
    visible[:lengths, :lengths] = True
    if form == "column":
        options = {"mask": cuattn.ColumnMask.from_dense(visible)}
    elif form == "dense":
        options = {"mask": visible}
    elif form == "bias":
        options = {"bias": np.where(visible, 0, -np.inf).astype(FLOAT32)}
    options["softcap"] = softcap
    results = []
    for bad in (0, poison):
        a, b, c, d = (x.copy() for x in (q, k, v, do))
        for x in (a, b, c, d):
            x[:, lengths:] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with way():
                fwd = cuattn.forward(a, b, c, **options)
                grads = cuattn.backward(d, a, b, c, fwd, **options)
        results.append((*fwd[:3], *grads))
    assert_same(*results)
    assert all(np.isfinite(x).all() for x in results[1][:2])
    assert not results[1][4][:, lengths:].any() and not results[1][5][:, lengths:].any()  # dk, dv of the padding
    if form != "window":
        assert not results[1][3][:, lengths:].any()  # dq of the empty rows


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_scores_far_apart(scale):
    """Exponentials that leave the normal numbers, maxima that keep growing: the references must follow."""
    rng = np.random.default_rng(9)
    q = rng.standard_normal((1, 64, 8)).astype(FLOAT32)
    k = (rng.standard_normal((1, 200, 8)) * np.linspace(0.01, 1, 200)[:, None]).astype(FLOAT32)
    v = rng.standard_normal((1, 200, 8)).astype(FLOAT32)
    with tiled(32, 16, step=4):
        fwd = cuattn.forward(q, k, v, scale=scale)
    s = scale * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2))
    m = s.max(-1)
    np.testing.assert_allclose(fwd.m, m, rtol=1e-5)
    p = np.exp(s - m[..., None])
    np.testing.assert_allclose(fwd.l, p.sum(-1), rtol=1e-6 * max(1, np.abs(s).max()))
    assert np.isfinite(fwd.o).all()


def test_infinite_and_nan_scores_behave_as_in_the_textbook():
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, 40, 8)).astype(FLOAT32) for _ in range(3))
    q[0, 3], q[0, 5] = np.nan, 0
    q[0, 7, 0] = np.inf
    with np.errstate(all="ignore"):
        s = q @ k.swapaxes(1, 2) * FLOAT32.type(8**-0.5)
        m = s.max(-1)
        l = np.exp(s - m[..., None]).sum(-1)
    fwd = cuattn.forward(q, k, v)
    np.testing.assert_array_equal(np.isnan(fwd.l), np.isnan(l))
    np.testing.assert_array_equal(np.isnan(fwd.m), np.isnan(m))
    np.testing.assert_array_equal(np.isposinf(fwd.m), np.isposinf(m))
    assert np.isnan(fwd.o[0, [3, 7]]).all() and np.isfinite(np.delete(fwd.o, [3, 7], axis=1)).all()


@in_each_way
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("form", ["causal", "dense", "bias"])
def test_a_row_is_not_touched_by_keys_that_it_may_not_see(poison, where, form, way):
    """Other rows see these keys, so they are no padding; o, l, m and dq of the rows that do not are as ever."""
    rng = np.random.default_rng(13)
    n, key = 150, 90
    visible = oracle.visible_band(n, n, None, 0, 0)
    if form == "dense":
        visible[key:, key] = rng.random(n - key) < 0.5
    options = {
        "causal": {"is_causal": True},
        "dense": {"mask": visible},
        "bias": {"bias": np.where(visible, 0, -np.inf).astype(FLOAT32)},
    }[form]
    arrays = {name: rng.standard_normal((2, n, 16)).astype(FLOAT32) for name in ("q", "k", "v", "do")}
    results = []
    for value in (1, poison):
        arrays[where][:, key] = value
        with way():
            fwd = cuattn.forward(*(arrays[name] for name in "qkv"), **options)
            dq = cuattn.backward(arrays["do"], *(arrays[name] for name in "qkv"), fwd, **options).dq
        results.append((*fwd[:3], dq))
    apart = ~visible[:, key]
    for clean, poisoned in zip(*results, strict=True):
        np.testing.assert_array_equal(clean[:, apart], poisoned[:, apart])
        assert np.isfinite(poisoned[:, apart]).all()
    assert not np.isfinite(results[1][0][:, ~apart]).all(axis=-1).any()


def test_values_of_infinity_reach_the_output_as_in_the_textbook():
    rng = np.random.default_rng(14)
    q, k, v = (rng.standard_normal((1, 40, 8)).astype(FLOAT32) for _ in range(3))
    v[0, 3, 0], v[0, 4, 1], v[0, 5, 2], v[0, 6, 2] = np.inf, -np.inf, np.inf, -np.inf
    for way in THREE_WAYS:
        with way():
            o = cuattn.attention(q, k, v)
        assert (o[0, :, 0] == np.inf).all() and (o[0, :, 1] == -np.inf).all() and np.isnan(o[0, :, 2]).all()
        assert np.isfinite(o[0, :, 3:]).all()


@dtypes
@in_each_way
@pytest.mark.parametrize("n_keys", [7, 50, 77, 128, 1000, 4096])
def test_l_of_equal_scores_is_their_number(n_keys, dtype, way):
    """To the one rounding that the rule allows, as the textbook's is: whatever l is summed relative to."""
    q, k, v = (np.ones((1, n, 2), dtype) for n in (32, n_keys, n_keys))
    count = np.full((1, 32), n_keys, np.longdouble)
    for size in (-1e9, -40.3, -17.7, -0.1, 0.3, 1.7, 12.3, 21.9, 3e4):
        bias = np.full((1, 1), size, np.float64 if dtype == np.float64 else FLOAT32)
        with way():
            found = [cuattn.forward(q, k, v, bias=bias), cuattn.jvp(q, k, v, tq=q, bias=bias)]
            found.append(cuattn.jvp(q, k, v, tq=q, scale=size / 2))  # of equal keys
        for x in found:
            assert_close(x.l, count, count, name=f"l for {size}")


@in_each_way
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 3e3, 3e5, 3e7, 3e9, 1e15, 1e30, 1e37])
def test_l_is_1_for_one_key_whatever_its_score(size, way):
    q, k = np.full((1, 20, 1), size, FLOAT32), np.ones((1, 33, 1), FLOAT32)
    visible = np.zeros((20, 33), bool)
    visible[np.arange(20), np.arange(20)] = True
    for sign in (1, -1):
        with way():
            one = cuattn.forward(q, sign * k, k, mask=visible, scale=1.0)
            grads = cuattn.backward(k[:, :20], q, sign * k, k, one, mask=visible, scale=1.0)
        np.testing.assert_array_equal(one.l, 1)
        np.testing.assert_array_equal(one.m, sign * q[..., 0])
        assert all(np.isfinite(x).all() for x in grads[:3])
        np.testing.assert_array_equal(grads.dv[0, :20], 1)
        assert not grads.dq.any()


@dtypes
@in_each_way
def test_a_bias_of_the_smallest_number_throughout_gives_the_mean_of_v(dtype, way):
    rng = np.random.default_rng(15)
    q, k, v, do = (normal(rng, (2, 70, 16), dtype) for _ in range(4))
    bias = np.zeros((2, 1, 70), dtype)
    bias[0], bias[1, :, :40] = (ml_dtypes.finfo(dtype).min,) * 2
    with way():
        fwd = cuattn.forward(q, k, v, bias=bias)
        grads = cuattn.backward(do, q, k, v, fwd, bias=bias)
        padded = cuattn.forward(q[1:], k[1:, 40:], v[1:, 40:])
    assert all(np.isfinite(x.astype(np.float64)).all() for x in (*fwd[:3], *grads))
    if dtype in DTYPES[1:]:  # float16's is -65504, beside which scores of float32 still count
        np.testing.assert_array_equal(fwd.l[0], 70)
        mean = v[0].astype(np.float64).mean(0)
        assert (
            max_error(fwd.o[0], np.broadcast_to(mean, fwd.o[0].shape))
            <= 8 * eps(dtype) * np.abs(v[0].astype(np.float64)).max()
        )
    assert max_error(fwd.o[1], padded.o[0]) <= 8 * eps(dtype) * float(np.abs(v.astype(np.float64)).max())


@pytest.mark.parametrize("n", [96, 512, 1000])
def test_a_saturated_softmax_gives_the_textbooks_gradients(n):
    """Scores up to 110, and 438: the weight of the highest is 1, in the backward as in the forward."""
    rng = np.random.default_rng(16)
    q, v, do = (rng.standard_normal((1, n, 64)).astype(FLOAT32) for _ in range(3))
    for scale in (1.0, 4.0):
        fwd = cuattn.forward(q, q, v, scale=scale)
        grads = cuattn.backward(do, q, q, v, fwd, scale=scale)
        exact = oracle.backward(do, q, q, v, scale=scale)
        assert max_error(grads.dv, exact[2]) <= 20 * eps(FLOAT32)


@settings(max_examples=30)
@given(case=cases(dtypes=DTYPES[2:], max_length=200), sizes=block_sizes)
def test_backward_scores_have_the_forwards_bits(case, sizes):
    """Without this, rounding of a large score moves probabilities that should cancel."""
    found = []
    make = Walk.make_scores

    def spy(self, part, q, *, careful):
        s, masks = make(self, part, q, careful=careful)
        for first, slots, _ in part.runs:
            for tile, slot in enumerate(range(slots.start, slots.stop), first):
                for head, of_head in enumerate(s[:, slot].reshape(self.item.group.count, -1, *s.shape[2:])):
                    for row, of_row in enumerate(of_head.copy(), self.item.rows.start // self.blocks.rows):
                        found.append(((self.item.group.batch, self.item.group.start + head, row, tile), of_row))
        return s, masks

    Walk.make_scores = spy
    try:
        with tiled(*sizes):
            (q, k, v), options = case.arguments()
            fwd = cuattn.forward(q, k, v, **options)
            of_forward, found = dict(found), []
            options.pop("rng", None)
            cuattn.backward(case.do, q, k, v, fwd, **options)
    finally:
        Walk.make_scores = make
    if not (fwd.l == 0).any():  # the backward loads empty rows as 0
        for where, s in found:
            np.testing.assert_array_equal(s, of_forward[where])


@settings(max_examples=60)
@given(case=cases(max_length=200), sizes=block_sizes)
def test_the_bound_changes_no_bit(case, sizes):
    (q, k, v), options = case.arguments()
    with tiled(*sizes):
        bounded, alone = cuattn.forward(q, k, v, **options), cuattn.attention(q, k, v, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Walk, "bounded", lambda self, longest_q: False)
            searched, searched_alone = cuattn.forward(q, k, v, **options), cuattn.attention(q, k, v, **options)
    assert_same(bounded[:3], searched[:3])
    np.testing.assert_array_equal(alone, bounded.o)
    np.testing.assert_array_equal(alone, searched_alone)


@dtypes
@pytest.mark.parametrize(("factor", "looks"), [(0.99, False), (1.01, True), (40.0, True)])
def test_both_sides_of_the_border_keep_the_rule(dtype, factor, looks, monkeypatch):
    """One row and one key reach the bound exactly: their score is as long as Cauchy and Schwarz let it be."""
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (2, 90, 16), dtype) for _ in range(3))
    q[:, 7] = k[:, 11] = 6
    lengths = (float(np.sqrt((x.astype(np.float64) ** 2).sum(-1).max())) for x in (q, k))
    scale = factor * WINDOW / math.prod(lengths)
    searches = []
    follow = ForwardWalk._follow
    monkeypatch.setattr(ForwardWalk, "_follow", lambda self, *args: searches.append(1) or follow(self, *args))
    with tiled(16, 32):
        fwd = cuattn.forward(q, k, v, scale=scale)
    assert bool(searches) == looks
    check(plain(q, k, v, scale=scale), fwd[:3])


@in_each_way
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -3e38, 1e-30])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_a_common_number_warns_of_nothing_and_stays_where_it_is(where, value, masked, way):
    rng = np.random.default_rng(17)
    arrays = {name: rng.standard_normal((2, 70, 8)).astype(np.float32) for name in "qkv"}
    arrays[where][0, 33, 3] = value
    visible = rng.random((70, 70)) < 0.7
    visible[5:9] = False
    options = {"mask": visible if masked else None}
    with way(), warnings.catch_warnings():
        warnings.simplefilter("error")
        fwd, alone = cuattn.forward(*arrays.values(), **options), cuattn.attention(*arrays.values(), **options)
    np.testing.assert_array_equal(alone, fwd.o)
    assert np.isfinite(fwd.o[1]).all()
    if masked:
        assert not fwd.l[:, 5:9].any() and (fwd.m[:, 5:9] == -np.inf).all()


@in_each_way
@pytest.mark.parametrize("bias", [None, np.zeros((1, 70), np.float16)])
def test_gradients_beyond_float16_are_infinite_without_a_warning(bias, way):
    rng = np.random.default_rng(19)
    q, k, v, do = (rng.standard_normal((2, 70, 8)).astype(np.float16) * np.float16(size) for size in (1, 1, 1e4, 1e2))
    with way(), warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = cuattn.backward(do, q, k, v, cuattn.forward(q, k, v, bias=bias), bias=bias)
    assert np.isinf(grads.dq).any() and np.isfinite(grads.dv).all()


def test_work_is_in_proportion_to_what_is_visible(monkeypatch):
    """Count the tiles whose products are made."""
    visited = []
    make = Walk.make_scores

    def spy(self, part, q, **options):
        visited.append(part.count)
        return make(self, part, q, **options)

    monkeypatch.setattr(Walk, "make_scores", spy)
    n = 2048
    x = np.ones((1, n, 8), FLOAT32)
    for mask in (
        cuattn.masks.causal(n),
        cuattn.masks.sliding_window(n, 100),
        cuattn.masks.causal_document([n // 4] * 4),
        cuattn.masks.share_question([(256, [256] * 3)] * 2),
    ):
        visited.clear()
        cuattn.forward(x, x, x, mask=mask)
        plan = cuattn.plan(x, x, x, mask=mask)
        assert sum(visited) == (mask.tile_states(plan.block_m, plan.block_n) != 0).sum()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_keys_that_are_seen_are_copied_once_or_read_in_place(monkeypatch, dtype):
    loads = []
    load = Walk._load
    monkeypatch.setattr(Walk, "_load", lambda self, index, place: loads.append(index) or load(self, index, place))
    x = np.random.default_rng(0).standard_normal((1, 640, 16)).astype(dtype)
    visible = np.zeros((640, 640), bool)
    visible[:, 64:128] = visible[300:, 384:] = True
    with tiled(32, 32, 1, step=2):
        cuattn.forward(x, x, x, mask=visible)
    assert sorted(loads) == ([] if dtype == np.float32 else [1, *range(6, 10)])


@pytest.mark.parametrize("layout", ["rows of heads", "every second row", "unaligned", "backwards", "float32 of one"])
def test_operands_that_lie_otherwise_give_the_same_bits(layout):
    """Read in place where that is possible, else copied."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((2, 96, 1 if layout == "float32 of one" else 16)).astype(FLOAT32) for _ in range(3))
    others = [k, v]
    for n, x in enumerate(others):
        if layout == "rows of heads":
            others[n] = np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
        elif layout == "every second row":
            others[n] = np.repeat(x, 2, axis=1)[:, ::2]
        elif layout == "unaligned":
            others[n] = np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(FLOAT32).reshape(x.shape)
        elif layout == "backwards":
            others[n] = np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    mask = cuattn.masks.causal_document([50, 46])
    for way in (lambda: tiled(32, 32), whole_heads):
        with way():
            one = cuattn.forward(q, k, v, mask=mask)
            other = cuattn.forward(q, *others, mask=mask)
        assert_same(one[:3], other[:3])


def test_a_dtype_that_only_its_row_knows_is_computed():
    from cuattn.problem import dtypes

    dtype = np.dtype(ml_dtypes.float8_e4m3fn)
    dtypes.DTYPES[dtype] = dtypes.Dtype(dtype, np.dtype(np.float32))
    try:
        rng = np.random.default_rng(18)
        q, k, v, do = (rng.standard_normal((2, 40, 16)).astype(dtype) for _ in range(4))
        for way in THREE_WAYS:
            with way():
                fwd = cuattn.forward(q, k, v, out_dtype=np.float32)
                grads = cuattn.backward(do, q, k, v, fwd)
                expected = cuattn.forward(*(x.astype(np.float32) for x in (q, k, v)))
            np.testing.assert_array_equal(fwd.o, expected.o)
            assert grads.dq.dtype == dtype
    finally:
        del dtypes.DTYPES[dtype]


MASKS = {"none": None, "column": cuattn.masks.causal_document([30, 34]), "boolean": np.tri(64, dtype=bool)}


@pytest.mark.parametrize("way", [tiled, whole_heads], ids=["tiles", "whole heads"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_call_lets_go_of_its_arrays_when_it_is_over(way, mask):
    """At once: nothing waits for the collector of cycles."""
    q, k, v, do = normal(np.random.default_rng(0), (4, 2, 64, 16), FLOAT32)
    q = q.copy()
    freed = weakref.ref(q)
    gc.collect()
    gc.disable()
    try:
        with way():
            fwd = cuattn.forward(q, k, v, mask=mask)
            cuattn.backward(do, q, k, v, fwd, mask=mask)
        del q, fwd
        assert freed() is None
    finally:
        gc.enable()
