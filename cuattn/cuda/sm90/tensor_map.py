"""Tensor maps: how the bulk copy engine of compute capability 9.0 finds a tile of an array.

A map describes a four-dimensional view (batch, head, row, column) of 16-bit values and the box of 64 columns by some
rows that one copy moves.  Boxes that reach beyond the view are filled with zeros when loaded and cut off when stored.
The driver encodes a map into 128 opaque bytes, which a kernel takes by value.
"""

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.arguments import row_strides, steps_of
from cuattn.cuda.call import Call
from cuattn.cuda.constants import Constants
from cuattn.errors import CuattnError, UnsupportedError
from cuattn.problem import Band, Dtype, Problem

WARPGROUP_ROWS = 64  # query rows of a warpgroup, which the bounds of column masks count in
BOX_COLUMNS = 64
"""Columns of a box: 128 bytes, the widest that the 128-byte swizzle takes."""

_SWIZZLE_128B = 3
_PROMOTE_128B = 2  # 256 bytes at a time cost 7 % where device memory is the limit
_MAX_STRIDE = 1 << 40
_RANK = 4
_FEW_BITS = 8 << 20  # bytes
_OF_KEYS = ("k", "v", "tk", "tv")  # operands that come in boxes of keys
_MAPS_KEPT = 64  # addresses of one operand whose maps are kept


def takes_few_bits(problem: Problem, leading: Sequence[int]) -> bool:
    """Return whether a bit for each element of a mask's matrices takes little memory, alone or beside q."""
    q_bytes = problem.instances * problem.n_queries * problem.head_dim * problem.dtype.itemsize
    bits = math.prod(leading) * problem.n_queries * problem.n_keys
    return bits // 8 <= max(_FEW_BITS, q_bytes // 4)


class TensorMap(NamedTuple):
    """A map as the driver encoded it: the address of its 128 bytes, and what keeps them."""

    address: int
    storage: Any


@lru_cache(maxsize=1)
def _encoder():
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise UnsupportedError(f"the CUDA driver offers no tensor maps (expected 12.0 or newer): {error}") from error
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, ctypes.c_int, word, *[pointer] * 5, *[ctypes.c_int] * 4]
    return function


def unsupported_reason(address: int, strides: Iterable[int]) -> str | None:
    """Say why an array cannot be described, or return None.

    Parameters
    ----------
    address : int
        Of the first element.
    strides : iterable of int
        In bytes, of the batch, head and row axes; 0 on a broadcast axis.

    Returns
    -------
    str or None

    Examples
    --------
    >>> unsupported_reason(4096, (0, 256, 24))
    'a stride of 24 bytes is not a positive multiple of 16'
    """
    if address % 16:
        return f"its address {address:#x} is not a multiple of 16"
    for stride in strides:
        if stride % 16 or not 0 <= stride < _MAX_STRIDE:
            return f"a stride of {stride} bytes is not a positive multiple of 16"
    return None


class View(NamedTuple):
    """How one operand looks to the copy engine."""

    shape: tuple[int, int, int, int]  # batch, head, row, column; none 0
    strides: tuple[int, int, int]  # bytes; the columns are contiguous, and a broadcast axis has size 1
    box_rows: int  # rows per copy, at most 256


def describe(address: int, dtype: Dtype, view: View) -> TensorMap:
    """Encode the map of an array on the current device, of a dtype that has a code for tensor maps.

    Raises
    ------
    UnsupportedError
        The driver is too old.
    CuattnError
        The driver refuses the description (see :func:`unsupported_reason`).
    """
    shape, strides, box_rows = view
    extent = (ctypes.c_uint64 * _RANK)(*reversed(shape))
    # The driver wants a plausible stride also on axes that are never stepped along.
    plausible = [stride if size > 1 else 16 for size, stride in zip(shape, strides, strict=False)]
    step = (ctypes.c_uint64 * (_RANK - 1))(*reversed(plausible))
    box = (ctypes.c_uint32 * _RANK)(BOX_COLUMNS, box_rows, 1, 1)
    ones = (ctypes.c_uint32 * _RANK)(1, 1, 1, 1)
    storage = np.zeros(192, np.uint8)
    encoded = storage[-storage.ctypes.data % 64 :]
    described = encoded.ctypes.data, dtype.tensor_map, _RANK, address, extent, step, box, ones
    interleave = fill = 0
    status = _encoder()(*described, interleave, _SWIZZLE_128B, _PROMOTE_128B, fill)
    if status:
        raise CuattnError(
            f"the driver refused a tensor map (CUresult {status}) of {dtype.dtype} {shape} at {address:#x}, "
            f"strides {strides} bytes"
        )
    return TensorMap(encoded.ctypes.data, storage)


