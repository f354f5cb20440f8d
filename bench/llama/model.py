"""The decoder: norm, attention with rotary positions, norm, SwiGLU; the loss of one packed sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from bench.llama.text import VOCABULARY

__all__ = ["Config", "Decoder"]

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Config:
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

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim


class Block(nn.Module):
    """One layer."""

    def __init__(self, config):
        super().__init__()
        h, f = config.hidden, config.inner
        self.heads = config.heads
        self.qkv, self.o = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.gate, self.up = nn.Linear(h, f, bias=False), nn.Linear(h, f, bias=False)
        self.down = nn.Linear(f, h, bias=False)
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
        self.embedding = nn.Linear(VOCABULARY, config.hidden, bias=False)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.output = nn.Linear(config.hidden, VOCABULARY, bias=False)
        rate = ROTARY_BASE ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.arange(config.n)[:, None] * rate
        self.register_buffer("rotary", torch.polar(torch.ones_like(angle), angle))

    def forward(self, sequence, attention):
        """Return the loss of a `bench.llama.text.Sequence`, a 0-d tensor."""
        device = self.rotary.device
        tokens, targets, weights = (
            torch.from_numpy(x).to(device) for x in (sequence.tokens, sequence.targets, sequence.weights)
        )
        attention.prepare(sequence.lengths, device)
        x = self.embedding(functional.one_hot(tokens.long(), VOCABULARY).float()).float()
        for block in self.blocks:
            x = block(x, self.rotary, attention)
        losses = functional.cross_entropy(self.output(self.norm(x)).float(), targets.long(), reduction="none")
        return (losses * weights).sum()


def _rotate(x, rotary):
    """Return (heads, n, head_dim) with pairs of elements turned by the angle of their position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary).flatten(-2).to(x.dtype)
