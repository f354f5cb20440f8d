"""The one place that checks a call's arguments against each other."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cuattn import rng as _rng
from cuattn.errors import ArgumentError, DtypeError, ShapeError
from cuattn.masks import BlockMask, ColumnMask
from cuattn.problem import scalars
from cuattn.problem.model import FLOAT32, Operands, Origin, Problem
from cuattn.problem.shapes import (
    Sizes,
    align,
    broadcasts_to,
    check_bias_dtype,
    check_score_like,
    common_dtype,
    sizes,
)

_INDEX_LIMIT = 2**32  # the generator's counter words have 32 bits


def validate(
    direction: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: Any = False,
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
    dropout_p: Any = 0.0,
    rng: Any = None,
    enable_gqa: Any = False,
    precision: Any = None,
    kernel: Any = None,
    out_dtype: Any = None,
    deterministic: Any = False,
    do: Any = None,
    fwd: Any = None,
    origin: Origin | None = None,
) -> tuple[Problem, Operands, Sizes]:
    """Check every argument of a call and return the problem, its aligned operands and its sizes.

    Arrays are NumPy or CuPy views; `fwd` (backward only) is ``(o, l, m, rng_state)``.  See the public functions
    of :mod:`cuattn.api` for what each argument means.
    """
    dtype = common_dtype(q=q, k=k, v=v)
    mask_kind = _mask_kind(mask)
    bias_dtype = None if bias is None else check_bias_dtype(bias, dtype)
    known = (
        direction, dtype, tuple(q.shape), tuple(k.shape), tuple(v.shape), mask_kind, bias_dtype,
        is_causal, tuple(window) if isinstance(window, list) else window, scale, softcap, dropout_p,
        enable_gqa, precision, kernel, out_dtype, deterministic, origin,
    )  # fmt: skip
    try:
        size, problem = _solve(*known)
    except TypeError as error:
        if isinstance(error, DtypeError):
            raise
        size, problem = _solve.__wrapped__(*known)  # an argument that cannot be hashed (a 0-d array): without the cache
    if bias is not None:
        check_score_like("bias", tuple(bias.shape), size)
    if mask is not None:
        _check_mask(mask, mask_kind, size)
    rank = len(size.batch) + 3
    operands = Operands(
        align(_contiguous_last(q), rank),
        align(_contiguous_last(k), rank),
        align(_contiguous_last(v), rank),
        None if bias is None else align(bias, rank),
        align(mask, rank) if mask_kind == "dense" else mask,
    )
    if direction == "backward" and fwd is not None:
        return problem, _backward_operands(problem, size, operands, do, fwd), size
    return problem, operands._replace(rng=drawn_state(problem, rng)), size


def drawn_state(problem: Problem, rng: Any) -> _rng.RNGState | None:
    """Return the state of a forward's dropout from its argument rng; None without dropout."""
    if problem.dropout:
        return _rng.resolve(rng)
    if rng is not None and not isinstance(rng, np.random.Generator):
        _rng.resolve(rng)  # checks it; from a generator it would draw
    return None


def replayed_state(problem: Problem, state: Any) -> _rng.RNGState | None:
    """Return the state of a backward's dropout from its forward's; None without dropout."""
    if not problem.dropout:
        if state is not None:
            raise ArgumentError(f"fwd.rng_state is {state!r} but dropout_p is 0; expected the forward's dropout_p")
        return None
    if state is None:
        raise ArgumentError("dropout_p is set but fwd.rng_state is None; expected the state that the forward returned")
    if type(state) in (tuple, list) and len(state) == 2:
        state = _rng.RNGState(*state)
    return _rng.resolve(state)


