"""The decoder: parameters, loss and gradients of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.llama.heads import Attention
from bench.llama.layers import (
    cross_entropy,
    norm,
    norm_gradient,
    product,
    product_gradient,
    rotary_tables,
    rotate,
    swiglu,
    swiglu_gradient,
)
from bench.llama.text import VOCABULARY, Sequence

__all__ = ["Config", "Decoder"]


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


class Decoder:
    """Embedding, blocks of (norm, attention, norm, SwiGLU), norm, output layer.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    config : Config
        Sizes.
    scale : float
        Factor of the loss, which keeps half-precision gradients in range; the gradients returned are without it.
    seed : int
        Of the initial weights.
    """

    def __init__(self, xp: Any, config: Config, scale: float = 1.0, seed: int = 0) -> None:
        self.xp, self.config, self._scale = xp, config, scale
        self.half = np.dtype("float16" if xp.__name__ == "cupy" else "float32")
        self._rotary = rotary_tables(xp, config.n, config.head_dim)
        rng = np.random.default_rng(seed)
        h, f = config.hidden, config.inner

        def matrix(rows: int, columns: int) -> Any:
            return xp.asarray(rng.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5))

        self.parameters: dict[str, Any] = {"embedding": matrix(VOCABULARY, h), "output": matrix(h, VOCABULARY)}
        self.parameters["gain"] = xp.ones(h, np.float32)
        for i in range(config.layers):
            weights = {"qkv": matrix(h, 3 * h), "o": matrix(h, h), "gate": matrix(h, f), "up": matrix(h, f)}
            weights |= {"down": matrix(f, h), "gain1": xp.ones(h, np.float32), "gain2": xp.ones(h, np.float32)}
            self.parameters |= {f"{i}.{name}": weight for name, weight in weights.items()}

    def step(self, sequence: Sequence, attention: Attention) -> tuple[Any, dict[str, Any]]:
        """Return the loss, a 0-d array, and the gradient of every parameter."""
        xp, weights = self.xp, self.parameters
        tokens, targets = xp.asarray(sequence.tokens), xp.asarray(sequence.targets)
        attention.prepare(sequence.lengths)
        one_hot = (tokens[:, None] == xp.arange(VOCABULARY, dtype=tokens.dtype)).astype(self.half)
        x = weights["embedding"][tokens]
        saved = []
        for i in range(self.config.layers):
            x, kept = self._block(x, i, attention)
            saved.append(kept)
        y, inverse = norm(xp, x, weights["gain"])
        logits = product(y, weights["output"], self.half)
        loss, dlogits = cross_entropy(xp, logits, targets, xp.asarray(sequence.weights))
        gradients: dict[str, Any] = {}
        dy, gradients["output"] = product_gradient(dlogits * self._scale, y, weights["output"], self.half)
        dx, gradients["gain"] = norm_gradient(dy, x, weights["gain"], inverse)
        for i in reversed(range(self.config.layers)):
            dx = self._block_gradient(dx, i, attention, saved.pop(), gradients)
        # A product with the one-hot tokens adds rows up in a fixed order, which scattering would not.
        gradients["embedding"] = (one_hot.T @ dx.astype(self.half)).astype(np.float32)
        return loss, {name: gradient / self._scale for name, gradient in gradients.items()}

    def _heads(self, x: Any) -> Any:
        """(n, hidden) -> (heads, n, head_dim)."""
        return x.reshape(len(x), self.config.heads, self.config.head_dim).swapaxes(0, 1)

    def _merged(self, x: Any) -> Any:
        """(heads, n, head_dim) -> (n, hidden)."""
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)

    def _block(self, x: Any, i: int, attention: Attention) -> tuple[Any, tuple[Any, ...]]:
        xp, half, h = self.xp, self.half, self.config.hidden
        w = {name: self.parameters[f"{i}.{name}"] for name in ("qkv", "o", "gate", "up", "down", "gain1", "gain2")}
        y1, inverse1 = norm(xp, x, w["gain1"])
        qkv = product(y1, w["qkv"], half)
        q, k = (rotate(xp, self._heads(qkv[:, at : at + h]), *self._rotary) for at in (0, h))
        v = self._heads(qkv[:, 2 * h :])
        o, fwd = attention.forward(q, k, v)
        middle = x + product(self._merged(o), w["o"], half)
        y2, inverse2 = norm(xp, middle, w["gain2"])
        y1, y2 = y1.astype(half, copy=False), y2.astype(half, copy=False)
        gate, up = product(y2, w["gate"], half), product(y2, w["up"], half)
        out = middle + product(swiglu(xp, gate, up), w["down"], half)
        return out, (x, y1, inverse1, q, k, v, o, fwd, middle, y2, inverse2, gate, up)

    def _block_gradient(
        self, dout: Any, i: int, attention: Attention, saved: tuple[Any, ...], gradients: dict[str, Any]
    ) -> Any:
        xp, half = self.xp, self.half
        x, y1, inverse1, q, k, v, o, fwd, middle, y2, inverse2, gate, up = saved
        w = {name: self.parameters[f"{i}.{name}"] for name in ("qkv", "o", "gate", "up", "down", "gain1", "gain2")}
        g: dict[str, Any] = {}
        inner, g["down"] = product_gradient(dout, swiglu(xp, gate, up), w["down"], half)
        dgate, dup = swiglu_gradient(xp, inner, gate, up)
        dy2, g["gate"] = product_gradient(dgate, y2, w["gate"], half)
        more, g["up"] = product_gradient(dup, y2, w["up"], half)
        dmiddle, g["gain2"] = norm_gradient(dy2 + more, middle, w["gain2"], inverse2)
        dmiddle += dout
        do, g["o"] = product_gradient(dmiddle, self._merged(o), w["o"], half)
        dq, dk, dv = attention.backward(self._heads(do), q, k, v, fwd)
        cosine, sine = self._rotary
        dq, dk = (rotate(xp, d, cosine, -sine) for d in (dq, dk))
        dqkv = xp.concatenate([self._merged(d) for d in (dq, dk, dv)], axis=1)
        dy1, g["qkv"] = product_gradient(dqkv, y1, w["qkv"], half)
        dx, g["gain1"] = norm_gradient(dy1, x, w["gain1"], inverse1)
        gradients |= {f"{i}.{name}": gradient for name, gradient in g.items()}
        return dx + dmiddle
