"""The errors that cuattn raises.

Every one of them is a :class:`CuattnError`, and each also derives from the built-in exception that a NumPy
user would expect in its place, so existing ``except ValueError`` clauses keep working.  Messages name the
argument, its value and what was expected.  The functions here are internal: they check and write what errors say.
"""

import math
import operator
import reprlib
import sys
from numbers import Real
from typing import Any

import numpy as np

__all__ = [
    "ArgumentError",
    "CompileError",
    "CuattnError",
    "DtypeError",
    "MaskError",
    "ShapeError",
    "UnsupportedError",
]


class CuattnError(Exception):
    """Base class of every error that cuattn raises on purpose.

    See Also
    --------
    ArgumentError, ShapeError, DtypeError, MaskError, UnsupportedError, CompileError : What is raised.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> q = np.zeros((2, 8, 4))
    >>> try:
    ...     cuattn.attention(q, q, q, scale=float("nan"))
    ... except cuattn.CuattnError as error:
    ...     print(type(error).__name__)
    ArgumentError
    """


class ArgumentError(CuattnError, ValueError):
    """A scalar argument is out of range, or two arguments contradict each other.

    See Also
    --------
    CuattnError : Catches every error.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> q = np.zeros((2, 8, 4))
    >>> cuattn.attention(q, q, q, softcap=-1.0)
    Traceback (most recent call last):
        ...
    cuattn.errors.ArgumentError: softcap is -1.0; expected a number > 0 from 2.23e-308 to 1.8e+308: scores are float64
    """


class ShapeError(CuattnError, ValueError):
    """The shape of an array does not fit the shapes of the others.

    See Also
    --------
    CuattnError : Catches every error.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> cuattn.attention(np.zeros((8, 4)), np.zeros((8, 3)), np.zeros((8, 3)))
    Traceback (most recent call last):
        ...
    cuattn.errors.ShapeError: q has shape (8, 4) and k (8, 3); expected the same last axis (head_dim)
    """


class DtypeError(CuattnError, TypeError):
    """An argument has the wrong type, dtype, array kind or device.

    See Also
    --------
    CuattnError : Catches every error.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> cuattn.attention(*np.zeros((3, 8, 4), np.int64))
    Traceback (most recent call last):
        ...
    cuattn.errors.DtypeError: q has dtype int64; expected float16 or bfloat16 or float32 or float64
    """


class MaskError(CuattnError, ValueError):
    """A mask is malformed, or the requested form cannot express it.

    See Also
    --------
    CuattnError : Catches every error.

    Examples
    --------
    >>> from cuattn import masks
    >>> masks.causal_document([3, -1])
    Traceback (most recent call last):
        ...
    cuattn.errors.MaskError: lengths[1] = -1: expected a value in [0, 2147483647]
    """


class UnsupportedError(CuattnError, NotImplementedError):
    """The chosen kernel or backend cannot do what was asked; the message names the argument and the reason.

    See Also
    --------
    cuattn.plan : Says which kernels can do what, and why.
    CuattnError : Catches every error.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> cuattn.attention(*np.zeros((3, 8, 4)), kernel="sm90")
    Traceback (most recent call last):
        ...
    cuattn.errors.UnsupportedError: kernel is 'sm90' but q is in host memory; expected an array on a GPU
    """


class CompileError(CuattnError, RuntimeError):
    """A CUDA kernel could not be compiled or loaded; the message holds the compiler's log.

    See Also
    --------
    CuattnError : Catches every error.

    Examples
    --------
    >>> import cuattn
    >>> issubclass(cuattn.CompileError, RuntimeError)
    True
    """


def expect_no_tracing() -> None:
    """Refuse to be traced by PyTorch's compiler, and keep it from looking into this package from then on.

    It would trace what NumPy does as if arrays were tensors.  Refused, it calls the caller's function as it is.

    Raises
    ------
    UnsupportedError
        When the compiler is tracing.

    Examples
    --------
    >>> expect_no_tracing()
    """
    if "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
        _keep_compiler_out()
        raise UnsupportedError(
            "torch.compile is tracing a function of cuattn, which runs on real memory alone: call it outside, or "
            "compile without fullgraph=True; cuattn.torch.attention goes into a graph"
        )


