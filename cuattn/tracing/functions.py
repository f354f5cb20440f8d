"""A function called once with proxies, and known from then on: by its identity, then by its graph."""

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn.errors import ArgumentError, CuattnError, as_integer, shown
from cuattn.tracing.bound import Bound, Frozen, facts, kind_of_number, narrowed, span_of
from cuattn.tracing.build import convert, place_in
from cuattn.tracing.capture import Argument, Identity, Snapshot, Tracer, copied, identity, is_array, watch
from cuattn.tracing.derivatives import split_visible
from cuattn.tracing.graph import Node, order, variable
from cuattn.tracing.proxy import ArrayProxy, Proxy, active, as_node, kind_of
from cuattn.tracing.values import leaves_int64

SCORE, MASK = ("s", "b", "h", "i", "j"), ("b", "h", "i", "j")
"""What functions of scores and of masks are called with."""

_MOST = 512  # functions that are remembered
_lock = threading.RLock()
_known: dict[Hashable, "Known"] = {}  # by identity
_recent: dict[int, tuple[Snapshot, "Known"]] = {}  # by the function's id


@dataclass(frozen=True, eq=False)
class Traced(Bound):
    """A traced function.

    Attributes
    ----------
    root : Node
        The result: a float of the variables in `SCORE`, or a boolean of those in `MASK`.
    arrays : tuple
        By slot of the graph: an :class:`Argument`, the place of an array in the arguments, or a captured array.
    numbers : tuple
        By slot of the parameters: an :class:`Argument` or a Python float.
    spans : tuple
        By slot of the arrays: least and greatest element of captured integers.
    """

    signature: tuple = ()  # what of the arguments it was traced for

    @functools.cached_property
    def kind(self) -> Hashable:
        """What calls share that differ in the elements of arrays and in the values of numbers alone."""
        captured = [x if isinstance(x, Argument) else (np.dtype(x.dtype), x.shape, x.strides) for x in self.arrays]
        return _token(self.root, self.signature, self.spans, *captured)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """By slot of the arrays, which of the arguments that are arrays it is; -1 of a captured array."""
        arguments = sorted(x for x in self.arrays if isinstance(x, Argument))
        return tuple([arguments.index(x) if isinstance(x, Argument) else -1 for x in self.arrays])

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether the function's arrays are the arguments, in their order."""
        return self.order == tuple(range(len(self.order)))

    @functools.cached_property
    def has_own_numbers(self) -> bool:
        """Whether none of the numbers are arguments."""
        return Argument not in map(type, self.numbers)

    def numbers_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return Python numbers by slot of the parameters, given the function's arguments after j."""
        if self.has_own_numbers:
            return self.numbers
        numbers = [args[x] if type(x) is Argument else x for x in self.numbers]
        return tuple([x.item() if isinstance(x, np.generic) else x for x in numbers])

    @functools.cached_property
    def split(self) -> tuple[Frozen | None, Node]:
        """Where a score is visible, if captured integers alone say that, and the score there.

        A mask may then say it, whatever the precision of scores.  See :func:`cuattn.tracing.split_visible`.
        """
        visible, score = split_visible(self.root)
        if visible is None:
            return None, self.root
        nodes = order(visible)
        read = {(x.op, x.value) for x in nodes}
        arrays = [x if ("load", slot) in read else np.zeros(0) for slot, x in enumerate(self.arrays)]
        numbers = [x if ("parameter", slot) in read else 0.0 for slot, x in enumerate(self.numbers)]
        constant = all(isinstance(x, np.ndarray) for x in arrays) and Argument not in map(type, numbers)
        if not constant or any(x.kind == "f" for x in nodes):
            return None, self.root
        return Frozen(visible, arrays, numbers), score

    @functools.cached_property
    def floats(self) -> dict[int, int]:
        """The slots of arrays of floats among the arguments, and which arguments they are."""
        slots = {slot: int(x) for slot, x in enumerate(self.arrays) if isinstance(x, Argument)}
        return {slot: index for slot, index in slots.items() if kind_of(self.signature[2 + index][0]) == "f"}

    def bind(self, args: Sequence[Any] = ()) -> "Bound":
        """Return the graph with the arrays and numbers of a call.

        Parameters
        ----------
        args : sequence
            The function's arguments after j.
        """
        arrays, numbers = ([args[x] if isinstance(x, Argument) else x for x in y] for y in (self.arrays, self.numbers))
        return Bound(self.root, tuple(arrays), tuple(numbers), self.spans)

    @functools.cached_property
    def captured(self) -> Bound:
        """The graph with what a function without further arguments captured: a `Frozen` if all of it is on the host."""
        if all(isinstance(array, np.ndarray) for array in self.arrays):
            return Frozen(self.root, self.arrays, self.numbers)
        return self.bind()


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a function that captures certain objects.

    Attributes
    ----------
    traced : dict
        What it was traced to, by what of its arguments counts.
    watched : list
        References to what it captures, whose ends make it unknown.
    calls : dict
        What others keep as long as it is known.
    """

    traced: dict[Hashable, Traced]
    watched: list[Any]
    calls: dict[Any, Any]


@functools.lru_cache(_MOST)
def _token(*content: Hashable) -> Hashable:
    """Return an object that stands for some content: it takes no time to hash."""
    return object()


def trace(
    function: Callable[..., Any],
    names: tuple[str, ...] = SCORE,
    args: Sequence[Any] = (),
    *,
    adopt: Callable[[Any], Any] = copied,
) -> Traced:
    """Trace a function, or return what is known of it.

    Parameters
    ----------
    function : callable
        ``score(s, b, h, i, j, *args)`` or ``visible(b, h, i, j, *args)``, in NumPy style.
    names : tuple of str, default SCORE
        `SCORE` or `MASK`.
    args : sequence of arrays and numbers, optional
        Further arguments; of arrays shape and dtype count.
    adopt : callable, optional
        Copies a captured array; by default to the host, or within CuPy.

    Returns
    -------
    Traced

    Raises
    ------
    ArgumentError
        The function cannot be traced; the message says where and what to write instead.

    Examples
    --------
    >>> import numpy as np
    >>> slope = np.array([0.5, 0.25])
    >>> trace(lambda s, b, h, i, j: s + slope[h] * (j - i)).root
    add(s, multiply(array0(h), to_float(subtract(j, i))))
    """
    signature = names, adopt, *[kind_of_argument(names, index, x) for index, x in enumerate(args)]
    known = recall(function)
    traced = known and known.traced.get(signature)
    if traced is None:
        who = identity(function)
        with _lock:
            traced = _trace(function, names, args, signature)
        if who is not None:
            key = tuple(who.parts)
            known = _known.get(key)
            if known is None:
                known = Known({}, watch(who.held, functools.partial(_known.pop, key)), {})
                _remember(_known, key, known)
            _remember(known.traced, signature, traced)
            _remember_snapshot(function, who, known)
    return traced


def recall(function: Callable) -> "Known | None":
    """Return what is known of a function; the same object as long as it captures the same."""
    recent = _recent.get(id(function))
    if recent is not None and recent[0].holds(function):
        return recent[1]
    who = identity(function)
    found = who and _known.get(tuple(who.parts))
    if not who or not found:
        return None
    _remember_snapshot(function, who, found)
    return found


def _remember_snapshot(function: Callable, who: Identity, known: "Known") -> None:
    snapshot = Snapshot.of(function, who, functools.partial(_recent.pop, id(function)))
    if snapshot is not None:
        _remember(_recent, id(function), (snapshot, known))


def _remember(where: dict, key: Hashable, value: Any) -> None:
    """Keep a value among at most `_MOST`, of which the oldest make room."""
    while len(where) >= _MOST:
        where.pop(next(iter(where)), None)
    where[key] = value


def kind_of_argument(names: tuple[str, ...], index: int, value: Any) -> Any:
    """Return what a trace depends on of a further argument: dtype and shape of an array, the kind of a number."""
    if type(value) is float:
        return "f"
    if is_array(value):
        dtype = _plain(value.dtype)
        if dtype is None:
            place = _argument(names, index)
            raise ArgumentError(f"{place} has dtype {value.dtype}: expected booleans, integers or floats")
        return dtype, tuple(value.shape)
    if isinstance(value, bool | np.bool_ | float | np.floating):
        return kind_of_number(value)
    number = as_integer(value)
    if number is None or not -(2**63) <= number < 2**63:
        place = _argument(names, index)
        raise ArgumentError(f"{place} = {shown(value)}: expected an array, or a number (integers of int64)")
    return kind_of_number(number)


@functools.lru_cache(maxsize=64)
def _plain(dtype: Any) -> np.dtype | None:
    """Return a dtype of any library as NumPy's; None of those whose elements are no numbers."""
    for given in (dtype, str(dtype).rpartition(".")[2]):  # "torch.float32"
        with contextlib.suppress(TypeError):
            return np.dtype(given) if kind_of(given) else None
    return None


