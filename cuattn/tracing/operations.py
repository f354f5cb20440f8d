"""The operations that functions are made of: one row each.

A row says how an operation is computed by NumPy and in CUDA, which kinds it takes, how its derivative follows from
those of its operands and how its bounds follow from theirs.  Everything else in this room reads the table; a new
operation is a row here.

Ties: at a tie of `maximum` or `minimum` the slope is that of the first operand; `absolute` has slope 0 at 0; what is
rounded to integers has slope 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn.tracing import ranges

_LN2, _LN10 = math.log(2), math.log(10)


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation.

    Attributes
    ----------
    name : str
    signatures : tuple of str
        Kinds of operands and result, "ii-i" for example; the first to which all operands can be promoted holds.
    cuda : str
        C++ expression of the operands {0}, {1}, {2}, of the accumulator's suffix {f} and of the result's type {T}.
    slopes : callable, optional
        Partial derivatives in NumPy style, of the operands and the result; without it all are 0.
    ufunc : callable
        Computes it, as ``ufunc(*operands, out=..., dtype=...)``; the dtype is that of the operands' kind.
    bounds : callable
        Rule of :mod:`cuattn.tracing.ranges`; of divisions that of integers.
    chosen : callable, optional
        Of operations that choose one of their last two operands: when it is the first of these.
    left, right : number, optional
        Operand that leaves the other one as it is; `absorbing`: that makes the result equal to it (not for floats).
    boolean : str, optional
        The operation of that meaning on booleans; "" where there is none.
    exact : bool
        Whether the result is never rounded.
    unsigned : str, optional
        C++ expression of integers where none is negative and the last one not 0; {U} is the unsigned type.
    positive : str, optional
        C++ expression of integers where the last one is positive.
    short : str, optional
        C++ expression in 16-bit problems; of what is rounded correctly only where it depends on s.
    wraps : bool
        Whether an integer result may leave int64, in which it then wraps.
    heavy : bool
        Whether it takes more than a few instructions, so that it is worth computing once for many elements.
    """

    name: str
    signatures: tuple[str, ...]
    cuda: str
    slopes: Callable[..., Any] | None
    ufunc: Callable[..., Any]
    bounds: ranges.Rule
    chosen: Callable[..., Any] | None = None
    left: float | bool | None = None
    right: float | bool | None = None
    absorbing: float | bool | None = None
    boolean: str | None = None
    exact: bool = False
    unsigned: str | None = None
    positive: str | None = None
    short: str | None = None
    wraps: bool = False
    heavy: bool = False


def _quiet(ufunc: np.ufunc) -> Callable[..., Any]:
    """Return a ufunc whose second operand counts only where it is not 0; elsewhere the result is 0."""

    def compute(x: Any, y: Any, out: Any = None, dtype: Any = None) -> Any:
        return np.where(y == 0, np.asarray(0, dtype), ufunc(x, np.where(y == 0, np.asarray(1, dtype), y), dtype=dtype))

    return lambda x, y, **options: (compute if options["dtype"].kind == "i" else ufunc)(x, y, **options)


def _shift(ufunc: np.ufunc, beyond: Callable) -> Callable[..., Any]:
    """Return a shift that is defined for any count: outside of 0 to 63 the result is `beyond` of the value."""

    def compute(x: Any, y: Any, out: Any = None, dtype: Any = None) -> Any:
        legal = (y >= 0) & (y <= 63)
        value = np.asarray(x, np.int64)
        return np.where(legal, ufunc(value, np.where(legal, y, 0)), beyond(value)).astype(dtype)

    return compute


def _converted(x: Any, out: Any = None, dtype: Any = None) -> Any:
    return np.asarray(x).astype(dtype)


def _truncated(x: Any, out: Any = None, dtype: Any = None) -> Any:
    x = np.asarray(x, np.float64)
    return np.clip(np.where(np.isnan(x), 0, x), -(2.0**31), 2.0**31 - 1).astype(dtype)


def _select(c: Any, x: Any, y: Any, out: Any = None, dtype: Any = None) -> Any:
    if out is not None and out is x:
        np.copyto(out, y, where=np.logical_not(c))
    elif out is not None and out is y:
        np.copyto(out, x, where=c)
    else:
        chosen = np.where(c, np.asarray(x, dtype), np.asarray(y, dtype))
        if out is None:
            return chosen
        out[...] = chosen
    return out


def _row(name: str, signatures: str, cuda: str, slopes: Callable[..., Any] | None = None, **options: Any) -> Operation:
    """Return a row, computed by NumPy's function of that name and bounded by the rule of that name, or by others."""
    options = {"ufunc": getattr(np, name, None), "bounds": getattr(ranges, name, None), **options}
    return Operation(name, tuple(signatures.split()), cuda, slopes, **options)


