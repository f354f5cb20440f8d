"""The public functions: attention, forward, backward, merge, plan; :mod:`cuattn.derivatives` has the others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from cuattn import dispatch
from cuattn.dispatch import Call
from cuattn.errors import ArgumentError, DtypeError, shown
from cuattn.plans import Plan
from cuattn.problem import BACKWARD, FORWARD, JVP, OPERATIONS, Options, Origin
from cuattn.results import Forward, Gradients, Jvp
from cuattn.rng import RNGState, recorded

# `_make` in half the time
_options, _forward = partial(tuple.__new__, Options), partial(tuple.__new__, Forward)
_gradients = partial(tuple.__new__, Gradients)

ArrayT = TypeVar("ArrayT")
Function = TypeVar("Function", bound=Callable[..., Any])

_SHARED = {
    "operands": """q : array, (..., Hq, Nq, d) or (Nq, d), float16 | bfloat16 | float32 | float64
        Queries.  NumPy, CuPy, PyTorch, JAX or any other DLPack array; results are of the same kind.
    k : array, (..., Hkv, Nk, d) or (Nk, d)
        Keys, of q's dtype.
    v : array, (..., Hkv, Nk, dv) or (Nk, dv)
        Values, of q's dtype.  Leading axes broadcast as in :func:`numpy.matmul`.""",
    "mask": """mask : bool array | mask of :mod:`cuattn.masks` | callable, optional
        Which keys each query may see (True = attend), broadcast to (..., Hq, Nq, Nk); or a pure function
        ``visible(b, h, i, j) -> bool`` in NumPy style, of the global indices of leading axes (flat), query head, row
        and key: see :func:`cuattn.masks.from_function`.  Define it once, for it is recognised by identity.
        Mask, ``is_causal`` and ``window`` combine by AND.
    bias : array, optional
        Added to the scores after scale, softcap and score, broadcast to (..., Hq, Nq, Nk); q's dtype or float32.
        -inf makes a score invisible.
    score : callable, optional
        A pure function ``score(s, b, h, i, j, *score_args) -> s`` in NumPy style that changes each score s, after scale
        and softcap and before bias and mask: of the flat leading index, query head, row and key, all global.  It is
        traced once and recognised by its code and what it captures, which is constant: see :mod:`cuattn.tracing`.  It
        computes in float32 (float64 for float64), and -inf makes a score invisible.
    score_args : sequence, optional
        Its further arguments: arrays of q's kind and device, which it indexes by integers made of b, h, i, j and of
        elements of integer arrays (``table[h, i - j + n]``), and Python numbers.
    is_causal : {False, True, "top_left", "bottom_right"}, optional
        Row i sees keys j <= i ("top_left") or j <= i + Nk - Nq ("bottom_right"); True needs Nq == Nk.
    window : (left, right) or (left, right, alignment), optional
        Row i sees keys ``i' - left <= j <= i' + right``; None leaves a side open.  ``i' = i`` or, aligned
        "bottom_right", ``i + Nk - Nq``; the alignment is is_causal's, or the third item.
    scale : float, optional
        Factor of the scores, by default ``d ** -0.5``.
    softcap : float, optional
        Cap the scores softly: ``s = softcap * tanh(s / softcap)``, before score, bias and mask.
    dropout_p : float, default 0
        Probability of dropping each attention weight, 0 <= dropout_p < 1.""",
    "rng": """rng : int, RNGState, numpy.random.Generator or None, optional
        Where dropout's random numbers come from; None draws a fresh seed.  See :mod:`cuattn.rng`.""",
    "kernel": """enable_gqa : bool, default False
        Allow grouped heads: Hq a multiple of Hkv, query head h reads key/value head ``h // (Hq / Hkv)``.
    precision : {None, "tf32"}, optional
        "tf32" permits a backend to compute float32 products with TF32 inputs.
    kernel : {None, "cpu", "sm80", "sm90"}, optional
        The kernel family; None lets the plan choose.""",
    "origin": """origin : Origin, optional
        Where the call's part stands in a larger problem that is computed in parts; see :class:`Origin`.""",
    "tangents": """tq, tk, tv, tbias : array, optional
        Tangents of q, k, v and bias, each of its operand's shape and dtype.  None is a tangent of 0 and costs nothing.
    tscore_args : sequence, optional
        Tangents of `score_args`, one entry each: an array like the argument, or None.""",
    "errors": """ShapeError, DtypeError, ArgumentError, MaskError
        When an argument does not fit; the message names it, its value and what was expected.
    UnsupportedError
        When the backend cannot do what was asked, or a gradient would be lost in silence: of a PyTorch tensor that
        requires grad while grad mode is on, or of a JAX tracer.""",
}


