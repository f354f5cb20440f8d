"""Masks that a plain Python function describes."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from cuattn.errors import MaskError, UnsupportedError, shown
from cuattn.io_model.sizes import cdiv
from cuattn.masks import checks
from cuattn.masks.base import Instance, Mask
from cuattn.masks.column import ColumnMask
from cuattn.masks.device import adopt, is_device_array
from cuattn.masks.runs import Runs, indices
from cuattn.tracing import MASK, B, Facts, Frozen, H, Program, columns, facts, tile_states, trace
from cuattn.tracing.capture import copied, is_array

_ELEMENTS = 1 << 16  # that are evaluated at once
_STRIPS = 1 << 10  # of tiles, whose states a mask remembers


class FunctionMask(Mask):
    """A mask that a function describes: row i may see key j if ``visible(b, h, i, j)``.

    The function is traced once into an expression, which is evaluated on the tiles that are neither wholly visible nor
    wholly hidden; no matrix is made.  :func:`from_function` returns the quicker `ColumnMask` where that says the same.

    Parameters
    ----------
    visible : callable
        ``visible(b, h, i, j, *args) -> bool`` in NumPy style: of the flat leading index, the query head, the row and
        the key.  It must be pure.  Arrays that it captures are copied.
    n_queries : int
        Rows.
    n_keys : int, optional
        Keys; by default `n_queries`.
    args : sequence of arrays and numbers, optional
        Further arguments, which are copied.
    batch : int or tuple of int, optional
        Length, or lengths, of the leading axes before the heads; needed where the function depends on b.
    heads : int, optional
        Query heads; needed where the function depends on h.

    Attributes
    ----------
    n_queries, n_keys, leading : int, int, tuple of int
        Shape of the matrix that is masked and of the axes before it: none where the function depends on neither b
        nor h.

    Raises
    ------
    ArgumentError
        The function cannot be traced, or returns no boolean; the message says where.
    MaskError
        A length is negative, or `batch` or `heads` is missing.

    Notes
    -----
    Numbers are float32.  A mask compares and pickles by what the function computes, not by the function.  A GPU does
    not take this kind of mask yet.

    Examples
    --------
    >>> from cuattn.masks import FunctionMask
    >>> mask = FunctionMask(lambda b, h, i, j: (i - j) % (h + 2) == 0, 4, heads=2)
    >>> mask
    <FunctionMask (2,) x 4 queries x 4 keys: equal(remainder(subtract(i, j), add(h, 2)), 0)>
    >>> mask.dense()[1].astype(int)
    array([[1, 0, 0, 1],
           [0, 1, 0, 0],
           [0, 0, 1, 0],
           [1, 0, 0, 1]])
    """

    kind = "function"
    _parameter_names = ("_bound", "_rows", "_keys", "leading", "_first")
    _bound: Frozen
    _rows: Runs  # that the mask has, of those that the function knows
    _keys: Runs
    _i: np.ndarray  # the same, one by one
    _j: np.ndarray
    _first: tuple[int, int]  # b and h of the first matrix

    def __init__(
        self,
        visible: Callable[..., Any],
        n_queries: int,
        n_keys: int | None = None,
        *,
        args: Sequence[Any] = (),
        batch: int | tuple[int, ...] | None = None,
        heads: int | None = None,
    ) -> None:
        lengths = [checks.integer("n_queries", n_queries)]
        lengths.append(lengths[0] if n_keys is None else checks.integer("n_keys", n_keys))
        args = [_snapshot(x) if is_array(x) else x for x in checks.sequence("args", args)]
        bound = trace(visible, MASK, args, adopt=_snapshot).bind(args)
        for name, given, variable in (("batch", batch, B), ("heads", heads, H)):
            if given is None and bound.root.depends & variable:
                raise MaskError(f"{name} = None: expected a length, as the function depends on {'bh'[variable == H]}")
        batch = batch if isinstance(batch, tuple) else (1 if batch is None else batch,)
        axes = [checks.integer("batch", n) for n in batch] + [1 if heads is None else checks.integer("heads", heads)]
        rows, keys = (((0, length),) for length in lengths)
        frozen = Frozen(bound.root, bound.arrays, bound.numbers)
        self._settle(None, frozen, rows, keys, _needed(frozen, tuple(axes)), (0, 0))

    def _derived(self) -> dict[str, Any]:
        i, j = (indices(runs).astype(np.int32) for runs in (self._rows, self._keys))
        return {"_i": i, "_j": j, "n_queries": len(i), "n_keys": len(j)}

    @cached_property
    def _facts(self) -> Facts:
        i, j = (max((stop for _, stop in runs), default=0) for runs in (self._rows, self._keys))
        b, h = self._first
        return facts(self._bound, (b + math.prod(self.leading[:-1]), h + math.prod(self.leading[-1:]), i, j))

    @cached_property
    def _visible(self) -> Callable[..., list[np.ndarray]]:
        return Program((self._bound.root,), np.dtype(np.float32), self._facts).ready(self._bound)

    @cached_property
    def _strips(self) -> Callable[..., np.ndarray]:
        """The function that returns the states of a matrix's row tiles; some are kept."""
        return lru_cache(_STRIPS)(partial(_states, self._bound, self._i, self._j))

    @property
    def layout(self) -> tuple[Hashable, ...]:
        return self.kind, self.leading, self._bound.root, self._facts

    def _matrix(self, instance: Instance) -> tuple[int, int]:
        """Return b and h of one of the matrices."""
        heads = math.prod(self.leading[-1:])
        b, h = divmod(int(np.ravel_multi_index(instance, self.leading)) if instance else 0, heads)
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
        return self._strips(*self._matrix(instance), block_m, block_n, start, stop)

    def simplified(self) -> "FunctionMask | ColumnMask":
        """For backends: return the `ColumnMask` that says the same, or else this mask."""
        bounds = np.zeros((4, *self.leading, self.n_keys), np.int32)
        for instance in np.ndindex(*self.leading):
            found = columns(self._bound, self._i, self._j, *self._matrix(instance))
            if found is None:
                return self
            bounds[(slice(None), *instance)] = found
        return ColumnMask._wrap(bounds, self.n_queries)

    def _restrict(self, rows: Runs, keys: Runs) -> "FunctionMask":
        rows, keys = _within(self._rows, rows), _within(self._keys, keys)
        return self._wrap(None, self._bound, rows, keys, self.leading, self._first)

    def to_device(self, device: int | None = None) -> "FunctionMask":
        """Raise UnsupportedError: kernels do not take this kind of mask."""
        raise UnsupportedError(f"mask holds {self!r}; expected kinds that a GPU takes")

    def __repr__(self) -> str:
        leading = f"{self.leading} x " if self.leading else ""
        text = shown(self._bound.root)
        return f"<FunctionMask {leading}{self.n_queries} queries x {self.n_keys} keys: {text}>"


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
        ``visible(b, h, i, j, *args) -> bool`` in NumPy style, see `FunctionMask`.
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
        A `ColumnMask` where the function is recognised as one: bounds on rows and keys, windows, documents, prefixes
        and what is combined of them.  It has leading axes only where the function depends on b or h.

    Raises
    ------
    ArgumentError
        The function cannot be traced, or returns no boolean; the message says where.
    MaskError
        A length is negative, or `batch` or `heads` is missing.

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
    return FunctionMask(visible, n_queries, n_keys, args=args, batch=batch, heads=heads).simplified()


