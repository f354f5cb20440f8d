"""Products of kernel matrices with vectors, and their gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuattn.api import documented_by
from cuattn.errors import UnsupportedError, expect_array
from cuattn.pairwise import attention
from cuattn.pairwise.pairs import Pairs, Sums, Wanted, columns_of, entered

_PARAGRAPHS = {
    "points": """x : array, (..., M, d), float16 | bfloat16 | float32 | float64
        Rows: points, of NumPy, CuPy, PyTorch, JAX or any other DLPack array; results are of the same kind.
    y : array, (..., N, d)
        Keys: points, of x's dtype.  Leading axes broadcast as in :func:`numpy.matmul`.""",
    "bandwidth": """bandwidth : float
        Scale of distances, > 0; on a GPU a 0-d array is not read back, and not checked.""",
    "kernel_function": """kernel_function : {"gaussian", "laplacian", "cauchy", "matern32", "matern52"}
        With r the Euclidean distance of x and y over the bandwidth: ``exp(-r^2 / 2)``, ``exp(-r)``, ``1 / (1 + r^2)``,
        ``(1 + a) exp(-a)`` with ``a = sqrt(3) r``, and ``(1 + a + a^2 / 3) exp(-a)`` with ``a = sqrt(5) r``.  They are
        scikit-learn's ``RBF`` and ``Matern`` of that length scale; its ``laplacian_kernel`` sums absolute differences
        instead.""",
    "options": """mask : bool array | mask of :mod:`cuattn.masks` | callable, optional
        Which pairs count (True), broadcast to (..., M, N).
    window : (left, right) or (left, right, alignment), optional
        Row i takes keys ``i - left <= j <= i + right``, see :func:`cuattn.attention`.
    precision : {None, "float64", "tf32"}, optional
        "float64" computes in float64 and rounds the result; "tf32" permits products in TF32 above 8 coordinates.
    kernel : {None, "cpu", "direct", "products", "sm80", "sm90"}, optional
        What computes: on a GPU differences of coordinates ("direct": without masks, up to 32 of them or 8 in float64),
        products of up to 128 in float32 ("products": without masks, not the Laplacian), or the named family of
        attention kernels; None takes the first of them up to 8 coordinates, else products, else differences.""",
    "errors": """ShapeError, DtypeError, ArgumentError, MaskError, UnsupportedError
        When an argument does not fit; the message names it, its value and what was expected.""",
    "accuracy": """Up to 8 coordinates distances are as good as sums of squared differences.  Above, float32 takes them
    apart into products, relative to the mean c of the points: the error grows by up to
    ``2^-21 max|x - c|^2 / bandwidth^2``, of which NumPy arrays get a warning where it is large, and which
    ``precision="float64"`` lifts.""",
}


public = documented_by(_PARAGRAPHS)


class MatvecGradients(NamedTuple):
    """The result of :func:`matvec_backward`: gradients, each of its operand's shape and dtype.

    Attributes
    ----------
    dx, dy, db : array
    dbandwidth : array
        0-d.

    See Also
    --------
    matvec_backward : Returns one.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x = np.zeros((1, 2))
    >>> pairwise.matvec_backward(np.ones(1), x, x, np.ones(1), bandwidth=1.0).db
    array([1.])
    """

    dx: Any
    dy: Any
    db: Any
    dbandwidth: Any


def engine(pairs: Pairs) -> Any:
    """Return the module that computes a call's sums with :class:`Wanted`.

    Raises
    ------
    UnsupportedError
        `kernel` names something that cannot.
    """
    wanted = pairs.kernel
    if pairs.origin.backend == "cpu":
        if wanted not in (None, "cpu"):
            raise UnsupportedError(f"kernel is {wanted!r} but x is in host memory; expected an array on a GPU")
        from cuattn.pairwise import host

        return host
    if wanted == "cpu":
        raise UnsupportedError("kernel is 'cpu' but x is on a GPU; expected an array in host memory")
    from cuattn.pairwise import device, tensor_cores

    rooms: dict[str | None, Any] = {"direct": device, "products": tensor_cores}
    if wanted is None:
        order = ("direct", "products") if pairs.is_direct else ("products", "direct")
        wanted = next((name for name in order if rooms[name].takes(pairs)), None)
    elif wanted in rooms and not rooms[wanted].takes(pairs):
        raise UnsupportedError(f"kernel is {wanted!r}; expected {rooms[wanted].TAKEN}")
    return rooms.get(wanted, attention)


