"""Where results go: into arrays of the caller's (``out=``), or into new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn.errors import ArgumentError, UnsupportedError, expect_array, shown
from cuattn.interop.dlpack import Memory
from cuattn.interop.origin import ArrayOrigin, hold, type_name

_ALIGNMENT = 16  # bytes; what the kernels' widest stores need


class Outputs:
    """The arrays that a caller wants results in.

    Parameters
    ----------
    results : sequence of str
        The operation's results.
    out : object
        None, or a sequence with an item for each result: an array, or None for a new one.  A lone array where the
        call has one result.

    Attributes
    ----------
    given : dict of str to array
        The caller's arrays, under the names that error messages use.
    direct : dict of str to array
        By result, views of those that a backend can fill as they are: contiguous and aligned.
    """

    def __init__(self, results: Sequence[str], out: Any) -> None:
        items = {} if out is None else self._items(results, out)
        self.given = {label: array for label, array in items.items() if array is not None}
        self._names = {label: name for label, name in zip(items, results, strict=False) if label in self.given}
        self.direct: dict[str, Any] = {}

    @staticmethod
    def _items(results: Sequence[str], out: Any) -> dict[str, Any]:
        if len(results) == 1:
            return {"out": out}
        fewest = len(results) - results[-1].endswith("dbias")
        if not isinstance(out, (tuple, list)) or not fewest <= len(out) <= len(results):
            raise ArgumentError(
                f"out is {shown(type_name(out))}; expected a tuple ({', '.join(results)}) of arrays or None"
            )
        return {f"out[{index}]": array for index, array in enumerate(out)}

    def take(self, views: dict[str, Any]) -> dict[str, Any]:
        """Keep the views of `given` among those of a call's arrays, and return these without them."""
        self._views = {label: views.pop(label) for label in self.given}
        return views

    def check(self, made: dict[str, Any], operands: dict[str, Any], origin: ArrayOrigin) -> None:
        """Check the given arrays against the results' shapes and dtypes, and that none shares memory.

        Parameters
        ----------
        made : dict of str to (shape, dtype)
            Of the results.
        operands : dict of str to array
            Views of the call's arrays; None for absent ones.
        origin : ArrayOrigin
        """
        if self.given and origin.kind == "jax":
            raise UnsupportedError("out is given for JAX arrays, which are immutable; expected None")
        self._made, self._origin = made, origin
        taken = {name: array for name, array in operands.items() if array is not None}
        for label, view in self._views.items():
            name = self._names[label]
            if name not in made:
                raise ArgumentError(f"{label} is given but the call has no {name}; expected None")
            expect_array(label, view, *made[name])
            _check_memory(label, view, taken)
            taken[label] = view
            if view.flags.c_contiguous and _address(view) % _ALIGNMENT == 0:
                self.direct[name] = view

    def allocator(self) -> Any:
        """Return what allocates the results that are not given and scratch memory, see `ArrayOrigin.allocator`."""
        allocate = self._origin.allocator([one for name, one in self._made.items() if name not in self.direct])
        if not self.direct:
            return allocate
        given, own = [self.direct.get(name) for name in self._made], list(self.given.values())

        def allocate_rest(scratch_bytes: int, together: bool, held: Sequence[Any]) -> tuple[list[Any], list[int], Any]:
            fresh, (*addresses, scratch), keep = allocate(scratch_bytes, together, held)
            if together and not fresh:
                hold(own[0], (keep, held))
            rest = zip(fresh, addresses, strict=True)
            pairs = [next(rest) if array is None else (array, array.data.ptr) for array in given]
            results, places = zip(*pairs, strict=True)
            return list(results), [*places, scratch], keep

        return allocate_rest

    def fill(self, results: Sequence[Any]) -> list[Any]:
        """Return a backend's results as the caller's; the given arrays are filled here where no backend could."""
        found = dict(zip(self._made, map(self._origin.from_backend, results), strict=True))
        for label, name in self._names.items():
            if name not in self.direct:
                self.given[label][...] = found[name]
            found[name] = self.given[label]
        return list(found.values())


def _check_memory(label: str, view: Any, taken: dict[str, Any]) -> None:
    """Check that a view can be written to, each element in a place of its own and outside the arrays `taken`."""
    if isinstance(view, np.ndarray) and not view.flags.writeable:
        raise ArgumentError(f"{label} is read-only; expected a writable array")
    if view.size and any(size > 1 and step == 0 for size, step in zip(view.shape, view.strides, strict=True)):
        raise ArgumentError(f"{label} has elements that share memory (a stride of 0); expected distinct ones")
    for other, array in taken.items():
        if _overlap(view, array):
            raise ArgumentError(f"{label} overlaps {other} in memory; expected memory of its own")


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _overlap(*arrays: Any) -> bool:
    """Whether two arrays share an element's memory; also true where that is hard to tell."""
    # As NumPy sees memory, which is never read: it may lie on a GPU.
    seen = [Memory(_address(a), a.shape, a.strides, f"|V{a.dtype.itemsize}") for a in arrays]
    try:
        return np.shares_memory(*map(np.asarray, seen), max_work=10_000)
    except np.exceptions.TooHardError:
        return True
