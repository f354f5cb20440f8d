"""Checks of what callers hand to masks: each names the argument, its value and what was expected."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn.errors import DtypeError, MaskError, as_integer, shown
from cuattn.masks.device import adopt, is_device_array

INT32_MAX = 2**31 - 1


def integer(name: str, value: Any, minimum: int = 0, maximum: float = INT32_MAX) -> int:
    """Return `value` as an int in [minimum, maximum]."""
    number = as_integer(value)
    if number is None:
        raise DtypeError(f"{name} = {shown(value)}: expected an integer, got {type(value).__name__}")
    if not minimum <= number <= maximum:
        raise MaskError(f"{name} = {shown(number)}: expected an integer in [{minimum}, {maximum}]")
    return number


def tile(block_m: Any, block_n: Any) -> tuple[int, int]:
    """Return the sizes of a tile as ints >= 1."""
    return integer("block_m", block_m, 1), integer("block_n", block_n, 1)


def any_array(name: str, value: Any, on_host: bool = False) -> Any:
    """Return `value` as a NumPy or, unless it must be on the host, a CuPy array, without copying one."""
    if is_device_array(value):
        if on_host:
            raise DtypeError(f"{name} is on a GPU: expected host data")
        return adopt(name, value)
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(f"{name} is a numpy masked array: expected a plain one")
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(f"{name} = {type(value).__name__}: expected something array-like") from error


def integers(name: str, value: Any, on_host: bool = False) -> Any:
    """Return `value` as an array of an integer dtype (bools and floats are refused; an empty list is fine)."""
    array = any_array(name, value, on_host)
    if array.size == 0 and isinstance(value, list | tuple):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array


def in_range(name: str, array: Any, maximum: int) -> None:
    """Raise MaskError naming the first element of a host array outside [0, maximum]; one on a GPU is not read."""
    if isinstance(array, np.ndarray) and (array.min(initial=0) < 0 or array.max(initial=0) > maximum):
        place = np.argwhere((array < 0) | (array > maximum))[0].tolist()
        raise MaskError(f"{name}{place} = {array[tuple(place)]}: expected a value in [0, {maximum}]")


def numbers(name: str, value: Any, *pair: int) -> np.ndarray:
    """Return a list of integers in [0, 2**31) or, where `pair` is 2, of pairs of them, as int64."""
    array = integers(name, value, on_host=True)
    if array.shape == (0,):
        array = array.reshape(0, *pair)
    if array.ndim == 0 or array.shape[1:] != pair:
        raise MaskError(f"{name} has shape {array.shape}: expected a list of {'pairs' if pair else 'lengths'}")
    in_range(name, array, INT32_MAX)
    return array.astype(np.int64)


def lengths(name: str, value: Any) -> np.ndarray:
    """Return a list of lengths, whose sum is an int32, as int64, (n,)."""
    array = numbers(name, value)
    integer(f"sum({name})", array.sum())
    return array


def booleans(name: str, value: Any) -> Any:
    """Return `value` as a bool array, NumPy or CuPy, of at least two axes."""
    array = any_array(name, value)
    if array.dtype != bool:
        raise DtypeError(f"{name} has dtype {array.dtype}: expected bool")
    if array.ndim < 2:
        raise MaskError(f"{name} has shape {array.shape}: expected at least 2 axes")
    return array


def vectors(named: dict[str, Any]) -> dict[str, Any]:
    """Return arrays of integers by name: all in one place, their last axes equal and the leading ones broadcasting."""
    arrays = {name: integers(name, value) for name, value in named.items()}
    if len({str(array.device) for array in arrays.values()}) > 1:
        places = ", ".join(f"{name} on {array.device}" for name, array in arrays.items())
        raise DtypeError(f"{places}: expected one place")
    shapes = [array.shape for array in arrays.values()]
    given = ", ".join(f"{name} {shape}" for name, shape in zip(arrays, shapes, strict=True))
    try:
        if () in shapes or len({shape[-1] for shape in shapes}) != 1:
            raise ValueError
        np.broadcast_shapes(*shapes)
    except ValueError:
        expected = "(..., n_keys) with the same n_keys and leading axes that broadcast"
        raise MaskError(f"shapes {given}: expected {expected}") from None
    return arrays


def sequence(name: str, value: Any) -> Sequence[Any]:
    """Return `value` if it is a list-like sequence."""
    if isinstance(value, np.ndarray):
        value = value.tolist()  # rows of a matrix would be matrices without end
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise DtypeError(f"{name} = {shown(value)}: expected a sequence")
    return value
