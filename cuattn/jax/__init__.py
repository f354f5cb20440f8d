"""Exact attention for JAX: under ``jax.jit``, ``jax.grad``, ``jax.vmap`` and ``jax.jvp``.

:func:`attention` is a function like any of JAX's.  XLA calls it where it stands in the program, through
``jax.experimental.buffer_callback``: on the CPU, and on a GPU on XLA's stream, in device memory, without waiting for
the host.  A GPU needs CuPy.  Outside of ``jax.jit`` it computes at once on the CPU, and is a program of its own on a
GPU, where a score or mask function is known by what it is: define it once.

It can be differentiated twice, in any order of ``jax.grad`` and ``jax.jvp`` but ``jax.jvp`` of ``jax.jvp``.
``jax.vmap`` adds a leading axis to the call; with a mask of :func:`cuattn.masks.from_function`, which knows its leading
axes, it makes one call after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cuattn
from cuattn.errors import DtypeError
from cuattn.jax import primitives
from cuattn.jax.spec import COLUMNS, Spec, as_jax

__all__ = ["attention"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Any = None,
    bias: jax.Array | None = None,
    is_causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    score: Callable[..., Any] | None = None,
    score_args: Sequence[Any] = (),
) -> jax.Array:
    """Compute exact attention, ``softmax(scale * q @ k.T + bias) @ v``, as a function that JAX transforms.

    Parameters
    ----------
    q : jax.Array, (..., Hq, Nq, d) or (Nq, d), float16 | bfloat16 | float32 | float64
        Queries.
    k : jax.Array, (..., Hkv, Nk, d) or (Nk, d)
        Keys, of q's dtype.
    v : jax.Array, (..., Hkv, Nk, dv) or (Nk, dv)
        Values, of q's dtype.  Leading axes broadcast as in :func:`numpy.matmul`.
    mask : bool array | mask of :mod:`cuattn.masks` | tuple of four arrays | callable, optional
        Which keys each query may see, as :func:`cuattn.attention` takes it.  A mask is constant under ``jax.jit``; the
        tuple ``(lts, lte, uts, ute)``, of arrays of integers that broadcast to (..., Hq, Nk), may be traced: the
        vectors of a :class:`cuattn.masks.ColumnMask`.
    bias : jax.Array, optional
        Added to the scores, broadcast to (..., Hq, Nq, Nk); q's dtype or float32.
    is_causal : {False, True, "top_left", "bottom_right"}, optional
        Row i sees keys j <= i ("top_left") or j <= i + Nk - Nq ("bottom_right"); True needs Nq == Nk.
    window : (left, right) or (left, right, alignment), optional
        Row i sees keys ``i' - left <= j <= i' + right``, as in :func:`cuattn.attention`.
    scale : float, optional
        Factor of the scores, by default ``d ** -0.5``; no traced value.
    softcap : float, optional
        Cap the scores softly: ``s = softcap * tanh(s / softcap)``, before score, bias and mask.
    enable_gqa : bool, default False
        Allow grouped heads: Hq a multiple of Hkv, query head h reads key/value head ``h // (Hq / Hkv)``.
    score : callable, optional
        A pure function ``score(s, b, h, i, j, *score_args) -> s`` in NumPy style that changes each score, as
        :func:`cuattn.attention` takes it.
    score_args : sequence, optional
        Its further arguments: arrays, of which those of floats are differentiated, and Python numbers.

    Returns
    -------
    jax.Array, (..., Hq, Nq, dv)
        The output, in q's dtype.  A row that sees no key is 0.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, MaskError
        When an argument does not fit; the message names it, its value and what was expected.
    UnsupportedError
        For a third derivative, or ``jax.jvp`` of ``jax.jvp``; under ``jax.jit`` on a platform other than the CPU and
        CUDA.

    See Also
    --------
    cuattn.attention : The same for arrays of any kind, without derivatives.

    Notes
    -----
    Extra memory is O(N), that of derivatives O(N d).

    Examples
    --------
    >>> import jax, cuattn.jax
    >>> x = jax.random.normal(jax.random.key(0), (3, 8, 16))
    >>> def loss(x):
    ...     return cuattn.jax.attention(x, x, x, is_causal=True).sum()
    >>> jax.jit(jax.grad(loss))(x).shape
    (3, 8, 16)
    """
    window = tuple(window) if isinstance(window, list) else window
    options = dict(is_causal=is_causal, window=window, scale=scale, softcap=softcap, enable_gqa=enable_gqa)
    named = {"q": q, "k": k, "v": v, "bias": bias}
    arrays = {name: as_jax(name, array) for name, array in named.items() if name != "bias" or array is not None}
    columns = dict(zip(COLUMNS, map(as_jax, COLUMNS, mask), strict=True)) if _is_columns(mask) else {}
    if hasattr(mask, "__dlpack__"):
        mask = as_jax("mask", mask)
    if isinstance(score_args, (tuple, list)):
        score_args = tuple([as_jax("score_args", x) if hasattr(x, "__dlpack__") else x for x in score_args])
    options |= {"mask": None if columns else mask, "score": score, "score_args": score_args}
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((arrays, columns, options)))
    if not traced and primitives.on_host(arrays["q"]):
        return _call(cuattn.attention, arrays, columns, options)
    _check(arrays, columns, options)
    return _bind(arrays, columns, options)


def _is_columns(mask: Any) -> bool:
    """Return whether a mask is given as the vectors of a column mask."""
    if not isinstance(mask, (tuple, list)):
        return False
    if len(mask) != len(COLUMNS):
        raise DtypeError(
            f"mask is {type(mask).__name__} of {len(mask)}; expected the four vectors {', '.join(COLUMNS)}"
        )
    return True


def _call(
    function: Callable[..., Any], arrays: dict[str, Any], columns: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Call a function of cuattn."""
    if columns:
        options = {**options, "mask": cuattn.ColumnMask(**columns, n_queries=arrays["q"].shape[-2])}
    return function(arrays["q"], arrays["k"], arrays["v"], bias=arrays.get("bias"), **options)


