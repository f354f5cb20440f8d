"""Estimators of scikit-learn on :mod:`cuattn.pairwise`, for NumPy arrays: memory grows with the samples alone.

Their kernels are those of :func:`cuattn.pairwise.matvec`, functions of the Euclidean distance.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, DensityMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from cuattn import pairwise
from cuattn.errors import ArgumentError, shown
from cuattn.pairwise.functions import FUNCTIONS

__all__ = ["KernelDensity", "KernelRidge", "NadarayaWatson"]

_DTYPES = (np.float64, np.float32)


class _Estimator(BaseEstimator):
    """What all share: samples are kept."""

    kernel: str
    bandwidth: float

    def _new(self, X: Any) -> np.ndarray:
        """Check points that are asked about."""
        check_is_fitted(self)
        return validate_data(self, X, dtype=self.X_fit_.dtype, reset=False)

    def _options(self) -> dict[str, Any]:
        return {"bandwidth": self.bandwidth, "kernel_function": self.kernel}


class _Regressor(MultiOutputMixin, RegressorMixin, _Estimator):
    """What both regressors share."""

    def _take(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Check and keep the samples; return them with targets as columns."""
        X, y = validate_data(self, X, y, dtype=_DTYPES, multi_output=True, y_numeric=True)
        _check_kernel(self.kernel, self.bandwidth)
        self.X_fit_, self._is_vector = X, y.ndim == 1
        return X, y.reshape(len(y), -1).astype(X.dtype)


class NadarayaWatson(_Regressor):
    """Kernel regression: predictions are means of the targets, weighted by the kernel (attention).

    Parameters
    ----------
    bandwidth : float, default 1.0
        Scale of distances, > 0.
    kernel : {"gaussian", "laplacian", "cauchy", "matern32", "matern52"}
        See :func:`cuattn.pairwise.matvec`.

    Attributes
    ----------
    X_fit_, y_fit_ : ndarray
        The samples and their targets.
    n_features_in_ : int
        Number of coordinates.

    See Also
    --------
    KernelRidge : Least squares in the space of the kernel.

    Notes
    -----
    Where the kernel of every sample underflows, predictions are the targets' mean.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.sklearn import NadarayaWatson
    >>> X = np.arange(5.0)[:, None]
    >>> NadarayaWatson(bandwidth=0.5).fit(X, X[:, 0]).predict([[1.0]]).round(2)
    array([1.])
    """

    def __init__(self, bandwidth: float = 1.0, *, kernel: str = "gaussian") -> None:
        self.bandwidth, self.kernel = bandwidth, kernel

    def fit(self, X: Any, y: Any) -> NadarayaWatson:
        """Keep the samples.

        Parameters
        ----------
        X : array, (n_samples, n_features)
        y : array, (n_samples,) or (n_samples, n_targets)

        Returns
        -------
        self
        """
        _, self.y_fit_ = self._take(X, y)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the weighted means of the targets.

        Parameters
        ----------
        X : array, (n_points, n_features)

        Returns
        -------
        array, (n_points,) or (n_points, n_targets)
        """
        X = self._new(X)
        mean = self.y_fit_.mean(0)
        # Of the deviations from the mean, so that a constant is predicted as it is.
        columns = np.concatenate([self.y_fit_ - mean, np.ones_like(self.y_fit_[:, :1])], -1)
        found = pairwise.matvec(X, self.X_fit_, columns, **self._options())
        weights = found[:, -1:]
        means = np.divide(found[:, :-1], weights, out=np.zeros_like(found[:, :-1]), where=weights > 0) + mean
        return means[:, 0] if self._is_vector else means


class KernelRidge(_Regressor):
    """Kernel ridge regression by conjugate gradients, ``(K + alpha I) dual_coef_ = y``.

    Parameters
    ----------
    alpha : float, default 1.0
        Ridge, >= 0.
    kernel : {"gaussian", "laplacian", "cauchy", "matern32", "matern52"}
        See :func:`cuattn.pairwise.matvec`.
    bandwidth : float, default 1.0
        Scale of distances, > 0.
    tol : float, default 1e-6
        Relative residual at which the solver stops.
    max_iter : int, optional
        Its most iterations, by default ten times the samples.

    Attributes
    ----------
    dual_coef_ : ndarray, (n_samples,) or (n_samples, n_targets)
        Weights of the samples.
    X_fit_ : ndarray
        The samples.
    n_iter_ : int
        Iterations taken, of the target that took most.
    n_features_in_ : int
        Number of coordinates.

    See Also
    --------
    NadarayaWatson : Needs no solver.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.sklearn import KernelRidge
    >>> X = np.linspace(0, 6, 50)[:, None]
    >>> KernelRidge(alpha=1e-3).fit(X, np.sin(X[:, 0])).predict([[np.pi / 2]]).round(2)
    array([1.])
    """

    def __init__(
        self,
        alpha: float = 1.0,
        *,
        kernel: str = "gaussian",
        bandwidth: float = 1.0,
        tol: float = 1e-6,
        max_iter: int | None = None,
    ) -> None:
        self.alpha, self.kernel, self.bandwidth, self.tol, self.max_iter = alpha, kernel, bandwidth, tol, max_iter

    def fit(self, X: Any, y: Any) -> KernelRidge:
        """Solve for the weights.

        Parameters
        ----------
        X : array, (n_samples, n_features)
        y : array, (n_samples,) or (n_samples, n_targets)

        Returns
        -------
        self
        """
        if not self.alpha >= 0:
            raise ArgumentError(f"alpha is {shown(self.alpha)}; expected a number >= 0")
        X, targets = self._take(X, y)
        operator = pairwise.linear_operator(X, X, ridge=self.alpha, **self._options())
        most = 10 * len(X) if self.max_iter is None else self.max_iter
        coefficients, self.n_iter_ = _solve(operator, targets, self.tol, most)
        self.dual_coef_ = coefficients[:, 0] if self._is_vector else coefficients
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return ``K(X, X_fit_) @ dual_coef_``.

        Parameters
        ----------
        X : array, (n_points, n_features)

        Returns
        -------
        array, (n_points,) or (n_points, n_targets)
        """
        X = self._new(X)
        return pairwise.matvec(X, self.X_fit_, self.dual_coef_, **self._options())


