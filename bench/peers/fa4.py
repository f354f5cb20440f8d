"""FlashAttention-4 (``flash_attn.cute``), when it is importable: whole sequences, and packed documents."""

import importlib.util
import itertools

from bench.peers.base import Runner, half, is_causal, through_autograd

__all__ = ["Fa4", "Fa4Packed", "document_starts", "installed"]


def installed():
    """Return whether FlashAttention-4 can be imported."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def _unsupported_reason(case):
    """Return what keeps both ways of calling FlashAttention-4 from a case."""
    if not installed():
        return "flash_attn.cute is not installed"
    if not half(case):
        return f"does not compute in {case.dtype}"
    if case.dropout:
        return "has no dropout"
    if case.head_dim > 256:
        return "head dimension at most 256"
    return None


class Fa4(Runner):
    """``flash_attn_func``: full, causal, and the sliding window."""

    name = "fa4"
    compile_seconds = 8.0

    def unsupported_reason(self, case):
        if case.mask not in (None, "full", "causal", "sliding_window"):
            return "says only full, causal and window masks (others: FlexAttention's FLASH backend)"
        return _unsupported_reason(case)

    def bind(self, case, inputs):
        from flash_attn.cute import flash_attn_func

        options = dict(causal=is_causal(case), deterministic=case.deterministic)
        if case.mask == "sliding_window":
            options["window_size"] = (inputs.samples[0].number - 1, 0)
        # This library's own layout is (B, N, H, d).
        operands = tuple(x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.do))

        def attention(q, k, v):
            return _first(flash_attn_func(q, k, v, **options))

        return through_autograd(case, attention, operands, lambda x: x.transpose(1, 2))


class Fa4Packed(Runner):
    """``flash_attn_varlen_func``: documents as separate sequences, back to back."""

    name = "fa4-varlen"
    compile_seconds = 8.0

    def unsupported_reason(self, case):
        if case.mask not in ("document", "causal_document"):
            return "packs documents only"
        return _unsupported_reason(case)

    def bind(self, case, inputs):
        import torch
        from flash_attn.cute import flash_attn_varlen_func

        starts = document_starts(inputs)
        longest = max(b - a for a, b in itertools.pairwise(starts))
        cumulative = torch.tensor(starts, dtype=torch.int32, device=inputs.q.device)
        options = dict(
            cu_seqlens_q=cumulative,
            cu_seqlens_k=cumulative,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=case.mask == "causal_document",
            deterministic=case.deterministic,
        )
        operands = tuple(x.transpose(1, 2).flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v, inputs.do))

        def attention(q, k, v):
            return _first(flash_attn_varlen_func(q, k, v, **options))

        return through_autograd(case, attention, operands, lambda x: x.unflatten(0, (case.batch, -1)).transpose(1, 2))


def document_starts(inputs):
    """Return where each document of the batch starts in the packed rows, and the total."""
    lengths = (length for sample in inputs.samples for length in sample.lengths)
    return [0, *itertools.accumulate(lengths)]


def _first(result):
    """Return the output alone: some versions return it together with the row sums."""
    return result[0] if isinstance(result, (tuple, list)) else result
