"""Products of kernel matrices: values, gradients, accuracy, what is hidden, shapes, errors."""

import ml_dtypes
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from cuattn import errors, masks, pairwise
from cuattn.pairwise import attention, logsums, products
from tests.pairwise.textbook import KERNELS, Problem
from tests.tolerances import assert_close, eps

NAMES = "dx", "dy", "db", "dbandwidth"


@pytest.fixture(params=["tiles", "attention"])
def way(request, monkeypatch):
    """Both ways to compute: the host's own tiles, and attention, which GPUs take for many coordinates."""
    if request.param == "attention":
        monkeypatch.setattr(products, "engine", lambda pairs: attention)
        monkeypatch.setattr(logsums, "engine", lambda pairs: attention)
    return request.param


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d", [3, 11])
def test_values_and_gradients(way, kernel, d):
    problem = Problem(d, given=np.float64, m=60, n=90)
    visible = np.random.default_rng(1).random((60, 90)) < 0.7
    visible[3], visible[:, 5] = False, False
    options = dict(bandwidth=1.3, kernel_function=kernel, mask=visible)
    a = pairwise.matvec(problem.x, problem.y, problem.b, **options)
    exact = [problem.matvec(np.longdouble, kernel, 1.3, visible)]
    exact += problem.matvec_backward(np.longdouble, kernel, 1.3, visible)
    found = [a, *pairwise.matvec_backward(problem.da, problem.x, problem.y, problem.b, **options)]
    textbook = [problem.matvec(np.float64, kernel, 1.3, visible)]
    textbook += problem.matvec_backward(np.float64, kernel, 1.3, visible)
    for name, own, true, plain in zip(("a", *NAMES), found, exact, textbook, strict=True):
        assert_close(own, true, plain, dtype=np.float64, magnitude=2000.0 if name == "dbandwidth" else 50.0, name=name)
    assert not a[3].any()


@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize("d", [3, 8])
@pytest.mark.parametrize("spread", [1, 3, 5, 10, 100])
def test_few_coordinates_are_as_good_as_differences(given, d, spread):
    """Every row is held to twice the error of direct differences in the same precision, and one rounding."""
    problem = Problem(d, 1, spread=spread, given=given)
    problem.b = np.abs(problem.b)
    wide = np.longdouble if given == np.float64 else np.float64
    found = pairwise.matvec(problem.x, problem.y, problem.b, bandwidth=1.0)[:70].astype(wide)
    exact, plain = (problem.matvec(dtype)[:70] for dtype in (wide, given))
    error, allowed = (np.abs(part - exact) / exact for part in (found, plain))
    assert error.max() <= 2 * allowed.max() + eps(given)


@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize("d", [1, 3, 8])
@pytest.mark.parametrize(("kernel", "spread"), [("laplacian", 1.0), ("laplacian", 30.0), ("gaussian", 1000.0)])
def test_points_near_one_another(given, d, kernel, spread):
    """Also the same ones, at which a Laplacian kernel has a slope; gradients are 0 there."""
    problem = Problem(d, 1, 300, 700, spread, given)
    problem.b = np.abs(problem.b)
    if kernel == "laplacian":
        problem.y[:100] = problem.x[:100]
        problem.y[100:200] = problem.x[:100] * (1 + 4 * eps(given))
    wide, options = np.longdouble if given == np.float64 else np.float64, dict(bandwidth=1.0, kernel_function=kernel)
    found = pairwise.matvec(problem.x, problem.y, problem.b, **options)[:150].astype(wide)
    exact, plain = (problem.matvec(dtype, kernel)[:150] for dtype in (wide, given))
    error, allowed = (np.abs(part - exact) / exact for part in (found, plain))
    assert error.max() <= 2 * allowed.max() + eps(given)
    if kernel == "gaussian" or d == 1:  # of sums of slopes times points, more than 50 roundings are lost there
        return
    found = pairwise.matvec_backward(problem.da, problem.x, problem.y, problem.b, **options)[:3]
    exact, plain = (problem.matvec_backward(dtype, kernel)[:3] for dtype in (wide, given))
    for name, own, true, textbook in zip(NAMES[:3], found, exact, plain, strict=True):
        assert_close(own, true, textbook, dtype=given, magnitude=50.0, name=name)


