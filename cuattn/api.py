"""The public functions: attention, forward, backward, merge, plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn import dispatch
from cuattn.errors import ArgumentError, DtypeError
from cuattn.plans import Plan
from cuattn.problem import unpack_part
from cuattn.results import Forward, Gradients
from cuattn.rng import RNGState

__all__ = ["attention", "backward", "forward", "merge", "plan"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: bool | str = False,
    window: tuple | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    rng: int | RNGState | np.random.Generator | None = None,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
) -> Any:
    """Compute exact attention, ``softmax(scale * q @ k.T + bias) @ v``, without ever making a score matrix.

    Parameters
    ----------
    q : array, (..., Hq, Nq, d) or (Nq, d), float16 | bfloat16 | float32 | float64
        Queries.  NumPy, CuPy, PyTorch, JAX or any other DLPack array; the result is of the same kind.
    k : array, (..., Hkv, Nk, d) or (Nk, d)
        Keys, of q's dtype.
    v : array, (..., Hkv, Nk, dv) or (Nk, dv)
        Values, of q's dtype.  Leading axes broadcast as in :func:`numpy.matmul`.
    mask : bool array | ColumnMask | BlockMask, optional
        Which keys each query may see (True = attend), broadcast to (..., Hq, Nq, Nk); see :mod:`cuattn.masks`.
        Mask, ``is_causal`` and ``window`` combine by AND.
    bias : array, optional
        Added to the scores after scale and softcap, broadcast to (..., Hq, Nq, Nk); q's dtype or float32.
        -inf makes a score invisible.
    is_causal : {False, True, "top_left", "bottom_right"}, optional
        Row i sees keys j <= i ("top_left") or j <= i + Nk - Nq ("bottom_right"); True needs Nq == Nk.
    window : (left, right) or (left, right, alignment), optional
        Row i sees keys ``i' - left <= j <= i' + right``; None leaves a side open.  ``i' = i`` or, aligned
        "bottom_right", ``i + Nk - Nq``; the alignment is is_causal's, or the third item.
    scale : float, optional
        Factor of the scores, by default ``d ** -0.5``.
    softcap : float, optional
        Cap the scores softly: ``s = softcap * tanh(s / softcap)``, before bias and mask.
    dropout_p : float, default 0
        Probability of dropping each attention weight, 0 <= dropout_p < 1.
    rng : int, RNGState, numpy.random.Generator or None, optional
        Where dropout's random numbers come from; None draws a fresh seed.  See :mod:`cuattn.rng`.
    enable_gqa : bool, default False
        Allow grouped heads: Hq a multiple of Hkv, query head h reads key/value head ``h // (Hq / Hkv)``.
    precision : {None, "tf32"}, optional
        "tf32" permits a backend to compute float32 products with TF32 inputs.
    kernel : {None, "cpu", "sm80", "sm90"}, optional
        The kernel family; None lets the plan choose.

    Returns
    -------
    o : array, (..., Hq, Nq, dv)
        The output, in q's dtype and kind.  A row that sees no key is 0.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, MaskError
        When an argument does not fit; the message names it, its value and what was expected.
    UnsupportedError
        When the backend cannot do what was asked, or a gradient would be lost (see Notes).

    See Also
    --------
    forward : also returns the softmax statistics and the random state.
    backward : gradients.

    Notes
    -----
    Extra memory is O(Nq).  Automatic differentiation is explicit: a PyTorch tensor that requires grad, or a JAX
    tracer, is refused; wrap :func:`forward` and :func:`backward` in a ``torch.autograd.Function`` or a
    ``jax.custom_vjp``.

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
    results, _ = dispatch.compute(
        "forward",
        {"q": q, "k": k, "v": v, "bias": bias, "mask": mask},
        {
            "is_causal": is_causal, "window": window, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
            "enable_gqa": enable_gqa, "precision": precision, "kernel": kernel, "out_dtype": None,
        },
        rng,
        statistics=False,
    )  # fmt: skip
    return results[0]


