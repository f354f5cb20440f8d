"""The one place that checks a call's arguments against each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cuattn import rng as _rng
from cuattn.errors import ArgumentError, DtypeError, ShapeError, shown
from cuattn.masks import BooleanMask
from cuattn.masks.base import Mask
from cuattn.problem import scalars
from cuattn.problem.model import Place, Problem
from cuattn.problem.operations import Operation
from cuattn.problem.origin import Origin, place_of
from cuattn.problem.shapes import Sizes, align, broadcasts_to, check_bias_dtype, check_score_like, common_dtype, sizes

__all__ = ["Checked", "Options", "bind", "borrowed_mask", "check", "drawn_state", "place_of_call", "replayed_state"]

_INDEX_LIMIT = 2**32  # the generator's counter words have 32 bits


class Options(NamedTuple):
    """The arguments of a call that are neither arrays nor masks, as the caller gave them."""

    is_causal: Any = False
    window: Any = None
    scale: Any = None
    softcap: Any = None
    dropout_p: Any = 0.0
    enable_gqa: Any = False
    precision: Any = None
    kernel: Any = None
    out_dtype: Any = None
    deterministic: Any = False
    statistics: bool = True


class Checked(NamedTuple):
    """A problem, the sizes of its operands as the caller sees them, and whether its band ends at the bottom right."""

    problem: Problem
    sizes: Sizes
    bottom_right: bool


def check(
    operation: Operation,
    arrays: dict[str, Any],
    masks: tuple[Mask, ...],
    options: Options,
    origin: Origin | None = None,
) -> Checked:
    """Check every argument of a call against the others.

    Parameters
    ----------
    operation : Operation
    arrays : dict of str to array
        NumPy or CuPy views of q, k, v and of what the operation needs beside; absent ones are missing or None.
    masks : tuple of Mask
    options : Options
    origin : Origin, optional
        Of a part of a larger problem: of it only whether it is given, which decides how the band is placed (see
        :func:`place_of_call`), and whether it has runs.

    Returns
    -------
    Checked
    """
    q, k, v = (arrays[name] for name in "qkv")
    dtype = common_dtype(q=q, k=k, v=v)
    size = sizes(tuple(q.shape), tuple(k.shape), tuple(v.shape), scalars.flag("enable_gqa", options.enable_gqa))
    bias = arrays.get("bias")
    band, bottom_right = scalars.check_band(
        options.is_causal, options.window, size.n_queries, size.n_keys, sharded=origin is not None
    )
    problem = Problem(
        operation=operation.name,
        batch=size.batch,
        heads=size.heads,
        kv_heads=size.kv_heads,
        n_queries=size.n_queries,
        n_keys=size.n_keys,
        head_dim=size.head_dim,
        head_dim_v=size.head_dim_v,
        dtype=dtype,
        scale=scalars.check_scale(options.scale, size.head_dim, dtype),
        softcap=scalars.check_softcap(options.softcap, dtype),
        band=band,
        masks=tuple(mask.kind for mask in masks),
        bias=None if bias is None else check_bias_dtype(bias, dtype),
        dropout=_rng.threshold(scalars.real("dropout_p", options.dropout_p)),
        out_dtype=scalars.check_out_dtype(options.out_dtype, dtype),
        statistics=options.statistics,
        precision=scalars.choice("precision", options.precision, ("tf32",)),
        deterministic=scalars.flag("deterministic", options.deterministic),
        kernel=scalars.check_kernel(options.kernel),
    )
    if problem.dropout and origin is not None and origin.has_runs:
        problem = replace(problem, runs=True)
    if bias is not None:
        check_score_like("bias", tuple(bias.shape), size)
    for mask in masks:
        _check_mask(mask, size)
    operation.check(problem, size, arrays)
    _check_counters(problem, problem.place)
    return Checked(problem, size, bottom_right)


def bind(problem: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return a call's operands, aligned to one rank, with a contiguous last axis where it holds columns."""
    rank = len(problem.batch) + 3
    found = {}
    for name, array in arrays.items():
        if array is None:
            continue
        if name in ("l", "m", "dlse"):
            found[name] = align(array, rank - 1)
        else:
            found[name] = align(array if name == "bias" else _contiguous_last(array), rank)
    return found


def place_of_call(checked: Checked, origin: Origin | None) -> Place:
    """Return where a call stands in the whole problem."""
    if origin is None:
        return checked.problem.place
    place = place_of(origin, checked.problem, checked.bottom_right)
    _check_counters(checked.problem, place)
    return place


def drawn_state(problem: Problem, rng: Any) -> _rng.RNGState | None:
    """Return the state of a forward's dropout from its argument rng; None without dropout."""
    if problem.dropout:
        return _rng.resolve(rng)
    if rng is not None and not isinstance(rng, np.random.Generator):
        _rng.resolve(rng)  # checks it; from a generator it would draw
    return None


def replayed_state(problem: Problem, state: Any) -> _rng.RNGState | None:
    """Return the state of a backward's dropout from its forward's; None without dropout."""
    if isinstance(state, np.random.Generator):
        raise DtypeError(
            "fwd.rng_state is a numpy.random.Generator, which would draw other numbers than the forward did; expected "
            "the RNGState that the forward returned"
        )
    if not problem.dropout:
        if state is not None:
            raise ArgumentError(f"fwd.rng_state is {shown(state)} but dropout_p is 0; expected the forward's dropout_p")
        return None
    if state is None:
        raise ArgumentError("dropout_p is set but fwd.rng_state is None; expected the state that the forward returned")
    if type(state) in (tuple, list) and len(state) == 2:
        state = _rng.RNGState(*state)
    return _rng.resolve(state)


def _check_counters(problem: Problem, place: Place) -> None:
    """Dropout's generator counts batch-heads, rows and keys in 32 bits."""
    if not problem.dropout:
        return
    batches = problem.instances // problem.heads if problem.heads else 0
    total = (place.batch + batches) * place.heads
    ends = (("batch x heads", total), ("query", place.row + problem.n_queries), ("key", place.key + problem.n_keys))
    for name, end in ends:
        if end > _INDEX_LIMIT:
            raise ArgumentError(f"dropout_p needs {name} indices up to {end}; expected at most {_INDEX_LIMIT}")


def _check_mask(mask: Mask, size: Sizes) -> None:
    """Check a mask's shape against the scores."""
    if isinstance(mask, BooleanMask) and mask.borrowed:
        check_score_like("mask", tuple(mask.array.shape), size)
        return
    if not mask.fits(size.n_queries, size.n_keys):
        raise ShapeError(f"mask is {mask!r}; expected one for {size.n_queries} queries and {size.n_keys} keys")
    if not broadcasts_to(mask.leading, size.leading):
        raise ShapeError(
            f"mask has leading axes {mask.leading}; expected ones that broadcast to {size.leading} (batch, query heads)"
        )


def borrowed_mask(array: Any) -> Mask:
    """Return a caller's boolean array as a mask that shares its memory."""
    if array.dtype != np.bool_:
        raise DtypeError(
            f"mask has dtype {array.dtype}; expected a boolean array (True = attend), or a mask of cuattn.masks"
        )
    return BooleanMask.borrow(align(array, 2))


def _contiguous_last(array: Any) -> Any:
    """Return the array itself when its last axis is contiguous, else a contiguous copy."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return array.copy(order="C")
