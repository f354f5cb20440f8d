"""The score function of a call: traced once, known from then on, and the arrays that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cuattn import interop
from cuattn.errors import ArgumentError, DtypeError, expect_array, shown
from cuattn.masks.device import upload
from cuattn.masks.function import live
from cuattn.problem import Operation, ScoreFunction
from cuattn.tracing import MASK, SCORE, Bound, Frozen, Traced, kind_of_argument, recall, trace
from cuattn.tracing.capture import Argument, copied
from cuattn.tracing.graph import variable
from cuattn.tracing.proxy import kind_of

_UNCHANGED = variable("s")
_NAMES = [f"score_args[{index}]" for index in range(1000)]
_TANGENTS = [f"t{name}" for name in _NAMES]


class Score:
    """A score function and its arguments in one call.

    Parameters
    ----------
    function, args : object
        The caller's ``score`` and ``score_args``.
    arrays : dict of str to array
        The call's, to which the arrays among `args` are added.
    operation : Operation
        What the call does: whether it returns gradients, and the name of the next argument.
    tangents : object, optional
        The caller's tangents of `args`, which are added to `arrays`, too.

    Attributes
    ----------
    whole : Traced or None
        The function, once it is known.
    traced : Traced or None
        Then; but None if it changes no score that is visible, and there is nothing to differentiate.
    visible : Frozen or None
        Then, where scores are visible, until a mask says that.
    """

    whole: Traced | None = None
    traced: Traced | None = None
    visible: Frozen | None = None
    _given: tuple[int, ...] = ()  # arguments that have a tangent
    _count = 0  # of arrays among the arguments

    def __init__(
        self, function: Any, args: Any, arrays: dict[str, Any], operation: Operation, tangents: Any = None
    ) -> None:
        if not isinstance(args, (tuple, list)):
            raise DtypeError(
                f"score_args is {interop.type_name(args)}; expected a tuple of arrays and numbers, as (x,)"
            )
        if function is None:
            raise ArgumentError(f"score_args has {len(args)} items but score is None; expected a function of them")
        if not callable(function):
            raise DtypeError(f"score is {shown(function)}; expected a function score(s, b, h, i, j, *score_args)")
        self._function, self._args, self._operation = function, args, operation
        if args:
            self._count = 0
            for name, value in zip(_NAMES, args, strict=False):
                if hasattr(value, "__dlpack__"):
                    arrays[name] = value
                    self._count += 1
        if tangents is not None:
            named = self._named(tangents)
            self._given = tuple([index for index, value in enumerate(named.values()) if value is not None])
            arrays |= {name: value for name, value in named.items() if value is not None}

    def _named(self, tangents: Any) -> dict[str, Any]:
        """Return the tangents of the arguments by name."""
        label, n = self._operation.label("tscore_args"), len(self._args)
        if not isinstance(tangents, (tuple, list)) or len(tangents) != n:
            what = f"{len(tangents)} items" if isinstance(tangents, (tuple, list)) else interop.type_name(tangents)
            raise ArgumentError(f"{label} has {what}; expected a tuple of {n}, one for each item of score_args")
        return dict(zip(_TANGENTS, tangents, strict=False))

    def recall(self) -> tuple[Any, ...] | None:
        """Return what is known of the function, and the kinds of its arguments that are numbers; None if nothing is."""
        known = recall(self._function)
        if known is None or self._count == len(self._args):
            return known and (known,)
        numbers = [(n, x) for n, x in enumerate(self._args) if not hasattr(x, "__dlpack__")]
        return known, *[kind_of_argument(SCORE, n, x) for n, x in numbers]

    def trace(self, views: dict[str, Any]) -> None:
        """Trace the function for NumPy or CuPy views of the call's arrays."""
        args = [views.get(name, value) for name, value in zip(_NAMES, self._args, strict=False)]
        self.take(trace(self._function, SCORE, args, adopt=_copied))

    def take(self, traced: Traced) -> None:
        """Take what the function was traced to."""
        self.whole, self.traced, (self.visible, root) = traced, traced, traced.split
        if root is _UNCHANGED and not self.learned:
            self.traced = None

    @property
    def learned(self) -> dict[int, int]:
        """The slots of the arrays that the call differentiates, and which arguments they are."""
        return self.traced.floats if self.traced and self._operation.replays else {}

    @property
    def tangents(self) -> dict[int, int]:
        """The slots of the function's arrays that have a tangent, and the arguments' numbers."""
        floats = self.traced.floats if self.traced else {}
        return {slot: index for slot, index in floats.items() if index in self._given}

    @property
    def tangent_slots(self) -> tuple[tuple[int, int], ...]:
        """The slots of the function's arrays that have a tangent, and the slots of these, which come last."""
        return tuple([(slot, n) for n, slot in enumerate(self.tangents, len(self.traced.arrays) if self.traced else 0)])

    def check_tangents(self, views: dict[str, Any]) -> None:
        """Check the tangents of arguments, given views of the call's arrays."""
        for index in self._given:
            name, array = _NAMES[index], views.get(_NAMES[index])
            label, tangent = self._operation.label(_TANGENTS[index]), views[_TANGENTS[index]]
            if array is None or kind_of(array.dtype) != "f":
                raise ArgumentError(f"{label} is given but {name} is no array of floats; expected None")
            expect_array(label, tangent, tuple(array.shape), np.dtype(array.dtype))

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Python numbers by slot of the function's parameters."""
        numbers = self.traced.numbers if self.traced else ()
        if not numbers or self.traced.has_own_numbers:
            return numbers
        return tuple([_as_number(self._args[x]) if type(x) is Argument else x for x in numbers])

    @property
    def own_numbers(self) -> tuple[Any, ...] | None:
        """The numbers, where warm calls need ask nothing else of the function; else None."""
        known, whole = self.traced, self.whole
        if known is None or self._given or self.learned or not (known.in_order and known.has_own_numbers):
            return None
        return known.numbers if whole is not None and whole.split[0] is None else None

    def bound(self, operands: dict[str, Any]) -> Bound | None:
        """Return the function with the arrays, by a backend's names, and the numbers of the call."""
        if self.traced is None:
            return None
        arrays = [operands[name] for name in ScoreFunction.names_of((*self.traced.arrays, *self.tangents))]
        return Bound(self.traced.split[1], tuple(arrays), self.numbers, self.traced.spans)

    def _by_slot(self, values: list[Any], captured: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Divide what belongs to the call's arrays that there are: into its own, and the function's with `captured`."""
        first = len(values) - len(self._given)
        own, args = values[: first - self._count], values[first - self._count : first]
        if self.traced is None:
            return own, []
        tangents = dict(zip(self._given, values[first:], strict=True))
        arrays = [captured[slot] if n < 0 else args[n] for slot, n in enumerate(self.traced.order)]
        return own, [*arrays, *[tangents[index] for index in self.tangents.values()]]

    def given(self, addresses: list[int], device: int) -> tuple[list[int], tuple[Any, ...], tuple[Any, ...]]:
        """Return what a launch on a GPU is given, from the addresses of the call's arrays.

        Returns
        -------
        addresses : list of int
            Those of the function's arrays come last, by slot.
        captured : tuple of array
            What some of them belong to.
        numbers : tuple
        """
        traced = self.traced
        if traced and traced.in_order and not self._given:
            return addresses, (), self.numbers
        captured, places = _captured(traced, device) if traced else ((), ())
        own, arrays = self._by_slot(addresses, places)
        return own + arrays, captured, self.numbers

    def operands(self, views: dict[str, Any], origin: interop.ArrayOrigin) -> dict[str, Any]:
        """Return the call's arrays, and captured ones, by a backend's names."""
        device = None if origin.backend == "cpu" else origin.device
        captured, _ = _captured(self.traced, device) if self.traced else ((), ())
        own, arrays = self._by_slot(list(views.values()), captured)
        return dict(zip(views, own, strict=False)) | dict(zip(ScoreFunction.names_of(arrays), arrays, strict=True))

    def divide(self, results: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """Divide a backward's results into those by operands and those by the function's arguments, which come last."""
        if not self._args:
            return results, ()
        learned, found = self.learned, [None] * len(self._args)
        own = len(results) - len(learned)
        for index, gradient in zip(learned.values(), results[own:], strict=True):
            found[index] = gradient
        return results[:own], tuple(found)


def visible(function: Any) -> Bound:
    """Return a function of visibility with what it captures, traced."""
    return trace(function, MASK, adopt=live).captured


def _as_number(value: Any) -> Any:
    """Return a number of Python or NumPy as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _copied(array: Any) -> Any:
    """Return a copy of an array that a function captures, of NumPy or CuPy."""
    views, _ = interop.to_backend({"an array that score captures": array})
    return copied(*views.values())


@lru_cache(maxsize=64)
def _captured(traced: Traced, device: int | None) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Return the arrays that a function captures and their addresses, by slot; copied to a GPU once."""
    found = [None if isinstance(array, Argument) else _moved(array, device) for array in traced.arrays]
    return tuple(found), tuple([0 if array is None or device is None else array.data.ptr for array in found])


def _moved(array: Any, device: int | None) -> Any:
    """Return a captured array where those of a call lie."""
    if isinstance(array, np.ndarray):
        return array if device is None else upload(array, device)
    if array.device.id != device:
        here = "the CPU" if device is None else f"CUDA device {device}"
        raise DtypeError(f"score captures an array on CUDA device {array.device.id}; expected {here}, where q is")
    return array
