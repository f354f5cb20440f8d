"""Attention over packed documents in three ways: a column mask, the same mask dense, one call per document."""

import numpy as np
import torch

import cuattn
from cuattn import masks

__all__ = ["WAYS", "Attention"]


class Attention:
    """How a step computes attention, differentiable for PyTorch.

    Parameters
    ----------
    way : {"column", "dense", "documents"}
        A `ColumnMask`; the same mask as a boolean matrix; or a causal call per document.
    kernel : str, optional
        As in `cuattn.attention`.
    deterministic : bool
        Ask for bitwise reproducible gradients.
    """

    def __init__(self, way, kernel=None, deterministic=True):
        self._make, self._kernel, self._deterministic = WAYS[way], kernel, deterministic
        self._spans = []

    def prepare(self, lengths, device):
        """Take the documents of the next sequence."""
        self._spans = self._make(lengths, device)

    def forget(self):
        """Drop the masks of the last sequence."""
        self._spans = []

    def __call__(self, q, k, v):
        """Return o, (heads, n, head_dim)."""
        parts = [
            _Exact.apply(q[:, rows], k[:, rows], v[:, rows], {**options, "kernel": self._kernel}, self._deterministic)
            for rows, options in self._spans
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _Exact(torch.autograd.Function):
    """cuattn's forward and backward."""

    @staticmethod
    def forward(context, q, k, v, options, deterministic):
        fwd = cuattn.forward(*(x.detach() for x in (q, k, v)), **options)
        context.save_for_backward(q, k, v, *fwd[:3])
        context.options = {**options, "deterministic": deterministic}
        return fwd.o

    @staticmethod
    def backward(context, do):
        q, k, v, *fwd = (x.detach() for x in context.saved_tensors)
        gradients = cuattn.backward(do.contiguous(), q, k, v, cuattn.Forward(*fwd, None), **context.options)
        return *gradients[:3], None, None


def _column(lengths, device):
    return [(slice(None), {"mask": masks.causal_document(list(lengths))})]


def _dense(lengths, device):
    document = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
    place = torch.arange(len(document), device=device)
    return [(slice(None), {"mask": (document[:, None] == document) & (place[:, None] >= place)})]


def _documents(lengths, device):
    ends = np.cumsum(lengths).tolist()
    return [(slice(end - length, end), {"is_causal": True}) for end, length in zip(ends, lengths, strict=True)]


WAYS = {"column": _column, "dense": _dense, "documents": _documents}
