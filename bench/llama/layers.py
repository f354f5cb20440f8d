"""The layers of a Llama decoder, each a function with its gradient.  Arrays are NumPy or CuPy; x is (n, hidden).

Products are computed in ``half`` (float16 on a GPU, where cuBLAS sums in float32; float32 on the host), everything else
in float32.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "cross_entropy", "norm", "norm_gradient", "product", "product_gradient", "rotary_tables", "rotate", "swiglu",
    "swiglu_gradient",
]  # fmt: skip

EPSILON = 1e-5
ROTARY_BASE = 10000.0


def product(x: Any, weight: Any, half: Any) -> Any:
    """Return ``x @ weight`` in `half`."""
    return x.astype(half, copy=False) @ weight.astype(half, copy=False)


def product_gradient(dy: Any, x: Any, weight: Any, half: Any) -> tuple[Any, Any]:
    """Return the gradients of x, in `half`, and of the weight, in float32."""
    dy, x, weight = (a.astype(half, copy=False) for a in (dy, x, weight))
    return dy @ weight.T, (x.T @ dy).astype("float32")


def norm(xp: Any, x: Any, gain: Any) -> tuple[Any, Any]:
    """Return ``x / rms(x) * gain`` and 1 / rms(x), (n, 1)."""
    inverse = 1 / xp.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
    return x * inverse * gain, inverse


def norm_gradient(dy: Any, x: Any, gain: Any, inverse: Any) -> tuple[Any, Any]:
    """Return the gradients of x and of the gain."""
    dy = dy.astype("float32", copy=False)
    unit = x * inverse
    du = dy * gain
    return inverse * (du - unit * (du * unit).mean(axis=1, keepdims=True)), (dy * unit).sum(axis=0)


def rotary_tables(xp: Any, n: int, head_dim: int) -> tuple[Any, Any]:
    """Return the cosines and sines of rotary positions, (n, head_dim / 2) float32."""
    rate = ROTARY_BASE ** (-xp.arange(head_dim // 2, dtype="float32") / (head_dim // 2))
    angle = xp.arange(n, dtype="float32")[:, None] * rate
    return xp.cos(angle), xp.sin(angle)


def rotate(xp: Any, x: Any, cosine: Any, sine: Any) -> Any:
    """Rotate the pairs (x[..., i], x[..., i + d / 2]) of (heads, n, d); with -sine, back: that is the gradient."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype("float32"), x[..., half:].astype("float32")
    rotated = xp.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)
    return rotated.astype(x.dtype)


def swiglu(xp: Any, gate: Any, up: Any) -> Any:
    """Return ``gate * sigmoid(gate) * up``, in gate's dtype."""
    wide = gate.astype("float32")
    return (wide / (1 + xp.exp(-wide)) * up).astype(gate.dtype)


def swiglu_gradient(xp: Any, dy: Any, gate: Any, up: Any) -> tuple[Any, Any]:
    """Return the gradients of gate and up."""
    wide = gate.astype("float32")
    sigmoid = 1 / (1 + xp.exp(-wide))
    dgate = dy * up * sigmoid * (1 + wide * (1 - sigmoid))
    return dgate.astype(gate.dtype), (dy * wide * sigmoid).astype(gate.dtype)


def cross_entropy(xp: Any, logits: Any, targets: Any, weights: Any) -> tuple[Any, Any]:
    """Return the weighted mean of the negative log-likelihood, a 0-d array, and the gradient of the logits."""
    wide = logits.astype("float32")
    wide = wide - wide.max(axis=1, keepdims=True)
    exponential = xp.exp(wide)
    total = exponential.sum(axis=1, keepdims=True)
    rows = xp.arange(len(targets))
    loss = (weights * (xp.log(total[:, 0]) - wide[rows, targets])).sum()
    dlogits = exponential / total
    dlogits[rows, targets] -= 1
    return loss, dlogits * weights[:, None]
