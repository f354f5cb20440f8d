"""What the tests of PyTorch's attention share."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

# What PyTorch's inductor compiles with.
HAS_COMPILER = bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").exists()
inductor = pytest.param("inductor", marks=pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler"))

SHAPES = {"q": (2, 4, 5, 3), "k": (2, 2, 6, 3), "v": (2, 2, 6, 2)}


def double(*shape):
    """Return a random tensor of float64 that requires grad."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def operands():
    """Return q, k, v of two groups of heads."""
    torch.manual_seed(0)
    return tuple(double(*shape) for shape in SHAPES.values())


def textbook(q, k, v, bias=None, visible=None, is_causal=False):
    """Return softmax(q k^T / sqrt(d) + bias) v, of operations that PyTorch differentiates."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if q.ndim > 2 else x for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    if is_causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril()
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    return s.softmax(-1) @ v
