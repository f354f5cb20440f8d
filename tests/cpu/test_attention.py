"""Forward and backward on the CPU, with many tiles, chunks, panels and stacks even in small problems."""

import contextlib
import importlib
import math
import tracemalloc
import warnings
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.cpu import threads
from cuattn.cpu.inplace import InPlace
from cuattn.cpu.panel import Panel
from cuattn.cpu.sweep import Sweep
from tests.cpu.sizes import block_sizes, forced
from tests.strategies import DTYPES, cases, normal
from tests.test_api import check_backward, check_forward
from tests.tolerances import eps, max_error

FLOAT32 = np.dtype(np.float32)


def both(case, do=None):
    """Return the forward and the gradients of a case; no warning may escape."""
    (q, k, v), options = case.arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fwd = cuattn.forward(q, k, v, **options)
        options.pop("rng", None)
        return fwd, cuattn.backward(case.do if do is None else do, q, k, v, fwd, **options)


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)


@settings(max_examples=60)
@given(case=cases(max_length=200), sizes=block_sizes)
def test_any_block_sizes_match_the_oracle(case, sizes):
    with forced(*sizes):
        fwd, grads = both(case)
    check_forward(case, fwd)
    check_backward(case, grads)


class FlatCase:
    """Rows that see all keys about alike, and values of one sign: sums as long as they get, which roundings fill."""

    def __init__(self, n_keys, head_dim, width):
        rng = np.random.default_rng(n_keys * width)
        self.q, self.k = 0.01 * normal(rng, (1, 256, head_dim), FLOAT32), normal(rng, (1, n_keys, head_dim), FLOAT32)
        self.v = rng.uniform(1, 1.3, (1, n_keys, width)).astype(np.float32)

    def reference(self):
        return {}


@pytest.mark.parametrize(("head_dim", "width"), [(64, 1), (16, 2), (16, 5), (64, 8), (64, 64), (32, 128)])
@pytest.mark.parametrize("n_keys", [128, 384, 777, 2304])
def test_long_sums_keep_the_rule(n_keys, head_dim, width):
    case = FlatCase(n_keys, head_dim, width)
    fwd = cuattn.forward(case.q, case.k, case.v)
    check_forward(case, fwd)
    np.testing.assert_array_equal(cuattn.attention(case.q, case.k, case.v), fwd.o)


@given(case=cases(max_length=200), sizes=block_sizes)
def test_the_number_of_threads_changes_no_bit(case, sizes):
    results = []
    for workers in (1, 3):
        with forced(*sizes, workers=workers):
            fwd, grads = both(case)
        results.append((*fwd[:3], *grads))
    assert_same_bits(*results)


@given(case=cases(max_length=200, mask_kinds=("column", "document")), sizes=block_sizes)
def test_a_column_mask_and_its_boolean_array_give_the_same_bits(case, sizes):
    mask = case.options.get("mask")
    if mask is None:
        return
    results = []
    for form in (mask, mask.dense()):
        case.options["mask"] = form
        with forced(*sizes):
            fwd, grads = both(case)
        results.append((*fwd[:3], *grads))
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
        with forced(16, 16, 1, 3, 2):
            fwd = cuattn.forward(q, k, v, mask=mask)
            grads = cuattn.backward(do, q, k, v, fwd, mask=mask)
        results.append((*fwd[:3], *grads))
    assert_same_bits(*results)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), sizes=block_sizes)