def documented_by(paragraphs: dict[str, str]) -> Callable[[Function], Function]:
    """Return a decorator that fills paragraphs that functions share, indented by four, into docstrings.

    From Python 3.13 on the compiler takes the indentation off docstrings.
    """

    def document(function: Function) -> Function:
        text = inspect.cleandoc(function.__doc__ or "") + "\n"
        for name, paragraph in paragraphs.items():
            text = text.replace(f"<{name}>", paragraph.replace("\n    ", "\n"))
        function.__doc__ = text
        return function

    return document


public = documented_by(_SHARED)


@public
def attention(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    /,
    *,
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
    origin: Origin | None = None,
    out: ArrayT | None = None,
) -> ArrayT:
    """Compute exact attention, ``softmax(scale * q @ k.T + bias) @ v``, without ever making a score matrix.

    Parameters
    ----------
    <operands>
    <mask>
    <rng>
    <kernel>
    <origin>
    out : array, optional
        Where o goes: of o's shape and dtype and q's kind and device, writable, with any strides, sharing no memory
        with an operand.  Not for JAX.

    Returns
    -------
    array, (..., Hq, Nq, dv)
        The output, in q's dtype and kind; `out` if it was given.  A row that sees no key is 0.

    Raises
    ------
    <errors>

    See Also
    --------
    forward : Also returns the softmax statistics and the random state.
    backward : Gradients.

    Notes
    -----
    Extra memory is O(Nq).  Automatic differentiation is explicit, by :func:`forward` and :func:`backward`; for PyTorch
    ``cuattn.torch.attention`` is this function with gradients.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 2.  G. Wang et al., "FlashMask", 2024, algorithm 1.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.ones((2, 4, 16), np.float32)
    >>> cuattn.attention(q, q, q, is_causal=True).shape
    (2, 4, 16)
    """
    options = _options(
        (is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, False, None, False, 0)
    )
    arrays = {"q": q, "k": k, "v": v}
    if bias is not None:
        arrays["bias"] = bias
    if mask is not None:
        arrays["mask"] = mask
    return dispatch.compute(Call(FORWARD, arrays, options, rng, origin, out, score, score_args))[0][0]


@public
def forward(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    /,
    *,
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
) -> Forward:
    """Compute exact attention and keep what a backward pass or a merge needs.

    Parameters
    ----------
    <operands>
    <mask>
    <rng>
    <kernel>
    out_dtype : dtype, optional
        By default q's dtype; float32 keeps o unrounded, for :func:`merge`.
    <origin>
    out : (o, l, m), optional
        Arrays to fill, as :func:`attention`'s; None in place of one is a new array.

    Returns
    -------
    Forward
        ``(o, l, m, rng_state)``, with ``lse = m + log(l)`` as a property.

    Raises
    ------
    <errors>

    See Also
    --------
    backward : Takes the result.
    merge : Combines results over disjoint keys.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 2: it returns O, l, m and the generator's state.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.ones((4, 16), np.float32)
    >>> fwd = cuattn.forward(q, q, q)
    >>> fwd.l, fwd.m
    (array([4., 4., 4., 4.], dtype=float32), array([4., 4., 4., 4.], dtype=float32))
    """
    options = _options(
        (is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, True, out_dtype, False, 0)
    )
    arrays = {"q": q, "k": k, "v": v}
    if bias is not None:
        arrays["bias"] = bias
    if mask is not None:
        arrays["mask"] = mask
    (o, l, m), state = dispatch.compute(Call(FORWARD, arrays, options, rng, origin, out, score, score_args))
    return _forward((o, l, m, state))


