"""Masks that a plain Python function describes."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from cuattn.errors import MaskError, shown
from cuattn.masks import checks
from cuattn.masks.base import Instance, Mask
from cuattn.masks.column import ColumnMask
from cuattn.masks.cuda_half import CudaHalf, Generated, Source, element_tables, function_kernels, function_tables
from cuattn.masks.device import adopt, is_device_array, load_cupy, upload
from cuattn.masks.runs import Runs, indices
from cuattn.tracing import (
    MASK,
    B,
    Bound,
    Facts,
    Frozen,
    H,
    Node,
    Program,
    columns,
    facts,
    joined,
    source,
    tile_source,
    tile_states,
    trace,
)
from cuattn.tracing.build import apply
from cuattn.tracing.capture import copied, is_array

_ELEMENTS = 1 << 16  # that are evaluated at once
_STRIPS = 1 << 10  # of tiles, whose states a mask remembers
_NAMESPACE = "traced::mask"  # of generated text
_NUMBERS = np.dtype(np.float64)  # so that a mask is one matrix, that of its formula in NumPy, in calls of any dtype


class FunctionMask(Mask):
    """A mask that a function describes: row i may see key j if ``visible(b, h, i, j)``.

    :func:`from_function` makes it, of functions that are no column masks.  The function was traced into an expression,
    of which bounds tell the tiles that are wholly visible or hidden; on the others it is evaluated.  No matrix is made.

    Attributes
    ----------
    n_queries, n_keys, leading : int, int, tuple of int
        Shape of the matrix that is masked and of the axes before it: none where the function depends on neither b
        nor h.

    See Also
    --------
    from_function : Makes one.
    ColumnMask : What a function becomes where it can.

    Notes
    -----
    Numbers are float64, whatever the dtype of a call, as in NumPy.  A mask compares and pickles by what the function
    computes, not by the function.  On a GPU the bounds of tiles and the function on the others are computed by code
    that is compiled for it.  On Hopper that is done once where a bit for each element takes up to 8 MB, or a quarter
    of what q takes; else wherever the function is needed.

    Examples
    --------
    >>> from cuattn.masks import from_function
    >>> mask = from_function(lambda b, h, i, j: (i - j) % (h + 2) == 0, 4, heads=2)
    >>> mask
    <FunctionMask (2,) x 4 queries x 4 keys: equal(remainder(subtract(i, j), add(h, 2)), 0)>
    >>> mask.dense()[1].astype(int)
    array([[1, 0, 0, 1],
           [0, 1, 0, 0],
           [0, 0, 1, 0],
           [1, 0, 0, 1]])
    """

    kind = "function"
    cuda: ClassVar[CudaHalf | None] = CudaHalf(32, 1, "function", "function", function_tables, function_kernels)
    elements: ClassVar[CudaHalf | None] = CudaHalf(16, 1, "function", None, element_tables, function_kernels)
    _parameter_names = ("_bound", "n_queries", "leading", "_first")
    _bound: Bound  # a Frozen, unless it reads a caller's arrays on a GPU
    _first: tuple[int, int]  # b and h of the first matrix
    _i: np.ndarray  # the rows and the keys, by the indices that the function knows
    _j: np.ndarray

    def __init__(self) -> None:
        raise MaskError("a FunctionMask is made by cuattn.masks.from_function(...): expected a call of that")

    def _derived(self) -> dict[str, Any]:
        i, j = np.split(self._array, [self.n_queries])
        return {"_i": i, "_j": j, "n_keys": len(j), "borrowed": not isinstance(self._bound, Frozen)}

    @cached_property
    def _facts(self) -> Facts:
        i, j = (int(x.max(initial=-1)) + 1 for x in (self._i, self._j))
        b, h = self._first
        return facts(self._bound, (b + math.prod(self.leading[:-1]), h + math.prod(self.leading[-1:]), i, j))

    @cached_property
    def _visible(self) -> Callable[..., list[np.ndarray]]:
        return Program((self._bound.root,), _NUMBERS, self._facts).ready(self._bound)

    @cached_property
    def _states(self) -> Callable[..., np.ndarray]:
        """The function that returns the states of a matrix's row tiles, of which some are kept."""
        return lru_cache(_STRIPS)(partial(_strip, self._bound, self._i, self._j))

    @cached_property
    def layout(self) -> tuple[Hashable, ...]:
        return (
            self.kind,
            self.leading,
            self._bound.root,
            self._facts,
            self._first,
            tuple(map(repr, self._bound.numbers)),
        )

    def _matrix(self, instance: Instance) -> tuple[int, int]:
        """Return b and h of one of the matrices."""
        place = int(np.ravel_multi_index(instance, self.leading)) if instance else 0
        b, h = divmod(place, math.prod(self.leading[-1:]))
        return self._first[0] + b, self._first[1] + h

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> np.ndarray:
        b, h = map(np.int32, self._matrix(instance))
        i, j = self._i[rows], self._j[keys, None]
        hidden = np.empty((len(j), len(i)), bool)
        step = max(_ELEMENTS // max(len(i), 1), 1)
        for start in range(0, len(j), step):
            part = slice(start, start + step)
            np.logical_not(*self._visible({"b": b, "h": h, "i": i, "j": j[part]}), out=hidden[part])
        return hidden

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> np.ndarray:
        return self._states(*self._matrix(instance), block_m, block_n, start, stop)

    def _restrict(self, rows: Runs, keys: Runs) -> "FunctionMask":
        i, j = self._i[indices(rows)], self._j[indices(keys)]
        return self._wrap(np.concatenate([i, j]), self._bound, len(i), *self._parameters[2:])

    def _heads(self, part: slice) -> "FunctionMask":
        b, h = self._first
        leading = (*self.leading[:-1], part.stop - part.start)
        return self._wrap(self._array, self._bound, self.n_queries, leading, (b, h + part.start))

    def joined(self, other: Mask) -> "FunctionMask | None":
        if not isinstance(other, FunctionMask) or not self._aligned(other):
            return None
        (ours, theirs), _ = joined((self._bound.root, self._facts), (other._bound.root, other._facts))
        arrays, numbers = (getattr(self._bound, name) + getattr(other._bound, name) for name in ("arrays", "numbers"))
        both, leading = Frozen(apply("logical_and", ours, theirs), arrays, numbers), self.leading or other.leading
        return self._wrap(self._array, both, self.n_queries, leading, self._first if self.leading else other._first)

    def _aligned(self, other: "FunctionMask") -> bool:
        """Return whether another mask's function is asked about the same indices."""
        same = self.leading == other.leading and self._first == other._first
        return np.array_equal(self._array, other._array) and (same or not self.leading or not other.leading)

    @property
    def on_device(self) -> bool:
        return self.borrowed

    # For a GPU.

    def source(self) -> Source:
        inner = np.cumprod((1, *self.leading[:0:-1]))[::-1][: len(self.leading)]
        strides = tuple(0 if n == 1 else int(step) for n, step in zip(self.leading, inner, strict=True))
        counts = self._sources[1].counts
        return Source(self.leading, strides, 1, 1, values=counts, arrays=len(self._bound.arrays))

    @cached_property
    def _sources(self) -> tuple[Any, Any]:
        """The texts of the function itself and of its bounds on tiles."""
        return _written(self._bound.root, self._facts)

    @property
    def generated(self) -> dict[str, Generated]:
        blank = (0,) * len(self._bound.arrays)
        made = zip(("visible", "tiles"), self._sources, strict=True)
        return {name: Generated(text.text, text.pack(self._bound, blank)) for name, text in made}

    @property
    def fields(self) -> dict[str, int]:
        b, h = self._first
        return {"matrices.first_b": b, "matrices.first_h": h, "matrices.heads": math.prod(self.leading[-1:])}

    def arrays_on(self, device: int) -> tuple[Any, ...]:
        key = ("device", device)
        if key not in self._cache:
            arrays = [
                x if is_device_array(x) else upload(_words(x), device) for x in (self._array, *self._bound.arrays)
            ]
            self._cache.setdefault(key, tuple(arrays))
        return self._cache[key]

    def to_device(self, device: int | None = None) -> "FunctionMask":
        """Return this mask, which lies on the host, with copies on a GPU of what it reads.

        Parameters
        ----------
        device : int, optional
            Index of the GPU; by default CuPy's current device.
        """
        self.arrays_on(
            int(load_cupy("device").cuda.Device().id) if device is None else checks.integer("device", device)
        )
        return self

    def __repr__(self) -> str:
        leading = f"{self.leading} x " if self.leading else ""
        return f"<FunctionMask {leading}{self.n_queries} queries x {self.n_keys} keys: {shown(self._bound.root)}>"


def from_function(
    visible: Callable[..., Any],
    n_queries: int,
    n_keys: int | None = None,
    *,
    args: Sequence[Any] = (),
    batch: int | tuple[int, ...] | None = None,
    heads: int | None = None,
) -> FunctionMask | ColumnMask:
    """Return the mask that a function describes: row i may see key j if ``visible(b, h, i, j, *args)``.

    Parameters
    ----------
    visible : callable
        ``visible(b, h, i, j, *args) -> bool`` in NumPy style: of the flat leading index, the query head, the row and
        the key.  It must be pure, for it is called once, with stand-ins that trace what it computes.
    n_queries : int
        Rows.
    n_keys : int, optional
        Keys; by default `n_queries`.
    args : sequence of arrays and numbers, optional
        Further arguments.  They and captured arrays are copied; those on a GPU are read back, once.
    batch : int or tuple of int, optional
        Length, or lengths, of the leading axes before the heads; needed where the function depends on b.
    heads : int, optional
        Query heads; needed where the function depends on h.

    Returns
    -------
    ColumnMask or FunctionMask
        A `ColumnMask` where the function is recognised as one: causal, windows, documents, prefixes and what is
        combined of them.  It has leading axes only where the function depends on b or h.

    Raises
    ------
    ArgumentError
        The function cannot be traced, or returns no boolean; the message says where.
    MaskError
        A length is negative, or `batch` or `heads` is missing.

    See Also
    --------
    FunctionMask : What it returns where no ColumnMask says the same.
    ColumnMask.from_dense : Makes a mask of a boolean array.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn.masks import causal_document, from_function
    >>> document = np.repeat([0, 1, 2], [300, 500, 224])
    >>> mask = from_function(lambda b, h, i, j: (document[i] == document[j]) & (j <= i), 1024)
    >>> mask
    <ColumnMask 1024 queries x 1024 keys on the host>
    >>> bool((mask.dense() == causal_document([300, 500, 224]).dense()).all())
    True
    """
    rows = checks.integer("n_queries", n_queries)
    keys = rows if n_keys is None else checks.integer("n_keys", n_keys)
    args = [_snapshot(x) if is_array(x) else x for x in checks.sequence("args", args)]
    bound = trace(visible, MASK, args, adopt=_snapshot).bind(args)
    for name, given, variable, letter in (("batch", batch, B, "b"), ("heads", heads, H, "h")):
        if given is None and bound.root.depends & variable:
            raise MaskError(f"{name} = None: expected a length, as the function depends on {letter}")
    lengths = [("batch", n) for n in (batch if isinstance(batch, tuple) else (batch,))] + [("heads", heads)]
    leading = tuple([1 if n is None else checks.integer(name, n) for name, n in lengths])
    return mask_of(Frozen(bound.root, bound.arrays, bound.numbers), ((0, rows),), ((0, keys),), leading)


def mask_of(
    bound: Bound, rows: Runs, keys: Runs, leading: tuple[int, ...], first: tuple[int, int] = (0, 0)
) -> FunctionMask | ColumnMask:
    """Return the mask of a traced function, a `ColumnMask` if it is one and reads nothing on a GPU.

    Parameters
    ----------
    bound : Bound
        With arrays on one GPU, which every call reads; or a Frozen.
    rows, keys : tuple of (start, stop)
        Those that the mask has, of what the function knows.
    leading : tuple of int
        Leading axes, query heads last; those that do not matter are dropped.
    first : (int, int), optional
        b and h of the first matrix.
    """
    i, j = (indices(runs).astype(np.int32) for runs in (rows, keys))
    batch = leading[:-1] if bound.root.depends & B else ()
    heads = leading[-1:] if bound.root.depends & H else (1,) * bool(batch)
    mask = FunctionMask._wrap(np.concatenate([i, j]), bound, len(i), (*batch, *heads), first)
    if not isinstance(bound, Frozen):
        return mask
    bounds = np.zeros((4, *mask.leading, len(j)), np.int32)
    for instance in np.ndindex(*mask.leading):
        found = columns(bound, i, j, *mask._matrix(instance), _NUMBERS)
        if found is None:
            return mask
        bounds[(slice(None), *instance)] = found
    return ColumnMask._wrap(bounds, len(i))


@lru_cache(maxsize=64)
def _written(root: Node, known: Facts) -> tuple[Any, Any]:
    """Return the texts of a function and of its bounds on tiles."""
    visible = source({"visible": [root]}, known, _NUMBERS, namespace=_NAMESPACE)
    return visible, tile_source(root, known, _NUMBERS, namespace=_NAMESPACE)


def live(array: Any) -> Any:
    """Return a captured array as a bare mask function reads it: on a GPU in every call, from the host a copy."""
    return adopt("mask", array) if is_device_array(array) else np.array(copied(array), order="C")


def _words(array: np.ndarray) -> np.ndarray:
    """Return an array of a dtype that CuPy may not know as one of integers."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array


def _snapshot(array: Any) -> np.ndarray:
    """Return a copy of an array on the host, wherever it lies."""
    return copied(adopt("args", array).get() if is_device_array(array) else array)


def _strip(
    bound: Any, i: np.ndarray, j: np.ndarray, b: int, h: int, block_m: int, block_n: int, start: int, stop: int
) -> np.ndarray:
    """Return the states of row tiles start to stop of one matrix."""
    rows, keys = _ends(i[start * block_m : stop * block_m], block_m), _ends(j, block_n)
    states = tile_states(bound, rows, keys, b, h, bound.extremes)
    states.flags.writeable = False
    return states


def _ends(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last element of each tile."""
    first = np.arange(0, len(x), size)
    return x[first], x[np.minimum(first + size, len(x)) - 1]
