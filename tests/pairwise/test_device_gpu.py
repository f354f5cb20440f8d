"""Sums over pairs on a GPU against the textbook's in float64."""

import numpy as np
import pytest

from cuattn import masks, pairwise
from cuattn.masks.device import is_device_array
from cuattn.pairwise import near
from tests.pairwise.textbook import KERNELS, Problem

pytestmark = pytest.mark.gpu


def up(*arrays):
    import cupy

    return [cupy.asarray(array) for array in arrays]


def check(found, exact, plain, slack):
    """Hold a result to twice the direct error in its precision, with some units of its sums' size."""
    assert is_device_array(found)
    exact, plain = np.asarray(exact, np.float64), np.asarray(plain, np.float64)
    error, direct = np.abs(found.get() - exact).max(initial=0), np.abs(plain - exact).max(initial=0)
    assert error <= 2 * direct + slack * np.finfo(found.dtype).eps * np.abs(exact).max(initial=0), (error, direct)


@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("kernel", "d", "p", "batch"),
    [(k, 3, 1, ()) for k in KERNELS] + [("gaussian", 8, 11, (2,)), ("matern52", 28, 2, ())],
)
def test_products_and_gradients(given, kernel, d, p, batch):
    if d > 8 and given == np.float64:
        pytest.skip("float64 differences are taken up to 8 coordinates")
    problem = Problem(d, p, 300, 1500, 10.0, given, batch)
    x, y, b, da = up(problem.x, problem.y, problem.b, problem.da)
    options = dict(bandwidth=1.1, kernel_function=kernel, kernel="direct")
    wide = np.float64 if given == np.float32 else np.longdouble
    check(pairwise.matvec(x, y, b, **options), *(problem.matvec(t, kernel, 1.1) for t in (wide, given)), 2)
    found = pairwise.matvec_backward(da, x, y, b, **options)
    for own, *others in zip(found, *(problem.matvec_backward(t, kernel, 1.1) for t in (wide, given)), strict=True):
        check(own, *others, 40)


@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("d", [3, 11, 40])
def test_logarithms(given, spread, d):
    problem = Problem(d, 1, 300, 1500, spread, given)
    x, y, h, df = up(problem.x, problem.y, problem.h, problem.df)
    wide = np.float64 if given == np.float32 else np.longdouble
    precision = "float64" if d > 32 else None
    exact, plain = (problem.weights(t, 0.5)[0] for t in (wide, given))
    check(pairwise.softmin(x, y, h, eps=0.5, precision=precision), exact, plain, 4 if d == 3 else 16)
    (f,) = up(exact.astype(given))
    found = pairwise.softmin_backward(df, x, y, h, f, eps=0.5, precision=precision)
    magnitude = 4 * np.abs(exact).max() / 0.5  # of exponents, whose rounding f has
    for own, *others in zip(found, *(problem.softmin_backward(t, 0.5) for t in (wide, given)), strict=True):
        check(own, *others, 40 + magnitude)


@pytest.mark.parametrize("eps", [0.5, 0.01, 1e-4, 1e-6])
@pytest.mark.parametrize(("d", "batch"), [(1, ()), (2, (2,)), (3, ()), (3, (2, 2))])
def test_logarithms_of_rows_in_order(monkeypatch, d, batch, eps):
    """Rows near one another take products of tensor cores; those of the second half are too far from one another."""
    monkeypatch.setattr(near, "_MANY", 0)
    problem = Problem(d, 1, 1000, 1500, 1.0, batch=batch)
    problem.x[..., 500:, :] *= 100
    problem.h[..., 7] = -np.inf
    exact, plain = (problem.weights(t, eps)[0] for t in (np.float64, np.float32))
    x, y, h = up(problem.x, problem.y, problem.h)
    found = pairwise.softmin(x, y, h, eps=eps)
    for rows in (slice(0, 500), slice(500, None)):
        check(found[..., rows], exact[..., rows], plain[..., rows], 2)
    h[...] = -np.inf
    assert (pairwise.softmin(x, y, h, eps=eps) == np.inf).all()


