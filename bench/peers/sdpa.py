"""``torch.nn.functional.scaled_dot_product_attention`` on each of its backends."""

from __future__ import annotations

from dataclasses import replace

from bench.cases import Case
from bench.inputs import Inputs
from bench.peers.base import Bound, Runner, through_autograd

__all__ = ["Sdpa"]

HALF = ("float16", "bfloat16")
BACKENDS = {  # name: (member of SDPBackend, dtypes, largest head dimension)
    "cudnn": ("CUDNN_ATTENTION", HALF, 256),
    "fa2": ("FLASH_ATTENTION", HALF, 256),
    "mem-efficient": ("EFFICIENT_ATTENTION", (*HALF, "float32"), 1024),
    "math": ("MATH", (*HALF, "float32", "float64"), 1024),
    "sdpa": ("", (*HALF, "float32", "float64"), 1024),
}
MATH_BYTES = 40 << 30  # several score matrices of up to this size have to fit


class Sdpa(Runner):
    """PyTorch's attention held to one backend; ``"sdpa"`` lets PyTorch choose.

    Masks other than causal need a boolean N x N matrix there, which is the cost that cuattn exists to avoid: no
    runner makes one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._member, self._dtypes, self._largest = BACKENDS[name]

    def why_not(self, case: Case) -> str | None:
        if case.mask not in (None, "full", "causal"):
            return "takes a mask only as an N x N matrix"
        if case.dtype not in self._dtypes:
            return f"does not compute in {case.dtype}"
        if case.head_dim > self._largest:
            return f"head dimension at most {self._largest}"
        if self._member == "EFFICIENT_ATTENTION" and case.heads != case.kv_heads:
            return "needs as many key heads as query heads"
        if case.deterministic and self._member == "CUDNN_ATTENTION":
            return "has no deterministic backward in PyTorch"
        if self._member == "MATH":
            scores = case.batch * case.heads * case.n_queries * case.n_keys * (8 if case.dtype == "float64" else 4)
            if scores > MATH_BYTES:
                return f"would make score matrices of {scores >> 30} GiB each"
        return None

    def bind(self, case: Case, inputs: Inputs) -> Bound:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        options = dict(
            is_causal=case.causal or case.mask == "causal",
            dropout_p=case.dropout,
            enable_gqa=case.heads != case.kv_heads,
        )

        def attention(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        def scope():
            return sdpa_kernel([getattr(SDPBackend, self._member)])

        operands = (inputs.q, inputs.k, inputs.v, inputs.do)
        if not self._member:
            return through_autograd(case, attention, operands, lambda x: x)
        torch.use_deterministic_algorithms(case.deterministic)
        with scope():
            bound = through_autograd(case, attention, operands, lambda x: x)
        return replace(bound, scope=scope)

    def close(self) -> None:
        import torch

        torch.use_deterministic_algorithms(False)
