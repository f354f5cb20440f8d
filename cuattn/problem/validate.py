"""The one place that checks a call's arguments against each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cuattn import rng as _rng
from cuattn.errors import ArgumentError, DtypeError, ShapeError, expect_array, expect_dtype, shown
from cuattn.masks import BooleanMask
from cuattn.masks.base import Mask
from cuattn.problem import scalars
from cuattn.problem.dtypes import DTYPES, FLOAT32
from cuattn.problem.model import Problem, ScoreFunction
from cuattn.problem.operations import OF_ROWS, OPERATIONS, TANGENTS, Array, Operation
from cuattn.problem.origin import Origin

if TYPE_CHECKING:
    from cuattn.tracing import Bound

Shape = tuple[int, ...]

_MAX_LENGTH = 2**31 - 1  # masks hold row indices as int32, kernels count rows and keys in int32


class Options(NamedTuple):
    """The arguments of a call that are neither arrays nor masks, as the caller gave them.

    `sm_margin`, which our own callers alone give: multiprocessors of a GPU that are left to others, communication above
    all.
    """

    is_causal: Any = False
    window: Any = None
    scale: Any = None
    softcap: Any = None
    dropout_p: Any = 0.0
    enable_gqa: Any = False
    precision: Any = None
    kernel: Any = None
    statistics: bool = True
    out_dtype: Any = None
    deterministic: Any = False
    sm_margin: int = 0


def check(
    operation: Operation,
    arrays: dict[str, Any],
    masks: tuple[Mask, ...],
    options: Options,
    origin: Origin | None = None,
    score: Bound | None = None,
    learned: tuple[int, ...] = (),
    tangents: tuple[tuple[int, int], ...] = (),
) -> Problem:
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
        :func:`place_of`), and whether it has runs.
    score : Bound, optional
        A score function with the call's arrays and numbers.
    learned : tuple of int, optional
        Slots of its arrays that are differentiated.
    tangents : tuple of (int, int), optional
        Slots of its arrays that have a tangent, and of this.

    Returns
    -------
    Problem
    """
    q, k, v = (tuple(arrays[name].shape) for name in "qkv")
    dtype, bias = _common_dtype(arrays), arrays.get("bias")
    batch, heads, kv_heads = check_axes(q, k, v, scalars.flag("enable_gqa", options.enable_gqa))
    dropout = _rng.threshold(options.dropout_p)
    limits = (math.prod(batch), heads, q[-2], k[-2]) if origin is None else None
    problem = Problem(
        operation.name,
        batch,
        heads,
        kv_heads,
        *(q[-2], k[-2], q[-1], v[-1]),
        dtype=dtype,
        scale=q[-1] ** -0.5 if options.scale is None else scalars.of_scores("scale", options.scale, dtype),
        softcap=None if options.softcap is None else scalars.of_scores("softcap", options.softcap, dtype, True),
        band=scalars.check_band(options.is_causal, options.window, q[-2], k[-2], sharded=origin is not None),
        masks=tuple(mask.kind for mask in masks),
        bias=None if bias is None else np.dtype(bias.dtype),
        dropout=dropout,
        out_dtype=scalars.check_out_dtype(options.out_dtype, dtype),
        statistics=options.statistics,
        precision=scalars.choice("precision", options.precision, "tf32"),
        deterministic=scalars.flag("deterministic", options.deterministic),
        kernel=scalars.choice("kernel", options.kernel),
        sm_margin=options.sm_margin,
        runs=bool((dropout or score) and origin is not None and origin.has_runs),
        placed=origin is not None,
        score=None if score is None else _score_function(score, limits, learned, tangents),
        tangents=tuple([name[1:] for name in TANGENTS if arrays.get(name) is not None]),
        rank=max(map(len, (q, k, v))),
    )
    if bias is not None:
        expect_dtype("bias", bias.dtype, dtype, FLOAT32)
        _check_score_like("bias", bias, problem)
    for mask in masks:
        _check_mask(mask, problem)
    operation.check(problem, arrays)
    return problem


def _score_function(score: Bound, limits: tuple | None, learned: tuple, tangents: tuple) -> ScoreFunction:
    """Return a call's score function; `limits` is None where no lengths are known."""
    from cuattn.tracing import ANY_LENGTH, facts

    return ScoreFunction(score.root, facts(score, limits or ANY_LENGTH), learned, tangents)