def _argument(names: tuple[str, ...], index: int) -> str:
    return f"{'score_args' if names == SCORE else 'args'}[{index}]"


def _trace(function: Callable, names: tuple[str, ...], args: Sequence[Any], signature: tuple) -> Traced:
    if not callable(function):
        raise ArgumentError(f"{shown(function)}: expected a function of ({', '.join(names)})")
    tracer = Tracer(signature[1])
    outer, active.tracer = getattr(active, "tracer", None), tracer
    try:
        operands = [_operand(tracer, Argument(index), value) for index, value in enumerate(args)]
        result = tracer.called(function)(*[Proxy(variable(name)) for name in names], *operands)
        root = _checked(function, result, "f" if "s" in names else "b")
        for index, value in enumerate(args if names == SCORE else ()):
            if is_array(value):
                tracer.slot(Argument(index))  # one that the function does not read has a gradient, of 0
    except CuattnError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"{place_in(error.__traceback__) or _place(function)}{type(error).__name__}: {error}, while the function "
            f"was traced; it is called once, with ({', '.join(names)}) that stand for all of their values, and must be "
            "made of arithmetic and NumPy's ufuncs"
        ) from error
    finally:
        active.tracer = outer
    arrays = tuple(map(narrowed, tracer.arrays))
    traced = Traced(root, arrays, tuple(tracer.numbers), tuple(map(span_of, arrays)), signature)
    if leaves_int64(root, facts(traced.bind(args))):
        raise ArgumentError(
            f"{_place(function)}the function computes an integer beyond int64: expected smaller ones, or floats"
        )
    return traced


