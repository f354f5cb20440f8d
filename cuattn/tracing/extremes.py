"""Least and greatest elements of arrays over boxes of indices, one box per tile, for all tiles at once."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cuattn.tracing.ranges import EITHER, OPEN, Interval, whole

_TABLES = 64  # that an array remembers

Extremes = Callable[[Sequence[Interval]], Interval]
"""Bounds the elements of an array over bounds of its indices, one for each axis, before these wrap and are clamped."""


def described(array: Any) -> Extremes:
    """Return what bounds the elements of an array: all of one of NumPy, of others what the dtype says.

    Examples
    --------
    >>> found = described(np.array([3, 1, 2]))([Interval(np.float64(1), np.float64(2))])
    >>> float(found.lo), float(found.hi)
    (1.0, 2.0)
    """
    return _Elements(array) if isinstance(array, np.ndarray) and array.size else of_dtype(np.dtype(array.dtype))


def of_dtype(dtype: np.dtype, span: tuple[int, int] | None = None) -> Extremes:
    """Return the bounds of any element of an array, whose least and greatest integer may be known."""
    if dtype.kind in "iu":
        least, greatest = span or (np.iinfo(dtype).min, np.iinfo(dtype).max)
        found = whole(Interval(np.float64(least), np.float64(greatest)))
    else:
        found = EITHER if dtype.kind == "b" else OPEN._replace(nan=True)
    return lambda indices: found


def wrapped(index: Interval, length: int) -> Interval:
    """Return the bounds of an index after negative ones wrapped and all were clamped to [0, length).

    Examples
    --------
    >>> found = wrapped(Interval(np.float64(-2), np.float64(-1)), 5)
    >>> float(found.lo), float(found.hi)
    (3.0, 4.0)
    """
    lo = np.where(index.lo >= 0, index.lo, np.where(index.hi < 0, index.lo + length, 0))
    hi = np.where(index.hi < 0, index.hi + length, np.where(index.lo < 0, np.maximum(index.hi, length - 1), index.hi))
    return Interval(np.clip(lo, 0, length - 1), np.clip(hi, 0, length - 1))


class _Elements:
    """The extremes of an array of NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        self._boolean = array.dtype == bool
        self._values = array.astype(np.float64)
        self._nan = bool(np.isnan(self._values).any())
        self._tables: dict[Any, np.ndarray] = {}

    def __call__(self, indices: Sequence[Interval]) -> Interval:
        if self._nan:
            return OPEN._replace(nan=True)
        indices = [wrapped(index, length) for index, length in zip(indices, self._values.shape, strict=True)]
        single = [np.size(index.lo) == 1 and np.size(index.hi) == 1 for index in indices]
        parts = tuple([_slice(index) if one else slice(None) for index, one in zip(indices, single, strict=True)])
        moving = [index for index, one in zip(indices, single, strict=True) if not one]
        key = tuple([(part.start, part.stop) for part in parts])
        axes = tuple(np.flatnonzero(single))
        lo, hi = (self._of(combine, parts, axes, moving, key) for combine in (np.minimum, np.maximum))
        return Interval(lo != 0, hi != 0) if self._boolean else Interval(lo, hi)

    def _of(self, combine: np.ufunc, parts: tuple, axes: tuple, moving: list[Interval], key: tuple) -> np.ndarray:
        """Return the extremes of one kind; of more than two axes that move all but the last count as a whole."""
        values = combine.reduce(self._values[parts], axes)
        if len(moving) == 2 and _is_grid(*moving):
            return _of_grid(combine, values, *moving)
        if not moving:
            return values
        table = self._tables.get((combine, key))
        if table is None:
            if len(self._tables) >= _TABLES:
                self._tables.clear()
            table = _doubled(combine.reduce(values, tuple(range(values.ndim - 1))), combine)
            self._tables[combine, key] = table
        first, last = (np.asarray(x, np.int64) for x in moving[-1][:2])
        level = np.frexp((last - first + 1).astype(np.float64))[1] - 1  # the largest power of 2 within the range
        return combine(table[level, first], table[level, last - (np.int64(1) << level) + 1])


def _slice(index: Interval) -> slice:
    return slice(int(np.min(index.lo)), int(np.max(index.hi)) + 1)


def _doubled(values: np.ndarray, combine: np.ufunc) -> np.ndarray:
    """Return the extremes of 2**level elements from each element on, (levels, n)."""
    levels = [values]
    for level in range(len(values).bit_length() - 1):
        step, last = 1 << level, levels[-1]
        levels.append(np.concatenate([combine(last[:-step], last[step:]), last[-step:]]))
    return np.stack(levels)


def _is_grid(x: Interval, y: Interval) -> bool:
    """Return whether one index depends on the rows of tiles alone, and the other on the keys."""
    shapes = [np.broadcast_shapes(np.shape(index.lo), np.shape(index.hi)) for index in (x, y)]
    return np.prod(np.broadcast_shapes(*shapes)) == np.prod(shapes[0]) * np.prod(shapes[1])


def _of_grid(combine: np.ufunc, values: np.ndarray, x: Interval, y: Interval) -> np.ndarray:
    """Return the extremes of boxes, of which each axis has its own ranges."""
    shape = np.broadcast_shapes(*(np.shape(bound) for index in (x, y) for bound in index[:2]))
    for axis, index in enumerate((x, y)):
        first, last = (np.ravel(bound).astype(np.int64) for bound in np.broadcast_arrays(*index[:2]))
        ranges = np.stack([first, last + 1], 1).ravel()
        ends = np.take(values, [-1], axis)  # a range may end with the array
        values = combine.reduceat(np.concatenate([values, ends], axis), ranges, axis).take(
            range(0, len(ranges), 2), axis
        )
    rows_first = np.shape(x.lo)[-1:] in ((), (1,)) and np.shape(x.hi)[-1:] in ((), (1,))
    return (values if rows_first else values.T).reshape(shape)