class MappedCall(Call):
    """A call of kernels that read and write by tensor maps."""

    packed_masks = True

    @property
    def read(self) -> list[str]:
        """What the copy engine reads, as far as it is there: not all of a planned call is."""
        return [name for name in ("q", "k", "v", "do") if name in self.operands]

    @staticmethod
    def simplify(problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        """Take a column mask that is no more than a band as one; so it gives the bits of its boolean twin, too.

        With dropout tiles without any mask are larger: a mask that hides nothing is a band without ends then.  With a
        bias tiles with a band are, too.

        A mask function is computed ahead and read as a boolean mask is, where its bits take little room.
        """
        if problem.masks == ("function",) and takes_few_bits(problem, masks[0].leading):
            return replace(problem, masks=("boolean",)), masks
        alone = problem.masks == ("column",) and problem.band is None and problem.bias is None
        reach = masks[0].reach if alone else None
        if reach is None:
            return problem, masks
        unmasked = reach == (None, None) and not problem.dropout
        return replace(problem, masks=(), band=None if unmasked else Band(*reach, 0), twin=True), ()

    def layout_reason(self, more: Iterable[str] = ()) -> str | None:
        """Say why what is read, and `more`, cannot be described, or return None."""
        try:
            outer = self.axes.size[:-1]
        except UnsupportedError as error:
            return str(error)
        if math.prod(outer) > 1:
            return (
                f"its tensor maps have one leading axis, and the strides of its arrays keep {self.problem.batch} apart"
            )
        for name in (*self.read, *more):
            array = self.operands[name]
            unfit = unsupported_reason(array.data.ptr, row_strides(array))
            if unfit is None and array.shape[-2] > 1 and array.strides[-2] == 0:
                unfit = "its rows are one row, repeated"
            if unfit is not None:
                return f"the copy engine cannot read {name}: {unfit}"
        return None

    def view(self, name: str, box_rows: int) -> View:
        """Return the look of an operand or result, in boxes of so many rows; its batch axes are merged into one."""
        array, rank = self.arrays[name], len(self.problem.batch)
        batch = array.dtype.itemsize * self.axes.pick(steps_of(array))[-1]
        heads, rows, columns = array.shape[rank:]
        head, row = array.strides[rank:-1]
        shape = (self.axes.size[-1] if batch else 1, heads if head else 1, rows, columns)
        return View(shape, (batch, head, row), box_rows)

    def add_mapped(
        self,
        path: str,
        kernel: str,
        constants: Constants,
        work: int,
        warps: int,
        values: Mapping[str, Any],
        tile: tuple[int, ...],
        shared_bytes: int,
        written: Iterable[str],
        beside: Mapping[str, str] = MappingProxyType({}),
        together: int = 1,
        **more: Any,
    ) -> None:
        """Append a kernel whose blocks share pieces of `work`, and that takes maps of what it reads and writes.

        Results leave in boxes of one warpgroup's rows.  Unrounded ones leave without a map; q's stands in then.  Last
        come maps of what travels `beside` q, k and v: the name of each, and of whose look it has, or of what stands in
        for it where it is not there.
        `together`: blocks of a multiprocessor; `more` is for :meth:`add`.
        """
        dtype = self.problem.row
        read = [name for name in self.read if name not in beside]
        views = {name: self.view(name, tile[name in _OF_KEYS]) for name in read}
        for name in written:
            rounded = self.arrays[name].dtype == dtype.dtype
            views[name] = self.view(name if rounded else "q", WARPGROUP_ROWS)
        views |= {name: self.view(like, tile[like in _OF_KEYS]) for name, like in beside.items()}
        maps = [
            (
                name if name in self.arrays else beside[name],
                lru_cache(_MAPS_KEPT)(partial(describe, dtype=dtype, view=view)),
            )
            for name, view in views.items()
        ]
        grid = (min(work, together * self.device.multiprocessors),)
        self.add(path, kernel, constants, grid, warps, values, tile, shared_bytes=shared_bytes, maps=maps, **more)
