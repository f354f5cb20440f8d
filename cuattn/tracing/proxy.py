"""What a user's function is called with: stand-ins that build the graph when NumPy computes with them.

:class:`Proxy` stands for a number, :class:`ArrayProxy` for an array.  What cannot be traced raises an ArgumentError
that names the user's line and says what to write instead.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from cuattn.errors import shown
from cuattn.tracing.build import apply, checked_integer, complaint, convert, integer_power
from cuattn.tracing.graph import Node, constant, load
from cuattn.tracing.operations import TABLE

active = threading.local()
"""`active.tracer` is the :class:`cuattn.tracing.capture.Tracer` of this thread, if it traces."""

_FOLDED = (0.0, 1.0, -1.0, np.inf, -np.inf)
_KIND_OF = {"b": "b", "i": "i", "u": "i", "f": "f"}


@functools.lru_cache(maxsize=64)
def kind_of(dtype: Any) -> str | None:
    """Return the kind of an array's elements; None of dtypes that have none.

    Examples
    --------
    >>> kind_of(np.uint8), kind_of(np.float16), kind_of(complex)
    ('i', 'f', None)
    """
    dtype = np.dtype(dtype)
    return "f" if dtype.name == "bfloat16" else _KIND_OF.get(dtype.kind)


def as_node(value: Any) -> Node:
    """Return the node of what stands in a user's expression: a proxy, or a Python or NumPy number.

    Floats other than 0, 1, -1, inf and -inf become parameters, so that another value needs no other kernel.
    """
    if isinstance(value, Proxy):
        return value.node
    if isinstance(value, ArrayProxy):
        return value.element()
    if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0 and value.dtype.kind in _KIND_OF:
        value = value.item()
    if isinstance(value, bool):
        return constant(value)
    if isinstance(value, int):
        return constant(checked_integer(int(value)))
    if isinstance(value, float):
        return _number(float(value))
    if isinstance(value, np.ndarray):
        raise complaint(
            f"an array of shape {value.shape} in an expression: expected its element, array[b, h, i, j] with the "
            "indices that it has; make the array before the function is defined"
        )
    raise complaint(f"{shown(value)} of type {type(value).__name__} in an expression: expected a number or an array")


def _number(value: float) -> Node:
    tracer = getattr(active, "tracer", None)
    if tracer is None or value in _FOLDED or value != value:
        return constant(value)
    return tracer.number(value)


def _boolean(value: Any) -> Node:
    return convert(as_node(value), "b")


_REFUSED = {
    "bool": (
        "a branch",
        "write np.where(condition, a, b) for if, & for and, | for or, ~ for not, (a <= x) & (x < b) for a <= x < b, "
        "np.minimum and np.maximum for min and max",
    ),
    "float": ("float()", "write x.astype(float), and np.exp(x) for math.exp(x)"),
    "int": ("int()", "write x.astype(int)"),
    "index": (
        "an index",
        "index arrays that are arguments of the function, or that it takes from a closure; no lists, range() or "
        "arrays made in the function",
    ),
    "iter": ("iteration", "a score is a single number, not an array"),
    "len": ("len()", "a score is a single number, not an array"),
    "getitem": ("indexing", "a score, b, h, i and j are single numbers; index an array argument by them"),
    "setitem": ("assignment to an element", "write np.where(condition, new, old)"),
    "hash": ("a look-up in a dict or set", "index an array by it"),
    "array": (
        "a NumPy array",
        "the NumPy function has no traced form, or an array was indexed that the function makes, or finds in a "
        "module: make arrays before it, and take them from a closure",
    ),
    "round": ("round()", "write np.rint(x)"),
    "trunc": ("math.trunc()", "write np.trunc(x)"),
    "floor": ("math.floor()", "write np.floor(x)"),
    "ceil": ("math.ceil()", "write np.ceil(x)"),
}
"""What needs a value that is not known while a function is traced, by the method that Python calls, with advice."""


class _Standin(NDArrayOperatorsMixin):
    """What NumPy computes with."""

    __slots__ = ()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if _all_known(inputs):
            return wrapped(getattr(ufunc, method)(*map(_plain, inputs), **options))
        return computed(ufunc, method, inputs, options)

    def __array_function__(self, function: Callable, types: Any, args: Any, options: Any) -> Any:
        if _all_known([*args, *options.values()]):
            return wrapped(function(*map(_plain, args), **{name: _plain(x) for name, x in options.items()}))
        return called(function, args, options)


def _refused(what: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **options: Any) -> NoReturn:
        raise complaint(f"{what} needs a value that is not known while the function is traced: {advice}")

    return refuse


for _name, _reason in _REFUSED.items():
    setattr(_Standin, f"__{_name}__", _refused(*_reason))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(_Standin, f"__i{_name}__", getattr(_Standin, f"__{_name}__"))  # x += y is x = x + y


class Proxy(_Standin):
    """A number of the graph.

    Parameters
    ----------
    node : Node

    Examples
    --------
    >>> from cuattn.tracing.graph import variable
    >>> i, j = Proxy(variable("i")), Proxy(variable("j"))
    >>> np.where(i - j < 4, np.exp2(-i), 0).node
    select(less(subtract(i, j), 4), exp2(negative(to_float(i))), 0.0)
    """

    __slots__ = ("node",)
    shape: tuple[int, ...] = ()
    ndim = 0

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"<traced {self.node!r}>"

    def astype(self, dtype: Any, **options: Any) -> "Proxy":
        """Return the value as a boolean, an integer or a number of the accumulator's type.

        Parameters
        ----------
        dtype : dtype_like
            Only its kind counts.
        **options
            Ignored.
        """
        kind = kind_of(dtype)
        if kind is None:
            raise complaint(f"astype({dtype!r}): expected a boolean, integer or float dtype")
        return Proxy(convert(self.node, kind))

    def clip(self, min: Any = None, max: Any = None) -> "Proxy":
        """Return the value between two bounds, as `numpy.clip`."""
        return _clip(self, min, max)


class ArrayProxy(_Standin):
    """An array of the graph: an argument, or a constant that a function captured.

    Parameters
    ----------
    get : callable
        Returns the array, of an argument only for its shape and dtype.
    number : int, optional
        Of an argument its number; the elements of other arrays are known.
    indices : tuple of Node
        Those that were given so far, of ``array[b][h]``.
    """

    def __init__(self, get: Callable[[], Any], number: Any = None, indices: tuple[Node, ...] = ()) -> None:
        self._get, self._number, self._indices = get, number, indices

    def __repr__(self) -> str:
        return f"<traced array of shape {self.shape}>"

    @property
    def _array(self) -> Any:
        return self._get()

    @property
    def _known(self) -> bool:
        return self._number is None

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes that are not indexed yet."""
        return tuple(self._array.shape)[len(self._indices) :]

    @property
    def ndim(self) -> int:
        """Number of axes that are not indexed yet."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The array's own."""
        return self._array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if self._known and not self._indices and not any(isinstance(x, Proxy | ArrayProxy) for x in index):
            return wrapped(self._array[index])
        rest = tuple([x for x in index if x is not Ellipsis])
        if len(rest) == self.ndim or (index and index[-1] is Ellipsis):
            index = rest
        if len(index) > self.ndim:
            raise complaint(f"{len(index)} indices for an array of shape {self.shape}: expected at most {self.ndim}")
        nodes = tuple([self._index(x, axis) for axis, x in enumerate(index)])
        found = ArrayProxy(self._get, self._number, self._indices + nodes)
        return found if found.ndim else Proxy(found.element())

    def _index(self, index: Any, axis: int) -> Node:
        if index is None or isinstance(index, slice | list | np.ndarray) or index is Ellipsis:
            raise complaint(f"{shown(index)} as an index of a traced array: expected an integer for each axis")
        node, length = as_node(index), self.shape[axis]
        if node.kind != "i":
            kind = {"b": "boolean", "f": "float"}[node.kind]
            advice = "write np.where(condition, a, b)" if kind == "boolean" else "convert it by .astype(int), or use //"
            raise complaint(f"a {kind} index: expected an integer; {advice}")
        if node.op == "constant" and not -length <= node.value < max(length, 1):
            raise complaint(f"index {node.value} of an axis of length {length}: expected one in range")
        return node

    def element(self) -> Node:
        """Return the load of the element whose indices were given."""
        if self.ndim:
            raise complaint(
                f"an array of shape {self.shape} in an expression: expected one element; index it, for example "
                f"array[{', '.join('bhij'[-self.ndim :])}]"
            )
        kind = kind_of(self._array.dtype)
        if kind is None:
            raise complaint(f"an array of dtype {self._array.dtype}: expected booleans, integers or floats")
        if not all(self._array.shape):
            return convert(constant(0), kind)
        return load(active.tracer.slot(self._array if self._known else self._number), kind, self._indices)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self._known:
            raise complaint(f".{name} of an array argument, which is read in every call: expected indexing alone")
        found = getattr(self._array, name)
        if not callable(found):
            return wrapped(found)
        return lambda *args, **options: wrapped(found(*args, **options))


