"""A graph with the arrays and numbers of a call, and what of these the code that is made depends on."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuattn.tracing.graph import Node

ANY_LENGTH = (2**31, 2**31, 2**31, 2**31)
"""Limits of b, h, i and j where no lengths are known."""


@dataclass(frozen=True, eq=False)
class Bound:
    """A graph with the arrays and the numbers of a call, by slot."""

    root: Node
    arrays: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = ()

    def of(self, root: Node) -> "Bound":
        """Return another graph of the same arrays and numbers: a derivative, or a part."""
        return Bound(root, self.arrays, self.numbers)


class Layout(NamedTuple):
    """An array's dtype and shape, and whether its elements lie within 2**31 of its first."""

    dtype: np.dtype
    shape: tuple[int, ...]
    near: bool = True


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
    >>> facts(Bound(None, (np.zeros(3),), (2.0, 5)), (1, 2, 16, 16))
    Facts(limits=(1, 2, 16, 16), arrays=(Layout(dtype=dtype('float64'), shape=(3,), near=True),), numbers=('f', 'i'))
    """
    return Facts(limits, tuple(map(_layout, bound.arrays)), tuple(map(_kind_of, bound.numbers)))


def _layout(array: Any) -> Layout:
    span = sum(abs(stride) * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True))
    return Layout(array.dtype, tuple(array.shape), span // array.itemsize < 2**31)


def _kind_of(number: Any) -> str:
    if isinstance(number, bool | np.bool_):
        return "b"
    if isinstance(number, float | np.floating):
        return "f"
    return "i" if -(2**31) <= int(number) < 2**31 else "l"
