"""Standard attention, the papers' algorithms 0 and 3: every step an operation of its own, scores in device memory."""

from __future__ import annotations

from typing import Any

from bench.cases import Case
from bench.inputs import Inputs
from bench.peers.base import Bound, Runner, through_autograd

__all__ = ["Standard"]

LARGEST_BYTES = 20 << 30  # of one score matrix; three or four of them live at a time


class Standard(Runner):
    """``softmax(q k^T) v`` in PyTorch, written out as the papers' baseline is."""

    name = "standard"

    def why_not(self, case: Case) -> str | None:
        if case.mask is not None or case.causal:
            return "written without masks"
        if case.heads != case.kv_heads:
            return "needs as many key heads as query heads"
        scores = case.batch * case.heads * case.n_queries * case.n_keys * (8 if case.dtype == "float64" else 4)
        if scores > 2 * LARGEST_BYTES:
            return f"would make score matrices of {scores >> 31} GiB each"
        return None

    def bind(self, case: Case, inputs: Inputs) -> Bound:
        import torch

        scale = case.head_dim**-0.5

        def attention(q: Any, k: Any, v: Any) -> Any:
            weights = torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1)
            return torch.nn.functional.dropout(weights, case.dropout) @ v

        return through_autograd(case, attention, (inputs.q, inputs.k, inputs.v, inputs.do), lambda x: x)
