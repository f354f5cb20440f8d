"""Checks of what callers hand to masks: each names the argument, its value and what was expected."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn.errors import DtypeError, MaskError, shown
from cuattn.masks.device import adopt, is_device_array

INT32_MAX = 2**31 - 1


def integer(name: str, value: Any, minimum: int = 0, maximum: int | None = INT32_MAX) -> int:
    """Return `value` as an int in [minimum, maximum]; None leaves it open above."""
    if isinstance(value, bool | np.bool_):
        raise DtypeError(f"{name} = {shown(value)}: expected an integer, got a bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise DtypeError(f"{name} = {shown(value)}: expected an integer, got {type(value).__name__}") from None
    if number < minimum or (maximum is not None and number > maximum):
        bound = f">= {minimum}" if maximum is None else f"in [{minimum}, {maximum}]"
        raise MaskError(f"{name} = {shown(number)}: expected an integer {bound}")
    return number


def tile(block_m: Any, block_n: Any) -> tuple[int, int]:
    """Return the sizes of a tile as ints >= 1."""
    return integer("block_m", block_m, 1), integer("block_n", block_n, 1)


def host_array(name: str, value: Any) -> np.ndarray:
    """Return `value` as a NumPy array, without copying one."""
    if is_device_array(value):
        raise DtypeError(f"{name} is on a GPU: expected host data")
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a numpy masked array: expected a plain one")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{name} = {type(value).__name__}: expected something array-like") from error


def any_array(name: str, value: Any) -> Any:
    """Return `value` as a NumPy or a CuPy array, wherever it lies, without copying one."""
    return adopt(name, value) if is_device_array(value) else host_array(name, value)


def integers(name: str, value: Any, array: Any = None) -> Any:
    """Return `value` as an array of an integer dtype (bools and floats are refused; an empty list is fine)."""
    array = any_array(name, value) if array is None else array
    if array.size == 0 and isinstance(value, list | tuple):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array


def in_range(name: str, array: np.ndarray, minimum: int, maximum: int) -> None:
    """Raise MaskError naming the first element of a host array outside [minimum, maximum]."""
    if array.size == 0 or (array.min() >= minimum and array.max() <= maximum):
        return
    wrong = (array < minimum) | (array > maximum)
    place = np.unravel_index(int(wrong.argmax()), array.shape)
    index = ", ".join(map(str, place))
    raise MaskError(f"{name}[{index}] = {array[place]}: expected a value in [{minimum}, {maximum}]")


def lengths(name: str, value: Any) -> np.ndarray:
    """Return a list of lengths as int64, (n,): integers >= 0 whose sum is an int32."""
    array = integers(name, value, host_array(name, value))
    if array.ndim != 1:
        raise MaskError(f"{name} has shape {array.shape}: expected a list of lengths")
    in_range(name, array, 0, INT32_MAX)
    array = array.astype(np.int64)
    if array.sum() > INT32_MAX:
        raise MaskError(f"sum({name}) = {array.sum()}: expected at most {INT32_MAX}")
    return array


def pairs(name: str, value: Any) -> np.ndarray:
    """Return a list of pairs of integers >= 0 as int64, (n, 2)."""
    array = integers(name, value, host_array(name, value))
    if array.size == 0:
        array = array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2:
        raise MaskError(f"{name} has shape {array.shape}: expected a list of pairs")
    in_range(name, array, 0, INT32_MAX)
    return array.astype(np.int64)


def booleans(name: str, value: Any, min_ndim: int) -> Any:
    """Return `value` as a bool array, NumPy or CuPy, of at least `min_ndim` axes."""
    array = any_array(name, value)
    if array.dtype != np.bool_:
        raise DtypeError(f"{name} has dtype {array.dtype}: expected bool")
    if array.ndim < min_ndim:
        raise MaskError(f"{name} has shape {array.shape}: expected at least {min_ndim} axes")
    return array


def same_place(named: dict[str, Any]) -> bool:
    """Return whether the arrays lie on a GPU; raise DtypeError unless all lie in one place."""
    places = {name: None if isinstance(array, np.ndarray) else int(array.device.id) for name, array in named.items()}
    first_name, first = next(iter(places.items()))
    for name, place in places.items():
        if place != first:
            raise DtypeError(f"{name} is on {_place(place)}, {first_name} on {_place(first)}: expected one place")
    return first is not None


def common_shape(named: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of mask vectors whose leading axes broadcast and whose last axes agree."""
    shapes = [array.shape for array in named.values()]
    given = ", ".join(f"{name} {array.shape}" for name, array in named.items())
    if any(len(shape) == 0 for shape in shapes) or len({shape[-1] for shape in shapes}) != 1:
        raise MaskError(f"shapes {given}: expected (..., n_keys) with the same n_keys")
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise MaskError(f"shapes {given}: expected leading axes that broadcast") from None


def sequence(name: str, value: Any) -> Sequence[Any]:
    """Return `value` if it is a list-like sequence."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value.tolist()  # rows of a matrix would be matrices without end
    is_array = isinstance(value, np.ndarray | np.generic)
    if is_array or isinstance(value, str | bytes) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise DtypeError(f"{name} = {shown(value)}: expected a sequence")
    return value


def _place(device: int | None) -> str:
    return "the host" if device is None else f"GPU {device}"