@public
def backward(
    do: ArrayT,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    fwd: Any,
    /,
    *,
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
) -> Gradients:
    """Compute the gradients of attention, recomputing the scores from q, k and the forward's statistics.

    Parameters
    ----------
    do : array, (..., Hq, Nq, dv)
        Gradient with respect to o, of q's dtype.
    <operands>
    fwd : Forward or Jvp
        The forward's result, or any ``(o, l, m, rng_state)``: merged over shards, say.  Dropout is replayed from its
        ``rng_state``.
    <mask>
    <kernel>
    deterministic : bool, default False
        Make the gradients bitwise reproducible.
    out_dtype : dtype, optional
        By default each gradient has its operand's dtype; float32 keeps them unrounded, for sums over shards.
    dlse : array, (..., Hq, Nq), float32 | float64, optional
        Gradient with respect to lse, where it is used beside o.
    <origin>
    out : (dq, dk, dv) or (dq, dk, dv, dbias), optional
        Arrays to fill, as :func:`attention`'s; None in place of one is a new array.

    Returns
    -------
    Gradients
        ``(dq, dk, dv, dbias)``, each of its operand's shape; dbias is None without a bias.  The attribute ``dscore``
        has the gradients of the arrays of floats in `score_args`.

    Raises
    ------
    <errors>

    See Also
    --------
    forward : Computes `fwd`.

    Notes
    -----
    Extra memory is O(N d).  Sums are taken in float32 (float64 for float64) and rounded once.  Gradients of an
    empty row are 0.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 4.  G. Wang et al., "FlashMask", 2024, algorithm 2.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.ones((4, 16), np.float32)
    >>> fwd = cuattn.forward(q, q, q)
    >>> cuattn.backward(np.ones_like(fwd.o), q, q, q, fwd).dv[0, :3].round(6)
    array([1., 1., 1.], dtype=float32)
    """
    o, l, m, state = unpacked("fwd", fwd)
    options = _options(
        (is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, True, out_dtype, deterministic, 0)
    )
    arrays = {"q": q, "k": k, "v": v, "do": do, "o": o, "l": l, "m": m}
    if bias is not None:
        arrays["bias"] = bias
    if mask is not None:
        arrays["mask"] = mask
    if dlse is not None:
        arrays["dlse"] = dlse
    call = Call(BACKWARD, arrays, options, state, origin, out, score, score_args)
    results, _ = dispatch.compute(call)
    return gradients(call, results)


def unpacked(name: str, fwd: Any) -> tuple | list:
    """Return the o, l, m and rng_state of a forward or a jvp."""
    if isinstance(fwd, Jvp):
        return fwd[:4]
    if not isinstance(fwd, (tuple, list)) or len(fwd) != 4:
        raise DtypeError(f"{name} is {type(fwd).__name__}; expected a Forward, or any (o, l, m, rng_state)")
    return fwd


def gradients(call: Call, results: list[Any]) -> Gradients:
    """Return the results of a backward."""
    own, of_score = call.divide(results) if call.args else (results, ())
    made = _gradients(own if len(own) == 4 else (*own, None))
    if of_score:
        made.dscore = of_score
    return made


