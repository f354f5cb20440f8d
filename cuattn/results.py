"""What the public functions return."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuattn.rng import RNGState


class Forward(NamedTuple):
    """The result of :func:`cuattn.forward`: all that a backward pass or a merge needs, in O(N) memory.

    Attributes
    ----------
    o : array, (..., Hq, Nq, dv)
        The attention output, in the input dtype (or ``out_dtype``).
    l : array, (..., Hq, Nq), float32 | float64
        Row sum of ``exp(s - m)`` over the visible keys, before dropout; 0 in an empty row.
    m : array, (..., Hq, Nq), float32 | float64
        Row maximum of the scores s over the visible keys, natural units; -inf in an empty row.
    rng_state : RNGState | None
        The state that dropout used; None without dropout.

    See Also
    --------
    merge : Combines several.
    backward : Takes one.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> fwd = cuattn.forward(*np.ones((3, 4, 2)))
    >>> fwd.o.shape, fwd.l, fwd.rng_state
    ((4, 2), array([4., 4., 4., 4.]), None)
    """

    o: Any
    l: Any
    m: Any
    rng_state: RNGState | None = None

    @property
    def lse(self) -> Any:
        """Log of the softmax's denominator, ``m + log(l)`` (natural logarithm); -inf in an empty row."""
        return self.m + _log(self.l)


class Jvp(NamedTuple):
    """The result of :func:`cuattn.jvp`: a forward's, and the tangents of o and lse.

    It serves wherever a :class:`Forward` does.

    Attributes
    ----------
    o, l, m, rng_state
        As :class:`Forward`'s.
    to : array, (..., Hq, Nq, dv)
        The tangent of o, in o's dtype; 0 in an empty row.
    tlse : array, (..., Hq, Nq), float32 | float64
        The tangent of lse; 0 in an empty row.

    See Also
    --------
    Forward : What it is beside the tangents.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> x = np.ones((4, 2))
    >>> cuattn.jvp(x, x, x, tv=3 * x).to[0]
    array([3., 3.])
    """

    o: Any
    l: Any
    m: Any
    rng_state: RNGState | None
    to: Any
    tlse: Any

    @property
    def lse(self) -> Any:
        """Log of the softmax's denominator, ``m + log(l)`` (natural logarithm); -inf in an empty row."""
        return self.m + _log(self.l)


class _Gradients(NamedTuple):
    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None


class Gradients(_Gradients):
    """The result of :func:`cuattn.backward`, a tuple of four.

    Attributes
    ----------
    dq, dk, dv : array
        Gradients, each of the shape and dtype of its operand (broadcast axes are summed).
    dbias : array | None
        Gradient of the bias, of its shape and dtype; None when no bias was given.
    dscore : tuple of array | None
        One entry for each of the score function's arguments: the gradient of an array of floats, of its shape and
        dtype, else None.  No element of the tuple.

    See Also
    --------
    DoubleGradients : Those of gradients.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> x = np.ones((4, 2))
    >>> dq, dk, dv, dbias = cuattn.backward(x, x, x, x, cuattn.forward(x, x, x))
    >>> dv[0], dbias
    (array([1., 1.]), None)
    """

    dscore: tuple[Any, ...] = ()

    def __new__(cls, dq: Any, dk: Any, dv: Any, dbias: Any = None, dscore: tuple[Any, ...] = ()) -> Gradients:
        """Return gradients with those of the score function's arguments."""
        made = tuple.__new__(cls, (dq, dk, dv, dbias))
        if dscore:
            made.dscore = tuple(dscore)
        return made

    def _replace(self, **fields: Any) -> Gradients:
        """Return gradients with some replaced."""
        return type(self)(**{**self._asdict(), "dscore": self.dscore, **fields})


class _DoubleGradients(NamedTuple):
    ddo: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None


class DoubleGradients(_DoubleGradients):
    """The result of :func:`cuattn.double_backward`, a tuple of five.

    Attributes
    ----------
    ddo : array
        Gradient with respect to do, of its shape and dtype.
    dq, dk, dv : array
        Gradients, each of the shape and dtype of its operand (broadcast axes are summed).
    dbias : array | None
        Gradient of the bias, of its shape and dtype; None when no bias was given.
    dscore : tuple of array | None
        One entry for each of the score function's arguments, as :class:`Gradients`'.  No element of the tuple.
    ddlse : array | None
        Gradient with respect to dlse, float32 (float64); None without dlse.  No element of the tuple.

    See Also
    --------
    Gradients : Those of the first order.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> x = np.ones((4, 2))
    >>> double = cuattn.double_backward(None, None, x, x, x, x, x, cuattn.forward(x, x, x))
    >>> double.ddo[0]
    array([1., 1.])
    """

    dscore: tuple[Any, ...] = ()
    ddlse: Any = None


def _log(x: Any) -> Any:
    """Natural logarithm of an array of any kind, in its own kind; log(0) is -inf without a warning."""
    if hasattr(x, "log"):  # a tensor of PyTorch
        return x.log()
    with np.errstate(divide="ignore"):
        return x.__array_namespace__().log(x) if hasattr(x, "__array_namespace__") else np.log(x)  # CuPy answers NumPy
