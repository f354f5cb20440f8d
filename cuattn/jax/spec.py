"""What a call is apart from its arrays, and how it is called with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

import cuattn
from cuattn.errors import DtypeError
from cuattn.masks.base import Mask

COLUMNS = ("lts", "lte", "uts", "ute")


def as_jax(name: str, value: Any) -> Any:
    """Return an argument as an array of JAX; of one that is, ``jax.numpy.asarray`` would take its time to say so."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise DtypeError(f"{name} is {type(value).__name__}; expected an array of JAX or NumPy") from error


@dataclass(frozen=True)
class Spec:
    """What a call is apart from its arrays.

    Attributes
    ----------
    names : tuple of (str or int)
        The operands: q, k, v, and bias; mask, or the vectors of a column mask; by their index in `score_args` those of
        its items that are arrays.
    learned : int
        How many of them are differentiated, the first.
    score_args : tuple
        The numbers of `score_args`; None for arrays.
    given : tuple of (str, object)
        The arguments that are no arrays.
    types : tuple of type
        Of the values in the last two: True is no 1.
    """

    names: tuple[Any, ...]
    learned: int
    score_args: tuple[Any, ...]
    given: tuple[tuple[str, Any], ...]
    types: tuple[type, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", tuple(map(type, (*self.score_args, *self.keywords.values()))))

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments that are no arrays."""
        return dict(self.given)

    def call(self, operands: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the q, k, v and the keywords of a call of cuattn's functions."""
        named, keywords = dict(zip(self.names, operands, strict=True)), self.keywords
        keywords |= {name: named[name] for name in ("bias", "mask") if name in named}
        if COLUMNS[0] in named:
            keywords["mask"] = cuattn.ColumnMask(*map(named.get, COLUMNS), n_queries=named["q"].shape[-2])
        if self.score_args:
            keywords["score_args"] = tuple([named.get(index, value) for index, value in enumerate(self.score_args)])
        return [named[name] for name in "qkv"], keywords

    def tangents(self, prefix: str, score: str, given: tuple[int, ...], tangents: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by which tangents are handed over: those named `prefix` and an operand, and `score`."""
        named = {self.names[index]: tangent for index, tangent in zip(given, tangents, strict=True)}
        own = {f"{prefix}{name}": tangent for name, tangent in named.items() if isinstance(name, str)}
        if len(own) < len(named):
            own[score] = tuple([named.get(index) for index in range(len(self.score_args))])
        return own

    def gradients(self, found: Any) -> list[Any]:
        """Return the gradients of the operands that are differentiated."""
        own = {name: getattr(found, f"d{name}") for name in ("q", "k", "v", "bias")}
        own |= dict(enumerate(found.dscore))
        return [own[name] for name in self.names[: self.learned]]

    @property
    def n_own(self) -> int:
        """How many of the gradients belong to q, k, v and bias, which can be written to given memory."""
        return sum(name in ("q", "k", "v", "bias") for name in self.names)

    @property
    def has_table(self) -> bool:
        """Whether a mask is a function that was evaluated for the leading axes that the call has."""
        mask = self.keywords["mask"]
        return isinstance(mask, Mask) and any(part.kind == "function" for part in mask.parts)

    def mapped(self, batch: int, longer: Sequence[int]) -> Spec:
        """Return what the call is with an axis more in front of `batch` calls, as its operands `longer` have it."""
        score, mask = self.keywords["score"], self.keywords["mask"]
        if score is not None:
            further = {self.names[index] for index in longer}
            score = _mapped_score(score, batch, tuple([index in further for index in range(len(self.score_args))]))
        if callable(mask):
            mask = _mapped_mask(mask, batch)
        return replace(self, given=tuple({**self.keywords, "score": score, "mask": mask}.items()))


def _mapped_score(score: Callable[..., Any], batch: int, longer: tuple[bool, ...]) -> Callable[..., Any]:
    """Return a score function for calls one behind the other; arguments that are `longer` have the axis."""

    def mapped(s: Any, b: Any, h: Any, i: Any, j: Any, *args: Any) -> Any:
        own = [_Slice(x, b // batch) if further else x for x, further in zip(args, longer, strict=True)]
        return score(s, b % batch, h, i, j, *own)

    return mapped


def _mapped_mask(visible: Callable[..., Any], batch: int) -> Callable[..., Any]:
    return lambda b, h, i, j: visible(b % batch, h, i, j)


class _Slice:
    """A part of an array, along its first axis, for a function that is traced."""

    def __init__(self, array: Any, index: Any) -> None:
        self._array, self._index = array, index
        self.shape, self.ndim, self.dtype = array.shape[1:], array.ndim - 1, array.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: Any) -> Any:
        return self._array[(self._index, *(indices if isinstance(indices, tuple) else (indices,)))]