def wrapped(value: Any) -> Any:
    """Return what was computed of captured arrays alone: an array as a captured one, a number as it is."""
    if getattr(value, "shape", ()) == () and not isinstance(value, tuple | list):
        return value
    if isinstance(value, tuple | list):
        return type(value)([wrapped(x) for x in value])
    return ArrayProxy(lambda: value)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value._array if isinstance(value, ArrayProxy) else value


def _all_known(values: Any) -> bool:
    """Return whether nothing in some operands is traced but captured arrays, with which NumPy may compute."""
    if isinstance(values, ArrayProxy):
        return values._known and not values._indices
    return all(map(_all_known, values)) if isinstance(values, list | tuple) else not isinstance(values, Proxy)


def computed(ufunc: np.ufunc, method: str, inputs: tuple, options: dict[str, Any]) -> Any:
    """Return what a ufunc makes of proxies."""
    name = _ALIASES.get(ufunc.__name__, ufunc.__name__)
    if method != "__call__" or options:
        what = f".{method}" if method != "__call__" else f" with {', '.join(options)}="
        raise complaint(f"np.{name}{what} cannot be traced: expected a plain call")
    if name in _COMPOSED:
        return _COMPOSED[name](*inputs)
    if name not in TABLE:
        raise complaint(
            f"np.{name} cannot be traced: expected arithmetic, or one of {', '.join(sorted(TABLE | _COMPOSED))}"
        )
    as_operand = _boolean if name.startswith("logical_") else as_node
    return Proxy(apply(name, *map(as_operand, inputs)))


