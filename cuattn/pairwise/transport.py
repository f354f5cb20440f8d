"""Entropic optimal transport between weighted points, by Sinkhorn's iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cuattn.errors import ArgumentError, as_integer, as_real, shown
from cuattn.pairwise.logsums import log_sums, of_eps
from cuattn.pairwise.pairs import Pairs, entered, expect_length
from cuattn.pairwise.products import public, pull

_EVERY = 10  # iterations between looks at the error


class ConvergenceWarning(RuntimeWarning):
    """An iteration ended before its error was below `tol`.

    See Also
    --------
    sinkhorn : Warns.

    Examples
    --------
    >>> import warnings
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x, y = np.random.default_rng(0).standard_normal((2, 5, 2))
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     found = pairwise.sinkhorn(x, y, eps=0.01, n_iters=1, tol=1e-9)
    >>> caught[0].category is pairwise.ConvergenceWarning, found.converged
    (True, False)
    """


class _Sinkhorn(NamedTuple):
    cost: Any
    f: Any
    g: Any
    n_iters: int
    error: float | None
    converged: bool | None


class Sinkhorn(_Sinkhorn):
    """The result of :func:`sinkhorn`.

    Attributes
    ----------
    cost : array
        ``a . f + b . g``, less half of each self-cost if it is debiased; 0-d, or with the points' leading axes.
    f, g : array, (..., M) and (..., N)
        Potentials: the plan is ``a_i b_j exp((f_i + g_j - |x_i - y_j|^2 / 2) / eps)``.
    n_iters : int
        Iterations taken.
    error : float or None
        ``|P 1 - a|_1``, of the worst problem, as it was last read; None if it never was.
    converged : bool or None
        Whether it is at most `tol`.

    See Also
    --------
    sinkhorn : Returns one.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> found = pairwise.sinkhorn(np.zeros((1, 2)), np.ones((1, 2)), eps=0.1)
    >>> found.cost, found.converged
    (array(1.), True)
    """

    _plans: _Plans

    def gradient(self) -> tuple[Any, Any]:
        """Return the gradients of the cost by the points, (dx, dy), by the envelope theorem.

        Examples
        --------
        >>> import numpy as np
        >>> from cuattn import pairwise
        >>> x, y = np.zeros((1, 2)), np.ones((1, 2))
        >>> pairwise.sinkhorn(x, y, eps=0.1).gradient()[0]
        array([[-1., -1.]])
        """
        return self._plans.gradient()

    def barycentric_map(self) -> Any:
        """Return where the plan takes each x_i: the mean of y over its row, which is attention.

        Examples
        --------
        >>> import numpy as np
        >>> from cuattn import pairwise
        >>> x, y = np.array([[0.0], [1.0]]), np.array([[5.0], [9.0]])
        >>> pairwise.sinkhorn(x, y, eps=0.2, tol=0.01).barycentric_map().round(1)
        array([[5.],
               [9.]])
        """
        return self._plans.barycentric_map()


@dataclass
class _Plan:
    """A problem and its potentials, over eps."""

    pairs: Pairs
    log_a: Any
    log_b: Any
    f: Any
    g: Any

    def update_f(self) -> Any:
        """Return the f for which rows sum to a."""
        return -log_sums(self.pairs, self.g + self.log_b)

    def update_g(self) -> Any:
        """Return the g for which columns sum to b."""
        return -log_sums(self.pairs.swapped, self.f + self.log_a)

    def cost(self, eps: Any) -> Any:
        """Return a . f + b . g."""
        xp = self.pairs.xp
        return eps * sum((xp.exp(log) * xp.where(log > -xp.inf, p, 0)).sum(-1) for log, p in self._sides())

    def _sides(self) -> Iterator[tuple[Any, Any]]:
        yield from ((self.log_a, self.f), (self.log_b, self.g))

    def pulls(self) -> tuple[Any, Any]:
        """Return sum_j P_ij (x_i - y_j) for each i, and sum_i P_ij (y_j - x_i) for each j."""
        logs = self.f + self.log_a, self.g + self.log_b
        return pull(self.pairs, *logs), pull(self.pairs.swapped, *logs[::-1])


@dataclass
class _Plans:
    """The plan of a call, and those of its points with themselves where they are subtracted."""

    plan: _Plan
    selves: tuple[_Plan, ...]

    def gradient(self) -> tuple[Any, Any]:
        """Return the gradients of the cost."""
        pairs = self.plan.pairs
        with pairs.origin.scope():
            found = list(self.plan.pulls())
            for side, own in enumerate(self.selves):
                found[side] = found[side] - own.pulls()[0]
            return tuple(pairs.give(pairs.gather(d, name)) for d, name in zip(found, "xy", strict=True))

    def barycentric_map(self) -> Any:
        """Return the means of y by the plan's rows."""
        plan, pairs = self.plan, self.plan.pairs
        with pairs.origin.scope():
            return pairs.give(pairs.spread("x") - pull(pairs, plan.update_f(), plan.g + plan.log_b))


