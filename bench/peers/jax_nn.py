"""``jax.nn.dot_product_attention``: XLA's attention in float32, cuDNN's through JAX in 16 bits."""

import os

from bench.cases import TOGETHER
from bench.peers.base import HALF, Bound, Runner

SCORES_BYTES = 20 << 30  # XLA makes a few score matrices of up to this size


class Jax(Runner):
    """JAX's own attention, compiled, float32 products at full precision (its softmax is float32 in float64 too)."""

    package = "jax"
    dtypes = (*HALF, "float32")
    dropout = deterministic = host = False

    def unsupported_reason(self, case):
        self.scores_bytes = float("inf") if case.dtype in HALF else SCORES_BYTES
        return super().unsupported_reason(case)

    def bind(self, case, inputs):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch and CuPy live on the device too
        import jax

        # JAX's layout is (B, N, H, d).
        q, k, v, do = (jax.dlpack.from_dlpack(x.transpose(1, 2).contiguous()) for x in inputs.operands)
        implementation = "cudnn" if case.dtype in HALF and inputs.q.is_cuda else "xla"

        def attention(q, k, v):
            options = {"is_causal": case.kind == "causal", "implementation": implementation}
            return jax.nn.dot_product_attention(q, k, v, **options)

        def both(q, k, v, do):
            o, back = jax.vjp(attention, q, k, v)
            return o, *back(do)

        with jax.default_matmul_precision("highest"):
            function, operands = lambda *operands: (attention(*operands),), (q, k, v)
            if case.direction == "backward":
                _, back = jax.jit(lambda *operands: jax.vjp(attention, *operands))(q, k, v)
                function, operands = lambda back, do: back(do), (back, do)
            elif case.direction == TOGETHER:
                function, operands = both, (q, k, v, do)
            compiled = jax.jit(function).lower(*operands).compile()
        return Bound(
            lambda: jax.block_until_ready(compiled(*operands)),
            lambda found: map(_as_torch, found),
            alone=True,
        )


def _as_torch(array):
    """Return a (B, H, N, d) tensor over a (B, N, H, d) array's memory."""
    import torch

    return torch.from_dlpack(array).transpose(1, 2)
