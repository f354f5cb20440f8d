"""The points of a call: checked once, on one batch of axes, with what hides pairs of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cuattn import interop
from cuattn.errors import ArgumentError, DtypeError, ShapeError, as_real, expect_array, expect_dtype, shown
from cuattn.masks import from_function
from cuattn.masks.base import Mask
from cuattn.masks.constructors import kept_band
from cuattn.masks.device import namespace
from cuattn.masks.intervals import join
from cuattn.pairwise.functions import FUNCTIONS, KernelFunction
from cuattn.problem import DTYPES, borrowed_mask, check_band
from cuattn.problem.scalars import choice

DIRECT_DIM = 8
"""Coordinates up to which distances are sums of squared differences, or as exact as those."""

KERNELS = "cpu", "direct", "products", "sm80", "sm90"


class Wanted(NamedTuple):
    """What is summed over keys j for each row i; arrays have the batch's axes in front.

    Attributes
    ----------
    u, v : array or None
        (..., M, p) and (..., N, p).
    row_log, key_log : array or None
        Natural logarithms of weights, (..., M) and (..., N).
    sums : bool
        sum_j k_ij v_j.
    logs : bool
        log sum_j exp(key_log_j - w_ij).
    slopes : bool
        sum_j g_ij (x_i - y_j), with g_ij = (u_i . v_j) (-dk/dw)_ij.  With logarithms k is the Gaussian, multiplied by
        their exponentials.
    moments : bool
        sum_j g_ij w_ij beside it.
    """

    u: Any = None
    v: Any = None
    row_log: Any = None
    key_log: Any = None
    sums: bool = False
    logs: bool = False
    slopes: bool = False
    moments: bool = False


class Sums(NamedTuple):
    """Sums for each row, those that were wanted; in float64 on the host."""

    sums: Any = None
    logs: Any = None
    directions: Any = None
    moments: Any = None


@dataclass
class Pairs:
    """Points x_i and y_j, a function of their distance, and what else a call says.

    Attributes
    ----------
    arrays : dict of str to array
        NumPy or CuPy views of the call's arrays, in the dtype that is computed in.
    origin : ArrayOrigin
    dtype : numpy.dtype
        The caller's.
    scale : object
        Bandwidth: a float or, on a GPU, perhaps a 0-d array.
    function : KernelFunction
    masks : tuple of Mask
        With the window among them.
    given_mask, window : object
        The arguments.
    precision, kernel : str or None
    vectors : tuple of str
        The arrays with one number a point.
    """

    arrays: dict[str, Any]
    origin: Any
    dtype: np.dtype
    scale: Any
    function: KernelFunction
    given_mask: Any
    window: Any
    precision: str | None
    kernel: str | None
    vectors: tuple[str, ...] = ()

    @property
    def x(self) -> Any:
        """Rows, (..., M, d)."""
        return self.arrays["x"]

    @property
    def y(self) -> Any:
        """Keys, (..., N, d)."""
        return self.arrays["y"]

    @property
    def work(self) -> np.dtype:
        """The dtype that is computed in."""
        return np.dtype(self.x.dtype)

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return self.x.shape[-1]

    @cached_property
    def xp(self) -> Any:
        """The module that computes on the arrays."""
        return namespace(self.x)

    @property
    def factor(self) -> Any:
        """What makes w of a squared distance: a float, or a 0-d float64 array of the same value."""
        return self.function.weight / (self.scale * self.scale)

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Leading axes of the call."""
        shapes = {name: tuple(array.shape) for name, array in self.arrays.items()}
        try:
            return np.broadcast_shapes(*(of[: len(of) - 2 + (name in self.vectors)] for name, of in shapes.items()))
        except ValueError:
            said = ", ".join(f"{name} has shape {of}" for name, of in shapes.items())
            raise ShapeError(f"{said}; expected leading axes that broadcast") from None

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        """What hides pairs; all hold together."""
        rows, keys, found = self.x.shape[-2], self.y.shape[-2], []
        mask = self.given_mask
        if isinstance(mask, Mask):
            found += mask.parts
        elif callable(mask):
            batch, heads = (self.batch[:-1] or None, self.batch[-1]) if self.batch else (None, None)
            found += from_function(mask, rows, keys, batch=batch, heads=heads).parts
        elif mask is not None:
            found.append(borrowed_mask(mask))
        for one in found:
            shape = tuple(one._array.shape) if one.unowned else (*one.leading, rows, keys)
            if not (one.unowned or one.fits(rows, keys)) or not _broadcasts(shape, (*self.batch, rows, keys)):
                raise ShapeError(f"mask is {one!r}; expected one that broadcasts to {(*self.batch, rows, keys)}")
            if one.on_device and self.origin.backend == "cpu":
                raise DtypeError("mask holds device vectors but x is on the CPU; expected a mask of host vectors")
        found = [one.bind(rows, keys) for one in found]
        band = check_band(False, self.window, rows, keys)
        if band is not None:
            found.append(kept_band(rows, keys, band.left, band.right, band.offset))
        return join(found)

    @property
    def is_masked(self) -> bool:
        """Whether pairs may be hidden; asks no mask."""
        return self.given_mask is not None or self.window is not None

    @property
    def swapped(self) -> Pairs:
        """The call with rows and keys exchanged; it has no masks."""
        return replace(self, arrays={"x": self.spread("y"), "y": self.spread("x")})

    @property
    def is_direct(self) -> bool:
        """Whether a call is for kernels that take differences of coordinates."""
        return self.dim <= DIRECT_DIM

    @property
    def is_empty(self) -> bool:
        """Whether there are no pairs."""
        return 0 in (*self.batch, self.x.shape[-2], self.y.shape[-2])

    def spread(self, name: str, axes: int = 2) -> Any:
        """Return an array with the call's whole batch in front of its own axes."""
        array = self.arrays[name]
        return self.xp.broadcast_to(array, (*self.batch, *array.shape[array.ndim - axes :]))

    def gather(self, gradient: Any, name: str, axes: int = 2) -> Any:
        """Sum a gradient over the axes along which an operand was broadcast."""
        shape = self.arrays[name].shape
        more = gradient.ndim - len(shape)
        gradient = gradient.sum(axis=tuple(range(more))) if more else gradient
        alike = tuple([a for a, n in enumerate(shape[: len(shape) - axes]) if n == 1 != gradient.shape[a]])
        return gradient.sum(axis=alike, keepdims=True) if alike else gradient

    def give(self, result: Any) -> Any:
        """Return a result as the caller's kind of array."""
        result = self.xp.asarray(result).astype(self.dtype, copy=False)
        if self.origin.kind != "torch" or self.origin.backend == "cpu":
            return self.origin.from_backend(self.xp.ascontiguousarray(result).reshape(result.shape))
        (given,), *_ = self.origin.allocator([(result.shape, result.dtype)])(0, False, ())
        view = interop.to_backend({"result": given})[0]["result"]
        view[...] = result
        return given