@lru_cache(maxsize=32)
def mask_of_call(bound: Frozen, rows: Runs, keys: Runs, leading: tuple[int, ...], first: tuple[int, int]) -> Mask:
    """Return the mask that a bare function is in a call; the latest are kept, with their tables.

    Parameters
    ----------
    bound : Frozen
        The function, as :func:`cuattn.tracing.trace` knows it.
    rows, keys : tuple of (start, stop)
        The call's, in global indices.
    leading : tuple of int
        The call's leading axes, query heads last.
    first : (int, int)
        Global b and h of the call's first matrix.
    """
    return FunctionMask._wrap(None, bound, rows, keys, _needed(bound, leading), first).simplified()


def _needed(bound: Frozen, leading: tuple[int, ...]) -> tuple[int, ...]:
    """Return the leading axes on which a function depends; 1 in place of heads where these do not matter."""
    depends = bound.root.depends
    if not depends & B:
        return leading[-1:] if depends & H else ()
    return leading if depends & H or not leading else (*leading[:-1], 1)


def _within(runs: Runs, taken: Runs) -> Runs:
    """Return what runs, counted from 0 within others, take of the whole.

    >>> _within(((4, 6), (10, 12)), ((1, 3),))
    ((5, 6), (10, 11))
    """
    found, shift = [], 0
    for start, stop in runs:
        shift += start
        found += [(max(first + shift, start), min(last + shift, stop)) for first, last in taken]
        shift -= stop
    return tuple([(start, stop) for start, stop in found if start < stop])


def _snapshot(array: Any) -> np.ndarray:
    """Return a copy of an array on the host, wherever it lies."""
    return copied(adopt("args", array).get() if is_device_array(array) else array)


def _states(
    bound: Frozen, i: np.ndarray, j: np.ndarray, b: int, h: int, block_m: int, block_n: int, start: int, stop: int
) -> np.ndarray:
    """Return the states of row tiles start to stop of one matrix, read-only."""
    i = i[start * block_m : stop * block_m]
    if not (i.size and j.size):
        return np.zeros((stop - start, cdiv(len(j), block_n)), np.int8)
    rows, keys = (
        (x[::size], np.append(x[size - 1 :: size], x[-1])[: cdiv(len(x), size)])
        for x, size in ((i, block_m), (j, block_n))
    )
    states = tile_states(bound, rows, keys, b, h, bound.extremes)
    states.flags.writeable = False
    return states