def check_axes(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> tuple[Shape, int, int]:
    """Check the shapes of q, k and v; return the leading axes without heads, the query heads and the key heads."""
    _check_shapes(q, k, v)
    heads = _heads(q, k, v, enable_gqa)
    try:
        return np.broadcast_shapes(q[:-3], k[:-3], v[:-3]), *heads
    except ValueError:
        raise ShapeError(f"q has shape {q}, k {k} and v {v}; expected leading axes that broadcast") from None


def check_parts(parts: dict[str, Any]) -> dict[str, Array]:
    """Check the o, l, m of a merge's parts, at least one, by name; return shape and dtype of the results.

    The names end with ".o", ".l", ".m" and, where the parts have tangents, ".to" and ".tlse".
    """
    first, o = next(iter(parts.items()))
    shape, dtype = tuple(o.shape), np.dtype(o.dtype)
    if len(shape) < 2:
        raise ShapeError(f"{first} has shape {shape}; expected (..., Nq, dv)")
    expect_dtype(first, dtype, *DTYPES)
    kinds = dict.fromkeys([name.rpartition(".")[2] for name in parts])
    found = {kind: (shape[:-1], DTYPES[dtype].stat) if kind in OF_ROWS else (shape, dtype) for kind in kinds}
    for name, array in parts.items():
        expect_array(name, array, *found[name.rpartition(".")[2]])
    return found


def bind(problem: Problem, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return a call's operands, aligned to one rank, with a contiguous last axis where it holds columns.

    Those of a score function stay as they are.
    """
    rank, found = len(problem.batch) + 3, {}
    for name, array in arrays.items():
        if array is None or name == "mask":
            continue
        if problem.score is None or not ScoreFunction.has(name):
            per_row = name in OF_ROWS
            array = _align(array if per_row or name.endswith("bias") else _contiguous_last(array), rank - per_row)
        found[name] = array
    return found


def drawn_state(problem: Problem, rng: Any) -> _rng.RNGState | None:
    """Return the state of a forward's dropout from its argument rng; None without dropout."""
    if problem.dropout:
        return _rng.resolve(rng)
    if rng is not None and not isinstance(rng, np.random.Generator):
        _rng.resolve(rng)  # checks it; from a generator it would draw
    return None


def replayed_state(problem: Problem, state: Any) -> _rng.RNGState | None:
    """Return the state of a backward's dropout from its forward's; None without dropout."""
    check_state(OPERATIONS[problem.operation].label("rng_state"), state, problem.dropout)
    return None if state is None else _rng.recorded(state)


def check_state(name: str, state: Any, dropout: int) -> None:
    """Check that there is a state where there is dropout, given its threshold, and none elsewhere."""
    if (state is None) == bool(dropout):
        raise ArgumentError(
            f"{name} is {shown(state)} but dropout_p is {dropout / _rng.LEVELS:.3g}; expected the forward's dropout_p "
            "and the rng_state that it returned"
        )


def borrowed_mask(array: Any) -> Mask:
    """Return a caller's boolean array as a mask that shares its memory."""
    if array.dtype != np.bool_:
        raise DtypeError(
            f"mask has dtype {array.dtype}; expected a boolean array (True = attend), or a mask of cuattn.masks"
        )
    return BooleanMask.borrow(_align(array, 2))


def _common_dtype(arrays: dict[str, Any]) -> np.dtype:
    """Return the one dtype that q, k and v share."""
    dtype = np.dtype(arrays["q"].dtype)
    expect_dtype("q", dtype, *DTYPES)
    for name in "kv":
        if arrays[name].dtype != dtype:
            raise DtypeError(f"{name} has dtype {arrays[name].dtype} and q {dtype}; expected the same dtype")
    return dtype


def _check_shapes(q: Shape, k: Shape, v: Shape) -> None:
    for name, shape in zip("qkv", (q, k, v), strict=True):
        if len(shape) < 2:
            raise ShapeError(f"{name} has shape {shape}; expected at least two axes, (length, head_dim)")
        if shape[-2] > _MAX_LENGTH:
            raise ShapeError(f"{name} has shape {shape}; expected a length (axis -2) of at most {_MAX_LENGTH}")
    if q[-1] != k[-1]:
        raise ShapeError(f"q has shape {q} and k {k}; expected the same last axis (head_dim)")
    if q[-1] == 0:
        raise ShapeError(f"q has shape {q}; expected a head_dim (last axis) of at least 1")
    if k[-2] != v[-2]:
        raise ShapeError(f"k has shape {k} and v {v}; expected the same number of keys (axis -2)")


def _heads(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> tuple[int, int]:
    """Return (heads, kv_heads); kv heads of 1 broadcast over all query heads."""
    hq, hk, hv = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k, v))
    if hk != hv and 1 not in (hk, hv):
        raise ShapeError(f"k has shape {k} and v {v}; expected heads (axis -3) that broadcast, not {hk} and {hv}")
    kv_heads = hv if hk == 1 else hk
    if hq == 1:
        return kv_heads, kv_heads
    grouped = kv_heads and hq % kv_heads == 0
    if kv_heads in (1, hq) or (grouped and enable_gqa):
        return hq, kv_heads
    if grouped:
        expected = "equal heads, or enable_gqa=True for grouped heads"
    else:
        expected = f"a multiple of {kv_heads} heads in q" if enable_gqa else "heads (axis -3) that broadcast"
    raise ShapeError(f"q has {hq} heads and k, v have {kv_heads} (shapes {q}, {k}, {v}); expected {expected}")


def _check_mask(mask: Mask, problem: Problem) -> None:
    """Check a mask's shape against the scores."""
    if mask.unowned:
        return _check_score_like("mask", mask._array, problem)
    lengths = f"{problem.n_queries} queries and {problem.n_keys} keys"
    if not mask.fits(problem.n_queries, problem.n_keys) or not _broadcasts_to(mask.leading, problem.leading):
        raise ShapeError(
            f"mask is {mask!r} with leading axes {mask.leading}; expected one for {lengths}, whose leading axes "
            f"broadcast to {problem.leading} (batch, query heads)"
        )


def _check_score_like(name: str, array: Any, problem: Problem) -> None:
    """Check that an array broadcasts to the scores, (..., Hq, Nq, Nk)."""
    target = (*problem.leading, problem.n_queries, problem.n_keys)
    if not _broadcasts_to(tuple(array.shape), target):
        raise ShapeError(
            f"{name} has shape {tuple(array.shape)}; expected one that broadcasts to the scores' shape {target}"
        )


def _broadcasts_to(shape: Shape, target: Shape) -> bool:
    """Whether an array of `shape` can be broadcast to exactly `target`."""
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def _align(array: Any, rank: int) -> Any:
    """Return a view with axes of length 1 in front, up to `rank` axes."""
    missing = rank - array.ndim
    return array if missing <= 0 else array[(None,) * missing]


def _contiguous_last(array: Any) -> Any:
    """Return the array itself when its last axis is contiguous, else a contiguous copy."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return array.copy(order="C")
