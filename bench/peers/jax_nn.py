"""``jax.nn.dot_product_attention``: XLA's attention in float32, cuDNN's through JAX in 16 bits."""

import importlib.util
import os

from bench.cases import TOGETHER
from bench.peers.base import Bound, Runner, dense_reason, half, is_causal, names, scores_bytes

__all__ = ["Jax"]

SCORES_BYTES = 20 << 30  # XLA makes a few score matrices of up to this size


class Jax(Runner):
    """JAX's own attention, compiled, float32 products at full precision."""

    name = "jax"

    def unsupported_reason(self, case):
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed"
        if reason := dense_reason(case):
            return reason
        if case.dropout:
            return "has no dropout"
        if case.deterministic:
            return "has no deterministic backward"
        if case.host:
            return "waits for its own stream in every call"
        if case.dtype == "float64":
            return "has its softmax in float32"
        if not half(case) and scores_bytes(case) > SCORES_BYTES:
            return f"would make score matrices of {scores_bytes(case) >> 30} GiB each"
        return None

    def bind(self, case, inputs):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch and CuPy live on the device too
        import jax

        # JAX's layout is (B, N, H, d).
        q, k, v, do = (
            jax.dlpack.from_dlpack(x.transpose(1, 2).contiguous()) for x in (inputs.q, inputs.k, inputs.v, inputs.do)
        )
        options = {
            "is_causal": is_causal(case),
            "implementation": "cudnn" if half(case) and inputs.q.is_cuda else "xla",
        }

        def attention(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, **options)

        def both(q, k, v, do):
            o, back = jax.vjp(attention, q, k, v)
            return o, *back(do)

        with jax.default_matmul_precision("highest"):
            if case.direction == "backward":
                _, back = jax.jit(lambda *operands: jax.vjp(attention, *operands))(q, k, v)
                function, operands = lambda back, do: back(do), (back, do)
            elif case.direction == TOGETHER:
                function, operands = both, (q, k, v, do)
            else:
                function, operands = lambda *operands: (attention(*operands),), (q, k, v)
            compiled = jax.jit(function).lower(*operands).compile()
        return Bound(
            lambda: jax.block_until_ready(compiled(*operands)),
            lambda found: names(case.direction, map(_as_torch, found)),
            alone=True,
        )


def _as_torch(array):
    """Return a (B, H, N, d) tensor over a (B, N, H, d) array's memory."""
    import torch

    return torch.from_dlpack(array).transpose(1, 2)
