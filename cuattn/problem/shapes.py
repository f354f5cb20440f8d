"""Shapes and dtypes of the operands: broadcasting, grouped heads, alignment to one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuattn.errors import DtypeError, ShapeError
from cuattn.problem.dtypes import DTYPES, FLOAT32, dtype_names

Shape = tuple[int, ...]

MAX_LENGTH = 2**31 - 1  # masks hold row indices as int32, kernels count rows and keys in int32


class Sizes(NamedTuple):
    """Sizes of a problem, from the shapes of q, k and v."""

    batch: Shape
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    head_dim_v: int
    rank: int  # the highest rank of q, k and v: o has it too

    @property
    def leading(self) -> Shape:
        """Leading axes of o as the caller sees them: none at rank 2, else batch and heads."""
        return () if self.rank == 2 else (*self.batch, self.heads)


def sizes(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> Sizes:
    """Check the shapes of q, k and v against each other."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) < 2:
            raise ShapeError(f"{name} has shape {shape}; expected at least two axes, (length, head_dim)")
    if q[-1] != k[-1]:
        raise ShapeError(f"q has shape {q} and k {k}; expected the same last axis (head_dim)")
    if q[-1] == 0:
        raise ShapeError(f"q has shape {q}; expected a head_dim (last axis) of at least 1")
    if k[-2] != v[-2]:
        raise ShapeError(f"k has shape {k} and v {v}; expected the same number of keys (axis -2)")
    for name, shape in (("q", q), ("k", k)):
        if shape[-2] > MAX_LENGTH:
            raise ShapeError(f"{name} has shape {shape}; expected a length (axis -2) of at most {MAX_LENGTH}")
    try:
        batch = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
    except ValueError:
        raise ShapeError(f"q has shape {q}, k {k} and v {v}; expected leading axes that broadcast") from None
    heads, kv_heads = _heads(q, k, v, enable_gqa)
    rank = max(len(q), len(k), len(v))
    return Sizes(batch, heads, kv_heads, q[-2], k[-2], q[-1], v[-1], rank)


def _heads(q: Shape, k: Shape, v: Shape, enable_gqa: bool) -> tuple[int, int]:
    """Return (heads, kv_heads); kv heads of 1 broadcast over all query heads."""
    hq, hk, hv = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k, v))
    if hk != hv and 1 not in (hk, hv):
        raise ShapeError(f"k has shape {k} and v {v}; expected heads (axis -3) that broadcast, not {hk} and {hv}")
    kv_heads = hv if hk == 1 else hk
    if hq == kv_heads or kv_heads == 1:
        return hq, kv_heads
    if hq == 1:
        return kv_heads, kv_heads
    if kv_heads and hq % kv_heads == 0:
        if enable_gqa:
            return hq, kv_heads
        raise ShapeError(
            f"q has {hq} heads and k, v have {kv_heads} (shapes {q}, {k}, {v}); expected equal heads, or "
            "enable_gqa=True for grouped heads"
        )
    expected = f"a multiple of {kv_heads} heads in q" if enable_gqa else "heads (axis -3) that broadcast"
    raise ShapeError(f"q has {hq} heads and k, v have {kv_heads} (shapes {q}, {k}, {v}); expected {expected}")


def common_dtype(**arrays: Any) -> np.dtype:
    """Return the one dtype that q, k, v (and do) share."""
    (first, lead), *rest = arrays.items()
    dtype = np.dtype(lead.dtype)
    if dtype not in DTYPES or not dtype.isnative:
        raise DtypeError(
            f"{first} has dtype {dtype.newbyteorder('=') if dtype.isnative else dtype.str}; expected "
            f"{dtype_names()} in native byte order"
        )
    for name, array in rest:
        if array.dtype != dtype:
            raise DtypeError(f"{name} has dtype {array.dtype} and {first} {dtype}; expected the same dtype")
    return dtype


def check_bias_dtype(bias: Any, dtype: np.dtype) -> np.dtype:
    """A bias has the input's dtype or float32."""
    if bias.dtype not in (dtype, FLOAT32):
        allowed = f"{dtype}" if dtype == FLOAT32 else f"{dtype} or float32"
        raise DtypeError(f"bias has dtype {bias.dtype}; expected {allowed}")
    return np.dtype(bias.dtype)


def check_score_like(name: str, shape: Shape, size: Sizes) -> None:
    """Check that an array broadcasts to the scores, (..., Hq, Nq, Nk)."""
    target = (*size.leading, size.n_queries, size.n_keys)
    if not broadcasts_to(shape, target):
        raise ShapeError(f"{name} has shape {shape}; expected one that broadcasts to the scores' shape {target}")


def broadcasts_to(shape: Shape, target: Shape) -> bool:
    """Whether an array of `shape` can be broadcast to exactly `target`."""
    if len(shape) > len(target):
        return False
    return all(n in (1, m) for n, m in zip(shape[::-1], target[::-1], strict=False))


def align(array: Any, rank: int) -> Any:
    """Return a view with axes of length 1 in front, up to `rank` axes."""
    missing = rank - array.ndim
    return array if missing <= 0 else array[(None,) * missing]
