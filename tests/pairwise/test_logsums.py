"""Soft minima, densities and transport."""

import warnings

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import gaussian_kde

from cuattn import errors, pairwise
from tests.pairwise.test_products import way  # noqa: F401
from tests.pairwise.textbook import Problem
from tests.tolerances import assert_close


@pytest.mark.parametrize("given", [np.float32, np.float64])
@pytest.mark.parametrize("d", [3, 11])
def test_softmin_and_its_gradients(way, given, d):  # noqa: F811
    problem, scale = Problem(d, given=given), 0.3
    wide = np.longdouble if given == np.float64 else np.float64
    exact, plain = (problem.weights(dtype, scale)[0] for dtype in (wide, given))
    f = pairwise.softmin(problem.x, problem.y, problem.h, eps=scale)
    assert_close(f, exact, plain, dtype=given, magnitude=3.0, name="f")
    found = pairwise.softmin_backward(problem.df, problem.x, problem.y, problem.h, exact.astype(given), eps=scale)
    pairs = zip(problem.softmin_backward(wide, scale), problem.softmin_backward(given, scale), strict=True)
    for name, own, (true, textbook) in zip(found._fields, found, pairs, strict=True):
        assert_close(own, true, textbook, dtype=given, magnitude=60.0, name=name)


@pytest.mark.parametrize("spread", [10, 100])
def test_softmin_at_low_temperatures(spread):
    problem = Problem(3, spread=spread)
    exact, plain = (problem.weights(dtype, 1e-3)[0] for dtype in (np.float64, np.float32))
    assert_close(pairwise.softmin(problem.x, problem.y, problem.h, eps=1e-3), exact, plain)


def test_softmin_of_weights_far_apart():
    """By more than float32 has powers of 2, those of the nearest keys the smallest."""
    problem = Problem(3, spread=0.1)
    problem.y = (0.2 * problem.y).astype(np.float32)
    problem.y[300:] += 1
    problem.h = np.where(np.arange(700) < 300, -0.9, 0).astype(np.float32)
    exact, plain = (problem.weights(dtype, 8e-3)[0] for dtype in (np.float64, np.float32))
    assert_close(pairwise.softmin(problem.x, problem.y, problem.h, eps=8e-3), exact, plain)


def test_softmin_of_nothing_and_of_parts():
    problem = Problem(given=np.float64)
    h = problem.h.copy()
    h[::2] = -np.inf
    f = pairwise.softmin(problem.x, problem.y, h, eps=0.5)
    np.testing.assert_allclose(f, pairwise.softmin(problem.x, problem.y[1::2], h[1::2], eps=0.5), rtol=1e-13)
    g = pairwise.softmin(problem.x, problem.y[::2], problem.h[::2], eps=0.5)
    whole = pairwise.softmin(problem.x, problem.y, problem.h, eps=0.5)
    np.testing.assert_allclose(-0.5 * np.logaddexp(-f / 0.5, -g / 0.5), whole, rtol=1e-12)
    assert np.isposinf(pairwise.softmin(problem.x, problem.y, np.full_like(h, -np.inf), eps=0.5)).all()
    empty = pairwise.softmin(problem.x, problem.y[:0], h[:0], eps=0.5)
    assert np.isposinf(empty).all()
    assert not pairwise.softmin_backward(problem.df, problem.x, problem.y[:0], h[:0], empty, eps=0.5).dx.any()


def test_log_density():
    rng = np.random.default_rng(0)
    x, y, weights = rng.standard_normal((50, 1)), rng.standard_normal((300, 1)), rng.random(300)
    ours = pairwise.log_density(x, y, bandwidth=0.4, log_weights=np.log(3 * weights))
    theirs = gaussian_kde(y.T, 0.4 / np.sqrt(np.cov(y.T, aweights=weights)), weights=weights)
    np.testing.assert_allclose(ours, np.log(theirs(x.T)), rtol=1e-10)
    grid = np.linspace(-9, 9, 2001)[:, None]
    mass = np.exp(pairwise.log_density(grid, y, bandwidth=0.4)).sum() * (grid[1, 0] - grid[0, 0])
    assert abs(mass - 1) < 1e-9
    assert np.isneginf(pairwise.log_density(x, y[:0], bandwidth=0.4)).all()