@public
def matvec(
    x: Any,
    y: Any,
    b: Any,
    /,
    *,
    bandwidth: Any,
    kernel_function: str = "gaussian",
    mask: Any = None,
    window: tuple[Any, ...] | None = None,
    precision: str | None = None,
    kernel: str | None = None,
) -> Any:
    """Multiply a kernel matrix by vectors, ``sum_j K(x_i, y_j) b_j``, without ever making the matrix.

    Parameters
    ----------
    <points>
    b : array, (..., N, p) or (..., N)
        Vectors, of x's dtype: columns if it has as many axes as y, or more.
    <bandwidth>
    <kernel_function>
    <options>

    Returns
    -------
    array, (..., M, p) or (..., M)
        The products, in x's dtype and kind; 0 where a row has no pairs.

    Raises
    ------
    <errors>

    See Also
    --------
    matvec_backward : Its gradients.
    linear_operator : The same for solvers.

    Notes
    -----
    <accuracy>
    Products over parts of the keys add up to the whole.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x = np.array([[0.0], [1.0], [3.0]])
    >>> pairwise.matvec(x, x, np.ones(3), bandwidth=1.0).round(3)
    array([1.618, 1.742, 1.146])
    """
    options = dict(mask=mask, window=window, precision=precision, kernel=kernel, kernel_function=kernel_function)
    with entered({"x": x, "y": y, "b": b}, ("bandwidth", bandwidth), **options) as pairs:
        is_vector = columns_of(pairs, "b", "y")
        a = product(pairs, pairs.spread("b"))
        return pairs.give(a[..., 0] if is_vector else a)


def product(pairs: Pairs, b: Any, transposed: bool = False) -> Any:
    """Return sum_j k_ij b_j, or sum_i k_ij b_i if it is transposed."""
    return engine(pairs).run(pairs, Wanted(v=b, sums=True), transposed).sums


@public
def matvec_backward(
    da: Any,
    x: Any,
    y: Any,
    b: Any,
    /,
    *,
    bandwidth: Any,
    kernel_function: str = "gaussian",
    mask: Any = None,
    window: tuple[Any, ...] | None = None,
    precision: str | None = None,
    kernel: str | None = None,
) -> MatvecGradients:
    """Compute the gradients of :func:`matvec`.

    Parameters
    ----------
    da : array, (..., M, p) or (..., M)
        Gradient with respect to the products.
    <points>
    b : array, (..., N, p) or (..., N)
        Vectors.
    <bandwidth>
    <kernel_function>
    <options>

    Returns
    -------
    MatvecGradients
        ``(dx, dy, db, dbandwidth)``.  Where two points coincide, the gradient of every kernel function is 0.

    Raises
    ------
    <errors>

    See Also
    --------
    matvec : The function.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import pairwise
    >>> x, y = np.array([[0.0]]), np.array([[1.0]])
    >>> float(pairwise.matvec_backward(np.ones(1), x, y, np.ones(1), bandwidth=1.0).dx[0, 0].round(6))
    0.606531
    """
    options = dict(mask=mask, window=window, precision=precision, kernel=kernel, kernel_function=kernel_function)
    with entered({"x": x, "y": y, "b": b, "da": da}, ("bandwidth", bandwidth), **options) as pairs:
        da, vectors = pairs.arrays.pop("da"), columns_of(pairs, "b", "y")
        shape = (*pairs.batch, pairs.x.shape[-2], pairs.arrays["b"].shape[-1])
        expect_array("da", da, shape[:-1] if vectors else shape, pairs.work)
        da = da.reshape(shape)
        dx, dy, db, dscale = gradients(pairs, da, pairs.spread("b"))
        db = pairs.gather(db, "b")
        return MatvecGradients(
            pairs.give(pairs.gather(dx, "x")),
            pairs.give(pairs.gather(dy, "y")),
            pairs.give(db[..., 0] if vectors else db),
            pairs.give(-dscale / pairs.scale),
        )


def gradients(pairs: Pairs, u: Any, v: Any, row_log: Any = None, key_log: Any = None) -> tuple[Any, Any, Any, Any]:
    """Return the gradients of sum_ij (u_i . v_j) k_ij by x, y and v, and by the logarithm of the points' scale.

    With logarithms k is the Gaussian, multiplied by their exponentials; there the last is not for use.
    """
    room = engine(pairs)
    if room is attention:  # one backward has them all
        return attention.gradients(pairs, u, v, row_log, key_log)
    of_x: Sums = room.run(pairs, Wanted(u, v, row_log, key_log, slopes=True, moments=row_log is None))
    of_y: Sums = room.run(pairs, Wanted(v, u, key_log, row_log, slopes=True, sums=True), transposed=True)
    factor = -2 * pairs.factor
    dscale = None if of_x.moments is None else -2 * of_x.moments.sum(dtype=np.float64)
    return factor * of_x.directions, factor * of_y.directions, of_y.sums, dscale


def pull(pairs: Pairs, row_log: Any, key_log: Any) -> Any:
    """Return sum_j p_ij (x_i - y_j) of p_ij = exp(row_log_i + key_log_j - w_ij)."""
    xp, (rows, keys) = pairs.xp, (row_log.shape[-1], key_log.shape[-1])
    u, v = (xp.ones((*pairs.batch, n, 1), pairs.work) for n in (rows, keys))
    return engine(pairs).run(pairs, Wanted(u, v, row_log, key_log, slopes=True)).directions