@public
def sinkhorn(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    /,
    *,
    eps: Any,
    n_iters: int = 1000,
    tol: float = 1e-6,
    debias: bool = False,
    progress: bool = False,
) -> Sinkhorn:
    """Transport weights a of points x to weights b of points y at the least cost, with an entropic penalty eps.

    The cost of a pair is ``|x_i - y_j|^2 / 2``.

    Parameters
    ----------
    <points>
    a : array, (..., M), optional
        Weights of x, which sum to 1; by default uniform.
    b : array, (..., N), optional
        Weights of y, which sum to 1; by default uniform.
    eps : float
        Temperature, > 0, in units of the cost.
    n_iters : int, default 1000
        The most iterations; each updates f, then g, from 0.
    tol : float, default 1e-6
        Stop when ``|P 1 - a|_1`` is at most this.  It is looked at every 10 iterations; 0: never, and so nothing is
        read back from a GPU.
    debias : bool, default False
        Subtract half the cost of x to itself, and of y (the Sinkhorn divergence).
    progress : bool, default False
        Show the iterations on the terminal.

    Returns
    -------
    Sinkhorn
        Cost, potentials, and what the iteration came to; ``.gradient()`` and ``.barycentric_map()``.

    Raises
    ------
    <errors>

    Warns
    -----
    ConvergenceWarning
        When the error is above `tol` after `n_iters`.

    See Also
    --------
    softmin : Half an iteration.

    Notes
    -----
    <accuracy>

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x = np.random.default_rng(0).standard_normal((100, 2))
    >>> found = pairwise.sinkhorn(x, x + 1.0, eps=0.1, debias=True)
    >>> float(found.cost.round(3)), found.converged
    (1.0, True)
    """
    count, tol = as_integer(n_iters), as_real("tol", tol)
    if count is None or count < 1:
        raise ArgumentError(f"n_iters is {shown(n_iters)}; expected an integer >= 1")
    if tol < 0:
        raise ArgumentError(f"tol is {tol}; expected a number >= 0")
    with entered({"x": x, "y": y, "a": a, "b": b}, ("eps", eps), vectors=("a", "b")) as pairs:
        eps, xp = pairs.scale, pairs.xp
        logs = [_log_weights(pairs, *names) for names in (("a", "x"), ("b", "y"))]
        if pairs.is_empty:
            raise ArgumentError(f"x has shape {pairs.x.shape} and y {pairs.y.shape}; expected at least one point each")
        for name in "ab":
            pairs.arrays.pop(name, None)
        of_eps(pairs)
        plan = _Plan(pairs, *logs, *(xp.zeros(log.shape, pairs.work) for log in logs))
        with _shown(progress, count) as show:
            taken, error = _iterate(plan, count, tol, show)
        selves = tuple(_self(plan, side, count, tol) for side in range(2)) if debias else ()
        cost = plan.cost(eps) - sum(0.5 * own.cost(eps) for own in selves)
        converged = None if error is None else error <= tol
        if converged is False:
            warnings.warn(
                f"sinkhorn: |P 1 - a|_1 is {error:.3g} after {taken} iterations; expected at most tol = {tol:g} "
                "(allow more n_iters, or take a larger eps)",
                ConvergenceWarning,
                stacklevel=2,
            )
        f, g = (pairs.give(eps * potential) for potential in (plan.f, plan.g))
        found = Sinkhorn(pairs.give(cost), f, g, taken, error, converged)
        found._plans = _Plans(plan, selves)
        return found


