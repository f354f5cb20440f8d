"""Statistics and results where scores are large, capped, or the smallest finite numbers: both directions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import masks
from tests import oracle
from tests.cuda.cases import to_device
from tests.tolerances import FACTOR, assert_close, eps, max_error

pytestmark = pytest.mark.gpu

TYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("bfloat16", "float16", "float32", "float64")}
SHORT = ("bfloat16", "float16")


def both(do, qkv, options):
    """Return o, l, m and the gradients of the portable kernels as NumPy arrays of float64, which holds every dtype."""
    arrays, options = [*map(to_device, qkv)], {name: to_device(value) for name, value in options.items()}
    fwd = cuattn.forward(*arrays, kernel="sm80", **options)
    gradients = cuattn.backward(to_device(do), *arrays, fwd, kernel="sm80", **options)
    results = [None if x is None else x.get().astype(np.float64) for x in (*fwd[:3], *gradients)]
    return results[:3], results[3:]


def normal(dtype, *shapes):
    rng = np.random.default_rng(4)
    return [rng.standard_normal(shape).astype(TYPES[dtype]) for shape in shapes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [5.0, 50.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_softcap_statistics(dtype, softcap, bias):
    """l and m are as good as float32's: the cap's tanh is off by a few roundings of the cap."""
    qkv = normal(dtype, *[(2, n, 64) for n in (200, 333, 333)])
    options = {"softcap": softcap, "scale": 0.5}
    if bias:
        options["bias"] = np.random.default_rng(5).standard_normal((1, 333)).astype(np.float32)
    _, l, m = both(qkv[0], qkv, options)[0]
    exact = oracle.forward(*qkv, **options)
    single = oracle.forward(*[x.astype(np.float32) for x in qkv], **options, dtype=np.dtype(np.float32))
    allowed = FACTOR * max_error(single[2], exact[2]) + 4 * eps(np.float32) * softcap
    assert max_error(m, exact[2]) <= allowed
    lse = [part[2] + np.log(part[1]) for part in (exact, single)]
    assert max_error(m + np.log(l), lse[0]) <= FACTOR * max_error(lse[1], lse[0]) + 4 * eps(np.float32) * softcap


@pytest.mark.parametrize("shape", [(2, 1, 1, 300), (2, 1, 300, 300)])
@pytest.mark.parametrize("dtype", TYPES)
def test_least_finite_bias(dtype, shape):
    """Finite scores are visible: a row of nothing but the least number has the mean of v."""
    kind = TYPES[dtype]
    do, *qkv = normal(dtype, *[(2, 4, 300, 64)] * 4)
    least = float(ml_dtypes.finfo(kind).min)
    bias = np.zeros(shape, kind)
    bias[0], bias[1, ..., :200] = least, least
    forward, gradients = both(do, qkv, {"bias": bias})
    exact, textbook = (oracle.solve(*qkv, do, bias=bias, dtype=low) for low in (None, kind))
    for name, a in zip(("o", "l", "m", "dq", "dk", "dv", "dbias"), (*forward, *gradients), strict=True):
        assert_close(a, getattr(exact, name), getattr(textbook, name), dtype=kind, name=name)


@pytest.mark.parametrize("score", [3.0, 150.0, 3e5, 3e9, 3e30])
@pytest.mark.parametrize("dtype", TYPES)
def test_one_key_has_l_of_one(dtype, score):
    """The maximum is subtracted before anything is rounded; in 16 bits where its exponent is beyond 128."""
    q, v, do = (np.ones((1, 40, 64), TYPES[dtype]) for _ in range(3))
    k = np.ones((1, 1, 64), TYPES[dtype])
    (o, l, m), (dq, dk, dv, _) = both(do, [q, k, v[:, :1]], {"scale": score / 64})
    near = dtype in SHORT and score * 1.4427 <= 128
    np.testing.assert_allclose(l, 1, rtol=2.0**-17 if near else 0, atol=0)
    np.testing.assert_allclose(m, score, rtol=eps(np.float64 if dtype == "float64" else np.float32))
    np.testing.assert_array_equal(o, 1)
    np.testing.assert_array_equal(dv, 40)
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("dtype", TYPES)
def test_huge_scale(dtype):
    """With a scale of 1e30 each row has the v of its best key, and the gradient goes there."""
    q, k, v, do = normal(dtype, (2, 70, 64), (2, 90, 64), (2, 90, 64), (2, 70, 64))
    (o, l, m), (dq, dk, dv, _) = both(do, [q, k, v], {"scale": 1e30})
    scores = q.astype(np.float64) @ np.swapaxes(k.astype(np.float64), -1, -2)
    best = scores.argmax(-1)
    np.testing.assert_array_equal(l, 1)
    np.testing.assert_allclose(m, scores.max(-1) * 1e30, rtol=1e-4)
    best_v = np.take_along_axis(v.astype(np.float64), best[..., None], -2)
    np.testing.assert_allclose(o, best_v, rtol=2.0**-21 if dtype == "float32" else 0)  # float32 is split in two halves
    wanted = np.zeros(v.shape)
    for head in range(2):
        np.add.at(wanted[head], best[head], do[head].astype(np.float64))
    np.testing.assert_allclose(dv, wanted, atol=8 * eps(TYPES[dtype]))
    assert not np.isnan(dq).any() and not np.isnan(dk).any()


@pytest.mark.parametrize("dtype", SHORT)
def test_large_scores_leave_other_rows_alone(dtype):
    """A row whose maximum is far subtracts it by itself: its neighbours keep their bits."""
    q, k, v = normal(dtype, *[(1, 200, 64)] * 3)
    plain = both(q, [q, k, v], {})[0]
    q[:, 7] *= TYPES[dtype].type(1000)
    moved = both(q, [q, k, v], {})[0]
    for a, b in zip(plain, moved, strict=True):
        assert np.delete(a, 7, 1).tobytes() == np.delete(b, 7, 1).tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_tiles_that_a_row_does_not_see_leave_no_trace(dtype):
    """A boolean mask visits tiles that a ColumnMask passes over: the results are the same, bit for bit."""
    qkv, mask = normal(dtype, *[(2, 120, 64)] * 3), masks.hash_sparse([26, 11, 83])
    column, dense = (both(qkv[0], qkv, {"mask": kind})[0] for kind in (mask, mask.dense()))
    for a, b in zip(column, dense, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_keys_that_a_bias_hides_may_hold_nan(dtype):
    """A bias of -inf that all rows share hides a key as a mask does; a sequence without any key is empty."""
    do, q, k, v = normal(dtype, *[(2, 4, 300, 64)] * 4)
    bias = np.zeros((2, 1, 1, 300), TYPES[dtype])
    bias[0], bias[1, ..., 200:] = -np.inf, -np.inf
    hidden = np.broadcast_to(np.isneginf(bias.astype(np.float64)), (2, 4, 1, 300))[:, :, 0]
    clean = both(do, [q, k, v], {"bias": bias})
    for x in (k, v):
        x[hidden] = np.nan
    do[0], q[0] = np.nan, np.nan
    poisoned = both(do, [q, k, v], {"bias": bias})
    for name, a, b in zip("olm", clean[0], poisoned[0], strict=True):
        assert a.tobytes() == b.tobytes(), name
    dq, dk, dv, _ = poisoned[1]
    assert not dq[0].any() and not dk[hidden].any() and not dv[hidden].any()
    assert all(np.isfinite(x).all() for x in poisoned[1])