@pytest.mark.parametrize("many", [0, near._MANY])
@pytest.mark.parametrize("eps", [0.5, 1e-3])
@pytest.mark.parametrize("place", ["x", "y", "far y", "h", "hidden y"])
def test_nan_is_kept(monkeypatch, place, eps, many):
    """NaN of a row is its own, that of a key every row's; also where a tile's other terms are too small to matter."""
    monkeypatch.setattr(near, "_MANY", many)
    problem = Problem(3, 1, 1000, 1500, 10.0, batch=(2,))
    if place == "h":
        problem.h[0, 700] = np.nan
    else:
        getattr(problem, place[-1])[0, 700:760, 1] = np.nan
    if place == "far y":
        problem.y[0, 700:760] += (1e4, 0, 0)
    if place == "hidden y":
        problem.h[0, 700:760] = -np.inf
    exact, plain = (problem.weights(t, eps)[0] for t in (np.float64, np.float32))
    found = pairwise.softmin(*up(problem.x, problem.y, problem.h), eps=eps).get()
    assert np.array_equal(np.isnan(found), np.isnan(exact))
    there = ~np.isnan(exact)
    assert there[1].all() and there[0].sum() == (940 if place == "x" else 0)
    check(*up(found[there]), exact[there], plain[there], 2)


@pytest.mark.parametrize("many", [0, near._MANY])
@pytest.mark.parametrize("exponent", [28, 31, 34, 40, 60])
def test_large_exponents(monkeypatch, exponent, many):
    """Neighbouring float32 numbers are further apart there than a power of 2 can tell."""
    monkeypatch.setattr(near, "_MANY", many)
    problem = Problem(3, 1, 1000, 1500, 1.0)
    eps = 2.0**-exponent
    exact, plain = (problem.weights(t, eps)[0] for t in (np.float64, np.float32))
    check(pairwise.softmin(*up(problem.x, problem.y, problem.h), eps=eps), exact, plain, 2)
    problem.x += 3  # away from all keys
    exact, plain = (problem.weights(t, eps)[0] for t in (np.float64, np.float32))
    check(pairwise.softmin(*up(problem.x, problem.y, problem.h), eps=eps), exact, plain, 2)


@pytest.mark.parametrize("many", [0, near._MANY])
def test_sums_of_rows_that_share_a_reference(monkeypatch, many):
    """Other rows' greatest key raises the reference by more than a power of 2 has; the first row's sum stays."""
    monkeypatch.setattr(near, "_MANY", many)
    unit = np.log(2)
    far = np.sqrt(2 * 70 * unit)
    x, y, h = np.zeros((200, 3), np.float32), np.zeros((48, 3), np.float32), np.full(48, -np.inf, np.float32)
    x[0, 0] = y[16, 0] = far
    y[32, 0] = -far
    h[[0, 16, 32]] = 0, 95 * unit, 230 * unit
    found = pairwise.softmin(*up(x, y, h), eps=1.0).get()
    np.testing.assert_allclose(found, [-95 * unit, *[-160 * unit] * 199], rtol=1e-6)


@pytest.mark.parametrize("many", [0, near._MANY])
@pytest.mark.parametrize("infinite", ["x", "y", "h"])
def test_infinite_points_and_weights(monkeypatch, infinite, many):
    monkeypatch.setattr(near, "_MANY", many)
    problem = Problem(3, 1, 1000, 1500, 10.0)
    array = getattr(problem, infinite)
    array[(500, 2) if array.ndim == 2 else 500] = np.inf
    found = pairwise.softmin(*up(problem.x, problem.y, problem.h), eps=0.5).get()
    if infinite == "h":
        assert (found == -np.inf).all()
        return
    exact, plain = (problem.weights(t, 0.5)[0] for t in (np.float64, np.float32))
    there = np.isfinite(exact)
    assert np.array_equal(found[~there], exact[~there])
    check(*up(found[there]), exact[there], plain[there], 2)


@pytest.mark.parametrize("d", [16, 64])
def test_infinite_weights_of_many_coordinates(d):
    """By products of warps and of warpgroups."""
    problem = Problem(d, 1, 300, 900, 1.0)
    problem.h[500] = np.inf
    x, y, h = up(problem.x, problem.y, problem.h)
    assert (pairwise.softmin(x, y, h, eps=0.5).get() == -np.inf).all()
    assert (pairwise.softmin(x, y, -abs(h), eps=0.5).get() < np.inf).all()


@pytest.mark.parametrize("spread", [1, 10, 100])
def test_few_coordinates_are_as_good_as_differences(spread):
    problem = Problem(3, 1, 300, 3000, spread)
    problem.b = np.abs(problem.b)
    exact, plain = (problem.matvec(t)[:150] for t in (np.float64, np.float32))
    found = pairwise.matvec(*up(problem.x, problem.y, problem.b), bandwidth=1.0)[:150].get()
    assert np.abs(found / exact - 1).max() <= 2 * np.abs(plain / exact - 1).max() + np.finfo(np.float32).eps


