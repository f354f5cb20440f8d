"""Logarithms of sums over keys: softmin, its gradients, and densities."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from cuattn.errors import expect_array
from cuattn.pairwise.pairs import Pairs, Wanted, entered, expect_length
from cuattn.pairwise.products import engine, gradients, public


class SoftminGradients(NamedTuple):
    """The result of :func:`softmin_backward`: gradients, each of its operand's shape and dtype.

    Attributes
    ----------
    dx, dy, dh : array

    See Also
    --------
    softmin_backward : Returns one.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x, y, h = np.zeros((1, 2)), np.ones((3, 2)), np.zeros(3)
    >>> f = pairwise.softmin(x, y, h, eps=0.5)
    >>> pairwise.softmin_backward(np.ones(1), x, y, h, f, eps=0.5).dx
    array([[-1., -1.]])
    """

    dx: Any
    dy: Any
    dh: Any


def log_sums(pairs: Pairs, key_log: Any) -> Any:
    """Return log sum_j exp(key_log_j - w_ij)."""
    return engine(pairs).run(pairs, Wanted(key_log=key_log, logs=True)).logs


def of_eps(pairs: Pairs) -> None:
    """Make the scale eps of costs, which are half of squared distances, one of distances."""
    eps = pairs.scale
    pairs.scale = math.sqrt(eps) if isinstance(eps, float) else pairs.xp.sqrt(eps)


def _over(potential: Any, eps: Any) -> Any:
    """Return a potential in units of eps, in float64 wherever eps is."""
    return potential.astype(np.float64) / eps


@public
def softmin(
    x: Any,
    y: Any,
    h: Any,
    /,
    *,
    eps: Any,
    mask: Any = None,
    window: tuple[Any, ...] | None = None,
    precision: str | None = None,
    kernel: str | None = None,
) -> Any:
    """Compute a soft minimum of costs, ``-eps log sum_j exp((h_j - |x_i - y_j|^2 / 2) / eps)``.

    Parameters
    ----------
    <points>
    h : array, (..., N)
        Potential of each key, of x's dtype, in units of the cost (GeomLoss divides it by eps); -inf hides the key.
    eps : float
        Temperature, > 0, in units of the cost; on a GPU a 0-d array is not read back, and not checked.
    <options>

    Returns
    -------
    array, (..., M)
        In x's dtype and kind; +inf where a row has no pairs.

    Raises
    ------
    <errors>

    See Also
    --------
    softmin_backward : Its gradients.
    sinkhorn : Optimal transport by repeated soft minima.

    Notes
    -----
    <accuracy>
    Soft minima over parts of the keys combine as ``-eps logaddexp(-f / eps, -g / eps)``.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x = np.array([[0.0], [2.0]])
    >>> pairwise.softmin(x, x, np.zeros(2), eps=0.1).round(6)
    array([-0., -0.])
    """
    options = dict(mask=mask, window=window, precision=precision, kernel=kernel)
    with entered({"x": x, "y": y, "h": h}, ("eps", eps), vectors=("h",), **options) as pairs:
        expect_length("h", pairs.arrays["h"], pairs.y.shape[-2], "y")
        eps = pairs.scale
        of_eps(pairs)
        return pairs.give(-eps * log_sums(pairs, _over(pairs.spread("h", 1), eps)).astype(np.float64))


@public
def softmin_backward(
    df: Any,
    x: Any,
    y: Any,
    h: Any,
    f: Any,
    /,
    *,
    eps: Any,
    mask: Any = None,
    window: tuple[Any, ...] | None = None,
    precision: str | None = None,
    kernel: str | None = None,
) -> SoftminGradients:
    """Compute the gradients of :func:`softmin`.

    Parameters
    ----------
    df : array, (..., M)
        Gradient with respect to f.
    <points>
    h : array, (..., N)
        Potential of each key.
    f : array, (..., M)
        The result of :func:`softmin`.
    eps : float
        Temperature.
    <options>

    Returns
    -------
    SoftminGradients
        ``(dx, dy, dh)``.

    Raises
    ------
    <errors>

    See Also
    --------
    softmin : The function.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x, y, h = np.array([[0.0]]), np.array([[3.0]]), np.zeros(1)
    >>> f = pairwise.softmin(x, y, h, eps=1.0)
    >>> pairwise.softmin_backward(np.ones(1), x, y, h, f, eps=1.0).dx
    array([[-3.]])
    """
    options = dict(mask=mask, window=window, precision=precision, kernel=kernel)
    with entered({"x": x, "y": y, "h": h, "df": df, "f": f}, ("eps", eps), vectors=("h",), **options) as pairs:
        df, f, eps = pairs.arrays.pop("df"), pairs.arrays.pop("f"), pairs.scale
        expect_length("h", pairs.arrays["h"], pairs.y.shape[-2], "y")
        shape = (*pairs.batch, pairs.x.shape[-2])
        for name, array in (("df", df), ("f", f)):
            expect_array(name, array, shape, pairs.work)
        of_eps(pairs)
        dx, dy, dh = of_softmin(pairs, df, _over(pairs.spread("h", 1), eps), _over(f, eps))
        factor = -eps
        return SoftminGradients(
            pairs.give(pairs.gather(factor * dx, "x")),
            pairs.give(pairs.gather(factor * dy, "y")),
            pairs.give(pairs.gather(dh, "h", 1)),
        )


def of_softmin(pairs: Pairs, df: Any, key_log: Any, row_log: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of sum_i df_i log sum_j exp(key_log_j - w_ij), of which -row_log_i is the value.

    By the points, and minus that by key_log.
    """
    xp = pairs.xp
    row_log = xp.where(xp.isfinite(row_log), row_log, -xp.inf)  # of no keys it is inf; they have no gradients
    ones = xp.ones((*key_log.shape, 1), pairs.work)
    dx, dy, dv, _ = gradients(pairs, df[..., None], ones, row_log, key_log)
    return dx, dy, -dv[..., 0]