def forward(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: bool | str = False,
    window: tuple | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    rng: int | RNGState | np.random.Generator | None = None,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    out_dtype: Any = None,
) -> Forward:
    """Compute exact attention and keep what a backward pass or a merge needs.

    Parameters
    ----------
    q, k, v, mask, bias, is_causal, window, scale, softcap, dropout_p, rng, enable_gqa, precision, kernel : various
        As in :func:`attention`.
    out_dtype : dtype, optional
        float32 keeps o unrounded, for :func:`merge`; by default q's dtype.

    Returns
    -------
    Forward
        ``(o, l, m, rng_state)``, with ``lse = m + log(l)`` as a property.

    Raises
    ------
    CuattnError
        As :func:`attention`.

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
    results, state = dispatch.compute(
        "forward",
        {"q": q, "k": k, "v": v, "bias": bias, "mask": mask},
        {
            "is_causal": is_causal, "window": window, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
            "enable_gqa": enable_gqa, "precision": precision, "kernel": kernel, "out_dtype": out_dtype,
        },
        rng,
    )  # fmt: skip
    return Forward(*results, state)


def backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    fwd: Any,
    /,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: bool | str = False,
    window: tuple | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    deterministic: bool = False,
) -> Gradients:
    """Compute the gradients of attention, recomputing the scores from q, k and the forward's statistics.

    Parameters
    ----------
    do : array, (..., Hq, Nq, dv)
        Gradient with respect to o, of q's dtype.
    q, k, v : array
        The forward's operands.
    fwd : Forward
        The forward's result, or any ``(o, l, m, rng_state)``: merged over shards, say.
    mask, bias, is_causal, window, scale, softcap, dropout_p, enable_gqa, precision, kernel : various
        The forward's arguments, see :func:`attention`.  Dropout is replayed from ``fwd.rng_state``.
    deterministic : bool, default False
        Make the gradients bitwise reproducible.

    Returns
    -------
    Gradients
        ``(dq, dk, dv, dbias)``, each of its operand's shape and dtype; dbias is None without a bias.

    Raises
    ------
    CuattnError
        As :func:`attention`.

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
    if not isinstance(fwd, (tuple, list)) or len(fwd) != 4:
        raise DtypeError(f"fwd is {type(fwd).__name__}; expected a Forward, or any (o, l, m, rng_state)")
    o, l, m, state = fwd
    results, _ = dispatch.compute(
        "backward",
        {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "do": do, "fwd.o": o, "fwd.l": l, "fwd.m": m},
        {
            "is_causal": is_causal, "window": window, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
            "enable_gqa": enable_gqa, "precision": precision, "kernel": kernel, "deterministic": deterministic,
        },
        state,
    )  # fmt: skip
    return Gradients(*results)


def merge(*parts: Forward) -> Forward:
    """Combine forwards over disjoint sets of keys into the forward over their union.

    Parameters
    ----------
    *parts : Forward
        Results of :func:`forward` for the same queries; shapes and dtypes agree.  Parts with o in float32
        (``out_dtype=numpy.float32``) lose nothing on the way.

    Returns
    -------
    Forward
        The merged result; sums are taken in float32 (float64) and o is rounded once, to the parts' dtype.
        ``rng_state`` is kept when all parts have the same, else None.

    Raises
    ------
    ArgumentError
        Without parts.
    ShapeError, DtypeError
        When parts do not agree.

    Notes
    -----
    Commutative, and associative up to rounding; an empty row is the identity.  With m = max(m_a, m_b),
    l = l_a exp(m_a - m) + l_b exp(m_b - m) and o = (o_a l_a exp(m_a - m) + o_b l_b exp(m_b - m)) / l: the update
    of FlashAttention, algorithm 1, lines 11 and 12.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> x = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    >>> halves = cuattn.merge(cuattn.forward(x, x[:4], x[:4]), cuattn.forward(x, x[4:], x[4:]))
    >>> bool(np.allclose(halves.o, cuattn.attention(x, x, x), atol=1e-6))
    True
    """
    unpacked = [unpack_part(index, part) for index, part in enumerate(parts)]
    named = {
        f"parts[{index}].{name}": array
        for index, part in enumerate(unpacked)
        for name, array in zip("olm", part, strict=False)
    }
    if not named:
        raise ArgumentError("merge got no parts; expected at least one Forward")
    states = [part[3] for part in unpacked]
    state = states[0] if all(other is states[0] or dispatch.same_state(other, states[0]) for other in states) else None
    return Forward(*dispatch.merge(named), state)


def plan(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    mask: Any = None,
    bias: Any = None,
    is_causal: bool | str = False,
    window: tuple | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    rng: int | RNGState | np.random.Generator | None = None,
    enable_gqa: bool = False,
    precision: str | None = None,
    kernel: str | None = None,
    out_dtype: Any = None,
    deterministic: bool = False,
    direction: str = "forward",
) -> Plan:
    """Tell how a call would run: which kernel, tiles and memory, and why.  Computes nothing.

    Parameters
    ----------
    q, k, v, mask, bias, is_causal, window, scale, softcap, dropout_p, rng, enable_gqa : various
        As in :func:`forward`.
    precision, kernel, out_dtype : various
        As in :func:`forward`.
    deterministic : bool
        As in :func:`backward`.
    direction : {"forward", "backward"}
        Which of the two to plan.

    Returns
    -------
    Plan
        Prints as a readable table.

    Raises
    ------
    CuattnError
        What the call itself would raise.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = np.ones((4, 64), np.float32)
    >>> cuattn.plan(q, q, q).kernel
    'cpu'
    """
    if direction not in ("forward", "backward"):
        raise ArgumentError(f"direction is {direction!r}; expected 'forward' or 'backward'")
    if isinstance(rng, np.random.Generator):
        rng = None  # planning draws nothing
    return dispatch.plan(
        direction,
        {"q": q, "k": k, "v": v, "bias": bias, "mask": mask},
        {
            "is_causal": is_causal, "window": window, "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
            "enable_gqa": enable_gqa, "precision": precision, "kernel": kernel, "out_dtype": out_dtype,
            "deterministic": deterministic,
        },
        rng,
    )  # fmt: skip