@settings(max_examples=15)
def test_gradients_match_finite_differences(data, seed, sizes):
    case = data.draw(cases(dtypes=DTYPES[3:], max_length=40, head_dims=(1, 8)))
    case.options.pop("scale", None)
    with forced(*sizes):
        fwd, grads = both(case)
        if fwd.o.size == 0 or case.k.size == 0:
            return
        if fwd.rng_state is not None:
            case.options["rng"] = fwd.rng_state
        rng = np.random.default_rng(seed)
        operands = {"q": case.q, "k": case.k, "v": case.v, "bias": case.bias}
        for name, gradient in zip(operands, grads, strict=True):
            x = operands[name]
            if x is None or x.dtype != np.float64:
                continue
            step = rng.standard_normal(x.shape)
            ends = []
            for h in (1e-5, -1e-5):
                setattr(case, name, x + h * step)
                (q, k, v), options = case.arguments()
                ends.append(float((cuattn.attention(q, k, v, **options) * case.do).sum()))
            setattr(case, name, x)
            slope = (ends[0] - ends[1]) / 2e-5
            expected = float((gradient * step).sum())
            size = float(np.abs(gradient * step).sum()) + 1
            assert abs(slope - expected) <= 1e-6 * size, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_heads_equal_repeated_heads(dtype):
    rng = np.random.default_rng(5)
    q, do = (normal(rng, (2, 6, 70, 16), dtype) for _ in range(2))
    k, v = (normal(rng, (2, 2, 90, 16), dtype) for _ in range(2))
    with forced(16, 32, 1, 2, 1, workers=2):
        fwd = cuattn.forward(q, k, v, enable_gqa=True)
        grads = cuattn.backward(do, q, k, v, fwd, enable_gqa=True)
        repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
        other = cuattn.forward(q, *repeated)
        assert_same_bits(fwd[:3], other[:3])
        others = cuattn.backward(do, q, *repeated, other)
    np.testing.assert_array_equal(grads.dq, others.dq)
    wide = np.float64 if dtype == np.float64 else np.float32
    for name, one, many in zip(("dk", "dv"), grads[1:3], others[1:3], strict=True):
        summed = many.astype(wide).reshape(2, 2, 3, 90, 16).sum(2)
        assert max_error(one, summed) <= 4 * eps(dtype) * float(np.abs(summed).max()), name


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("form", ["column", "dense", "window", "bias"])
def test_what_is_invisible_never_leaks(poison, form):
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
    results = []
    for bad in (0, poison):
        a, b, c, d = (x.copy() for x in (q, k, v, do))
        for x in (a, b, c, d):
            x[:, lengths:] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with forced(32, 32, 2, 2, 1):
                fwd = cuattn.forward(a, b, c, **options)
                grads = cuattn.backward(d, a, b, c, fwd, **options)
        results.append((*fwd[:3], *grads))
    assert_same_bits(*results)
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
    with forced(32, 16, 2, 2, 100):
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


def forced_workers(count):
    """Make the CPU backend, and its plan, use this many threads."""
    patch = contextlib.ExitStack()
    for module in (threads, importlib.import_module("cuattn.cpu.plan")):
        patch.enter_context(mock.patch.object(module, "useful", lambda problem, blocks: count))
    return patch


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_memory_of_a_thread_is_bounded(direction):
    n, d = 16384, 64
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, d), FLOAT32) for _ in range(3))
    mask = cuattn.masks.sliding_window(n, 128)
    fwd = cuattn.forward(q, k, v, mask=mask)
    with forced_workers(1):
        tracemalloc.start()
        try:
            if direction == "forward":
                results = cuattn.forward(q, k, v, mask=mask)[:3]
            else:
                results = cuattn.backward(q, q, k, v, fwd, mask=mask)[:3]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak - sum(x.nbytes for x in results) < 64e6
    with forced_workers(1):
        planned = cuattn.plan(q, k, v, mask=mask, direction=direction).workspace_bytes
    assert planned < 64e6


def test_work_is_in_proportion_to_what_is_visible(monkeypatch):
    """Count the tiles whose products are made."""
    visited = []
    room = Sweep._room
    monkeypatch.setattr(Sweep, "_room", lambda self, *size: visited.append(math.prod(size)) or room(self, *size))
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
def test_the_keys_that_are_seen_are_loaded_once_or_read_in_place(monkeypatch, dtype):
    loads, looks = [], []
    load, look = Panel._load, InPlace._look
    monkeypatch.setattr(
        Panel, "_load", lambda self, index, count: loads.extend(range(index, index + count)) or load(self, index, count)
    )
    monkeypatch.setattr(InPlace, "_look", lambda self, index: looks.append(index) or look(self, index))
    x = np.random.default_rng(0).standard_normal((1, 640, 16)).astype(dtype)
    visible = np.zeros((640, 640), bool)
    visible[:, 64:128] = visible[300:, 384:] = True
    with forced(32, 32, 1, 2, 100):
        cuattn.forward(x, x, x, mask=visible)
    touched, other = (looks, loads) if dtype == np.float32 else (loads, looks)
    assert sorted(touched) == [1, 6, 7, 8, 9]
    assert not other


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
    with forced(32, 32, 2, 2, 1):
        one = cuattn.forward(q, k, v, mask=mask)
        other = cuattn.forward(q, *others, mask=mask)
    assert_same_bits(one[:3], other[:3])


def test_a_panel_is_loaded_once_per_head(monkeypatch):
    loads = []
    load = Panel._load
    monkeypatch.setattr(Panel, "_load", lambda self, head, first: loads.append(first) or load(self, head, first))
    x = np.random.default_rng(0).standard_normal((3, 600, 16)).astype(FLOAT32)
    with forced(32, 32, 2, 4, 100):
        cuattn.forward(x, x, x)
    assert len(loads) == 3