@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("d", "kernel", "spread"), [(3, "gaussian", 1.0), (3, "gaussian", 30.0), (11, "matern32", 1.0)]
)
def test_pairs_of_points_with_themselves(given, d, kernel, spread):
    """A tile of kernel values serves its mirror image, too: as good as without, in as many threads as one likes."""
    rng, n, wide = np.random.default_rng(0), 1500, np.longdouble if given == np.float64 else np.float64
    problem = Problem(d, 2, n, 1, spread, given)
    problem.y, problem.b, problem.h = problem.x.copy(), rng.random((n, 2)).astype(given), rng.random(n).astype(given)
    call = {
        "matvec": lambda y: pairwise.matvec(problem.x, y, problem.b, bandwidth=1.0, kernel_function=kernel),
        "softmin": lambda y: pairwise.softmin(problem.x, y, problem.h, eps=1.0),
    }
    for name, of in call.items():
        found = []
        for threads in (1, 3):
            with threadpool_limits(threads, user_api="blas"):
                found.append(of(problem.y))
        assert found[0].tobytes() == found[1].tobytes()
        if name == "matvec":
            exact, plain = (problem.matvec(dtype, kernel)[:200] for dtype in (wide, given))
        else:
            exact, plain = (problem.weights(dtype, 1.0)[0][:200] for dtype in (wide, given))
        assert_close(found[0][:200], exact, plain, dtype=given, magnitude=2.0 * d, name=name)


@pytest.mark.parametrize("spread", [1, 10])
def test_many_coordinates_are_expanded_about_their_mean(spread):
    problem = Problem(32, 1, spread=spread)
    problem.b = np.abs(problem.b)
    exact, plain = (problem.matvec(dtype)[:70] for dtype in (np.float64, np.float32))
    reach = np.square(problem.x.astype(float) - problem.y.mean(0)).sum(-1).max()
    direct = np.abs(plain / exact - 1).max()
    for precision, more in ((None, 2.0**-21 * reach), ("float64", 0.0)):
        found = pairwise.matvec(problem.x, problem.y, problem.b, bandwidth=1.0, precision=precision)[:70]
        assert np.abs(found / exact - 1).max() <= 2 * direct + more + eps(np.float32)


def test_a_spread_beyond_float32_is_told():
    x = np.random.default_rng(0).standard_normal((20, 32)).astype(np.float32)
    with pytest.warns(RuntimeWarning, match=r"precision=.float64"):
        pairwise.matvec(x, x, x, bandwidth=1e-3)
    pairwise.matvec(x, x, x, bandwidth=1e-3, precision="float64")


