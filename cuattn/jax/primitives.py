"""Attention and its derivatives as primitives of JAX, with the rules of its transformations.

A primitive is bound to ``(*operands, *saved, *rest)``: the operands of a :class:`Spec`, of which the first
`Spec.learned` are differentiated, the o, l, m of the forward, and what it is about: do, tangents or cotangents.  Where
these are tangents of some operands alone, `given` has their indices.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import cuattn
from cuattn.errors import UnsupportedError
from cuattn.jax import callback
from cuattn.jax.spec import Spec, as_jax
from cuattn.problem import DTYPES, check_axes

_SAVED = 3  # o, l, m


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


def on_host(array: Any) -> bool:
    """Whether an array that is there is on the CPU."""
    return all(device.platform == "cpu" for device in array.devices())


def _primitive(name: str, run: Callable[..., list[Any]], abstract: Callable[..., list[Any]]) -> Primitive:
    """Return a primitive: computed at once on the CPU where its arrays are there, else by a callback of XLA.

    On a GPU always by that: JAX frees and reuses memory in the order of its own stream.
    """
    primitive = Primitive(f"cuattn_{name}")
    primitive.multiple_results = True

    @functools.partial(jax.jit, static_argnames=("spec", "given", "along"))
    def program(*arrays: Any, **params: Any) -> list[Any]:
        return primitive.bind(*arrays, **params)

    def compute(*arrays: Any, spec: Spec, **params: Any) -> list[Any]:
        arrays = [as_jax("a cotangent", x) for x in arrays]
        return run(spec, arrays, **params) if on_host(arrays[0]) else program(*arrays, spec=spec, **params)

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
