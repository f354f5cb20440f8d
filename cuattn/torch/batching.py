"""torch.func.vmap: one call with an axis more in front, or one call after the other where that would count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cuattn.torch.core import Tensors

_OF_ROWS = ("l", "m", "dlse", "tlse", "tdlse")


def batched(
    apply: Callable[..., Sequence[Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    counts: bool,
    size: int,
    dims: Sequence[int | None],
    tensors: Sequence[Any],
) -> Tensors:
    """Apply a function to each element of an axis of some of its tensors.

    Parameters
    ----------
    apply : callable
        Of the tensors.
    inputs : sequence of str
        Names of the tensors but those among score_args, which come last.
    outputs : sequence of str
        Of what it returns: an operand's name of the gradient by that, of which there is one if the operand is there.
    counts : bool
        Whether the function depends on which of the leading axes' elements is which.
    size : int
        Length of the axis.
    dims : sequence of int or None
        Where each tensor has the axis.
    tensors : sequence of tensor or None

    Returns
    -------
    tuple of tensor
        The axis comes first.

    Notes
    -----
    Dropout counts leading axes, so that elements which are calls with one axis more draw independently: which is
    what is wanted of a seed that has the axis (``randomness="different"``).
    """
    named, axes = dict(zip(inputs, tensors, strict=False)), dict(zip(inputs, dims, strict=False))
    if counts or (named["seed"] is not None and axes["seed"] is None):
        return _one_by_one(apply, size, dims, tensors)
    shapes = {name: _without(x.shape, axes[name]) for name, x in named.items() if x is not None}
    rank = max(3, *(len(shapes[name]) for name in "qkv"))
    lone = max(len(shapes[name]) for name in "qkv") == 2
    folded = [
        None if x is None else _folded(name, x, axes[name], shapes[name], size, rank) for name, x in named.items()
    ]
    present = [name for name in outputs if name not in named or name in shapes]
    results = zip(present, apply(*folded), strict=True)
    return tuple([
        x.reshape(size, *shapes[name]) if name in shapes else x.squeeze(1) if lone else x for name, x in results
    ])  # fmt: skip


def _one_by_one(
    apply: Callable[..., Sequence[Any]], size: int, dims: Sequence[int | None], tensors: Sequence[Any]
) -> Tensors:
    results = []
    for n in range(size):
        chosen = [x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims, strict=True)]
        results.append(apply(*chosen))
    return tuple(map(torch.stack, zip(*results, strict=True)))


def _without(shape: Sequence[int], axis: int | None) -> tuple[int, ...]:
    """Return a shape without an axis."""
    return tuple([n for place, n in enumerate(shape) if place != axis])


def _folded(name: str, x: Any, axis: int | None, shape: tuple[int, ...], size: int, rank: int) -> Any:
    """Return a tensor with the axis in front of those that it has in a call of some rank."""
    if name == "seed":
        return x.select(axis, 0)
    if name == "mask" and axis is None:
        return x
    x = x.expand(size, *shape) if axis is None else x.movedim(axis, 0)
    missing = rank - len(shape) - (name in _OF_ROWS)
    return x.reshape(size, *(1,) * missing, *shape)
