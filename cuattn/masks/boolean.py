"""BooleanMask: any matrix, element by element."""

from typing import Any

import numpy as np

from cuattn.masks import checks
from cuattn.masks.base import Instance
from cuattn.masks.cells import CellMask
from cuattn.masks.cuda_half import CudaHalf
from cuattn.masks.device import copy


class BooleanMask(CellMask):
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

    __slots__ = ()
    kind = "boolean"
    cuda = CudaHalf(16, 1, "boolean", "boolean", "util/mask_alive.cu", ("mask_alive",))
    _stretches = True

    def __init__(self, array: Any) -> None:
        array = copy(checks.booleans("array", array, min_ndim=2))
        self._settle(array, block_m=1, block_n=1, borrowed=False, _lengths=(None, None))

    @classmethod
    def borrow(cls, array: Any) -> "BooleanMask":
        """Return a mask for one call around a caller's NumPy or CuPy array, bool with two axes or more: no copy."""
        array = array.view()
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
        return cls._around(array, None, 1, 1, True, (None, None))

    @property
    def array(self) -> Any:
        """The matrix or matrices, True = attend."""
        return self._array

    def __repr__(self) -> str:
        return f"<BooleanMask {tuple(self._array.shape)} {self._where}>"

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> np.ndarray:
        return ~self._part(instance, rows, keys).T

    def _part(self, instance: Instance, rows: slice, keys: slice) -> Any:
        matrix = self._array[instance]
        return matrix[rows if len(matrix) > 1 else slice(None), keys if matrix.shape[1] > 1 else slice(None)]

    def _seen(self, instance: Instance, rows: slice) -> tuple[Any, Any]:
        part = self._part(instance, rows, slice(None))
        return part.any(axis=0), part.all(axis=0)
