"""Attention over packed documents in three ways: a column mask, the same mask dense, one call per document."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cuattn
from cuattn import masks

__all__ = ["WAYS", "Attention"]


class Attention:
    """How a step computes attention.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    way : {"column", "dense", "documents"}
        A `ColumnMask`; the same mask as a boolean matrix; or a causal call per document.
    kernel : str, optional
        As in `cuattn.attention`.
    deterministic : bool
        Ask for bitwise reproducible gradients.
    """

    def __init__(self, xp: Any, way: str, kernel: str | None = None, deterministic: bool = True) -> None:
        self._make: Callable[..., Any] = WAYS[way]
        self._xp = xp
        self._packed = way != "documents"
        self._options = {"kernel": kernel}
        self._exact = {"deterministic": deterministic}
        self._spans: list[tuple[slice, dict[str, Any]]] = []

    def prepare(self, lengths: tuple[int, ...]) -> None:
        """Take the documents of the next sequence."""
        self._spans = self._make(self._xp, lengths)

    def forget(self) -> None:
        """Drop the masks of the last sequence."""
        self._spans = []

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, list[Any]]:
        """Return o, (heads, n, d), and what `backward` needs."""
        saved = [
            cuattn.forward(q[:, rows], k[:, rows], v[:, rows], **options, **self._options)
            for rows, options in self._spans
        ]
        if len(saved) == 1:
            return saved[0].o, saved
        return self._xp.concatenate([fwd.o for fwd in saved], axis=1), saved

    def backward(self, do: Any, q: Any, k: Any, v: Any, saved: list[Any]) -> tuple[Any, ...]:
        """Return dq, dk and dv."""
        parts = []
        for (rows, options), fwd in zip(self._spans, saved, strict=True):
            operands = (do[:, rows], q[:, rows], k[:, rows], v[:, rows])
            parts.append(cuattn.backward(*operands, fwd, **options, **self._options, **self._exact)[:3])
        if len(parts) == 1:
            return parts[0]
        return tuple(self._xp.concatenate(list(same), axis=1) for same in zip(*parts, strict=True))


def _column(xp: Any, lengths: tuple[int, ...]) -> list[tuple[slice, dict[str, Any]]]:
    return [(slice(None), {"mask": masks.causal_document(list(lengths))})]


def _dense(xp: Any, lengths: tuple[int, ...]) -> list[tuple[slice, dict[str, Any]]]:
    document = xp.asarray(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    place = xp.arange(document.size)
    mask = (document[:, None] == document) & (place[:, None] >= place)
    return [(slice(None), {"mask": mask})]


def _documents(xp: Any, lengths: tuple[int, ...]) -> list[tuple[slice, dict[str, Any]]]:
    ends = np.cumsum(lengths).tolist()
    starts = [0, *ends[:-1]]
    return [(slice(a, b), {"is_causal": True}) for a, b in zip(starts, ends, strict=True)]


WAYS = {"column": _column, "dense": _dense, "documents": _documents}
