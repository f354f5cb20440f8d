"""Graphs computed by NumPy: on tiles of any shape, in the accumulator's precision, in buffers that are used again."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuattn.tracing.bound import ANY_LENGTH, Bound, Facts, facts
from cuattn.tracing.build import is_uniform
from cuattn.tracing.extremes import of_dtype
from cuattn.tracing.graph import Node, order
from cuattn.tracing.operations import TABLE
from cuattn.tracing.ranges import EITHER, OPEN, Interval
from cuattn.tracing.tiles import bounds

_LARGEST = float(2**31 - 1)
_INT32 = Interval(np.float64(-_LARGEST - 1), np.float64(_LARGEST))
_OF_KIND = {"b": EITHER, "i": _INT32, "l": OPEN, "f": OPEN._replace(nan=True)}


@functools.lru_cache(maxsize=256)
def known(roots: tuple[Node, ...], facts: Facts) -> dict[Node, Interval]:
    """Return the bounds of every value of graphs that hold throughout a call.

    Parameters
    ----------
    roots : tuple of Node
    facts : Facts
    """
    limits = zip("bhij", facts.limits, strict=True)
    variables = {name: Interval(np.float64(0), np.float64(max(limit - 1, 0))) for name, limit in limits}
    arrays = [of_dtype(np.dtype(layout.dtype)) for layout in facts.arrays]
    return bounds(roots, variables, arrays, [_OF_KIND[kind] for kind in facts.numbers], keep=True)


def leaves_int64(found: dict[Node, Interval]) -> bool:
    """Return whether an integer among bounded values lies beyond int64 wherever it is computed."""
    wrapping = [node for node in found if node.kind == "i" and node.op in TABLE and TABLE[node.op].wraps]
    for node in wrapping:
        with np.errstate(all="ignore"):
            lo, hi, _ = TABLE[node.op].bounds(*[found[x] for x in node.args])
        if lo >= 2.0**63 or hi < -(2.0**63):
            return True
    return False


def fits_int32(interval: Interval) -> bool:
    """Return whether integers within bounds are integers of int32."""
    return bool(interval.lo >= -_LARGEST - 1 and interval.hi <= _LARGEST)


class Fit(NamedTuple):
    """Whether indices of an axis may be negative, and so wrap, and whether they may leave it then."""

    wraps: bool
    clamps: bool


def fit(index: Interval, length: int) -> Fit:
    """Return what has to be done with an index within bounds.

    Examples
    --------
    >>> fit(Interval(np.float64(0), np.float64(6)), 7), fit(Interval(np.float64(-3), np.float64(6)), 7)
    (Fit(wraps=False, clamps=False), Fit(wraps=True, clamps=False))
    """
    return Fit(bool(index.lo < 0), not bool(index.lo >= -length and index.hi < length))


class Program:
    """Graphs in the order in which NumPy computes them.

    Parameters
    ----------
    roots : tuple of Node
    dtype : numpy.dtype
        Of the accumulator: float32 or float64.
    facts : Facts
        Of the calls for which it is.

    Examples
    --------
    >>> from cuattn.tracing.functions import trace
    >>> bound = trace(lambda s, b, h, i, j: s + 0.5 * (j - i)).bind()
    >>> program = Program((bound.root,), np.dtype(np.float32), facts(bound))
    >>> i, j = np.arange(2, dtype=np.int32)[:, None], np.arange(2, dtype=np.int32)
    >>> program({"s": np.zeros((2, 2), np.float32), "i": i, "j": j}, bound)
    [array([[ 0. ,  0.5],
           [-0.5,  0. ]], dtype=float32)]
    """

    def __init__(self, roots: tuple[Node, ...], dtype: np.dtype, facts: Facts) -> None:
        self.roots, self.dtype, self._facts = roots, dtype, facts
        self._known = known(roots, facts)
        nodes = order(*roots)
        self._host = [node for node in nodes if is_uniform(node)]
        nodes = [node for node in nodes if not is_uniform(node)]
        last = {arg: node for node in nodes for arg in node.args}
        keep, self._dtypes = {*roots, *self._host}, {}
        for node in (*self._host, *nodes):
            self._dtypes[node] = self._dtype_of(node)
        self._steps = [
            (node, self._dtypes[node], [x for x in dict.fromkeys(node.args) if last[x] is node and x not in keep])
            for node in nodes
        ]

    def _dtype_of(self, node: Node) -> np.dtype:
        """Return the dtype of a value: integers are of int32 if they fit and all that they are made of is."""
        if node.kind != "i":
            return np.dtype(bool) if node.kind == "b" else self.dtype
        narrow = node.op == "load" or not any(self._dtypes[x] == np.int64 for x in node.args)
        return np.dtype(np.int32 if narrow and fits_int32(self._known[node]) else np.int64)

    def __call__(self, variables: Mapping[str, Any], bound: Bound, out: Any = None) -> list[np.ndarray]:
        """Compute the roots.

        Parameters
        ----------
        variables : mapping of str to array
            s, b, h, i, j, which broadcast; those that the graphs do not depend on may be missing.
        bound : Bound
            Its arrays and numbers.
        out : array, optional
            Where the first root is written if it has that shape and dtype and is computed last; it may be `s`.

        Returns
        -------
        list of array
            The roots' values, of the shape to which what they depend on broadcasts.
        """
        values: dict[Node, Any] = {}
        owned: set[int] = set()
        with np.errstate(all="ignore"):
            self._compute_host(values, bound.numbers)
            for node, dtype, dying in self._steps:
                if node.op == "variable":
                    values[node] = variables[node.value]
                elif node.op == "load":
                    values[node] = self._loaded(node, dtype, values, bound.arrays[node.value])
                else:
                    target = out if node is self.roots[0] and node is self._steps[-1][0] else None
                    buffers = [target, *[values[x] for x in dying if id(values[x]) in owned]]
                    values[node] = _computed(node, dtype, [values[x] for x in node.args], buffers)
                for x in dying:
                    owned.discard(id(values.pop(x)))
                if node.args and node.op != "load":
                    owned.add(id(values[node]))
        return [np.asarray(values[root]) for root in self.roots]

    def _compute_host(self, values: dict[Node, Any], numbers: Sequence[Any]) -> None:
        """Compute what no element changes, in float64, and round it."""
        wide: dict[Node, Any] = {}
        types = {"b": np.bool_, "i": np.int64, "f": np.float64}
        for node in self._host:
            if node.args:
                dtype = np.dtype(types[node.kind])
                wide[node] = _computed(node, dtype, [wide[x] for x in node.args], ())
            else:
                wide[node] = types[node.kind](node.value if node.op == "constant" else numbers[node.value])
            values[node] = self._dtypes[node].type(wide[node])

    def _loaded(self, node: Node, dtype: np.dtype, values: Mapping[Node, Any], array: np.ndarray) -> np.ndarray:
        """Return elements of an array."""
        indices = []
        for arg, length in zip(node.args, array.shape, strict=True):
            index, (wraps, clamps) = np.asarray(values[arg]), fit(self._known[arg], length)
            index = np.where(index < 0, index + length, index) if clamps and wraps else index  # NumPy wraps
            indices.append(np.clip(index, 0, length - 1) if clamps else index)
        return array[tuple(indices)].astype(dtype, copy=False)


def _computed(node: Node, dtype: np.dtype, operands: list[Any], buffers: Sequence[Any]) -> Any:
    """Compute an operation, in a buffer of the right shape where there is one."""
    ufunc, options = TABLE[node.op].ufunc, {}
    if node.kind != "b" or not isinstance(ufunc, np.ufunc):
        options["dtype"] = dtype
    if node.op in ("to_float", "to_integer"):
        options["casting"] = "unsafe"
    shape = np.broadcast_shapes(*[np.shape(x) for x in operands]) if buffers else ()
    for buffer in buffers if shape else ():
        if buffer is not None and buffer.shape == shape and buffer.dtype == dtype:
            return ufunc(*operands, out=buffer, **options)
    return ufunc(*operands, **options)


_program = functools.lru_cache(maxsize=256)(Program)


def host_value(root: Node, numbers: Sequence[Any]) -> Any:
    """Return a value that is made of constants and parameters alone, as a Python number.

    Parameters
    ----------
    root : Node
    numbers : sequence
        By slot of the parameters.

    Examples
    --------
    >>> from cuattn.tracing.build import apply
    >>> from cuattn.tracing.graph import parameter
    >>> host_value(apply("exp2", parameter(0, "f")), (3.0,))
    8.0
    """
    return evaluate(Bound(root, (), tuple(numbers)), {}, np.float64).item()


def evaluate(
    bound: Bound,
    variables: Mapping[str, Any],
    dtype: Any = np.float32,
    limits: tuple[int, int, int, int] = ANY_LENGTH,
    out: Any = None,
) -> np.ndarray:
    """Compute a graph on a tile.

    Parameters
    ----------
    bound : Bound
        The graph, its arrays and its numbers.
    variables : mapping of str to array
        s, b, h, i, j, which broadcast against each other; s in `dtype`, the others of int32.
    dtype : dtype_like, default float32
        The accumulator's: float32 or float64.
    limits : tuple of int, optional
        What b, h, i and j stay below; with narrow limits integers are of int32, which is quicker.
    out : array, optional
        Where the result is written if it has that shape; it may be ``variables["s"]``.

    Returns
    -------
    array
        Of the shape to which those variables broadcast on which the graph depends.

    Examples
    --------
    >>> from cuattn.tracing.functions import MASK, trace
    >>> i, j = np.arange(3, dtype=np.int32)[:, None], np.arange(3, dtype=np.int32)
    >>> evaluate(trace(lambda b, h, i, j: i >= j, MASK).bind(), {"i": i, "j": j}).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """
    program = _program((bound.root,), np.dtype(dtype), facts(bound, limits))
    return program(variables, bound, out)[0]
