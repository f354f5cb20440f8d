"""Kernel matrices as linear operators, for the solvers of SciPy and of CuPy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cuattn.errors import ShapeError, as_real
from cuattn.pairwise.pairs import entered
from cuattn.pairwise.products import product, public


@public
def linear_operator(
    x: Any,
    y: Any,
    /,
    *,
    bandwidth: Any,
    ridge: float = 0.0,
    kernel_function: str = "gaussian",
    mask: Any = None,
    window: tuple[Any, ...] | None = None,
    precision: str | None = None,
    kernel: str | None = None,
) -> Any:
    """Return a kernel matrix, with a ridge on its diagonal, as a linear operator: for cg, gmres, eigsh.

    Parameters
    ----------
    x : array, (M, d), float16 | bfloat16 | float32 | float64
        Rows: points, of any kind of array.
    y : array, (N, d)
        Keys: points, of x's dtype.
    <bandwidth>
    ridge : float, default 0
        Added to the diagonal; needs M == N.
    <kernel_function>
    <options>

    Returns
    -------
    scipy.sparse.linalg.LinearOperator
        CuPy's for arrays on a GPU.  Vectors are cast to x's dtype.

    Raises
    ------
    <errors>

    See Also
    --------
    matvec : One product.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse.linalg import cg
    >>> from cuattn import pairwise
    >>> x = np.array([[0.0], [1.0]])
    >>> solution, _ = cg(pairwise.linear_operator(x, x, bandwidth=1.0, ridge=1.0), np.array([1.0, 1.0]))
    >>> solution.round(3)
    array([0.384, 0.384])
    """
    ridge = as_real("ridge", ridge)
    options = dict(mask=mask, window=window, precision=precision, kernel=kernel, kernel_function=kernel_function)
    with entered({"x": x, "y": y}, ("bandwidth", bandwidth), **options) as pairs:
        if pairs.batch:
            raise ShapeError(f"x has shape {pairs.x.shape} and y {pairs.y.shape}; expected two axes each")
        shape = pairs.x.shape[0], pairs.y.shape[0]
        if ridge and shape[0] != shape[1]:
            raise ShapeError(f"ridge is {ridge} for a matrix of shape {shape}; expected a square one, or a ridge of 0")
        return _operator(pairs.origin.backend == "cuda")(pairs, ridge)


@lru_cache(maxsize=2)
def _operator(on_device: bool) -> type:
    """Return the class of operators, which derives from SciPy's or CuPy's."""
    if on_device:
        from cupyx.scipy.sparse.linalg import LinearOperator
    else:
        from scipy.sparse.linalg import LinearOperator

    class KernelOperator(LinearOperator):
        """A kernel matrix."""

        def __init__(self, pairs: Any, ridge: float) -> None:
            self._pairs, self._ridge = pairs, ridge
            super().__init__(pairs.dtype, (pairs.x.shape[0], pairs.y.shape[0]))

        def _product(self, vectors: Any, transposed: bool) -> Any:
            pairs = self._pairs
            with pairs.origin.scope():
                vectors = pairs.xp.asarray(vectors).astype(pairs.dtype, copy=False)
                own = vectors.reshape(len(vectors), -1).astype(pairs.work, copy=False)
                found = product(pairs, own, transposed) + own.dtype.type(self._ridge) * (own if self._ridge else 0)
                return found.reshape(-1, *vectors.shape[1:]).astype(np.dtype(self.dtype))

        def _matvec(self, x: Any) -> Any:
            return self._product(x, False)

        def _rmatvec(self, x: Any) -> Any:
            return self._product(x, True)

        _matmat, _rmatmat = _matvec, _rmatvec

    return KernelOperator