class KernelDensity(DensityMixin, _Estimator):
    """Kernel density estimation.

    Parameters
    ----------
    bandwidth : float, default 1.0
        Scale of distances, > 0.
    kernel : {"gaussian", "laplacian", "matern32", "matern52"}
        See :func:`cuattn.pairwise.matvec`; those that have a finite integral.

    Attributes
    ----------
    X_fit_ : ndarray
        The samples.
    n_features_in_ : int
        Number of coordinates.

    See Also
    --------
    cuattn.pairwise.log_density : The function.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.sklearn import KernelDensity
    >>> density = KernelDensity(bandwidth=0.5).fit(np.zeros((3, 1)))
    >>> density.score_samples([[0.0]]).round(3)
    array([-0.226])
    """

    def __init__(self, bandwidth: float = 1.0, *, kernel: str = "gaussian") -> None:
        self.bandwidth, self.kernel = bandwidth, kernel

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelDensity:
        """Keep the samples.

        Parameters
        ----------
        X : array, (n_samples, n_features)
        y : object, optional
            Not used.
        sample_weight : array, (n_samples,), optional
            Weights >= 0.

        Returns
        -------
        self
        """
        X = validate_data(self, X, dtype=_DTYPES)
        _check_kernel(self.kernel, self.bandwidth)
        if self.kernel != "gaussian" and self.kernel not in _MOMENTS:
            raise ArgumentError(f"kernel is {self.kernel!r}; expected 'gaussian' or one of {', '.join(_MOMENTS)}")
        self._weights = np.ones(len(X), X.dtype)
        if sample_weight is not None:
            self._weights = _check_sample_weight(sample_weight, X, dtype=X.dtype, ensure_non_negative=True)
        self.X_fit_ = X
        return self

    def score_samples(self, X: Any) -> np.ndarray:
        """Return the logarithm of the density at points.

        Parameters
        ----------
        X : array, (n_points, n_features)

        Returns
        -------
        array, (n_points,)
        """
        X = self._new(X)
        with np.errstate(divide="ignore"):
            if self.kernel == "gaussian":
                logs = np.log(self._weights)
                return pairwise.log_density(X, self.X_fit_, bandwidth=self.bandwidth, log_weights=logs)
            weights = self._weights / self._weights.sum()
            sums = pairwise.matvec(X, self.X_fit_, weights, **self._options())
            return np.log(sums) - X.dtype.type(_log_integral(self.kernel, X.shape[1], self.bandwidth))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the log-likelihood of points: the sum of their log densities.

        Parameters
        ----------
        X : array, (n_points, n_features)
        y : object, optional
            Not used.

        Returns
        -------
        float
        """
        return float(self.score_samples(X).sum(dtype=np.float64))

    def sample(self, n_samples: int = 1, random_state: Any = None) -> np.ndarray:
        """Draw points from the density; of the Gaussian kernel alone.

        Parameters
        ----------
        n_samples : int, default 1
        random_state : int, RandomState or None, optional

        Returns
        -------
        array, (n_samples, n_features)
        """
        check_is_fitted(self)
        if self.kernel != "gaussian":
            raise NotImplementedError(f"kernel is {self.kernel!r}; expected 'gaussian', the one that can be sampled")
        rng = check_random_state(random_state)
        chosen = rng.choice(len(self.X_fit_), n_samples, p=self._weights / self._weights.sum(dtype=np.float64))
        return rng.normal(self.X_fit_[chosen], self.bandwidth).astype(self.X_fit_.dtype)


_MOMENTS = {  # the integral of k(r) r^(d-1) dr from 0
    "laplacian": lambda d: math.gamma(d),
    "matern32": lambda d: (math.gamma(d) + math.gamma(d + 1)) / 3 ** (d / 2),
    "matern52": lambda d: (math.gamma(d) + math.gamma(d + 1) + math.gamma(d + 2) / 3) / 5 ** (d / 2),
}


def _log_integral(kernel: str, d: int, bandwidth: float) -> float:
    """Return the logarithm of a kernel's integral over all of space."""
    sphere = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
    return sphere + math.log(_MOMENTS[kernel](d)) + d * math.log(bandwidth)


