"""From arrays to the fields of kernel arguments: strides, merged axes, and the words that change with each call."""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.device import check_reachable
from cuattn.cuda.params import BATCH_AXES, PARAMS
from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Place, Problem
from cuattn.rng import RNGState, round_keys

_OPEN = 2**30  # a band side that hides nothing; lengths are smaller
_FIELDS = {"do": "dout"}  # operands whose names C++ reserves

Change = tuple[int, int]
"""Number of a 32-bit word of an argument, and its value."""


def pad(length: int, unit: int) -> int:
    """Round up to a multiple of `unit`, at least one of them.

    >>> pad(80, 32), pad(0, 32)
    (96, 32)
    """
    return max(cdiv(length, unit), 1) * unit


class Array(NamedTuple):
    """Shape and dtype of a C-contiguous array that is yet to be allocated."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        steps = accumulate(self.shape[:0:-1], operator.mul, initial=self.dtype.itemsize)
        return tuple(steps)[: len(self.shape)][::-1]


class Laid(NamedTuple):
    """The same of a result that is a part of a larger array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def slots_of(names: Iterable[str]) -> dict[str, str]:
    """Return the fields of ``Params`` that take addresses, each with the name of an operand, result or workspace."""
    fields = [(_FIELDS.get(name, name), name) for name in names]
    return {slot: name for field, name in fields for slot in (f"{field}.data", field) if slot in PARAMS.fields}


