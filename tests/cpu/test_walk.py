"""Products that select, rows and copies (cuattn.cpu's arithmetic, walk, buffers and dropout)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn import rng as cuattn_rng
from cuattn.cpu.arithmetic import selecting_product, summed_to
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.forward import ForwardWalk
from cuattn.cpu.softcap import Softcap
from cuattn.cpu.walk import Tiles, reads_in_place
from tests.cpu.problems import problem_of


@given(seed=st.integers(0, 2**32 - 1), bad=st.sampled_from((np.nan, np.inf, -np.inf)))
def test_a_weight_of_0_takes_nothing_and_others_what_the_textbook_takes(seed, bad):
    rng = np.random.default_rng(seed)
    weights, data = rng.integers(-1, 2, (2, 5, 7)).astype(np.float32), rng.standard_normal((2, 7, 3)).astype(np.float32)
    data[rng.random(data.shape) < 0.1] = bad
    data[rng.random(data.shape) < 0.1] = np.inf
    with np.errstate(all="ignore"):
        terms = np.where(weights[..., None] == 0, 0, weights[..., None] * data[:, None])
        expected = terms.sum(2)
        found = selecting_product(weights, data, np.empty((2, 5, 3), np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_scaled_transposed_and_padded():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 40, 8)).astype(np.float16)
    problem, operands, masks = problem_of(x, x, x)
    task = Tiles(problem, operands, masks, None, {}, False)
    walk = ForwardWalk(task)
    empty = np.zeros((2, 40), bool)
    x[1, 7], empty[1, 7] = np.nan, True
    walk.turn_to(task.item(0, 0))
    upright, transposed = walk.load("q", x, 0.5, empty)
    expected = np.where(empty[..., None], 0, x.astype(np.float32) * np.float32(0.5))
    np.testing.assert_array_equal(upright[:, :40], expected)
    assert upright.shape == (2, 48, 8) and not upright[:, 40:].any()
    np.testing.assert_array_equal(transposed, upright.swapaxes(1, 2))


def test_the_slope_of_the_cap_is_that_of_tanh():
    raw, ds = np.append(np.linspace(-3, 3, 50), np.nan), np.append(np.ones(50), 0)
    cap = Softcap(5.0, Buffers(raw.dtype, {"tanh": raw.size}))
    cap(raw.copy())
    cap.differentiate(ds, careful=True)
    np.testing.assert_allclose(ds, np.append(5 / np.cosh(raw[:-1]) ** 2, 0), rtol=1e-12)


@pytest.mark.parametrize("count", [10, 100_000])
def test_buffers_are_aligned_arrays_of_their_own(count):
    buffers = Buffers(np.dtype(np.float32), {"a": 3 * count, "b": count})
    a, b = buffers.get("a", 3, count), buffers.get("b", count)
    a.fill(1)
    b.fill(2)
    assert (a == 1).all()
    assert buffers.nbytes >= a.nbytes + b.nbytes
    if count > 1000:
        assert a.ctypes.data % 64 == b.ctypes.data % 64 == 0
        assert np.shares_memory(buffers.get("a", 5), a)


def test_what_products_cannot_read_is_copied():
    x = np.zeros((2, 4096, 64), np.float32)

    def in_place(k):
        problem, operands, _ = problem_of(x, k, x)
        return reads_in_place(problem, operands, 64)

    assert in_place(x)
    assert in_place(np.zeros((4096, 2, 64), np.float32).swapaxes(0, 1))
    assert not in_place(np.frombuffer(b"." + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape))
    assert not in_place(x[:, ::-1])


def test_parts_are_summed_over_what_is_broadcast():
    part = np.arange(6.0).reshape(1, 2, 3)
    np.testing.assert_array_equal(summed_to(part, (1, 1, 3), np.float64), [[[3, 5, 7]]])
    assert summed_to(part, part.shape, np.float64) is part


@pytest.mark.parametrize("runs", [False, True])
def test_dropout_reads_global_indices(runs):
    x = np.zeros((2, 3, 64, 8), np.float32)
    problem, *_ = problem_of(x, x, x, dropout_p=0.5)
    place = problem.place._replace(batch=1, head=2, heads=7, row=32, key=160)
    if runs:
        place = place._replace(key_blocks=np.array([0, 16, 320, 336], np.int32))
    state = cuattn.RNGState(5, 1)
    kept = Dropout(problem, place, state).kept((1,), 2, slice(16, 40), slice(32, 64))
    assert kept.shape == (24, 32)
    keys = (320, 352) if runs else (192, 224)
    np.testing.assert_array_equal(kept, cuattn_rng.keep(state, problem.dropout, 2 * 7 + 4, (48, 72), keys))
