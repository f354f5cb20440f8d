"""Graphs computed by NumPy: on tiles of any shape, in the accumulator's precision, in buffers that are used again."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cuattn.tracing.bound import ANY_LENGTH, Bound, Facts, facts
from cuattn.tracing.build import is_uniform
from cuattn.tracing.extremes import of_dtype
from cuattn.tracing.graph import HOST_DTYPES, Node, order
from cuattn.tracing.operations import TABLE
from cuattn.tracing.ranges import EITHER, OPEN, Interval, whole
from cuattn.tracing.tiles import bounds

_INT32 = Interval(np.float64(-(2**31)), np.float64(2**31 - 1))
_OF_KIND = {"b": EITHER, "i": _INT32, "l": OPEN, "f": OPEN._replace(nan=True)}


@functools.lru_cache(maxsize=256)
def known(
    roots: tuple[Node, ...], facts: Facts, integers: Callable[[Interval], Interval] = whole
) -> dict[Node, Interval]:
    """Return the bounds of every value of graphs that hold throughout a call.

    Parameters
    ----------
    roots : tuple of Node
    facts : Facts
    integers : callable, optional
        What becomes of the bounds of integers.
    """
    limits = zip("bhij", facts.limits, strict=True)
    variables = {name: Interval(np.float64(0), np.float64(max(limit - 1, 0))) for name, limit in limits}
    arrays = [of_dtype(np.dtype(layout.dtype), layout.span) for layout in facts.arrays]
    return bounds(roots, variables, arrays, [_OF_KIND[kind] for kind in facts.numbers], keep=True, integers=integers)


def leaves_int64(root: Node, facts: Facts) -> bool:
    """Return whether an integer of a graph lies beyond int64 wherever it is computed."""
    found = known((root,), facts, _unlimited)
    return any(node.kind == "i" and bool(x.lo >= 2.0**63 or x.hi < -(2.0**63)) for node, x in found.items())


def _unlimited(x: Interval) -> Interval:
    return x


def fits_int32(interval: Interval) -> bool:
    """Return whether integers within bounds are integers of int32."""
    return bool(interval.lo >= _INT32.lo and interval.hi <= _INT32.hi)


def fit(index: Interval, length: int) -> tuple[bool, bool]:
    """Return whether an index within bounds may be negative, and so wraps, and whether it may leave the axis then.

    Examples
    --------
    >>> fit(Interval(np.float64(0), np.float64(6)), 7), fit(Interval(np.float64(-3), np.float64(6)), 7)
    ((False, False), (True, False))
    """
    return bool(index.lo < 0), not (index.lo >= -length and index.hi < length)


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
        self.dtype, self._known = dtype, known(roots, facts)
        nodes = order(*roots)
        self._dtypes: dict[Node, np.dtype] = {}
        for node in nodes:
            self._dtypes[node] = self._dtype_of(node)
        self._roots, self._host = roots, [node for node in nodes if is_uniform(node)]
        self._variables = [node for node in nodes if node.op == "variable"]
        computed = [node for node in nodes if node.op != "variable" and not is_uniform(node)]
        last = {arg: node for node in computed for arg in node.args}
        made = {node for node in computed if node.op in TABLE}.difference(roots)
        self._steps = []  # what is computed, how, and the operands that nothing else needs
        for node in computed:
            compute = _operation(node, self._dtypes[node]) if node.op in TABLE else self._loader(node, facts)
            self._steps.append((node, compute, [x for x in dict.fromkeys(node.args) if last[x] is node and x in made]))

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
        return self.ready(bound)(variables, out)

    def ready(self, bound: Bound) -> Callable[..., list[np.ndarray]]:
        """Return the function of (variables, out=None, more=()) for the arrays and numbers of a call, for many tiles.

        Parameters
        ----------
        bound : Bound
            What it has no arrays for, in slots that come after, each call of the function gives as `more`.
        """
        wide: dict[Node, Any] = {}  # what no element changes is computed in float64, and rounded once
        with np.errstate(all="ignore"):
            for node in self._host:
                dtype = HOST_DTYPES[node.kind]
                if node.args:
                    wide[node] = _operation(node, dtype)([wide[x] for x in node.args], ())
                else:
                    wide[node] = dtype.type(node.value if node.op == "constant" else bound.numbers[node.value])
        start = {node: self._dtypes[node].type(value) for node, value in wide.items()}
        return functools.partial(self._run, start, bound.arrays)

    def _run(
        self,
        start: dict[Node, Any],
        arrays: Sequence[Any],
        variables: Mapping[str, Any],
        out: Any = None,
        more: Sequence[Any] = (),
    ) -> list[Any]:
        values = start | {node: variables[node.value] for node in self._variables}
        arrays = (*arrays, *more)
        with np.errstate(all="ignore"):
            for node, compute, dying in self._steps:
                buffers = [values[x] for x in dying]
                if out is not None and node is self._roots[0] and node is self._steps[-1][0]:
                    buffers.insert(0, out)
                values[node] = compute([values[x] for x in node.args], buffers, arrays)
                for x in dying:
                    del values[x]
        return [np.asarray(values[root]) for root in self._roots]

    def _loader(self, node: Node, facts: Facts) -> Callable[..., Any]:
        """Return the function that reads elements of an array, or says where they lie."""
        shape, dtype = facts.arrays[node.value].shape, self._dtypes[node]
        fits = [fit(self._known[arg], length) for arg, length in zip(node.args, shape, strict=True)]

        def load(operands: list[Any], buffers: Sequence[Any], arrays: Sequence[Any]) -> Any:
            indices = []
            for index, length, (wraps, clamps) in zip(map(np.asarray, operands), shape, fits, strict=True):
                if wraps and (clamps or node.op == "offset"):  # NumPy wraps
                    index = np.where(index < 0, index + length, index)
                indices.append(np.clip(index, 0, length - 1) if clamps else index)
            if node.op == "load":
                return arrays[node.value][tuple(indices)].astype(dtype, copy=False)
            place = np.int64(0)
            for index, length in zip(indices, shape, strict=True):
                place = place * length + index
            return place

        return load


def _operation(node: Node, dtype: np.dtype) -> Callable[..., Any]:
    """Return the function that computes an operation, in a buffer of the right shape where there is one."""
    ufunc, options = TABLE[node.op].ufunc, {}
    if node.kind != "b" or not isinstance(ufunc, np.ufunc):
        options["dtype"] = dtype

    def compute(operands: list[Any], buffers: Sequence[Any], arrays: Sequence[Any] = ()) -> Any:
        for buffer in buffers:
            if np.ndim(buffer) and buffer.dtype == dtype and buffer.shape == np.broadcast(*operands).shape:
                return ufunc(*operands, out=buffer, **options)
        return ufunc(*operands, **options)

    return compute


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