def steps_of(array: Any) -> tuple[int, ...]:
    """Return an array's strides in elements, 0 along axes of length 1."""
    size = array.dtype.itemsize
    return tuple(0 if n == 1 else stride // size for n, stride in zip(array.shape, array.strides, strict=True))


def row_strides(array: Any) -> list[int]:
    """Return the strides, in bytes, of all axes but the last along which an array has several elements."""
    return [stride for n, stride in zip(array.shape[:-1], array.strides[:-1], strict=True) if n > 1]


class Axes(NamedTuple):
    """The batch axes of a call after neighbours with matching strides were merged."""

    size: tuple[int, ...]  # outermost first, unused ones 1
    inner: tuple[int, ...]  # the innermost of the problem's axes that became each of the last of them

    def pick(self, values: tuple[int, ...], missing: int = 0) -> tuple[int, ...]:
        """Return what holds along the merged axes from what holds along the problem's: strides, or sizes."""
        return (missing,) * (len(self.size) - len(self.inner)) + tuple(values[axis] for axis in self.inner)


def collapse(
    batch: tuple[int, ...], layouts: Iterable[tuple[int, ...]], most: int = BATCH_AXES, whose: str = "q, k, v"
) -> Axes:
    """Merge neighbouring batch axes that every array walks evenly.

    Parameters
    ----------
    batch : tuple of int
        Lengths of the axes.
    layouts : iterable of tuple of int
        Strides of each array along these axes (and any behind them), 0 where it is broadcast.
    most, whose : int, str, optional
        How many axes may remain, and of which argument.

    Raises
    ------
    UnsupportedError
        More axes remain than a kernel can index.
    """
    layouts = list(layouts)
    sizes: list[int] = []
    inner: list[int] = []
    for axis, size in enumerate(batch):
        if size == 1:
            continue
        if inner and all(strides[inner[-1]] == strides[axis] * size for strides in layouts):
            sizes[-1] *= size
            inner[-1] = axis
        else:
            sizes.append(size)
            inner.append(axis)
    if len(inner) > most:
        raise UnsupportedError(
            f"the leading axes of {whose} {batch} have strides that leave {len(inner)} separate axes; expected at "
            f"most {most} on a GPU (make the arrays contiguous)"
        )
    return Axes((1,) * (most - len(sizes)) + tuple(sizes), tuple(inner))


def layout_fields(name: str, steps: tuple[int, ...], axes: Axes, rank: int) -> dict[str, Any]:
    """Return the fields of ``Params`` that describe an array by its strides, of which `rank` are of batch axes."""
    name = _FIELDS.get(name, name)
    inner = zip(("head", "row", "col"), steps[rank:], strict=False)  # l and m have no columns
    return {f"{name}.batch": axes.pick(steps), **{f"{name}.{field}": step for field, step in inner}}


def address_of(array: Any) -> int:
    """Return where an array is; 0 for none."""
    return 0 if array is None else array.data.ptr


def load_bytes(*arrays: Any) -> int:
    """Return the widest access (16, 8, 4 or 2 bytes) that the arrays' addresses and row strides allow."""
    return math.gcd(16, *chain(*((array.data.ptr, *row_strides(array)) for array in arrays)))


def band_fields(problem: Problem, shift: int = 0) -> dict[str, int]:
    """Return the band's fields of ``Params`` or ``MaskParams``, with its offset and a part's `shift` in its sides."""
    band = problem.band
    if band is None:
        return {}
    offset = band.offset + shift

    def side(width: int | None, sign: int) -> int:
        return _OPEN if width is None else max(min(width + sign * offset, _OPEN), -_OPEN)

    return {"band_left": side(band.left, -1), "band_right": side(band.right, 1)}


def row_bytes(problem: Problem) -> int:
    """Return the bytes of a row of k and of v, or of q and of do, together."""
    return (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize


def tile_counts(problem: Problem, tile: Sequence[int]) -> dict[str, int]:
    """Return the numbers of row tiles and of key tiles; `tile` begins with the sizes of one."""
    return {"row_tiles": cdiv(problem.n_queries, tile[0]), "key_tiles": cdiv(problem.n_keys, tile[1])}


def problem_fields(problem: Problem, axes: Axes) -> dict[str, Any]:
    """Return the fields of ``Params`` that follow from a problem and its merged batch axes alone."""
    same = ("heads", "kv_heads", "group", "n_queries", "n_keys", "head_dim", "head_dim_v", "scale", "dropout_scale")
    return {name: getattr(problem, name) for name in same} | {
        **band_fields(problem),
        "dropout.heads": problem.heads,
        "softcap": problem.softcap or 0.0,
        "cap_scale": problem.scale / problem.softcap if problem.softcap else 0.0,
        "batch_size": axes.size,
        "batch": math.prod(problem.batch),
    }


def changes(dtype: np.dtype, fields: dict[str, int]) -> list[Change]:
    """Return what sets fields of an argument to values of their sizes."""
    found: list[Change] = []
    for name, value in fields.items():
        field, first = dtype.fields[name][:2]
        found += [(first // 4 + word, value >> 32 * word & 0xFFFFFFFF) for word in range(field.itemsize // 4)]
    return found


_KEYS, _OFFSET, _OFFSET_DATA = (PARAMS.fields[f"dropout.{name}"][1] // 4 for name in ("keys", "offset", "offset_data"))


@functools.lru_cache(maxsize=256)
def _key_changes(seed: int) -> list[Change]:
    """Return what sets the two 32-bit keys of each Philox round."""
    return list(enumerate(chain(*round_keys(RNGState(seed).key)), _KEYS))


def state_changes(state: RNGState, device: int) -> list[Change]:
    """Return what gives a ``Params`` a random state.

    The offset may be a 0-d array of integers on the device, whose low word the kernel reads.
    """
    offset, address = state.offset, 0
    if not isinstance(offset, int):
        offset, address = 0, offset.__cuda_array_interface__["data"][0]
        check_reachable(address, device)
    where = (_OFFSET_DATA, address & 0xFFFFFFFF), (_OFFSET_DATA + 1, address >> 32)
    return [*_key_changes(state.seed), (_OFFSET, offset), *where]


def place_changes(problem: Problem, place: Place, row_blocks: int = 0, key_blocks: int = 0) -> list[Change]:
    """Return what gives a ``Params`` the place of a part in the whole; `row_blocks`, `key_blocks` are addresses."""
    fields = {f"dropout.{name}": getattr(place, name) for name in ("batch", "head", "heads", "row", "key")}
    fields |= {"dropout.row_blocks": row_blocks, "dropout.key_blocks": key_blocks}
    return changes(PARAMS, fields | band_fields(problem, place.shift))