@contextmanager
def entered(
    arrays: dict[str, Any],
    scale: tuple[str, Any],
    *,
    vectors: tuple[str, ...] = (),
    kernel_function: Any = "gaussian",
    mask: Any = None,
    window: Any = None,
    precision: Any = None,
    kernel: Any = None,
) -> Iterator[Pairs]:
    """Check a call; its arrays' device and stream are current within.

    Parameters
    ----------
    arrays : dict of str to array
        x, y, and those that only have to share their dtype.
    scale : (str, object)
        Name and value of the bandwidth.
    vectors : tuple of str
        The arrays with one number a point.
    kernel_function, mask, window, precision, kernel : object
        The arguments.
    """
    named = {name: array for name, array in arrays.items() if array is not None}
    if mask is not None and not isinstance(mask, Mask) and not callable(mask):
        named["mask"] = mask
    on_device = not _is_number(scale[1])
    if on_device:
        named[scale[0]] = scale[1]
    views, origin = interop.to_backend(named)
    with origin.scope():
        mask_view, dtype = views.pop("mask", None), _check_points(views)
        bandwidth = _positive(scale[0], views.pop(scale[0]) if on_device else scale[1], origin.backend == "cuda")
        if not isinstance(kernel_function, str) or kernel_function not in FUNCTIONS:
            expected = ", ".join(map(repr, FUNCTIONS))
            raise ArgumentError(f"kernel_function is {shown(kernel_function)}; expected one of {expected}")
        precision = choice("precision", precision, "float64", "tf32")
        kernel = choice("kernel", kernel, *KERNELS)
        work = np.dtype(np.float64) if precision == "float64" else DTYPES[dtype].stat
        views = {name: view.astype(work, copy=False) for name, view in views.items()}
        mask = mask if mask_view is None else mask_view
        yield Pairs(
            views, origin, dtype, bandwidth, FUNCTIONS[kernel_function], mask, window, precision, kernel, vectors
        )


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _is_number(value: Any) -> bool:
    return not hasattr(value, "__dlpack__") or (isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0)


def _positive(name: str, value: Any, keep: bool) -> Any:
    """Return a scalar > 0 as a float; an array on a GPU as it is, in float64, unread."""
    if not _is_number(value):
        expect_array(name, value, (), *DTYPES)
        if keep:
            return value.astype(np.float64)
    number = as_real(name, value)
    if not number > 0:
        raise ArgumentError(f"{name} is {number}; expected a number > 0")
    return number


def _check_points(views: dict[str, Any]) -> np.dtype:
    """Check what x, y and the other arrays have to share; return their dtype."""
    x, y = views["x"], views["y"]
    dtype = np.dtype(x.dtype)
    expect_dtype("x", dtype, *DTYPES)
    for name, view in views.items():
        if name in ("x", "y") and view.ndim < 2:
            raise ShapeError(f"{name} has shape {tuple(view.shape)}; expected (..., points, coordinates)")
        if view.ndim and view.dtype != dtype:
            raise DtypeError(f"{name} has dtype {view.dtype} and x {dtype}; expected the same dtype")
    if x.shape[-1] != y.shape[-1] or x.shape[-1] == 0:
        raise ShapeError(
            f"x has shape {x.shape} and y {y.shape}; expected the same last axis, of at least 1 coordinate"
        )
    return dtype


def expect_length(name: str, array: Any, length: int, other: str) -> None:
    """Check the last axis of an array with one number a point."""
    if not array.ndim or array.shape[-1] != length:
        raise ShapeError(
            f"{name} has shape {tuple(array.shape)}; expected (..., {length}), one number a point of {other}"
        )


def columns_of(pairs: Pairs, name: str, other: str) -> bool:
    """Make an array of vectors one of columns, and return whether it was one; check its length against a set's points.

    It has columns if it has as many axes as the points, or more, and at least two.
    """
    array, points = pairs.arrays[name], pairs.arrays[other]
    is_vector = array.ndim == 1 or array.ndim == points.ndim - 1
    if is_vector:
        expect_length(name, array, points.shape[-2], other)
        pairs.arrays[name] = array[..., None]
    elif array.ndim == 0 or array.shape[-2] != points.shape[-2]:
        n = points.shape[-2]
        raise ShapeError(f"{name} has shape {tuple(array.shape)}; expected (..., {n}, columns) or (..., {n})")
    return is_vector