def merge(*parts: Any, out: tuple[Any, ...] | None = None) -> Any:
    """Combine forwards over disjoint sets of keys into the forward over their union.

    Parameters
    ----------
    *parts : Forward or Jvp
        Results of :func:`forward`, or all of :func:`jvp`, for the same queries; shapes and dtypes agree.  Parts with o
        in float32 (``out_dtype=numpy.float32``) lose nothing on the way.
    out : (o, l, m) or (o, l, m, to, tlse), optional
        Arrays to fill, as :func:`attention`'s; None in place of one is a new array.

    Returns
    -------
    Forward or Jvp
        The merged result; sums are taken in float32 (float64) and o is rounded once, to the parts' dtype.
        ``rng_state`` is kept when all parts have the same, else None.

    Raises
    ------
    ArgumentError
        Without parts.
    ShapeError, DtypeError
        When parts do not agree.

    See Also
    --------
    Origin : Gives each part its place, for causality, windows and dropout.

    Notes
    -----
    Commutative, and associative up to rounding; an empty row is the identity.  With m = max(m_a, m_b),
    l = l_a exp(m_a - m) + l_b exp(m_b - m) and o = (o_a l_a exp(m_a - m) + o_b l_b exp(m_b - m)) / l: the update
    of FlashAttention, algorithm 1, lines 11 and 12.  Gradients follow part by part: :func:`backward` with the merged
    o, l and m and that part's keys, rng_state and origin.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> x = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    >>> halves = cuattn.merge(cuattn.forward(x, x[:4], x[:4]), cuattn.forward(x, x[4:], x[4:]))
    >>> bool(np.allclose(halves.o, cuattn.attention(x, x, x), atol=1e-6))
    True
    """
    if not parts:
        raise ArgumentError("merge got no parts; expected at least one Forward")
    jvps = [isinstance(part, Jvp) for part in parts]
    if any(jvps) and not all(jvps):
        raise DtypeError("parts holds a Jvp and a Forward; expected all of one kind")
    names = JVP.results if jvps[0] else FORWARD.results
    named, states = {}, {}
    for index, part in enumerate(parts):
        label = f"parts[{index}]"
        *arrays, state = unpacked(label, part)
        arrays += part[4:]
        named |= {f"{label}.{name}": array for name, array in zip(names, arrays, strict=True)}
        state = None if state is None else recorded(state, f"{label}.rng_state")
        states[_identity(state)] = state
    o, l, m, *tangents = dispatch.merge(named, names, out)
    state = states.popitem()[1] if len(states) == 1 else None
    return Jvp(o, l, m, state, *tangents) if tangents else Forward(o, l, m, state)


def _identity(state: RNGState | None) -> Any:
    """Return what equal states share, as far as that is known without reading an offset on a device."""
    return state if state is None or isinstance(state.offset, int) else (state.seed, id(state.offset))


@public
def plan(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    /,
    *,
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
    origin: Origin | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    direction: str = "forward",
) -> Plan:
    """Tell how a call would run: which kernel, tiles and memory, and why.  Computes nothing.

    Parameters
    ----------
    <operands>
    <mask>
    <rng>
    <kernel>
    <origin>
    out_dtype : dtype, optional
        As in :func:`forward` and :func:`backward`.
    deterministic : bool, default False
        As in :func:`backward`.
    direction : {"forward", "backward", "jvp", "backward_jvp", "double_backward"}
        Which operation to plan, the last three with tangents of all operands; of a double backward the pass that
        follows a jvp's.

    Returns
    -------
    Plan
        Prints as a readable table.

    Raises
    ------
    <errors>

    See Also
    --------
    attention : Takes the same arguments and computes.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.ones((4, 64), np.float32)
    >>> cuattn.plan(q, q, q).kernel
    'cpu'
    """
    if not isinstance(direction, str) or direction not in OPERATIONS:
        raise ArgumentError(f"direction is {shown(direction)}; expected {' or '.join(map(repr, OPERATIONS))}")
    options = Options(
        is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel, True, out_dtype, deterministic
    )
    arrays = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "tq": q, "tk": k, "tv": v, "tbias": bias}
    operation = OPERATIONS[direction]
    return dispatch.plan(Call(operation, operation.given(arrays), options, rng, origin, None, score, score_args))
