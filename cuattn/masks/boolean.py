"""BooleanMask: any matrix, element by element."""

from typing import Any

import numpy as np

from cuattn.io_model.sizes import cdiv
from cuattn.masks import checks, intervals
from cuattn.masks.base import Instance, Mask
from cuattn.masks.cuda_half import CudaHalf, Source, source_of
from cuattn.masks.device import copy, namespace
from cuattn.masks.runs import Runs, length_of, take


class BooleanMask(Mask):
    """A mask that says of every element whether it is visible, as a boolean array does.

    Parameters
    ----------
    array : array_like of bool, (..., n_queries | 1, n_keys | 1)
        True = attend, on the host or on a GPU (any array library).  All axes broadcast to the problem's
        (..., heads, n_queries, n_keys).  It is copied.

    Attributes
    ----------
    array : bool array
        Read-only; a NumPy array or, on a GPU, a CuPy array.

    Raises
    ------
    MaskError
        `array` has fewer than two axes.
    DtypeError
        `array` is not boolean.

    Examples
    --------
    >>> from cuattn.masks import BooleanMask
    >>> BooleanMask([[True, False]]).dense(n_queries=2).astype(int)
    array([[1, 0],
           [1, 0]])
    """

    __slots__ = ("_n_keys", "_n_queries", "borrowed")
    kind = "boolean"
    cuda = CudaHalf(16, 1, "boolean", "boolean", "util/mask_alive.cu", ("mask_alive",))
    _parameter_names = ("_n_queries", "_n_keys", "borrowed")
    _n_queries: int | None  # None: that of the array, which stands for any length if it is 1
    _n_keys: int | None
    borrowed: bool
    """Whether the array is a caller's, who may change it after a call: nothing made of it may be kept."""

    def __init__(self, array: Any) -> None:
        self._settle(copy(checks.booleans("array", array, min_ndim=2)), _n_queries=None, _n_keys=None, borrowed=False)

    @classmethod
    def borrow(cls, array: Any) -> "BooleanMask":
        """Return a mask for one call around a caller's NumPy or CuPy array, bool with two axes or more: no copy."""
        array = array.view()
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
        return cls._around(array, None, None, True, None)

    @classmethod
    def _around(cls, array: Any, n_queries: int | None, n_keys: int | None, borrowed: bool, ready: Any):
        """Build a mask around an array that it shares with others, who do not write to it once `ready`."""
        mask = object.__new__(cls)
        mask._settle(None, _n_queries=n_queries, _n_keys=n_keys, borrowed=borrowed)
        for name, value in (("_array", array), ("_ready", ready)):
            object.__setattr__(mask, name, value)
        return mask

    @property
    def array(self) -> Any:
        """The matrix or matrices, True = attend."""
        return self._array

    @property
    def leading(self) -> tuple[int, ...]:
        """Shape of the array without its last two axes."""
        return tuple(self._array.shape[:-2])

    @property
    def n_queries(self) -> int:
        """Number of query rows; a single one may stand for all (see `bind`)."""
        return self._array.shape[-2] if self._n_queries is None else self._n_queries

    @property
    def n_keys(self) -> int:
        """Number of key columns, in the same way."""
        return self._array.shape[-1] if self._n_keys is None else self._n_keys

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        return all(
            length == known or (known == 1 and bound is None)
            for length, known, bound in (
                (n_queries, self.n_queries, self._n_queries),
                (n_keys, self.n_keys, self._n_keys),
            )
        )

    @property
    def layout(self) -> tuple[Any, ...]:
        """All of the mask that a launch depends on."""
        return (*super().layout, self._array.strides)

    def _bound(self, n_queries: int, n_keys: int) -> "BooleanMask":
        return self._around(self._array, n_queries, n_keys, self.borrowed, self._ready)

    def __repr__(self) -> str:
        place = "on the host" if self.device is None else f"on GPU {self.device}"
        return f"<BooleanMask {tuple(self._array.shape)} {place}>"

    def visible(self, instance: Instance, i: Any, j: Any) -> Any:
        matrix = self._array[instance]
        return matrix[i if len(matrix) > 1 else 0 * i, j if matrix.shape[1] > 1 else 0 * j]

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> np.ndarray:
        return ~self._part(instance, rows, keys).T

    def _part(self, instance: Instance, rows: slice, keys: slice) -> Any:
        matrix = self._array[instance]
        rows = rows if len(matrix) > 1 else slice(None)
        return matrix[rows, keys] if matrix.shape[1] > 1 else matrix[rows]

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        xp = namespace(self._array)
        key_tiles = cdiv(self.n_keys, block_n)
        # Keys that do not exist are neutral in both: they are seen in `every`, and not in `some`.
        some = xp.zeros((stop - start, key_tiles * block_n), bool)
        every = xp.ones_like(some)
        for t in range(start, stop):
            part = self._part(instance, slice(t * block_m, (t + 1) * block_m), slice(None))
            some[t - start, : self.n_keys], every[t - start, : self.n_keys] = part.any(axis=0), part.all(axis=0)
        some, every = (seen.reshape(stop - start, key_tiles, block_n) for seen in (some, every))
        return xp.where(every.all(axis=-1), intervals.FULL, some.any(axis=-1)).astype(xp.int8)

    def _dense(self) -> Any:
        xp = namespace(self._array)
        return xp.broadcast_to(self._array, (*self.leading, self.n_queries, self.n_keys)).copy()

    def source(self) -> Source:
        return source_of(self._array)

    def _restrict(self, rows: Runs, keys: Runs) -> "BooleanMask":
        part = self._array
        for runs, axis in ((rows, -2), (keys, -1)):
            part = part if part.shape[axis] == 1 else take(part, runs, axis)
        return self._around(part, length_of(rows), length_of(keys), self.borrowed, self._ready)