def _keep_compiler_out() -> None:
    for room in _OPAQUE:
        sys.modules["torch._dynamo"].trace_rules.add(f"cuattn.{room}")


vars(_keep_compiler_out)["_dynamo_marked_constant"] = True  # it is run: torch.compiler.assume_constant_result
_OPAQUE = ("api", "derivatives", "dispatch", "interop", "masks", "problem", "scoring", "tracing")

_WRITER = reprlib.Repr()
_WRITER.maxtuple = _WRITER.maxlist = _WRITER.maxdict = 10
_WRITER.maxstring = _WRITER.maxother = _WRITER.maxlong = 80


def shown(value: object, limit: int = 80) -> str:
    """Write a value for an error message, on one line.

    Parameters
    ----------
    value : object
        What a caller passed; its repr may be megabytes long, or raise.
    limit : int, default 80
        The most characters to write.

    Returns
    -------
    str
        The beginning of its repr.

    Examples
    --------
    >>> shown(1.5), shown("x" * 200, 12)
    ('1.5', "'xxxxx ... '")
    """
    try:
        text = " ".join(_WRITER.repr(value).split())
    except Exception:  # a foreign object whose repr raises
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 6]} ... {text[-1]}"


def as_integer(value: Any) -> int | None:
    """Return what a caller passed as an integer; None where it is not one, as True is not.

    Parameters
    ----------
    value : object
        Of Python, of NumPy, or whatever else has ``__index__``.

    Returns
    -------
    int or None

    Examples
    --------
    >>> as_integer(3), as_integer(3.0), as_integer(True)
    (3, None, None)
    """
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def as_real(name: str, value: Any) -> float:
    """Return what a caller passed as a finite float.

    Parameters
    ----------
    name : str
        What messages call it.
    value : object
        A number of Python or NumPy, or a 0-d array.

    Returns
    -------
    float

    Raises
    ------
    ArgumentError, DtypeError
        When it is not finite, or no real number, as True is not.

    Examples
    --------
    >>> as_real("scale", np.array(2))
    2.0
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, bool) or not isinstance(value, Real):  # NumPy's numbers are, its booleans are not
        raise DtypeError(f"{name} is {shown(value)}; expected a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(f"{name} is {shown(value)}; expected a finite number")
    return number


def expect_array(name: str, array: Any, shape: tuple[int, ...], *dtypes: Any) -> None:
    """Check an array whose shape and dtype follow from other arguments.

    Parameters
    ----------
    name : str
        What the message calls it.
    array : array
        Of NumPy or CuPy.
    shape : tuple of int
        The one that it must have.
    *dtypes : numpy.dtype
        Those of which it must have one.

    Raises
    ------
    ShapeError, DtypeError
        When it does not.

    Examples
    --------
    >>> expect_array("l", np.zeros(3), (3,), np.dtype(np.float64))
    """
    if tuple(array.shape) != shape:
        raise ShapeError(f"{name} has shape {shown(tuple(array.shape))}; expected {shape}")
    expect_dtype(name, array.dtype, *dtypes)


def expect_dtype(name: str, dtype: Any, *dtypes: Any) -> None:
    """Check the dtype of an array.

    Parameters
    ----------
    name : str
        What the message calls the array.
    dtype : numpy.dtype
        The array's.
    *dtypes : numpy.dtype
        Those of which it must be one.

    Raises
    ------
    DtypeError
        When it is not.

    Examples
    --------
    >>> expect_dtype("l", np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float64))
    """
    if dtype not in dtypes:
        raise DtypeError(f"{name} has dtype {dtype}; expected {' or '.join(map(str, dict.fromkeys(dtypes)))}")
