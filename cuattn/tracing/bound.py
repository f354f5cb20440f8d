"""A graph with the arrays and numbers of a call, and what of these the code that is made depends on."""

import functools
import hashlib
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuattn.tracing.build import remade
from cuattn.tracing.extremes import Extremes, described
from cuattn.tracing.graph import Node, intern, rewrite

ANY_LENGTH = (2**31, 2**31, 2**31, 2**31)
"""Limits of b, h, i and j where no lengths are known."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A graph with the arrays and the numbers of a call, by slot.

    Attributes
    ----------
    root : Node
    arrays, numbers : tuple
    spans : tuple of (int, int) or None
        Least and greatest element of arrays that nobody can change, so that indices made of them may be trusted; None
        of others.  May be shorter than `arrays`.
    """

    root: Node
    arrays: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = ()
    spans: tuple[tuple[int, int] | None, ...] = ()

    def of(self, root: Node) -> "Bound":
        """Return another graph of the same arrays and numbers: a derivative, or a part."""
        return Bound(root, self.arrays, self.numbers, self.spans)


class Frozen(Bound):
    """A graph of arrays on the host that nobody can change: equal to others of the same content, picklable.

    Parameters
    ----------
    root : Node
    arrays : sequence of numpy.ndarray
        By slot; they are made read-only.
    numbers : sequence
        By slot.

    Examples
    --------
    >>> from cuattn.tracing.graph import load, variable
    >>> first = load(0, "i", [variable("j")])
    >>> Frozen(first, [np.arange(3)]) == Frozen(first, [np.arange(3)])
    True
    """

    def __init__(self, root: Node, arrays: Sequence[np.ndarray] = (), numbers: Sequence[Any] = ()) -> None:
        kept = tuple(narrowed(x if x.flags.c_contiguous else x.copy(order="C")) for x in arrays)
        for array in kept:
            array.flags.writeable = False
        super().__init__(root, kept, tuple(numbers), tuple(map(span_of, kept)))

    @functools.cached_property
    def content(self) -> Hashable:
        """What equal ones share."""
        arrays = [(x.dtype.str, x.shape, hashlib.blake2b(x.tobytes()).digest()) for x in self.arrays]
        return self.root, *arrays, *map(repr, self.numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and (self is other or self.content == other.content)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.content)

    def __reduce__(self) -> tuple[Any, ...]:
        return Frozen, (self.root, self.arrays, self.numbers)

    @functools.cached_property
    def extremes(self) -> list[Extremes]:
        """The arrays `described`, with the tables that this keeps."""
        return list(map(described, self.arrays))


def narrowed(array: Any) -> Any:
    """Return an array of int64 on the host as one of int32 where its elements fit; others as they are."""
    span = span_of(array)
    if span is None or array.dtype.itemsize < 8 or span[0] < -(2**31) or span[1] >= 2**31:
        return array
    array = array.astype(np.int32)
    array.flags.writeable = False
    return array


def span_of(array: Any) -> tuple[int, int] | None:
    """Return the least and the greatest element of an array of integers on the host.

    Examples
    --------
    >>> span_of(np.array([3, -1])), span_of(np.zeros(2))
    ((-1, 3), None)
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or not array.size:
        return None
    return int(array.min()), int(array.max())


class Layout(NamedTuple):
    """What the code that reads an array depends on.

    Attributes
    ----------
    dtype : numpy.dtype
    shape : tuple of int
    near : bool
        Whether all elements lie within 2**31 of the first.
    span : (int, int) or None
        Least and greatest element, if they are known.
    dense : bool
        Whether neighbours along the last axis are neighbours in memory.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    near: bool = True
    span: tuple[int, int] | None = None
    dense: bool = False


class Facts(NamedTuple):
    """What is known of a call without a look at its arrays.

    Attributes
    ----------
    limits : tuple of int
        What b, h, i and j stay below.
    arrays : tuple of Layout
        By slot.
    numbers : tuple of str
        By slot of the parameters: the kind; "l" of an integer beyond int32.
    """

    limits: tuple[int, int, int, int]
    arrays: tuple[Layout, ...]
    numbers: tuple[str, ...]


def facts(bound: Bound, limits: tuple[int, int, int, int] = ANY_LENGTH) -> Facts:
    """Return what is known of a call.

    Parameters
    ----------
    bound : Bound
    limits : tuple of int, optional
        What b, h, i and j stay below.

    Examples
    --------
    >>> facts(Bound(None, (np.zeros(3),), (2.0, 5)), (1, 2, 16, 16)).numbers
    ('f', 'i')
    """
    spans = itertools.chain(bound.spans, itertools.repeat(None))
    return Facts(limits, tuple(map(_layout, bound.arrays, spans)), tuple(map(kind_of_number, bound.numbers)))


@functools.lru_cache(maxsize=256)
def joined(*parts: tuple[Node, Facts]) -> tuple[tuple[Node, ...], Facts]:
    """Return graphs of calls of their own as graphs of one call, so that one text can compute them.

    The arrays and the numbers of that call are those of the parts, one part after the other.

    Parameters
    ----------
    *parts : (Node, Facts)
        A graph and what is known of its calls.

    Returns
    -------
    roots : tuple of Node
        The graphs with their slots renumbered.
    facts : Facts
        Limits are the greatest.

    Examples
    --------
    >>> from cuattn.tracing.functions import MASK, SCORE, trace
    >>> slope, window = np.ones(4), np.ones(4, int)
    >>> score = trace(lambda s, b, h, i, j: s * slope[h]).bind()
    >>> mask = trace(lambda b, h, i, j: i - j < window[h], MASK).bind()
    >>> roots, both = joined((score.root, facts(score)), (mask.root, facts(mask)))
    >>> roots
    (multiply(s, array0(h)), less(subtract(i, j), array1(h)))
    """
    roots, arrays, numbers = [], (), ()
    for root, known in parts:
        roots.append(_renumbered(root, len(arrays), len(numbers)))
        arrays, numbers = arrays + known.arrays, numbers + known.numbers
    limits = [max(limit) for limit in zip(*[known.limits for _, known in parts], strict=True)]
    return tuple(roots), Facts(tuple(limits), arrays, numbers)


def _renumbered(root: Node, arrays: int, numbers: int) -> Node:
    """Return a graph with its slots of arrays and of numbers raised."""
    shifts = {"load": arrays, "offset": arrays, "parameter": numbers}

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        shift = shifts.get(node.op)
        return remade(node, args) if not shift else intern(node.op, args, node.kind, node.value + shift)

    return rewrite(root, change)


def _layout(array: Any, span: tuple[int, int] | None) -> Layout:
    shape = tuple(array.shape)
    if array.flags.c_contiguous:
        return Layout(array.dtype, shape, array.size < 2**31, span, dense=True)
    reach = sum(abs(stride) * (length - 1) for stride, length in zip(array.strides, shape, strict=True))
    return Layout(array.dtype, shape, reach < 2**31 * array.itemsize, span, array.strides[-1] == array.itemsize)


def kind_of_number(number: Any) -> str:
    """Return the kind of a Python number: "l" of an integer beyond int32."""
    if isinstance(number, bool | np.bool_):
        return "b"
    if isinstance(number, float | np.floating):
        return "f"
    return "i" if -(2**31) <= int(number) < 2**31 else "l"
