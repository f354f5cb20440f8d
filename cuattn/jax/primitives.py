"""Attention and its derivatives as primitives of JAX, with the rules of its transformations.

A primitive is bound to ``(*operands, *saved, *rest)``: the operands of :class:`Spec` (the first `Spec.learned` of them
are differentiated), the o, l, m of the forward, and what it is about: do, tangents or cotangents.  Where these are
tangents of some operands alone, `given` has their indices.

================  =======================================  =================================================
primitive         computes, with A the attention of x      transposed
================  =======================================  =================================================
`forward`         A(x)
`jvp`             A'(x) t, linear in t                     `backward`
`backward`        A'(x)^T do, linear in do                 `jvp`
`double`          A'(x) g and (A'(x)^T do)' g, linear in   itself, of the second
                  g
`backward_jvp`    (A'(x)^T do)' (t, tdo), linear in t, tdo  `double`, which is symmetric
`curvature`       A''(x) t u, linear in u: it has no       `double`
                  kernel and only waits to be transposed
================  =======================================  =================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import cuattn
from cuattn.errors import UnsupportedError
from cuattn.jax import callback
from cuattn.masks.base import Mask
from cuattn.problem import DTYPES, check_axes

COLUMNS = ("lts", "lte", "uts", "ute")
_SAVED = 3  # o, l, m


@dataclass(frozen=True, eq=False)
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
    keywords : dict of str to object
        The arguments that are no arrays.
    """

    names: tuple[Any, ...]
    learned: int
    score_args: tuple[Any, ...]
    keywords: dict[str, Any]

    def call(self, operands: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the q, k, v and the keywords of a call of cuattn's functions."""
        named, keywords = dict(zip(self.names, operands, strict=True)), dict(self.keywords)
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
        return replace(self, keywords={**self.keywords, "score": score, "mask": mask})


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


def _run_forward(spec: Spec, arrays: Sequence[Any], out: Any = None) -> list[Any]:
    qkv, keywords = spec.call(arrays)
    return list(cuattn.forward(*qkv, **keywords, out=out)[:_SAVED])


def _run_jvp(spec: Spec, arrays: Sequence[Any], out: Any = None, *, given: tuple[int, ...]) -> list[Any]:
    operands, _, tangents = _split(spec, arrays)
    qkv, keywords = spec.call(operands)
    keywords |= spec.tangents("t", "tscore_args", given, tangents)
    return [cuattn.jvp(*qkv, **keywords, out=out and (None, None, None, *out, None)).to]


def _run_backward(spec: Spec, arrays: Sequence[Any], out: Any = None) -> list[Any]:
    operands, saved, (do,) = _split(spec, arrays)
    qkv, keywords = spec.call(operands)
    return spec.gradients(cuattn.backward(do, *qkv, (*saved, None), **keywords, out=out and out[: spec.n_own]))


def _run_double(spec: Spec, arrays: Sequence[Any], out: Any = None, *, given: tuple[int, ...]) -> list[Any]:
    operands, saved, (do, *cotangents) = _split(spec, arrays)
    qkv, keywords = spec.call(operands)
    named = {"gdq": None, "gdk": None, "gdv": None, **spec.tangents("gd", "gdscore", given, cotangents)}
    first = [named.pop(name) for name in ("gdq", "gdk", "gdv")]
    found = cuattn.double_backward(
        *first, do, *qkv, (*saved, None), **named, **keywords, out=out and out[: 1 + spec.n_own]
    )
    return [found.ddo, *spec.gradients(found)]


def _run_backward_jvp(spec: Spec, arrays: Sequence[Any], out: Any = None, *, given: tuple[int, ...]) -> list[Any]:
    operands, (_, l, _), (do, tdo, *tangents) = _split(spec, arrays)
    qkv, keywords = spec.call(operands)
    keywords |= spec.tangents("t", "tscore_args", given, tangents)
    along = cuattn.jvp(*qkv, **keywords, out_dtype=l.dtype)
    out = out and (None, out[: spec.n_own])
    return spec.gradients(cuattn.backward_jvp(do, *qkv, along, tdo=tdo, **keywords, out=out)[1])


def _run_curvature(*_: Any, **__: Any) -> list[Any]:
    raise UnsupportedError(
        "forward-mode differentiation of forward-mode differentiation (jax.jvp of jax.jvp, jax.jacfwd of jax.jacfwd) "
        "of cuattn.jax.attention; expected at most one of the two to be forward mode, as in jax.hessian"
    )


def _split(spec: Spec, arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the operands, o, l, m, and the rest of what a primitive is bound to."""
    n = len(spec.names)
    return arrays[:n], arrays[n : n + _SAVED], arrays[n + _SAVED :]


def _abstract_forward(*avals: Any, spec: Spec) -> list[Any]:
    q, k, v = avals[:3]
    batch, heads, _ = check_axes(q.shape, k.shape, v.shape, spec.keywords["enable_gqa"])
    rows = (*batch, heads, q.shape[-2])
    statistics = jax.core.ShapedArray(rows, DTYPES[jnp.dtype(q.dtype)].stat)
    return [jax.core.ShapedArray((*rows, v.shape[-1]), q.dtype), statistics, statistics]


def _like_o(*avals: Any, spec: Spec, **_: Any) -> list[Any]:
    return [_plain(avals[len(spec.names)])]


def _like_operands(*avals: Any, spec: Spec, **_: Any) -> list[Any]:
    return list(map(_plain, avals[: spec.learned]))


def _like_both(*avals: Any, spec: Spec, **_: Any) -> list[Any]:
    return _like_o(*avals, spec=spec) + _like_operands(*avals, spec=spec)


def _plain(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def _batch(primitive: Primitive, args: Sequence[Any], dims: Sequence[Any], *, spec: Spec, **params: Any) -> Any:
    """Map a primitive over an axis: one call with an axis more in front."""
    mapped = {index: jnp.moveaxis(args[index], dim, 0) for index, dim in enumerate(dims) if dim is not None}
    if spec.has_table:  # one call after the other

        def one(items: dict[int, Any]) -> Any:
            return primitive.bind(*[items.get(index, x) for index, x in enumerate(args)], spec=spec, **params)

        results = jax.lax.map(one, mapped)
        return results, [0] * len(results)
    size, together = len(next(iter(mapped.values()))), []
    for index, x in enumerate(args):
        if index in mapped:
            x = mapped[index]
        elif index >= len(spec.names) or index == 0 or (index < spec.learned and primitive is not forward):
            x = jnp.broadcast_to(x, (size, *x.shape))  # each call has a gradient of its own by what they share
        elif isinstance(spec.names[index], str):
            x = x[None]
        together.append(x)
    batch = math.prod(np.broadcast_shapes(*[x.shape[1:-3] for x in together[:3]]))
    longer = [
        index for index, x in enumerate(together[: len(spec.names)]) if x.ndim > args[index].ndim - (index in mapped)
    ]
    results = primitive.bind(*together, spec=spec.mapped(batch, longer), **params)
    return results, [0] * len(results)


def _primitive(name: str, run: Callable[..., list[Any]], abstract: Callable[..., list[Any]]) -> Primitive:
    """Return a primitive: computed at once where its arrays are there, by a callback of XLA under jit."""
    primitive = Primitive(f"cuattn_{name}")
    primitive.multiple_results = True

    def compute(*arrays: Any, spec: Spec, **params: Any) -> list[Any]:
        found = run(spec, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in arrays], **params)
        return list(found)

    def staged(*arrays: Any, spec: Spec, **params: Any) -> list[Any]:
        avals = abstract(*arrays, spec=spec, **params)
        results = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        return callback.call(functools.partial(run, spec, **params), results, arrays)

    def refused(ctx: Any, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"cuattn.jax.attention was staged for platform {ctx.module_context.platforms}; expected 'cpu' or 'cuda'"
        )

    primitive.def_impl(compute)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    mlir.register_lowering(primitive, refused)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, mlir.lower_fun(staged, multiple_results=True), platform=platform)
    return primitive


forward = _primitive("forward", _run_forward, _abstract_forward)
jvp = _primitive("jvp", _run_jvp, _like_o)
backward = _primitive("backward", _run_backward, _like_operands)
double = _primitive("double_backward", _run_double, _like_both)
backward_jvp = _primitive("backward_jvp", _run_backward_jvp, _like_operands)
curvature = _primitive("curvature", _run_curvature, _like_o)


# Rules of forward mode.  o, l, m are functions of the operands, whose tangents already say how they change.


def _given(tangents: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the indices of tangents or cotangents that are not zero, and these."""
    found = {index: tangent for index, tangent in enumerate(tangents) if type(tangent) is not ad.Zero}
    return tuple(found), list(found.values())


def _zero(result: Any) -> Any:
    return ad.Zero(_plain(result))


def _forward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> tuple[list[Any], list[Any]]:
    o, l, m = forward.bind(*primals, spec=spec)
    given, along = _given(tangents[: spec.learned])
    (to,) = jvp.bind(*primals, o, l, m, *along, spec=spec, given=given)
    return [o, l, m], [to, _zero(l), _zero(m)]


def _jvp_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec, given: tuple[int, ...]) -> Any:
    results = jvp.bind(*primals, spec=spec, given=given)
    x, saved, _ = _split(spec, primals)
    tx, _, tt = _split(spec, tangents)
    found, (first, along), (second, moved) = [], _given(tt), _given(tx[: spec.learned])
    if first:
        found += jvp.bind(*x, *saved, *along, spec=spec, given=tuple([given[index] for index in first]))
    if second:
        found += curvature.bind(*primals, *moved, spec=spec, given=given, along=second)
    return results, [sum(found[1:], found[0]) if found else _zero(results[0])]


def _backward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> tuple[list[Any], list[Any]]:
    results = backward.bind(*primals, spec=spec)
    tdo, (given, along) = tangents[-1], _given(tangents[: spec.learned])
    if type(tdo) is ad.Zero:  # then there are others
        return results, double.bind(*primals, *along, spec=spec, given=given)[1:]
    if not given:
        return results, backward.bind(*primals[:-1], tdo, spec=spec)
    return results, backward_jvp.bind(*primals, tdo, *along, spec=spec, given=given)


def _third(*_: Any, **__: Any) -> Any:
    raise UnsupportedError("a third derivative of cuattn.jax.attention; expected at most two")


# Rules of reverse mode: what is linear, transposed.


def _jvp_transpose(cotangents: Sequence[Any], *args: Any, spec: Spec, given: tuple[int, ...]) -> list[Any]:
    x, saved, _ = _split(spec, args)
    gradients = backward.bind(*x, *saved, *cotangents, spec=spec)
    return _for_last(args, [gradients[index] for index in given])


def _backward_transpose(cotangents: Sequence[Any], *args: Any, spec: Spec) -> list[Any]:
    given, along = _given(cotangents)
    return _for_last(args, jvp.bind(*args[:-1], *along, spec=spec, given=given))


def _double_transpose(cotangents: Sequence[Any], *args: Any, spec: Spec, given: tuple[int, ...]) -> list[Any]:
    x, saved, (do, *_) = _split(spec, args)
    those, along = _given(cotangents[1:])
    _, *gradients = double.bind(*x, *saved, do, *along, spec=spec, given=those)
    return _for_last(args, [gradients[index] for index in given])


def _backward_jvp_transpose(cotangents: Sequence[Any], *args: Any, spec: Spec, given: tuple[int, ...]) -> list[Any]:
    x, saved, (do, *_) = _split(spec, args)
    those, along = _given(cotangents)
    ddo, *gradients = double.bind(*x, *saved, do, *along, spec=spec, given=those)
    return _for_last(args, [ddo, *[gradients[index] for index in given]])


def _curvature_transpose(
    cotangents: Sequence[Any], *args: Any, spec: Spec, given: tuple[int, ...], along: tuple[int, ...]
) -> list[Any]:
    x, saved, rest = _split(spec, args)
    _, *gradients = double.bind(*x, *saved, *cotangents, *rest[: len(given)], spec=spec, given=given)
    return _for_last(args, [gradients[index] for index in along])


def _for_last(args: Sequence[Any], found: list[Any]) -> list[Any]:
    """Return cotangents of the last arguments, in which a primitive is linear."""
    return [None] * (len(args) - len(found)) + found


ad.primitive_jvps |= {
    forward: _forward_jvp,
    jvp: _jvp_jvp,
    backward: _backward_jvp,
    double: _third,
    backward_jvp: _third,
    curvature: _third,
}
ad.primitive_transposes |= {
    jvp: _jvp_transpose,
    backward: _backward_transpose,
    double: _double_transpose,
    backward_jvp: _backward_jvp_transpose,
    curvature: _curvature_transpose,
}
