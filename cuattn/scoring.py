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
from cuattn.problem import SCORE_ARGS, Operation, ScoreFunction
from cuattn.tracing import MASK, SCORE, Bound, Frozen, Traced, kind_of_argument, trace
from cuattn.tracing import recall as recall
from cuattn.tracing.capture import Argument, copied
from cuattn.tracing.graph import variable
from cuattn.tracing.proxy import kind_of

_UNCHANGED = variable("s")
_TANGENTS = [f"t{name}" for name in SCORE_ARGS]


class Score:
    """A score function and its arguments in one call.

    Parameters
    ----------
    function, args : object
        The caller's ``score`` and ``score_args``.
    count : int
        How many of these are arrays, which the call has.
    operation : Operation
        What the call does: whether it returns gradients, and the name of the next argument.

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

    def __init__(self, function: Any, args: Any, count: int, operation: Operation) -> None:
        self._function, self._args, self._count, self._operation = function, args, count, operation

    def take_tangents(self, tangents: Any) -> dict[str, Any]:
        """Return the tangents of the arguments that have one, by name, given the caller's."""
        named = self._named(tangents)
        self._given = tuple([index for index, value in enumerate(named.values()) if value is not None])
        return {name: value for name, value in named.items() if value is not None}

    def _named(self, tangents: Any) -> dict[str, Any]:
        """Return the tangents of the arguments by name."""
        label, n = self._operation.label("tscore_args"), len(self._args)
        if not isinstance(tangents, (tuple, list)) or len(tangents) != n:
            what = f"{len(tangents)} items" if isinstance(tangents, (tuple, list)) else interop.type_name(tangents)
            raise ArgumentError(f"{label} has {what}; expected a tuple of {n}, one for each item of score_args")
        return dict(zip(_TANGENTS, tangents, strict=False))

    def trace(self, views: dict[str, Any]) -> None:
        """Trace the function for NumPy or CuPy views of the call's arrays."""
        args = [views.get(name, value) for name, value in zip(SCORE_ARGS, self._args, strict=False)]
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
    def places(self) -> tuple[Any, ...]:
        """The first gradient by an argument among a backward's results, and which of these belongs to each argument.

        None for the latter if all have one, in their order.
        """
        if not (self._args and self._operation.replays):
            return ()
        learned, every = list(self.learned.values()), range(len(self._args))
        places = {index: place for place, index in enumerate(learned)}
        return -len(learned) or None, None if learned == [*every] else tuple(map(places.get, every))

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
            name, array = SCORE_ARGS[index], views.get(SCORE_ARGS[index])
            label, tangent = self._operation.label(_TANGENTS[index]), views[_TANGENTS[index]]
            if array is None or kind_of(array.dtype) != "f":
                raise ArgumentError(f"{label} is given but {name} is no array of floats; expected None")
            expect_array(label, tangent, tuple(array.shape), np.dtype(array.dtype))

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Python numbers by slot of the function's parameters."""
        return self.traced.numbers_of(self._args) if self.traced else ()

    @property
    def way_to_numbers(self) -> Any:
        """The numbers of warm calls that need ask nothing else of the function, or what tells them; else None."""
        known, whole = self.traced, self.whole
        if known is None or whole is None or whole.split[0] is not None or self._given or not known.in_order:
            return None
        return known.numbers if known.has_own_numbers else known.numbers_of

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


def check(function: Any, args: Any) -> None:
    """Check the caller's ``score`` and ``score_args``, one of which is given."""
    if not isinstance(args, (tuple, list)):
        raise DtypeError(f"score_args is {interop.type_name(args)}; expected a tuple of arrays and numbers, as (x,)")
    if function is None:
        raise ArgumentError(f"score_args has {len(args)} items but score is None; expected a function of them")
    if not callable(function):
        raise DtypeError(f"score is {shown(function)}; expected a function score(s, b, h, i, j, *score_args)")


def kinds_of_numbers(args: Sequence[Any]) -> list[Any]:
    """Return the kinds of those arguments of a score function that are no arrays."""
    return [kind_of_argument(SCORE, n, x) for n, x in enumerate(args) if not hasattr(x, "__dlpack__")]


def visible(function: Any) -> Bound:
    """Return a function of visibility with what it captures, traced."""
    return trace(function, MASK, adopt=live).captured


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
