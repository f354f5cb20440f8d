"""Estimators of scikit-learn."""

import warnings

import numpy as np
import pytest

sklearn = pytest.importorskip("sklearn")

from sklearn import kernel_ridge, neighbors  # noqa: E402
from sklearn.exceptions import ConvergenceWarning  # noqa: E402
from sklearn.gaussian_process.kernels import RBF, Matern  # noqa: E402
from sklearn.model_selection import GridSearchCV  # noqa: E402
from sklearn.utils.estimator_checks import parametrize_with_checks  # noqa: E402

from cuattn import errors  # noqa: E402
from cuattn.sklearn import KernelDensity, KernelRidge, NadarayaWatson  # noqa: E402


@parametrize_with_checks([NadarayaWatson(), KernelDensity(), KernelRidge()])
def test_estimator_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        check(estimator)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 3))
    return X, np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], -1), rng.standard_normal((40, 3))


@pytest.mark.parametrize(
    ("kernel", "theirs"), [("gaussian", RBF(0.8)), ("matern32", Matern(0.8, nu=1.5)), ("matern52", Matern(0.8, nu=2.5))]
)
def test_kernel_ridge_is_scikit_learns(data, kernel, theirs):
    X, y, new = data
    ours = KernelRidge(0.1, kernel=kernel, bandwidth=0.8, tol=1e-12).fit(X, y)
    solved = kernel_ridge.KernelRidge(alpha=0.1, kernel="precomputed").fit(theirs(X), y)
    np.testing.assert_allclose(ours.predict(new), solved.predict(theirs(new, X)), atol=1e-8)
    assert 0 < ours.n_iter_ <= 2000
    with pytest.warns(ConvergenceWarning, match="after 2 iterations"):
        KernelRidge(1e-6, max_iter=2).fit(X, y)


def test_kernel_density_is_scikit_learns(data):
    X, _, new = data
    weights = np.random.default_rng(1).random(200)
    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 1e-5)):
        ours = KernelDensity(0.5).fit(X.astype(dtype), sample_weight=weights)
        theirs = neighbors.KernelDensity(bandwidth=0.5).fit(X, sample_weight=weights)
        np.testing.assert_allclose(ours.score_samples(new.astype(dtype)), theirs.score_samples(new), rtol=tolerance)
    assert ours.score_samples(new.astype(np.float32)).dtype == np.float32
    drawn = ours.sample(500, random_state=0)
    assert drawn.shape == (500, 3) and abs(drawn.mean() - np.average(X, 0, weights).mean()) < 0.2


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian", "matern32", "matern52"])
def test_densities_integrate_to_one(kernel):
    axis = np.linspace(-12, 12, 161)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    density = KernelDensity(0.8, kernel=kernel).fit(np.array([[0.1, 0.0], [1.0, -0.5]]))
    assert abs(np.exp(density.score_samples(grid)).sum() * (axis[1] - axis[0]) ** 2 - 1) < 2e-2


def test_nadaraya_watson(data):
    X, y, new = data
    weights = RBF(0.7)(new, X)
    found = NadarayaWatson(0.7).fit(X, y).predict(new)
    np.testing.assert_allclose(found, weights @ y / weights.sum(1, keepdims=True), rtol=1e-10, atol=1e-12)
    far = NadarayaWatson(0.01).fit(X, y).predict(np.full((1, 3), 1e6))
    np.testing.assert_allclose(far[0], y.mean(0))
    search = GridSearchCV(NadarayaWatson(), {"bandwidth": [0.3, 30.0]}).fit(X, y)
    assert search.best_params_ == {"bandwidth": 0.3}


@pytest.mark.parametrize("estimator", [NadarayaWatson(-1.0), KernelRidge(kernel="linear"), KernelRidge(-1.0)])
def test_errors(data, estimator):
    with pytest.raises(errors.ArgumentError):
        estimator.fit(*data[:2])
    with pytest.raises(errors.ArgumentError, match="'cauchy'"):
        KernelDensity(kernel="cauchy").fit(data[0])