@lru_cache(maxsize=1024, typed=True)
def _solve(
    direction, dtype, q, k, v, mask_kind, bias_dtype, is_causal, window, scale, softcap, dropout_p,
    enable_gqa, precision, kernel, out_dtype, deterministic, origin,
) -> tuple[Sizes, Problem]:  # fmt: skip
    """Everything that depends on shapes, dtypes and scalars alone; cached, since it is most of a call's host cost."""
    size = sizes(q, k, v, scalars.flag("enable_gqa", enable_gqa))
    problem = Problem(
        direction=direction,
        batch=size.batch,
        heads=size.heads,
        kv_heads=size.kv_heads,
        n_queries=size.n_queries,
        n_keys=size.n_keys,
        head_dim=size.head_dim,
        head_dim_v=size.head_dim_v,
        dtype=dtype,
        scale=scalars.check_scale(scale, size.head_dim),
        softcap=scalars.check_softcap(softcap),
        band=scalars.check_band(is_causal, window, size.n_queries, size.n_keys),
        mask=mask_kind,
        bias=bias_dtype,
        dropout=_rng.threshold(scalars.real("dropout_p", dropout_p)),
        out_dtype=scalars.check_out_dtype(out_dtype, dtype),
        precision=scalars.choice("precision", precision, ("tf32",)),
        deterministic=scalars.flag("deterministic", deterministic),
        kernel=scalars.choice("kernel", kernel, scalars.KERNELS),
        origin=origin or Origin(),
    )
    _check_counters(problem)
    return size, problem


def _check_counters(problem: Problem) -> None:
    """Dropout's generator counts batch-heads, rows and keys in 32 bits."""
    origin = problem.origin
    instances = int(np.prod(problem.batch, dtype=object)) if problem.batch else 1
    total = (origin.batch + instances) * (origin.heads or problem.heads)
    ends = (("batch x heads", total), ("query", origin.row + problem.n_queries), ("key", origin.key + problem.n_keys))
    for name, end in ends:
        if problem.dropout and end > _INDEX_LIMIT:
            raise ArgumentError(f"dropout_p needs {name} indices up to {end}; expected at most {_INDEX_LIMIT}")


def _mask_kind(mask: Any) -> str | None:
    if mask is None:
        return None
    if isinstance(mask, ColumnMask):
        return "column"
    if isinstance(mask, BlockMask):
        return "block"
    if getattr(mask, "dtype", None) != np.bool_:
        got = f"has dtype {mask.dtype}" if hasattr(mask, "dtype") else f"is {type(mask).__name__}"
        raise DtypeError(f"mask {got}; expected a boolean array (True = attend), a ColumnMask or a BlockMask")
    return "dense"


def _check_mask(mask: Any, kind: str, size: Sizes) -> None:
    """Check a mask's shape against the scores."""
    if kind == "dense":
        check_score_like("mask", tuple(mask.shape), size)
        return
    if not mask.fits(size.n_queries, size.n_keys):
        raise ShapeError(f"mask is {mask!r}; expected one for {size.n_queries} queries and {size.n_keys} keys")
    if not broadcasts_to(mask.leading, size.leading):
        raise ShapeError(
            f"mask has leading axes {mask.leading}; expected ones that broadcast to {size.leading} (batch, query heads)"
        )


def _contiguous_last(array: Any) -> Any:
    """Return the array itself when its last axis is contiguous, else a contiguous copy."""
    if array.shape[-1] <= 1 or array.strides[-1] == array.itemsize:
        return array
    return array.copy(order="C")


def _backward_operands(problem: Problem, size: Sizes, operands: Operands, do: Any, fwd: Any) -> Operands:
    """Check do and the forward's results against the problem."""
    o, l, m, state = fwd
    o_shape = (*size.leading, size.n_queries, size.head_dim_v)
    statistics = problem.stat_dtype
    rank = len(size.batch) + 3
    for name, array, shape, dtypes in (
        ("do", do, o_shape, (problem.dtype,)),
        ("fwd.o", o, o_shape, (problem.dtype,) if problem.dtype == statistics else (problem.dtype, FLOAT32)),
        ("fwd.l", l, o_shape[:-1], (statistics,)),
        ("fwd.m", m, o_shape[:-1], (statistics,)),
    ):
        if tuple(array.shape) != shape:
            raise ShapeError(f"{name} has shape {tuple(array.shape)}; expected {shape}")
        if array.dtype not in dtypes:
            raise DtypeError(f"{name} has dtype {array.dtype}; expected {' or '.join(map(str, dtypes))}")
    return operands._replace(
        rng=replayed_state(problem, state),
        do=align(_contiguous_last(do), rank),
        o=align(_contiguous_last(o), rank),
        l=align(l, rank - 1),
        m=align(m, rank - 1),
    )
