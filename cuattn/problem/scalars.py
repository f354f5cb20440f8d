"""Checks of the scalar arguments, one function each; every one returns the value in its plain Python form."""

from __future__ import annotations

from typing import Any

import numpy as np

from cuattn.errors import ArgumentError, DtypeError, as_integer, as_real, shown
from cuattn.problem.dtypes import DTYPES
from cuattn.problem.model import Band

_ALIGNMENTS = ("top_left", "bottom_right")


def of_scores(name: str, value: Any, dtype: np.dtype, positive: bool = False) -> float:
    """Return a number that scores of inputs of `dtype`, which have that of the sums, can have."""
    number, limits = as_real(name, value), np.finfo(DTYPES[dtype].stat)
    least, most = limits.tiny if positive else limits.min, limits.max
    if not float(least) <= number <= float(most):
        expected = "a number > 0 from" if positive else "a number from"
        raise ArgumentError(
            f"{name} is {number}; expected {expected} {least:.3g} to {most:.3g}: scores are {most.dtype}"
        )
    return number


def flag(name: str, value: Any) -> bool:
    """Return a bool, or raise naming `name`."""
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(f"{name} is {shown(value)}; expected True or False")
    return bool(value)


def choice(name: str, value: Any, *options: str) -> str | None:
    """Return one of `options`, any string where there are none, or None."""
    if value is None or (isinstance(value, str) and (not options or value in options)):
        return value
    expected = f"one of {', '.join(map(repr, options))}" if options else "a name"
    raise ArgumentError(f"{name} is {shown(value)}; expected None or {expected}")


def check_out_dtype(out_dtype: Any, dtype: np.dtype) -> np.dtype:
    """Return the dtype of o or of the gradients: the input's, or that of the sums, which keeps them unrounded."""
    if out_dtype is None:
        return dtype
    try:  # of NumPy, PyTorch or JAX
        wanted = np.dtype(getattr(out_dtype, "__name__", str(out_dtype)).removeprefix("torch."))
    except (TypeError, ValueError) as error:
        raise DtypeError(f"out_dtype is {shown(out_dtype)}; expected a dtype") from error
    allowed = dict.fromkeys((dtype, DTYPES[dtype].stat))
    if wanted in allowed:
        return wanted
    raise DtypeError(f"out_dtype is {wanted}; expected {' or '.join(map(str, allowed))} for {dtype} inputs")


def check_band(is_causal: Any, window: Any, n_queries: int, n_keys: int, *, sharded: bool = False) -> Band | None:
    """Join `is_causal` and `window` into one diagonal band (their AND), or None when neither restricts.

    Parameters
    ----------
    is_causal, window : object
        The caller's arguments.
    n_queries, n_keys : int
        Of the call.
    sharded : bool
        Whether the call is part of a larger problem, by whose lengths the diagonal is placed: the band's offset is
        then 0, and no lengths need be equal.
    """
    placed = sharded or n_queries == n_keys  # so that the alignment need not be said
    lengths = f"with {n_queries} queries and {n_keys} keys"
    align = is_causal if isinstance(is_causal, str) else None
    if align not in (None, *_ALIGNMENTS) or not isinstance(is_causal, (bool, np.bool_, str)):
        raise ArgumentError(f"is_causal is {shown(is_causal)}; expected True, False, 'top_left' or 'bottom_right'")
    if is_causal and align is None and not placed:
        raise ArgumentError(
            f"is_causal is True {lengths}; expected 'top_left' or 'bottom_right', since True says which only when the "
            "lengths are equal"
        )
    left, right, window_align = _check_window(window)
    if None not in (align, window_align) and align != window_align:
        raise ArgumentError(f"window ends in {window_align!r} but is_causal is {align!r}; expected the same alignment")
    align = window_align or align
    if is_causal:
        right = 0
    if left is None and right is None:
        return None
    if align is None and not placed:
        raise ArgumentError(
            f"window is {window!r} {lengths}; expected its alignment as a third item: (left, right, 'top_left') or "
            "(left, right, 'bottom_right')"
        )
    bottom_right = align == "bottom_right"
    return Band(left, right, n_keys - n_queries if bottom_right and not sharded else 0, bottom_right)


def _check_window(window: Any) -> tuple[int | None, int | None, str | None]:
    if window is None:
        return None, None, None
    if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
        raise ArgumentError(f"window is {shown(window)}; expected (left, right) or (left, right, alignment)")
    left, right, align = (*window, None)[:3]
    if align is not None and not (isinstance(align, str) and align in _ALIGNMENTS):
        raise ArgumentError(f"window's alignment is {shown(align)}; expected 'top_left' or 'bottom_right'")
    return _side("left", left), _side("right", right), align


def _side(side: str, value: Any) -> int | None:
    number = as_integer(value)
    if value is not None and (number is None or number < 0):
        raise ArgumentError(f"window's {side} is {shown(value)}; expected an integer >= 0 or None (open)")
    return number