def dense_sinkhorn(x, y, a, b, eps, n_iters):
    """Return the potentials, from the cost matrix."""
    cost = np.square(x[:, None] - y[None]).sum(-1) / 2
    f, g = np.zeros(len(x)), np.zeros(len(y))
    for _ in range(n_iters):
        f = -eps * logsumexp((g - cost) / eps, b=b, axis=1)
        g = -eps * logsumexp((f[:, None] - cost) / eps, b=a[:, None], axis=0)
    return f, g, a[:, None] * b * np.exp((f[:, None] + g - cost) / eps)


@pytest.mark.parametrize("d", [2, 12])
def test_sinkhorn_is_the_textbook_iteration(way, d):  # noqa: F811
    problem = Problem(d, m=40, n=60, given=np.float64)
    a, b = (w / w.sum() for w in (np.exp(problem.df), np.exp(problem.h)))
    a[3] = 0.0
    a /= a.sum()
    found = pairwise.sinkhorn(problem.x, problem.y, a, b, eps=0.2, n_iters=50, tol=0)
    f, g, plan = dense_sinkhorn(problem.x, problem.y, a, b, 0.2, 50)
    np.testing.assert_allclose(found.f, f, atol=1e-12)
    np.testing.assert_allclose(found.g, g, atol=1e-12)
    np.testing.assert_allclose(found.cost, a @ f + b @ g, atol=1e-12)
    assert found.n_iters == 50 and found.error is None and found.converged is None
    live = a > 0
    np.testing.assert_allclose(
        found.barycentric_map()[live], plan[live] @ problem.y / plan[live].sum(1)[:, None], atol=1e-11
    )
    dx, dy = found.gradient()
    pulls = plan[..., None] * (problem.x[:, None] - problem.y)
    np.testing.assert_allclose(dx, pulls.sum(1), atol=1e-12)
    np.testing.assert_allclose(dy, -pulls.sum(0), atol=1e-12)


@pytest.mark.parametrize("debias", [False, True])
def test_the_gradient_is_that_of_the_cost(debias):
    problem = Problem(2, m=12, n=15, given=np.float64)
    solve = lambda x: pairwise.sinkhorn(x, problem.y, eps=0.3, tol=1e-12, n_iters=3000, debias=debias)  # noqa: E731
    dx, _ = solve(problem.x).gradient()
    step = np.zeros_like(problem.x)
    step[4, 1] = 1e-5
    slope = (solve(problem.x + step).cost - solve(problem.x - step).cost) / 2e-5
    np.testing.assert_allclose(dx[4, 1], slope, rtol=1e-5)
    if debias:
        same = pairwise.sinkhorn(problem.x, problem.x, eps=0.3, tol=1e-10, debias=True)
        assert abs(same.cost) < 1e-9


def test_sinkhorn_batches_and_convergence(capsys):
    problem = Problem(2, m=20, n=25, given=np.float32, batch=(3,))
    found = pairwise.sinkhorn(problem.x, problem.y, eps=0.3, tol=1e-4, progress=True)
    assert found.converged and found.error <= 1e-4 and found.n_iters % 10 == 0
    assert found.cost.shape == (3,) and found.cost.dtype == np.float32
    alone = pairwise.sinkhorn(problem.x[1], problem.y[1], eps=0.3, tol=0, n_iters=found.n_iters)
    np.testing.assert_allclose(found.f[1], alone.f, atol=1e-5)
    assert "Sinkhorn" in capsys.readouterr().out
    with pytest.warns(pairwise.ConvergenceWarning, match="after 10 iterations"):
        pairwise.sinkhorn(problem.x, problem.y, eps=1e-3, n_iters=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairwise.sinkhorn(problem.x, problem.y, eps=1e-3, n_iters=10, tol=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(eps=-1.0), "eps is -1.0"),
        (dict(n_iters=0), "n_iters is 0"),
        (dict(tol=-1.0), "tol is -1.0"),
        (dict(a=np.ones(5)), "a has sum 5.0"),
        (dict(a=np.ones(4)), "a has shape"),
        (dict(x=np.ones((0, 3))), "x has shape"),
    ],
)
def test_errors(change, text):
    given = dict(x=np.ones((5, 3)), y=np.ones((4, 3)), a=None, b=None, eps=1.0) | change
    with pytest.raises(errors.CuattnError, match=text):
        pairwise.sinkhorn(*[given.pop(name) for name in "xyab"], **given)