@pytest.mark.parametrize("mask", ["boolean", "column", "block", "function", "window"])
def test_masks(way, mask):
    problem = Problem(2, 1, m=200, n=1100, given=np.float64)
    i, j = np.ogrid[:200, :1100]
    if mask == "window":
        given, visible = dict(window=(30, 5, "top_left")), (j >= i - 30) & (j <= i + 5)
    elif mask == "column":
        given, visible = dict(mask=masks.causal(200, 1100, "top_left")), j <= i
    elif mask == "block":
        blocks = np.eye(4, 9, dtype=bool)
        given, visible = dict(mask=masks.BlockMask(blocks, 64, 128)), blocks[i // 64, j // 128]
    elif mask == "function":
        given, visible = dict(mask=lambda b, h, i, j: (i + j) % 3 > 0), (i + j) % 3 > 0
    else:
        visible = np.random.default_rng(2).random((200, 1100)) < 0.01
        given = dict(mask=visible)
    found = pairwise.matvec_backward(problem.da, problem.x, problem.y, problem.b, bandwidth=0.7, **given)
    exact = problem.matvec_backward(np.longdouble, bandwidth=0.7, visible=visible)
    plain = problem.matvec_backward(np.float64, bandwidth=0.7, visible=visible)
    for name, own, true, textbook in zip(NAMES, found, exact, plain, strict=True):
        assert_close(own, true, textbook, magnitude=2000.0 if name == "dbandwidth" else 100.0, name=name)
    f = pairwise.softmin(problem.x, problem.y, problem.h, eps=0.7, **given)
    assert_close(f, *(problem.weights(dtype, 0.7, visible)[0] for dtype in (np.longdouble, np.float64)), magnitude=10.0)


def test_what_is_hidden_may_hold_anything():
    problem = Problem(2, 1)
    visible = np.ones((150, 700), bool)
    visible[:, 7] = False
    clean = pairwise.matvec(problem.x, problem.y, problem.b, bandwidth=1.0, mask=visible)
    problem.y[7], problem.b[7] = np.nan, np.inf
    poisoned = pairwise.matvec(problem.x, problem.y, problem.b, bandwidth=1.0, mask=visible)
    np.testing.assert_allclose(poisoned, clean, rtol=1e-5, atol=1e-5)


def test_broadcasting_and_vectors():
    problem = Problem(3, 2, m=20, n=30, given=np.float64, batch=(4,))
    y, b = problem.y[0], problem.b
    whole = pairwise.matvec(problem.x, y, b, bandwidth=1.0)
    assert whole.shape == (4, 20, 2)
    for index in range(4):
        alone = pairwise.matvec(problem.x[index], y, b[index, :, 1], bandwidth=1.0)
        np.testing.assert_allclose(whole[index, :, 1], alone, rtol=1e-13)
    gradients = pairwise.matvec_backward(problem.da, problem.x, y, b, bandwidth=1.0)
    parts = [pairwise.matvec_backward(problem.da[n], problem.x[n], y, b[n], bandwidth=1.0) for n in range(4)]
    np.testing.assert_allclose(gradients.dy, sum(part.dy for part in parts), rtol=1e-12)
    np.testing.assert_allclose(gradients.dbandwidth, sum(part.dbandwidth for part in parts), rtol=1e-12)
    assert gradients.dx.shape == problem.x.shape and gradients.dbandwidth.shape == ()


def test_chunks_add_up():
    problem = Problem(given=np.float64)
    whole = pairwise.matvec(problem.x, problem.y, problem.b, bandwidth=1.0)
    parts = [
        pairwise.matvec(problem.x, problem.y[s], problem.b[s], bandwidth=1.0) for s in (slice(300), slice(300, None))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_and_empty(dtype):
    x, y, b = (np.ones(shape, dtype) for shape in ((5, 3), (4, 3), (4,)))
    a = pairwise.matvec(x, y, b, bandwidth=1.0)
    assert a.dtype == dtype and (a == 4).all()
    assert pairwise.matvec(x, y[:0], b[:0], bandwidth=1.0).tolist() == [0] * 5
    assert pairwise.matvec(x[:0], y, b, bandwidth=1.0).shape == (0,)
    assert pairwise.matvec(x, y, np.ones((4, 0), dtype), bandwidth=1.0).shape == (5, 0)
    gradients = pairwise.matvec_backward(np.ones(5, dtype), x, y[:0], b[:0], bandwidth=1.0)
    assert not gradients.dx.any() and gradients.dx.dtype == dtype


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(bandwidth=0.0), errors.ArgumentError, "bandwidth is 0.0"),
        (dict(bandwidth=np.nan), errors.ArgumentError, "bandwidth is"),
        (dict(bandwidth=np.ones(2)), errors.CuattnError, "bandwidth"),
        (dict(kernel_function="linear"), errors.ArgumentError, "kernel_function is 'linear'"),
        (dict(precision="bf16"), errors.ArgumentError, "precision is 'bf16'"),
        (dict(kernel="sm90"), errors.UnsupportedError, "kernel is 'sm90'"),
        (dict(mask=np.ones((5, 5), bool)), errors.ShapeError, "mask is"),
        (dict(mask=np.ones((5, 4))), errors.DtypeError, "mask has dtype"),
        (dict(y=np.ones((4, 2))), errors.ShapeError, "y"),
        (dict(y=np.ones((4, 3), np.float32)), errors.DtypeError, "y has dtype float32"),
        (dict(x=np.ones(3)), errors.ShapeError, "x has shape"),
        (dict(b=np.ones(3)), errors.ShapeError, "b has shape"),
        (dict(b=np.ones((3, 2))), errors.ShapeError, "b has shape"),
    ],
)
def test_errors(change, error, text):
    given = dict(x=np.ones((5, 3)), y=np.ones((4, 3)), b=np.ones(4), bandwidth=1.0) | change
    with pytest.raises(error, match=text):
        pairwise.matvec(*[given.pop(name) for name in "xyb"], **given)


@pytest.mark.filterwarnings("ignore:.*precision=:RuntimeWarning")
@pytest.mark.parametrize("kernel", KERNELS)
def test_points_too_far_apart_for_float32_products(kernel):
    """What these lose makes no kernel value greater than 1, and none infinite."""
    x = (1e4 * np.random.default_rng(5).standard_normal((300, 24))).astype(np.float32)
    found = pairwise.matvec(x, x, np.eye(300, dtype=np.float32), bandwidth=1, kernel_function=kernel)
    assert np.abs(found).max() <= 1 + eps(np.float32)


@pytest.mark.parametrize("n_rows, n_keys", [(68, 68), (51, 53), (513, 257), (1, 5)])
def test_order_of_terms(n_rows, n_keys):
    """Coarse parts cancel before rests are added in every row and key of a tile."""
    problem = Problem(5, 2, n_rows, n_keys, 3.0, np.float64)
    problem.y[: min(n_rows, n_keys)] = problem.x[: min(n_rows, n_keys)]
    exact, plain = (problem.matvec(dtype, "cauchy", 0.1) for dtype in (np.longdouble, np.float64))
    assert_close(
        pairwise.matvec(problem.x, problem.y, problem.b, bandwidth=0.1, kernel_function="cauchy"), exact, plain
    )