@pytest.mark.parametrize(("d", "p"), [(40, 1), (64, 5), (128, 3)])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_products_by_tensor_cores(d, p, spread):
    """The error grows with the points' distance from their mean, as is promised."""
    problem = Problem(d, p, 300, 900, spread)
    problem.b = np.abs(problem.b)
    x, y, b, h = up(problem.x, problem.y, problem.b, problem.h)
    reach = np.square(problem.x.astype(float) - problem.y.mean(0)).sum(-1).max()
    for function in ("gaussian", "cauchy", "matern32"):
        exact, plain = (problem.matvec(t, function, 2.0)[:150] for t in (np.float64, np.float32))
        for precision, unit in ((None, 2.0**-21), ("tf32", 2.0**-9)):
            options = dict(bandwidth=2.0, kernel_function=function, precision=precision)
            error = np.abs(pairwise.matvec(x, y, b, **options)[:150].get() / exact - 1).max()
            assert error <= 2 * np.abs(plain / exact - 1).max() + unit * reach / 4 * (
                2 if function == "matern32" else 1
            )
    f, plain = (problem.weights(t, 4.0)[0] for t in (np.float64, np.float32))
    error = np.abs(pairwise.softmin(x, y, h, eps=4.0).get() - f).max()
    assert error <= 2 * np.abs(plain - f).max() + 2.0**-21 * reach + 2 * np.finfo(np.float32).eps * np.abs(f).max()


@pytest.mark.parametrize(
    ("kernel", "d", "p", "batch"),
    [("gaussian", 12, 1, ()), ("matern52", 40, 1, (2,)), ("cauchy", 64, 5, ()), ("matern32", 128, 3, ())],
)
def test_gradients_by_tensor_cores(kernel, d, p, batch):
    """The same for gradients, relative to the sums of absolute terms."""
    problem = Problem(d, p, 150, 400, 2.0, batch=batch)
    x, y, b, da, h, df = up(problem.x, problem.y, problem.b, problem.da, problem.h, problem.df)
    reach = np.square(problem.x.astype(float) - problem.y.mean((0, 1) if batch else 0)).sum(-1).max()
    options = dict(bandwidth=2.0, kernel_function=kernel)
    found = pairwise.matvec_backward(da, x, y, b, **options)
    slack = 20 + reach  # units of the largest result
    for own, *others in zip(
        found, *(problem.matvec_backward(t, kernel, 2.0) for t in (np.float64, np.float32)), strict=True
    ):
        check(own, *others, slack)
    exact, _ = problem.weights(np.float64, 4.0)
    found = pairwise.softmin_backward(df, x, y, h, *up(exact.astype(np.float32)), eps=4.0)
    for own, *others in zip(found, *(problem.softmin_backward(t, 4.0) for t in (np.float64, np.float32)), strict=True):
        check(own, *others, slack + np.abs(exact).max())


def test_masks_scales_on_the_device_and_graphs():
    import cupy

    problem = Problem(3, 2, 200, 200)
    x, y, b, h = up(problem.x, problem.y, problem.b, problem.h)
    visible = np.tril(np.ones((200, 200), bool))
    exact = problem.matvec(np.float64, visible=visible)
    for options in (dict(mask=masks.causal(200)), dict(mask=cupy.asarray(visible)), dict(window=(None, 0))):
        check(pairwise.matvec(x, y, b, bandwidth=cupy.asarray(1.0), **options), exact, exact, 8)
    call = lambda: (pairwise.matvec(x, y, b, bandwidth=1.0), pairwise.softmin(x, y, h, eps=cupy.asarray(0.5)))  # noqa: E731
    expected = [array.get() for array in call()]
    assert np.array_equal(expected[1], pairwise.softmin(x, y, h, eps=0.5).get())
    assert all(np.array_equal(one, two.get()) for one, two in zip(expected, call(), strict=True))


@pytest.mark.parametrize("many", [0, near._MANY])
def test_sinkhorn_and_operators(monkeypatch, many):
    from cupyx.scipy.sparse.linalg import cg

    monkeypatch.setattr(near, "_MANY", many)
    problem = Problem(3, 1, 200, 300)
    x, y, df = up(problem.x, problem.y, problem.df)
    here = pairwise.sinkhorn(problem.x, problem.y, eps=0.5, tol=1e-4)
    there = pairwise.sinkhorn(x, y, eps=0.5, tol=1e-4)
    np.testing.assert_allclose(float(there.cost), float(here.cost), rtol=1e-5)
    np.testing.assert_allclose(there.barycentric_map().get(), here.barycentric_map(), atol=1e-4)
    np.testing.assert_allclose(there.gradient()[1].get(), here.gradient()[1], atol=1e-6)
    operator = pairwise.linear_operator(x, x, bandwidth=1.0, ridge=1.0)
    solution, _ = cg(operator, df, rtol=1e-5)
    np.testing.assert_allclose((operator @ solution).get(), problem.df, atol=1e-3)
