"""Checks of the scalar arguments, one function each; every one returns the value in its plain Python form."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

import numpy as np

from cuattn.errors import ArgumentError, DtypeError
from cuattn.problem.model import FLOAT32, FLOAT64, Band

ALIGNMENTS = ("top_left", "bottom_right")
KERNELS = ("cpu", "sm80", "sm90")


def real(name: str, value: Any) -> float:
    """Return a finite float, or raise naming `name`."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (Real, np.floating, np.integer)):
        raise DtypeError(f"{name} is {value!r}; expected a real number")
    value = float(value)
    if not math.isfinite(value):
        raise ArgumentError(f"{name} is {value}; expected a finite number")
    return value


def check_scale(scale: Any, head_dim: int) -> float:
    """Return the score scale, by default ``head_dim ** -0.5``."""
    return head_dim**-0.5 if scale is None else real("scale", scale)


def check_softcap(softcap: Any) -> float | None:
    """Return a positive softcap or None."""
    if softcap is None:
        return None
    value = real("softcap", softcap)
    if value <= 0:
        raise ArgumentError(f"softcap is {value}; expected a number > 0, or None for no softcap")
    return value


def flag(name: str, value: Any) -> bool:
    """Return a bool, or raise naming `name`."""
    if not isinstance(value, (bool, np.bool_)):
        raise DtypeError(f"{name} is {value!r}; expected True or False")
    return bool(value)


def choice(name: str, value: Any, options: tuple[str, ...]) -> str | None:
    """Return one of `options` or None."""
    if value is None or (isinstance(value, str) and value in options):
        return value
    raise ArgumentError(f"{name} is {value!r}; expected None or one of {', '.join(map(repr, options))}")


def check_out_dtype(out_dtype: Any, dtype: np.dtype) -> np.dtype:
    """Return the dtype of o: the input's, or float32 to keep the sums unrounded."""
    if out_dtype is None:
        return dtype
    try:
        wanted = np.dtype(out_dtype)
    except TypeError as error:
        raise DtypeError(f"out_dtype is {out_dtype!r}; expected a dtype") from error
    if wanted == dtype or (wanted == FLOAT32 and dtype != FLOAT64):
        return wanted
    allowed = f"{dtype}" if dtype == FLOAT64 else f"{dtype} or float32"
    raise DtypeError(f"out_dtype is {wanted}; expected {allowed} for {dtype} inputs")


def check_band(is_causal: Any, window: Any, n_queries: int, n_keys: int) -> Band | None:
    """Join `is_causal` and `window` into one diagonal band (their AND), or None when neither restricts."""
    causal, align = _check_causal(is_causal, n_queries, n_keys)
    left, right, window_align = _check_window(window)
    if window_align is not None:
        if align is not None and align != window_align:
            raise ArgumentError(
                f"window ends in {window_align!r} but is_causal is {align!r}; expected the same alignment"
            )
        align = window_align
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    if align is None:
        if n_queries != n_keys:
            raise ArgumentError(
                f"window is {window!r} with {n_queries} queries and {n_keys} keys; expected its alignment as a third "
                "item: (left, right, 'top_left') or (left, right, 'bottom_right')"
            )
        align = "top_left"
    return Band(left, right, 0 if align == "top_left" else n_keys - n_queries)


def _check_causal(is_causal: Any, n_queries: int, n_keys: int) -> tuple[bool, str | None]:
    if isinstance(is_causal, str) and is_causal in ALIGNMENTS:
        return True, is_causal
    if not isinstance(is_causal, (bool, np.bool_)):
        raise ArgumentError(f"is_causal is {is_causal!r}; expected True, False, 'top_left' or 'bottom_right'")
    if is_causal and n_queries != n_keys:
        raise ArgumentError(
            f"is_causal is True with {n_queries} queries and {n_keys} keys; expected 'top_left' or 'bottom_right', "
            "since True says which only when the lengths are equal"
        )
    return bool(is_causal), None


def _check_window(window: Any) -> tuple[int | None, int | None, str | None]:
    if window is None:
        return None, None, None
    if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
        raise ArgumentError(f"window is {window!r}; expected (left, right) or (left, right, alignment)")
    align = window[2] if len(window) == 3 else None
    if align is not None and align not in ALIGNMENTS:
        raise ArgumentError(f"window's alignment is {align!r}; expected 'top_left' or 'bottom_right'")
    sides = []
    for side, value in zip(("left", "right"), window[:2], strict=True):
        if value is None:
            sides.append(None)
            continue
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            number = operator.index(value)
        except TypeError:
            raise ArgumentError(f"window's {side} is {value!r}; expected an integer >= 0 or None (open)") from None
        if number < 0:
            raise ArgumentError(f"window's {side} is {number}; expected an integer >= 0 or None (open)")
        sides.append(number)
    return sides[0], sides[1], align