@public
def log_density(
    x: Any,
    y: Any,
    /,
    *,
    bandwidth: Any,
    log_weights: Any = None,
    mask: Any = None,
    window: tuple[Any, ...] | None = None,
    precision: str | None = None,
    kernel: str | None = None,
) -> Any:
    """Compute the logarithm of a Gaussian kernel density estimate from samples y, at points x.

    Parameters
    ----------
    <points>
    bandwidth : float
        Standard deviation of the kernel, > 0; on a GPU a 0-d array is not read back, and not checked.
    log_weights : array, (..., N), optional
        Logarithms of the samples' weights, of x's dtype, which need not sum to 1; by default all weigh the same.
    <options>

    Returns
    -------
    array, (..., M)
        Normalised: the density integrates to 1.  In x's dtype and kind; -inf where a row has no pairs.

    Raises
    ------
    <errors>

    See Also
    --------
    softmin : The sum behind it, without normalisation.

    Notes
    -----
    <accuracy>

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> np.exp(pairwise.log_density(np.zeros((1, 1)), np.zeros((4, 1)), bandwidth=1.0)).round(6)
    array([0.398942])
    """
    options = dict(mask=mask, window=window, precision=precision, kernel=kernel)
    with entered(
        {"x": x, "y": y, "log_weights": log_weights}, ("bandwidth", bandwidth), vectors=("log_weights",), **options
    ) as pairs:
        xp, n = pairs.xp, pairs.y.shape[-2]
        if log_weights is None:
            logs, total = xp.zeros((*pairs.batch, n), pairs.work), math.log(max(n, 1))
        else:
            expect_length("log_weights", pairs.arrays["log_weights"], n, "y")
            logs = pairs.spread("log_weights", 1)
            total = _log_total(xp, logs)[..., None]
        scale = math.log(pairs.scale) if isinstance(pairs.scale, float) else xp.log(pairs.scale)
        normal = pairs.dim * (scale + 0.5 * math.log(2 * math.pi))
        return pairs.give(log_sums(pairs, logs) - total - normal)


def _log_total(xp: Any, logs: Any) -> Any:
    """Return the logarithm of the sum of exponentials along the last axis."""
    if not logs.shape[-1]:
        return xp.zeros(logs.shape[:-1])
    most = logs.max(-1, keepdims=True).astype(np.float64)
    most = xp.where(xp.isfinite(most), most, 0)
    return (most + xp.log(xp.exp(logs - most).sum(-1, keepdims=True)))[..., 0]