def _math(
    name: str, slope: Callable[..., Any], low: float = -np.inf, high: float = np.inf, **options: Any
) -> Operation:
    """Return the row of a function of one number, by default one that rises between two numbers."""
    bounds = ranges.increasing(getattr(np, name), low, high)
    named = {"cuda": name.replace("arc", "a") + "{f}({0})", "bounds": bounds, **options}
    return _row(name, "f-f", slopes=lambda x, y: (slope(x, y),), heavy=True, **named)


def _rounding(name: str) -> Operation:
    return _row(name, "f-f", name + "{f}({0})", bounds=ranges.increasing(getattr(np, name)), exact=True)


def _infix(name: str, sign: str, signatures: str, **options: Any) -> Operation:
    """Return the row of what is an operator of two operands in C++."""
    return _row(name, signatures, f"{{0}} {sign} {{1}}", **options)


_NUMBERS = "ii-i ff-f"
_COMPARED = "ii-b ff-b"
_ROWS = (
    # Arithmetic.
    _infix("add", "+", _NUMBERS, slopes=lambda x, y, z: (1, 1), left=0, right=0, boolean="logical_or", wraps=True),
    _infix("subtract", "-", _NUMBERS, slopes=lambda x, y, z: (1, -1), right=0, boolean="", wraps=True),
    _infix(
        "multiply",
        "*",
        _NUMBERS,
        slopes=lambda x, y, z: (y, x),
        left=1,
        right=1,
        absorbing=0,
        boolean="logical_and",
        wraps=True,
    ),
    _row("negative", "i-i f-f", "-{0}", lambda x, y: (-1,), exact=True, boolean="", wraps=True),
    _infix(
        "true_divide",
        "/",
        "ff-f",
        slopes=lambda x, y, z: (1 / y, -z / y),
        right=1,
        short="product_of({0}, ptx::rcp({1}))",
        heavy=True,
    ),
    _row(
        "floor_divide",
        _NUMBERS,
        "floor_quotient({0}, {1})",
        ufunc=_quiet(np.floor_divide),
        unsigned="({T})(({U}){0} / ({U}){1})",
        positive="quotient_by_positive({0}, {1})",
        heavy=True,
    ),
    _row(
        "remainder",
        _NUMBERS,
        "floor_remainder({0}, {1})",
        lambda x, y, z: (1, -(x // y)),
        ufunc=_quiet(np.remainder),
        unsigned="({T})(({U}){0} % ({U}){1})",
        positive="remainder_by_positive({0}, {1})",
        heavy=True,
    ),
    _row(
        "fmod",
        _NUMBERS,
        "truncated_remainder({0}, {1})",
        lambda x, y, z: (1, -np.trunc(x / y)),
        ufunc=_quiet(np.fmod),
        unsigned="({T})(({U}){0} % ({U}){1})",
        positive="{0} % {1}",
        heavy=True,
    ),
    _row(
        "power",
        "ff-f",
        "pow{f}({0}, {1})",
        lambda x, y, z: (
            np.where(y == 0, 0.0, y * np.power(x, y - 1)),
            np.where(x > 0, z * np.log(x), 0.0),
        ),
        bounds=ranges.anything,
        right=1,
        heavy=True,
    ),
    _row("absolute", "i-i f-f", "absolute_of({0})", lambda x, y: (np.sign(x),), exact=True, boolean=""),
    _row("sign", "i-i f-f", "sign_of({0})", bounds=ranges.increasing(np.sign), exact=True, boolean=""),
    _row(
        "maximum",
        _NUMBERS,
        "maximum_of<{T}>({0}, {1})",
        chosen=lambda x, y: x >= y,
        exact=True,
        boolean="logical_or",
    ),
    _row(
        "minimum",
        _NUMBERS,
        "minimum_of<{T}>({0}, {1})",
        chosen=lambda x, y: x <= y,
        exact=True,
        boolean="logical_and",
    ),
    _row("select", "bbb-b bii-i bff-f", "{0} ? {1} : {2}", ufunc=_select, chosen=lambda c, x, y: c, exact=True),
    # Functions of numbers.
    _math("sqrt", lambda x, y: 0.5 / y, 0, short="ptx::sqrt({0})"),
    _math("cbrt", lambda x, y: 1 / (3 * y * y)),
    _math("exp", lambda x, y: y, bounds=ranges.exp, short=f"ptx::ex2({{0}} * {1 / _LN2}f)"),
    _math("exp2", lambda x, y: _LN2 * y, short="ptx::ex2({0})"),
    _math("expm1", lambda x, y: y + 1),
    _math(
        "log",
        lambda x, y: 1 / x,
        bounds=ranges.approximated(np.log, 0),
        short=f"product_of(ptx::lg2_any({{0}}), {_LN2}f)",
    ),
    _math(
        "log2",
        lambda x, y: 1 / (_LN2 * x),
        bounds=ranges.approximated(np.log2, 0),
        cuda="binary_logarithm({0})",
        short="ptx::lg2_any({0})",
    ),
    _math("log10", lambda x, y: 1 / (_LN10 * x), 0),
    _math("log1p", lambda x, y: 1 / (1 + x), -1),
    _math("sin", lambda x, y: np.cos(x), bounds=ranges.within(-1, 1)),
    _math("cos", lambda x, y: -np.sin(x), bounds=ranges.within(-1, 1)),
    _math("tan", lambda x, y: 1 + y * y, bounds=ranges.anything),
    _math("arcsin", lambda x, y: 1 / np.sqrt(1 - x * x), -1, 1),
    _math("arccos", lambda x, y: -1 / np.sqrt(1 - x * x), bounds=ranges.decreasing(np.arccos, -1, 1)),
    _math("arctan", lambda x, y: 1 / (1 + x * x)),
    _math("sinh", lambda x, y: np.cosh(x)),
    _math("cosh", lambda x, y: np.sinh(x), bounds=ranges.even(np.cosh)),
    _math("tanh", lambda x, y: 1 - y * y, bounds=ranges.approximated(np.tanh), short="short_tanh({0})"),
    _math("arcsinh", lambda x, y: 1 / np.sqrt(x * x + 1)),
    _math("arccosh", lambda x, y: 1 / np.sqrt(x * x - 1), 1),
    _math("arctanh", lambda x, y: 1 / (1 - x * x), -1, 1),
    _row(
        "arctan2",
        "ff-f",
        "atan2{f}({0}, {1})",
        lambda x, y, z: (y / (x * x + y * y), -x / (x * x + y * y)),
        bounds=ranges.within(-3.2, 3.2),
        heavy=True,
    ),
    _row(
        "hypot",
        "ff-f",
        "hypot{f}({0}, {1})",
        lambda x, y, z: (np.where(z == 0, 0.0, x / z), np.where(z == 0, 0.0, y / z)),
        heavy=True,
    ),
    _row(
        "logaddexp",
        "ff-f",
        "log_add_exp({0}, {1})",
        lambda x, y, z: tuple([np.where(side == -np.inf, 0.0, np.exp(side - z)) for side in (x, y)]),
        bounds=ranges.anything,
        heavy=True,
    ),
    *map(_rounding, ("floor", "ceil", "trunc", "rint")),
    # Questions.
    _row("isnan", "f-b", "{0} != {0}"),
    _row("isinf", "f-b", "is_infinite({0})", bounds=ranges.either),
    _infix("less", "<", _COMPARED),
    _infix("less_equal", "<=", _COMPARED),
    _infix("equal", "==", _COMPARED),
    _row("logical_not", "b-b", "!{0}"),
    _infix("logical_and", "&&", "bb-b", left=True, right=True, absorbing=False),
    _infix("logical_or", "||", "bb-b", left=False, right=False, absorbing=True),
    _infix("logical_xor", "!=", "bb-b", left=False, right=False),
    # Bits of integers.
    _infix("bitwise_and", "&", "ii-i", boolean="logical_and", left=-1, right=-1),
    _infix("bitwise_or", "|", "ii-i", boolean="logical_or", left=0, right=0),
    _infix("bitwise_xor", "^", "ii-i", bounds=ranges.bitwise_or, boolean="logical_xor", left=0, right=0),
    _row("invert", "i-i", "~{0}", boolean="logical_not"),
    _row("left_shift", "ii-i", "shifted_left<{T}>({0}, {1})", ufunc=_shift(np.left_shift, np.zeros_like), right=0),
    _row(
        "right_shift", "ii-i", "shifted_right<{T}>({0}, {1})", ufunc=_shift(np.right_shift, lambda x: x >> 63), right=0
    ),
    # From one kind to another.
    _row("to_float", "b-f i-f", "({T}){0}", ufunc=_converted),
    _row("to_integer", "b-i f-i", "truncated_to<{T}>({0})", ufunc=_truncated),
)

TABLE = {row.name: row for row in _ROWS}
"""The operations by name."""

COMPARISONS = frozenset({"less", "less_equal", "equal"})  # of which the others are made
DIVISIONS = frozenset({"floor_divide", "remainder", "fmod"})
SHIFTS = frozenset({"left_shift", "right_shift"})
ROUNDED = frozenset({"true_divide", "sqrt"})  # correctly, by IEEE 754
