"""The derivatives of attention along tangents, and of its gradients: jvp, backward_jvp, double_backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuattn import dispatch
from cuattn.api import ArrayT, gradients, public, unpacked
from cuattn.dispatch import Call
from cuattn.errors import ArgumentError, DtypeError, shown
from cuattn.problem import BACKWARD_JVP, DOUBLE_BACKWARD, GRADIENTS, JVP, Options, Origin, check_state
from cuattn.results import DoubleGradients, Gradients, Jvp
from cuattn.rng import RNGState, threshold

_JVP_OF_DOUBLE = replace(JVP, tangents="gd")


@public
def jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    /,
    *,
    tq: ArrayT | None = None,
    tk: ArrayT | None = None,
    tv: ArrayT | None = None,
    tbias: ArrayT | None = None,
    tscore_args: Sequence[Any] | None = None,
    mask: Any = None,
    bias: ArrayT | None = None,
    score: Callable[..., Any] | None = None,
    score_args: Sequence[Any] = (),
    is_causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    rng: int | RNGState | np.random.Generator | None = None,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    out_dtype: Any = None,
    origin: Origin | None = None,
    out: tuple[Any, ...] | None = None,
) -> Jvp:
    """Compute exact attention and its derivative along tangents of the operands, in one pass.

    Parameters
    ----------
    <operands>
    <tangents>
    <mask>
    <rng>
    <kernel>
    out_dtype : dtype, optional
        By default q's dtype; float32 keeps o and its tangent unrounded, for :func:`backward_jvp` and :func:`merge`.
    <origin>
    out : (o, l, m, to, tlse), optional
        Arrays to fill, as :func:`attention`'s; None in place of one is a new array.

    Returns
    -------
    Jvp
        ``(o, l, m, rng_state, to, tlse)``: the forward, and the tangents of o and lse.  It serves as a
        :class:`Forward`.

    Raises
    ------
    <errors>

    See Also
    --------
    backward_jvp : The same of the gradients.
    merge : Combines results over disjoint keys.

    Notes
    -----
    With s. the tangent of a score, ``tlse = sum(p * s.)`` and ``to = sum(p * (s. - tlse) * v) + sum(p * tv)``, p with
    dropout in the second.  The scores' tangents are taken relative to their running mean, so that nothing is lost where
    they hardly differ along a row.  Extra memory is O(Nq).

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q, k, v, tq = np.random.default_rng(0).standard_normal((4, 8, 16))
    >>> ahead, behind = (cuattn.attention(q + step * tq, k, v) for step in (1e-6, -1e-6))
    >>> bool(np.allclose(cuattn.jvp(q, k, v, tq=tq).to, (ahead - behind) / 2e-6, atol=1e-8))
    True
    """
    options = Options(is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, True, out_dtype)
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "tq": tq, "tk": tk, "tv": tv, "tbias": tbias}
    results, state = dispatch.compute(
        Call(JVP, JVP.given(arrays), options, rng, origin, out, score, score_args, tscore_args)
    )
    o, l, m, to, tlse = results
    return Jvp(o, l, m, state, to, tlse)


@public
def backward_jvp(
    do: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    jvp: Any,
    /,
    *,
    tdo: ArrayT | None = None,
    tq: ArrayT | None = None,
    tk: ArrayT | None = None,
    tv: ArrayT | None = None,
    tbias: ArrayT | None = None,
    tscore_args: Sequence[Any] | None = None,
    mask: Any = None,
    bias: ArrayT | None = None,
    score: Callable[..., Any] | None = None,
    score_args: Sequence[Any] = (),
    is_causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    deterministic: bool = False,
    out_dtype: Any = None,
    dlse: ArrayT | None = None,
    origin: Origin | None = None,
    out: tuple[Any, ...] | None = None,
) -> tuple[Gradients, Gradients]:
    """Compute the gradients of attention and their derivatives along tangents of the operands and of do.

    Parameters
    ----------
    do : array, (..., Hq, Nq, dv)
        Gradient with respect to o, of q's dtype.
    <operands>
    jvp : Jvp
        The result of :func:`jvp` along the same tangents, or any ``(o, l, m, rng_state, to, tlse)``: merged over
        shards, say.  Take it with ``out_dtype=numpy.float32``, as o and its tangent enter sums whose terms cancel.
    tdo : array, optional
        Tangent of do.
    <tangents>
    <mask>
    <kernel>
    deterministic : bool, default False
        Make the results bitwise reproducible.
    out_dtype : dtype, optional
        By default each result has its operand's dtype; float32 keeps them unrounded, for sums over shards.
    dlse : array, (..., Hq, Nq), float32 | float64, optional
        Gradient with respect to lse, where it is used beside o; its tangent is 0.
    <origin>
    out : (gradients, tangents), optional
        Arrays to fill, each a tuple as :func:`backward`'s, or None.

    Returns
    -------
    gradients : Gradients
        What :func:`backward` returns.
    tangents : Gradients
        The tangents of that.

    Raises
    ------
    <errors>

    See Also
    --------
    double_backward : The gradient of the gradients.

    Notes
    -----
    This is a Hessian-vector product.  It is the gradient of :func:`jvp`, too: with cotangents a of o and b of to, give
    ``do=b, tdo=a``; the gradients are then those by the tangents, and the tangents those by the operands.
    Extra memory is O(N d).

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> do, q, k, v, tk = np.random.default_rng(0).standard_normal((5, 8, 16))
    >>> def dv(step):
    ...     return cuattn.backward(do, q, k + step * tk, v, cuattn.forward(q, k + step * tk, v)).dv
    >>> _, tangents = cuattn.backward_jvp(do, q, k, v, cuattn.jvp(q, k, v, tk=tk), tk=tk)
    >>> bool(np.allclose(tangents.dv, (dv(1e-6) - dv(-1e-6)) / 2e-6, atol=1e-8))
    True
    """
    if not isinstance(jvp, (tuple, list)) or len(jvp) != 6:
        raise DtypeError(f"jvp is {type(jvp).__name__}; expected a Jvp, or any (o, l, m, rng_state, to, tlse)")
    o, l, m, state, to, tlse = jvp
    options = Options(
        is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, True, out_dtype, deterministic
    )
    arrays = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "do": do, "o": o, "l": l, "m": m, "to": to, "tlse": tlse,
        "dlse": dlse, "tq": tq, "tk": tk, "tv": tv, "tbias": tbias, "tdo": tdo,
    }  # fmt: skip
    call = Call(
        BACKWARD_JVP, BACKWARD_JVP.given(arrays), options, state, origin, _pair(out), score, score_args, tscore_args
    )
    results, _ = dispatch.compute(call)
    half = len(results) // 2
    return gradients(call, results[:half]), gradients(call, results[half:])


def _pair(out: Any) -> list[Any] | None:
    """Return the arrays to fill of gradients and of their tangents, one after the other."""
    if out is None:
        return None
    n = len(GRADIENTS)
    if (
        not isinstance(out, (tuple, list))
        or len(out) != 2
        or not all(part is None or (isinstance(part, (tuple, list)) and n - 1 <= len(part) <= n) for part in out)
    ):
        raise ArgumentError(f"out is {shown(out)}; expected two tuples ({', '.join(GRADIENTS)}) of arrays or None")
    return [array for part in out for array in [*(part or ()), *[None] * n][:n]]


@public
def double_backward(
    gdq: ArrayT | None,
    gdk: ArrayT | None,
    gdv: ArrayT | None,
    do: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    fwd: Any,
    /,
    *,
    gdbias: ArrayT | None = None,
    gdscore: Sequence[Any] | None = None,
    mask: Any = None,
    bias: ArrayT | None = None,
    score: Callable[..., Any] | None = None,
    score_args: Sequence[Any] = (),
    is_causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    deterministic: bool = False,
    out_dtype: Any = None,
    dlse: ArrayT | None = None,
    origin: Origin | None = None,
    out: tuple[Any, ...] | None = None,
) -> DoubleGradients:
    """Compute the gradients of :func:`backward`: of ``sum(gdq * dq) + sum(gdk * dk) + ...`` by all that it was given.

    Parameters
    ----------
    gdq, gdk, gdv : array or None
        Gradients with respect to dq, dk and dv, each of its operand's shape and dtype; None is 0 and costs nothing.
    do : array, (..., Hq, Nq, dv)
        Gradient with respect to o, of q's dtype.
    <operands>
    fwd : Forward or Jvp
        The forward's result.  Only its ``rng_state`` is read: o is computed again, in float32, with its tangent.
    gdbias : array, optional
        Gradient with respect to dbias.
    gdscore : sequence, optional
        Gradients with respect to ``Gradients.dscore``, one entry each: an array, or None.
    <mask>
    <kernel>
    deterministic : bool, default False
        Make the gradients bitwise reproducible.
    out_dtype : dtype, optional
        By default each gradient has its operand's dtype; float32 keeps them unrounded.
    dlse : array, (..., Hq, Nq), float32 | float64, optional
        As the backward was given.
    <origin>
    out : (ddo, dq, dk, dv) or (ddo, dq, dk, dv, dbias), optional
        Arrays to fill, as :func:`attention`'s; None in place of one is a new array.

    Returns
    -------
    DoubleGradients
        ``(ddo, dq, dk, dv, dbias)``, with the attributes ``dscore`` and ``ddlse``.

    Raises
    ------
    <errors>

    See Also
    --------
    backward_jvp : What it is made of; for keys in shards, merge :func:`jvp`'s results and call that.

    Notes
    -----
    The gradients lie along tangents: ddo is the tangent of o along (gdq, gdk, gdv, gdbias), and dq that of the
    backward's dq.  So this is one :func:`jvp` and one pass more.  Extra memory is O(N d).

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> gdq, do, q, k, v = np.random.default_rng(0).standard_normal((5, 8, 16))
    >>> double = cuattn.double_backward(gdq, None, None, do, q, k, v, cuattn.forward(q, k, v))
    >>> bool(np.allclose(double.ddo, cuattn.jvp(q, k, v, tq=gdq).to))
    True
    """
    *_, state = unpacked("fwd", fwd)
    check_state("fwd.rng_state", state, threshold(dropout_p))
    sums = np.float64 if "float64" in str(getattr(q, "dtype", None)) else np.float32
    options = Options(is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, True, sums)
    tangents = {"tq": gdq, "tk": gdk, "tv": gdv, "tbias": gdbias}
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask}
    arrays |= tangents
    first = Call(_JVP_OF_DOUBLE, _JVP_OF_DOUBLE.given(arrays), options, state, origin, None, score, score_args, gdscore)
    (o, l, m, to, tlse), _ = dispatch.compute(first)
    arrays |= {"do": do, "o": o, "l": l, "m": m, "to": to, "tlse": tlse, "dlse": dlse}
    options = options._replace(out_dtype=out_dtype, deterministic=deterministic)
    call = Call(DOUBLE_BACKWARD, DOUBLE_BACKWARD.given(arrays), options, state, origin, out, score, score_args, gdscore)
    (ddo, *results), _ = dispatch.compute(call)
    own, of_score = call.divide(results) if call.args else (results, ())
    double = DoubleGradients(ddo, *own)
    double.dscore, double.ddlse = of_score, None if dlse is None else tlse
    return double