def _check_kernel(kernel: Any, bandwidth: Any) -> None:
    if not isinstance(kernel, str) or kernel not in FUNCTIONS:
        raise ArgumentError(f"kernel is {shown(kernel)}; expected one of {', '.join(map(repr, FUNCTIONS))}")
    if not bandwidth > 0:
        raise ArgumentError(f"bandwidth is {shown(bandwidth)}; expected a number > 0")


def _solve(operator: Any, targets: np.ndarray, tol: float, most: int) -> tuple[np.ndarray, int]:
    """Solve for several targets side by side, by conjugate gradients; return the iterations that they took.

    One product serves them all; those that are done stand still.
    """
    x, residual = np.zeros_like(targets), targets.copy()
    direction, square = residual.copy(), np.square(residual).sum(0)
    enough = tol**2 * square
    for count in range(most):
        going = square > enough
        if not going.any():
            return x, count
        product = operator @ direction
        step = _share(square, (direction * product).sum(0)) * going
        x += step * direction
        residual -= step * product
        before, square = square, np.square(residual).sum(0)
        direction = residual + _share(square, before) * direction
    if (square > enough).any():
        warnings.warn(
            f"KernelRidge: the residual is above tol = {tol:g} after {most} iterations; expected fewer to do (allow "
            "more max_iter, or take a larger alpha)",
            ConvergenceWarning,
            stacklevel=3,
        )
    return x, most


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