def _log_weights(pairs: Pairs, name: str, points: str) -> Any:
    """Return the logarithms of weights, checked where they are on the host, over the whole batch."""
    xp, n = pairs.xp, pairs.arrays[points].shape[-2]
    if name not in pairs.arrays:
        return xp.full((*pairs.batch, n), -np.log(max(n, 1)), pairs.work)
    expect_length(name, pairs.arrays[name], n, points)
    weights = pairs.spread(name, 1)
    if pairs.origin.backend == "cpu":
        sums = weights.sum(-1, dtype=np.float64)
        slack = 1e-3 if pairs.dtype.itemsize < 4 else 1e-4
        if not (weights >= 0).all() or not (np.abs(sums - 1) <= slack).all():
            raise ArgumentError(f"{name} has sum {shown(sums.tolist())}; expected numbers >= 0 that sum to 1")
    with np.errstate(divide="ignore"):
        return xp.log(weights)


def _iterate(plan: _Plan, count: int, tol: float, show: Callable[..., None]) -> tuple[int, float | None]:
    """Update the potentials; return the iterations taken and the error as it was last read."""
    error, taken, f = None, 0, plan.update_f()
    while taken < count:
        taken += 1
        plan.f = f
        plan.g = plan.update_g()
        reads = tol > 0 and (taken % _EVERY == 0 or taken == count)
        if reads or taken < count:
            f = plan.update_f()
        if reads:
            error = _error(plan, f)
        show(taken, error)
        if error is not None and error <= tol:
            break
    return taken, error


def _error(plan: _Plan, f: Any) -> float:
    """Return |P 1 - a|_1, the worst problem's, given the f for which it would be 0."""
    xp, log = plan.pairs.xp, plan.log_a
    # Row i sums to a_i exp(f_i - that).
    rows = xp.exp(log) * xp.abs(xp.expm1(xp.where(log > -xp.inf, plan.f - f, 0)))
    return float(rows.sum(-1).max())


def _self(plan: _Plan, side: int, count: int, tol: float) -> _Plan:
    """Return the plan of one side's points with themselves, which is symmetric: both potentials are moved half-way."""
    name, log = "xy"[side], (plan.log_a, plan.log_b)[side]
    pairs, xp = plan.pairs, plan.pairs.xp
    own = replace(pairs, arrays={"x": pairs.spread(name), "y": pairs.spread(name)})
    found = _Plan(own, log, log, xp.zeros_like(log), xp.zeros_like(log))
    for taken in range(1, count + 1):
        f = found.update_f()
        if (
            tol > 0
            and taken % _EVERY == 0
            and float((xp.exp(log) * xp.abs(xp.expm1(found.f - f))).sum(-1).max()) <= tol
        ):
            break
        found.f = found.g = (found.f + f) / 2
    return found


@contextmanager
def _shown(progress: bool, count: int) -> Iterator[Callable[..., None]]:
    """Give a function that is told each iteration and the error."""
    if not progress:
        yield lambda taken, error: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("Sinkhorn"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[error]}")
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=count, error="")

        def show(taken: int, error: float | None) -> None:
            bar.update(task, completed=taken, error="" if error is None else f"|P 1 - a| {error:.2e}")

        yield show
