"""Standard attention, the papers' algorithms 0 and 3, every step an operation of its own: in PyTorch, and in NumPy."""

from bench.cases import TOGETHER
from bench.peers.base import Bound, Runner, names, scores_bytes, through_autograd

__all__ = ["Formula", "Standard"]

LARGEST_BYTES = 40 << 30  # of one score matrix in float32; three or four of them live at a time in 16 bits


class Standard(Runner):
    """``softmax(q k^T) v`` in PyTorch, written out as the papers' baseline is."""

    name = "standard"

    def unsupported_reason(self, case):
        if case.mask is not None or case.causal or case.bias:
            return "written without masks"
        if case.heads != case.kv_heads:
            return "needs as many key heads as query heads"
        if scores_bytes(case) > LARGEST_BYTES:
            return f"would make score matrices of {scores_bytes(case) >> 31} GiB each"
        return None

    def bind(self, case, inputs):
        import torch

        scale = case.head_dim**-0.5

        def attention(q, k, v):
            weights = torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1)
            return torch.nn.functional.dropout(weights, case.dropout) @ v

        return through_autograd(case, attention, (inputs.q, inputs.k, inputs.v, inputs.do))


class Formula(Standard):
    """The three lines of NumPy, and the five of their gradients."""

    name = "numpy"

    def unsupported_reason(self, case):
        if case.dropout or case.dtype == "bfloat16":
            return "three lines of NumPy have no dropout and no bfloat16"
        return super().unsupported_reason(case)

    def bind(self, case, inputs):
        import numpy as np
        import torch

        q, k, v, do = (x.numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        scale = np.asarray(case.head_dim**-0.5, q.dtype)

        def forward():
            s = scale * (q @ k.swapaxes(-1, -2))
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            p /= p.sum(axis=-1, keepdims=True)
            return p @ v, p

        def backward(o, p):
            dv = p.swapaxes(-1, -2) @ do
            dp = do @ v.swapaxes(-1, -2)
            ds = scale * p * (dp - (do * o).sum(axis=-1, keepdims=True))
            return ds @ k, ds.swapaxes(-1, -2) @ q, dv

        def both():
            o, p = forward()
            return o, *backward(o, p)

        o, p = forward()
        calls = {"forward": lambda: forward()[:1], "backward": lambda: backward(o, p), TOGETHER: both}
        return Bound(calls[case.direction], lambda found: names(case.direction, [torch.from_numpy(x) for x in found]))