def _check(arrays: dict[str, Any], columns: dict[str, Any], options: dict[str, Any]) -> None:
    """Check the arguments of a call against each other, as far as shapes and dtypes tell."""
    alike = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x,
        (arrays, columns, {name: options[name] for name in ("mask", "score_args")}),
    )
    leaves, tree = jax.tree.flatten((*alike[:2], {**options, **alike[2]}))
    try:
        _checked(tree, *leaves)
    except TypeError:  # what cannot be hashed, or does not fit
        _checked.__wrapped__(tree, *leaves)


@lru_cache(maxsize=64, typed=True)
def _checked(tree: Any, *leaves: Any) -> None:
    def stand_in(leaf: Any) -> Any:  # zeros take no memory before they are read
        return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    _call(cuattn.plan, *jax.tree.unflatten(tree, map(stand_in, leaves)))


def _bind(arrays: dict[str, Any], columns: dict[str, Any], options: dict[str, Any]) -> jax.Array:
    """Call the primitive that JAX transforms, for arguments that were checked."""
    mask, args = options.pop("mask"), options.pop("score_args")
    shaped = max(arrays[name].ndim for name in "qkv")
    rank = max(shaped, 3)  # so that there is an axis of heads, before which an axis that is mapped goes
    items = {index: x for index, x in enumerate(args) if isinstance(x, jax.Array)}
    floats = {index: x for index, x in items.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    operands = {name: _aligned(x, rank) for name, x in arrays.items()} | floats
    learned = len(operands)
    operands |= {name: _aligned(x, rank - 1) for name, x in columns.items()} | items
    if isinstance(mask, jax.Array):
        operands["mask"], mask = _aligned(mask, rank), None
    numbers = tuple([None if index in items else x for index, x in enumerate(args)])
    spec = Spec(tuple(operands), learned, numbers, tuple({**options, "mask": mask}.items()))
    o, _, _ = primitives.forward.bind(*operands.values(), spec=spec)
    return o if rank == shaped else o[0]


def _aligned(array: Any, rank: int) -> Any:
    """Return an array with axes of length 1 in front, up to `rank` axes."""
    return array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)
