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

_LN2, _LN10, _LOG2E = math.log(2), math.log(10), 1 / math.log(2)


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation.

    Attributes
    ----------
    name : str
    ufunc : callable
        Computes it, as ``ufunc(*operands, out=..., dtype=...)``; the dtype is that of the operands' kind.
    signatures : tuple of str
        Kinds of operands and result, "ii-i" for example; the first to which all operands can be promoted holds.
    cuda : str
        C++ expression of the operands {0}, {1}, {2}, of the accumulator's suffix {f} and of the result's type {T}.
    bounds : callable
        Rule of :mod:`cuattn.tracing.ranges`; `bounds_integer` where integers have another.
    slopes : tuple of callable
        Partial derivatives in NumPy style, of the operands and the result; () means that all are 0.
    chosen : callable, optional
        Of operations that choose one of their last two operands: when it is the first of these.
    left, right : number, optional
        Operand that leaves the other one as it is; `absorbing`: that makes the result equal to it (not for floats).
    boolean : str, optional
        The operation of that meaning on booleans; "" where there is none.
    exact : bool
        Whether the result is never rounded.
    unsigned : str, optional
        C++ expression where no operand is negative and the last one not 0; {U} is the unsigned type.
    short : str, optional
        C++ expression in 16-bit problems.
    wraps : bool
        Whether an integer result may leave int64, in which it then wraps.
    heavy : bool
        Whether it takes more than a few instructions, so that it is worth computing once for many elements.
    """

    name: str
    ufunc: Callable[..., Any]
    signatures: tuple[str, ...]
    cuda: str
    bounds: ranges.Rule
    slopes: tuple[Callable[..., Any], ...] = ()
    chosen: Callable[..., Any] | None = None
    bounds_integer: ranges.Rule | None = None
    left: float | bool | None = None
    right: float | bool | None = None
    absorbing: float | bool | None = None
    boolean: str | None = None
    exact: bool = False
    unsigned: str | None = None
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
    return np.positive(x, out=out, dtype=dtype, casting="unsafe")


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


def _math(name: str, ufunc: np.ufunc, cuda: str, bounds: ranges.Rule, slope: Callable, **options: Any) -> Operation:
    """Return the row of a function of one number."""
    return Operation(name, ufunc, ("f-f",), cuda + "{f}({0})", bounds, (slope,), heavy=True, **options)


def _rounding(name: str, ufunc: np.ufunc) -> Operation:
    return Operation(name, ufunc, ("f-f",), name + "{f}({0})", ranges.increasing(ufunc), exact=True)


def _comparison(name: str, ufunc: np.ufunc, sign: str, bounds: ranges.Rule) -> Operation:
    return Operation(name, ufunc, ("ii-b", "ff-b"), f"{{0}} {sign} {{1}}", bounds)


def _choice(name: str, ufunc: np.ufunc, bounds: ranges.Rule, chosen: Callable, boolean: str) -> Operation:
    return Operation(
        name,
        ufunc,
        ("ii-i", "ff-f"),
        f"{name}_of<{{T}}>({{0}}, {{1}})",
        bounds,
        chosen=chosen,
        exact=True,
        boolean=boolean,
    )


def _logic(name: str, ufunc: np.ufunc, sign: str, bounds: ranges.Rule, unit: bool, **options: Any) -> Operation:
    return Operation(name, ufunc, ("bb-b",), f"{{0}} {sign} {{1}}", bounds, left=unit, right=unit, **options)


def _bitwise(name: str, ufunc: np.ufunc, sign: str, bounds: ranges.Rule, boolean: str, unit: int) -> Operation:
    return Operation(name, ufunc, ("ii-i",), f"{{0}} {sign} {{1}}", bounds, boolean=boolean, left=unit, right=unit)


_ROWS = (
    # Arithmetic.
    Operation(
        "add",
        np.add,
        ("ii-i", "ff-f"),
        "{0} + {1}",
        ranges.add,
        (lambda x, y, z: 1, lambda x, y, z: 1),
        left=0,
        right=0,
        boolean="logical_or",
        wraps=True,
    ),
    Operation(
        "subtract",
        np.subtract,
        ("ii-i", "ff-f"),
        "{0} - {1}",
        ranges.subtract,
        (lambda x, y, z: 1, lambda x, y, z: -1),
        right=0,
        boolean="",
        wraps=True,
    ),
    Operation(
        "multiply",
        np.multiply,
        ("ii-i", "ff-f"),
        "{0} * {1}",
        ranges.corners(np.multiply),
        (lambda x, y, z: y, lambda x, y, z: x),
        left=1,
        right=1,
        absorbing=0,
        boolean="logical_and",
        wraps=True,
    ),
    Operation(
        "negative",
        np.negative,
        ("i-i", "f-f"),
        "-{0}",
        ranges.negative,
        (lambda x, y: -1,),
        exact=True,
        boolean="",
        wraps=True,
    ),
    Operation(
        "true_divide",
        np.true_divide,
        ("ff-f",),
        "{0} / {1}",
        ranges.divide,
        (lambda x, y, z: 1 / y, lambda x, y, z: -z / y),
        right=1,
        short="{0} * ptx::rcp({1})",
        heavy=True,
    ),
    Operation(
        "floor_divide",
        _quiet(np.floor_divide),
        ("ii-i", "ff-f"),
        "floor_quotient({0}, {1})",
        ranges.floor_divide_float,
        bounds_integer=ranges.floor_divide,
        unsigned="({T})(({U}){0} / ({U}){1})",
        heavy=True,
    ),
    Operation(
        "remainder",
        _quiet(np.remainder),
        ("ii-i", "ff-f"),
        "floor_remainder({0}, {1})",
        ranges.remainder,
        (lambda x, y, z: 1, lambda x, y, z: -(x // y)),
        bounds_integer=ranges.remainder_integer,
        unsigned="({T})(({U}){0} % ({U}){1})",
        heavy=True,
    ),
    Operation(
        "fmod",
        _quiet(np.fmod),
        ("ii-i", "ff-f"),
        "truncated_remainder({0}, {1})",
        ranges.fmod,
        (lambda x, y, z: 1, lambda x, y, z: -np.trunc(x / y)),
        unsigned="({T})(({U}){0} % ({U}){1})",
        heavy=True,
    ),
    Operation(
        "power",
        np.power,
        ("ff-f",),
        "pow{f}({0}, {1})",
        ranges.power,
        (
            lambda x, y, z: np.where(y == 0, 0.0, y * np.power(x, y - 1)),
            lambda x, y, z: np.where(x > 0, z * np.log(x), 0.0),
        ),
        right=1,
        heavy=True,
    ),
    Operation(
        "absolute",
        np.absolute,
        ("i-i", "f-f"),
        "absolute_of({0})",
        ranges.absolute,
        (lambda x, y: np.sign(x),),
        exact=True,
        boolean="",
    ),
    Operation("sign", np.sign, ("i-i", "f-f"), "sign_of({0})", ranges.increasing(np.sign), exact=True, boolean=""),
    _choice("maximum", np.maximum, ranges.greater, lambda x, y: x >= y, "logical_or"),
    _choice("minimum", np.minimum, ranges.lesser, lambda x, y: x <= y, "logical_and"),
    Operation(
        "select",
        _select,
        ("bbb-b", "bii-i", "bff-f"),
        "{0} ? {1} : {2}",
        ranges.select,
        chosen=lambda c, x, y: c,
        exact=True,
    ),
    # Functions of numbers.
    _math("sqrt", np.sqrt, "sqrt", ranges.increasing(np.sqrt, 0), lambda x, y: 0.5 / y, short="ptx::sqrt({0})"),
    _math("cbrt", np.cbrt, "cbrt", ranges.increasing(np.cbrt), lambda x, y: 1 / (3 * y * y)),
    _math("exp", np.exp, "exp", ranges.exp, lambda x, y: y, short=f"ptx::ex2({{0}} * {_LOG2E}f)"),
    _math("exp2", np.exp2, "exp2", ranges.increasing(np.exp2), lambda x, y: _LN2 * y, short="ptx::ex2({0})"),
    _math("expm1", np.expm1, "expm1", ranges.increasing(np.expm1), lambda x, y: y + 1),
    _math("log", np.log, "log", ranges.increasing(np.log, 0), lambda x, y: 1 / x),
    _math("log2", np.log2, "log2", ranges.increasing(np.log2, 0), lambda x, y: 1 / (_LN2 * x)),
    _math("log10", np.log10, "log10", ranges.increasing(np.log10, 0), lambda x, y: 1 / (_LN10 * x)),
    _math("log1p", np.log1p, "log1p", ranges.increasing(np.log1p, -1), lambda x, y: 1 / (1 + x)),
    _math("sin", np.sin, "sin", ranges.within(-1, 1), lambda x, y: np.cos(x)),
    _math("cos", np.cos, "cos", ranges.within(-1, 1), lambda x, y: -np.sin(x)),
    _math("tan", np.tan, "tan", ranges.anything, lambda x, y: 1 + y * y),
    _math("arcsin", np.arcsin, "asin", ranges.increasing(np.arcsin, -1, 1), lambda x, y: 1 / np.sqrt(1 - x * x)),
    _math("arccos", np.arccos, "acos", ranges.decreasing(np.arccos, -1, 1), lambda x, y: -1 / np.sqrt(1 - x * x)),
    _math("arctan", np.arctan, "atan", ranges.increasing(np.arctan), lambda x, y: 1 / (1 + x * x)),
    _math("sinh", np.sinh, "sinh", ranges.increasing(np.sinh), lambda x, y: np.cosh(x)),
    _math("cosh", np.cosh, "cosh", ranges.even(np.cosh), lambda x, y: np.sinh(x)),
    _math("tanh", np.tanh, "tanh", ranges.tanh, lambda x, y: 1 - y * y, short="short_tanh({0})"),
    _math("arcsinh", np.arcsinh, "asinh", ranges.increasing(np.arcsinh), lambda x, y: 1 / np.sqrt(x * x + 1)),
    _math("arccosh", np.arccosh, "acosh", ranges.increasing(np.arccosh, 1), lambda x, y: 1 / np.sqrt(x * x - 1)),
    _math("arctanh", np.arctanh, "atanh", ranges.increasing(np.arctanh, -1, 1), lambda x, y: 1 / (1 - x * x)),
    Operation(
        "arctan2",
        np.arctan2,
        ("ff-f",),
        "atan2{f}({0}, {1})",
        ranges.within(-3.2, 3.2),
        (lambda x, y, z: y / (x * x + y * y), lambda x, y, z: -x / (x * x + y * y)),
        heavy=True,
    ),
    Operation(
        "hypot",
        np.hypot,
        ("ff-f",),
        "hypot{f}({0}, {1})",
        lambda x, y: ranges.corners(np.hypot)(ranges.absolute(x), ranges.absolute(y)),
        (lambda x, y, z: np.where(z == 0, 0.0, x / z), lambda x, y, z: np.where(z == 0, 0.0, y / z)),
        heavy=True,
    ),
    Operation(
        "logaddexp",
        np.logaddexp,
        ("ff-f",),
        "log_add_exp({0}, {1})",
        ranges.log_add_exp,
        (
            lambda x, y, z: np.where(x == -np.inf, 0.0, np.exp(x - z)),
            lambda x, y, z: np.where(y == -np.inf, 0.0, np.exp(y - z)),
        ),
        heavy=True,
    ),
    *(_rounding(name, getattr(np, name)) for name in ("floor", "ceil", "trunc", "rint")),
    # Questions.
    Operation("isnan", np.isnan, ("f-b",), "{0} != {0}", ranges.is_nan),
    Operation("isinf", np.isinf, ("f-b",), "is_infinite({0})", ranges.either),
    _comparison("less", np.less, "<", ranges.less),
    _comparison("less_equal", np.less_equal, "<=", ranges.less_equal),
    _comparison("greater", np.greater, ">", ranges.swapped(ranges.less)),
    _comparison("greater_equal", np.greater_equal, ">=", ranges.swapped(ranges.less_equal)),
    _comparison("equal", np.equal, "==", ranges.equal),
    _comparison("not_equal", np.not_equal, "!=", ranges.not_equal),
    Operation("logical_not", np.logical_not, ("b-b",), "!{0}", ranges.logical_not),
    _logic("logical_and", np.logical_and, "&&", ranges.logical_and, True, absorbing=False),
    _logic("logical_or", np.logical_or, "||", ranges.logical_or, False, absorbing=True),
    _logic("logical_xor", np.logical_xor, "!=", ranges.logical_xor, False),
    # Bits of integers.
    _bitwise("bitwise_and", np.bitwise_and, "&", ranges.bitwise_and, "logical_and", -1),
    _bitwise("bitwise_or", np.bitwise_or, "|", ranges.bitwise_or, "logical_or", 0),
    _bitwise("bitwise_xor", np.bitwise_xor, "^", ranges.bitwise_or, "logical_xor", 0),
    Operation("invert", np.invert, ("i-i",), "~{0}", ranges.invert, boolean="logical_not"),
    Operation(
        "left_shift",
        _shift(np.left_shift, np.zeros_like),
        ("ii-i",),
        "shifted_left<{T}>({0}, {1})",
        ranges.left_shift,
        right=0,
    ),
    Operation(
        "right_shift",
        _shift(np.right_shift, lambda x: x >> 63),
        ("ii-i",),
        "shifted_right<{T}>({0}, {1})",
        ranges.right_shift,
        right=0,
    ),
    # From one kind to another.
    Operation("to_float", _converted, ("b-f", "i-f"), "({T}){0}", ranges.as_number),
    Operation("to_integer", _truncated, ("b-i", "f-i"), "truncated_to<{T}>({0})", ranges.as_integer),
)

TABLE = {row.name: row for row in _ROWS}
"""The operations by name."""

COMPARISONS = frozenset({"less", "less_equal", "greater", "greater_equal", "equal", "not_equal"})
DIVISIONS = frozenset({"floor_divide", "remainder", "fmod"})
SHIFTS = frozenset({"left_shift", "right_shift"})