def _place(function: Callable) -> str:
    """Return where a function begins, as errors write it."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}: " if code else ""


def _operand(tracer: Tracer, index: Argument, value: Any) -> Proxy | ArrayProxy:
    if is_array(value):
        return ArrayProxy(lambda: value, index)
    return Proxy(tracer.argument(index, kind_of_argument(SCORE, index, value).replace("l", "i")))


def _checked(function: Callable, result: Any, kind: str) -> Node:
    """Return the node of a function's result."""
    place = _place(function)
    wanted = {"f": "the score, a single number", "b": "a boolean, True where the key may be seen"}[kind]
    if not isinstance(result, Proxy | ArrayProxy | np.ndarray | np.generic | int | float) or getattr(
        result, "shape", ()
    ):
        what = "None (a return is missing?)" if result is None else f"{shown(result)} of type {type(result).__name__}"
        raise ArgumentError(f"{place}the function returns {what}: expected {wanted}")
    node = as_node(result)
    if kind == "b" and node.kind != "b":
        raise ArgumentError(f"{place}the function returns a number: expected {wanted}; write x != 0")
    if kind == "f" and node.kind == "b":
        raise ArgumentError(
            f"{place}the function returns a boolean: expected {wanted}; a function of visibility is a mask"
        )
    return convert(node, kind)