def called(function: Callable, args: tuple, options: dict[str, Any]) -> Proxy:
    """Return what a NumPy function that is no ufunc makes of proxies."""
    if function.__name__ not in _FUNCTIONS:
        raise complaint(
            f"np.{function.__name__} cannot be traced: expected arithmetic, ufuncs, or one of "
            f"{', '.join(f'np.{name}' for name in sorted(_FUNCTIONS))}"
        )
    return _FUNCTIONS[function.__name__](*args, **options)


def _where(condition: Any, *branches: Any) -> Proxy:
    if len(branches) != 2:
        raise complaint("np.where of a condition alone: expected np.where(condition, a, b)")
    return Proxy(apply("select", _boolean(condition), *map(as_node, branches)))


def _clip(x: Any, a_min: Any = None, a_max: Any = None, **options: Any) -> Proxy:
    low, high = options.get("min", a_min), options.get("max", a_max)
    x = x if low is None else np.maximum(x, low)
    return Proxy(as_node(x if high is None else np.minimum(x, high)))


def _choose(conditions: Any, choices: Any, default: Any = 0) -> Proxy:
    result = default
    for condition, choice in reversed(list(zip(conditions, choices, strict=True))):
        result = _where(condition, choice, result)
    return Proxy(as_node(result))


def _power(x: Any, y: Any) -> Proxy:
    """Return a power; exponents that are whole or 1/2, and the base 2, are no parameters."""
    plain = isinstance(y, float | np.floating) and (y == 0.5 or float(y).is_integer())
    base = constant(2.0) if isinstance(x, float | np.floating) and x == 2 else as_node(x)
    exponent = constant(float(y)) if plain else as_node(y)
    if base.kind != "f" and exponent.kind == "i":
        if base.kind == "i" and not (exponent.op == "constant" and exponent.value < 0):
            return Proxy(integer_power(base, exponent))
        raise complaint("an integer to a negative power: expected a float base, 2.0 ** -h")
    return Proxy(apply("power", base, exponent))


def _filled(value: Any) -> Callable[..., Proxy]:
    return lambda like, *args, **options: Proxy(
        convert(as_node(args[0] if value is None else value), as_node(like).kind)
    )


_ALIASES = {"divide": "true_divide", "radians": "deg2rad", "degrees": "rad2deg"}
_COMPOSED: dict[str, Callable[..., Any]] = {
    "greater": lambda x, y: np.less(y, x),
    "greater_equal": lambda x, y: np.less_equal(y, x),
    "not_equal": lambda x, y: ~np.equal(x, y),
    "power": _power,
    "divmod": lambda x, y: (x // y, x % y),
    "float_power": lambda x, y: _power(Proxy(convert(as_node(x), "f")), y),
    "positive": lambda x: Proxy(as_node(x)),
    "fabs": lambda x: np.absolute(Proxy(convert(as_node(x), "f"))),
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "fmax": lambda x, y: np.where(np.isnan(x), y, np.where(np.isnan(y), x, np.maximum(x, y))),
    "fmin": lambda x, y: np.where(np.isnan(x), y, np.where(np.isnan(y), x, np.minimum(x, y))),
    "isfinite": lambda x: (x - x) == 0,
    "heaviside": lambda x, y: np.where(x == 0, y, np.where(x > 0, 1.0, 0.0)),
    "logaddexp2": lambda x, y: np.logaddexp(x * np.log(2), y * np.log(2)) / np.log(2),
    "deg2rad": lambda x: x * (np.pi / 180),
    "rad2deg": lambda x: x * (180 / np.pi),
}
_FUNCTIONS: dict[str, Callable[..., Proxy]] = {
    "where": _where,
    "clip": _clip,
    "select": _choose,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _filled(None),
    "isclose": lambda x, y, rtol=1e-5, atol=1e-8: np.absolute(x - y) <= atol + rtol * np.absolute(y),
    "round": lambda x, decimals=0: np.rint(x) if not decimals else np.rint(x * 10.0**decimals) / 10.0**decimals,
}
