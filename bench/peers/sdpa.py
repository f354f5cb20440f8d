"""``torch.nn.functional.scaled_dot_product_attention`` on each of its backends, and document by document."""

from dataclasses import replace

import numpy as np

from bench.peers.base import Runner, dense_reason, is_causal, scores_bytes, through_autograd

__all__ = ["BACKENDS", "Documents", "Sdpa"]

HALF = ("float16", "bfloat16")
BACKENDS = {  # name: (member of SDPBackend, dtypes, largest head dimension)
    "cudnn": ("CUDNN_ATTENTION", HALF, 256),
    "fa2": ("FLASH_ATTENTION", HALF, 256),
    "mem-efficient": ("EFFICIENT_ATTENTION", (*HALF, "float32"), 1024),
    "math": ("MATH", (*HALF, "float32", "float64"), 1024),
    "sdpa": ("", (*HALF, "float32", "float64"), 1024),
    "sdpa-dense": ("", (*HALF, "float32", "float64"), 1024),
}
MATH_BYTES = 40 << 30  # several score matrices of up to this size have to fit


class Sdpa(Runner):
    """PyTorch's attention held to one backend; ``"sdpa"`` lets PyTorch choose, ``"sdpa-dense"`` takes any mask too.

    Masks other than causal need a boolean N x N matrix there, which is the cost that cuattn exists to avoid: only
    ``"sdpa-dense"``, which is meant for the host, makes one.
    """

    def __init__(self, name):
        self.name = name
        self._member, self._dtypes, self._largest = BACKENDS[name]

    def unsupported_reason(self, case):
        if self.name != "sdpa-dense" and (reason := dense_reason(case)):
            return reason
        if case.dtype not in self._dtypes:
            return f"does not compute in {case.dtype}"
        if case.head_dim > self._largest:
            return f"head dimension at most {self._largest}"
        if self._member == "EFFICIENT_ATTENTION" and case.heads != case.kv_heads:
            return "needs as many key heads as query heads"
        if case.deterministic and self._member == "CUDNN_ATTENTION":
            return "has no deterministic backward in PyTorch"
        if self._member == "MATH" and scores_bytes(case) > MATH_BYTES:
            return f"would make score matrices of {scores_bytes(case) >> 30} GiB each"
        return None

    def bind(self, case, inputs):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        options = dict(is_causal=is_causal(case), dropout_p=case.dropout, enable_gqa=case.heads != case.kv_heads)
        if self.name == "sdpa-dense":
            options |= _dense(inputs)

        def attention(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        def scope():
            return sdpa_kernel([getattr(SDPBackend, self._member)])

        operands = (inputs.q, inputs.k, inputs.v, inputs.do)
        if not self._member:
            return through_autograd(case, attention, operands)
        torch.use_deterministic_algorithms(case.deterministic)
        with scope():
            bound = through_autograd(case, attention, operands)
        return replace(bound, scope=scope)

    def close(self):
        import torch

        torch.use_deterministic_algorithms(False)


class Documents(Runner):
    """PyTorch's attention called once per document, causal or not: what one does there without a mask's matrix."""

    name = "sdpa-documents"

    def unsupported_reason(self, case):
        if case.mask not in ("document", "causal_document") or case.batch > 1:
            return "loops over the documents of one sequence"
        return None

    def bind(self, case, inputs):
        import torch

        lengths = list(inputs.samples[0].lengths)
        causal = case.mask == "causal_document"

        def attention(q, k, v):
            parts = zip(*(x.split(lengths, dim=-2) for x in (q, k, v)), strict=True)
            return torch.cat(
                [torch.nn.functional.scaled_dot_product_attention(*part, is_causal=causal) for part in parts], dim=-2
            )

        return through_autograd(case, attention, (inputs.q, inputs.k, inputs.v, inputs.do))


def _dense(inputs):
    """Return the mask and the bias of a problem as PyTorch's ``attn_mask``."""
    import torch

    if inputs.bias is not None:
        return {"attn_mask": inputs.bias}
    if inputs.visible is not None:
        return {"attn_mask": inputs.visible}
    if inputs.mask is None:
        return {}
    seen = torch.from_numpy(np.array(inputs.mask.dense())).to(inputs.q.device)
    return {"attn_mask": seen, "is_causal": False}
