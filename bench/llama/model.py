"""A small Llama-shaped decoder in PyTorch: norm, attention with rotary positions, norm, SwiGLU; the loss of a sequence.

Its attention is cuattn's, over packed documents in three ways: a column mask, the same mask dense, a call per document.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bench.harness import Calls
from bench.llama.text import VOCABULARY
from cuattn import masks

ROTARY_BASE = 10000.0


class Config(NamedTuple):
    """Sizes of a decoder.

    Attributes
    ----------
    n : int
        Tokens of a sequence.
    layers, heads, head_dim, inner : int
        Blocks, heads of head_dim each, and the width inside the feed-forward part.
    longest : int
        Tokens of a document at most.
    """

    n: int
    layers: int
    heads: int
    head_dim: int
    inner: int
    longest: int


class Block(nn.Module):
    """One layer."""

    def __init__(self, config):
        super().__init__()
        self.heads, h = config.heads, config.heads * config.head_dim
        self.qkv, self.o = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.gate, self.up = (nn.Linear(h, config.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(config.inner, h, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)

    def forward(self, x, rotary, attention):
        """Return x, (n, hidden), with attention and the feed-forward part added."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        o = attention(_rotate(q, rotary), _rotate(k, rotary), v.contiguous())
        x = x + self.o(o.transpose(0, 1).flatten(1))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """Embedding, blocks, norm, output layer; the embedding is a product with one-hot tokens, whose gradient is a sum in
    a fixed order.

    Parameters
    ----------
    config : Config
        Sizes.
    seed : int
        Of the initial weights.
    """

    def __init__(self, config, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        hidden = config.heads * config.head_dim
        self.embedding = nn.Linear(VOCABULARY, hidden, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(hidden)
        self.output = nn.Linear(hidden, VOCABULARY, bias=False)
        rate = ROTARY_BASE ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.arange(config.n)[:, None] * rate
        self.register_buffer("rotary", torch.polar(torch.ones_like(angle), angle))

    def forward(self, sequence, attention):
        """Return the loss of a `bench.llama.text.Sequence`, a 0-d tensor."""
        device = self.rotary.device
        tokens, targets = (torch.from_numpy(x).to(device) for x in sequence[:2])
        attention.prepare(sequence.lengths, device)
        x = self.embedding(functional.one_hot(tokens, VOCABULARY).float()).float()
        for block in self.blocks:
            x = block(x, self.rotary, attention)
        return functional.cross_entropy(self.output(self.norm(x)).float(), targets)


def _rotate(x, rotary):
    """Return (heads, n, head_dim) with pairs of elements turned by the angle of their position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)


class Attention:
    """How a step computes attention, differentiable for PyTorch.

    Parameters
    ----------
    way : {"column", "dense", "documents"}
        A `ColumnMask`; the same mask as a boolean matrix; or a causal call per document.
    **options
        Of the calls: `kernel`, `deterministic`.
    """

    def __init__(self, way, **options):
        self.make, self.options = WAYS[way], options

    def prepare(self, lengths, device):
        """Take the documents of the next sequence; without any, drop the masks of the last."""
        self.spans = self.make(lengths, device) if lengths else []

    def __call__(self, q, k, v):
        """Return o, (heads, n, head_dim)."""
        spans = ((*(x[:, rows] for x in (q, k, v)), {**self.options, **mask}) for rows, mask in self.spans)
        parts = [_Exact.apply(*arguments) for arguments in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class _Exact(torch.autograd.Function):
    """cuattn's forward and backward."""

    @staticmethod
    def forward(context, q, k, v, options):
        calls = Calls(*(x.detach() for x in (q, k, v)), **options)
        context.save_for_backward(q, k, v, *calls.fwd[:3])
        context.options = options
        return calls.fwd.o

    @staticmethod
    def backward(context, do):
        q, k, v, *fwd = (x.detach() for x in context.saved_tensors)
        return *Calls(q, k, v, do.contiguous(), **context.options).backward((*fwd, None))[:3], None


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
