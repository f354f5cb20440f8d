"""FlashAttention's own libraries on Hopper: FlashAttention-4, and FlashAttention-3 by its operators.

FlashAttention-3 is a shared library, ``_C*.so`` in a folder ``flash_attn_3``: its wheel's, or, in a folder of
``--site``, one with the file of xformers' wheel and the CUDA runtime that it was built with.
"""

import ctypes
import functools
import importlib.util
import itertools
from pathlib import Path

import numpy as np

from bench.peers.base import DOCUMENTS, HALF, Runner
from bench.peers.pytorch import in_turn, through_autograd
from bench.score_samples import CAP

CAUSAL = ("causal", "causal_document")


class Fa4(Runner):
    """FlashAttention-4's ``flash_attn_func``: full, causal, the sliding window; its softcap, ALiBi as a score_mod."""

    package = "flash_attn.cute"
    compile_seconds = 8.0
    masks = ("full", "causal", "sliding_window")
    takes = "says only full, causal and window masks (others: FlexAttention's FLASH backend)"
    dtypes = HALF
    scores = ("softcap", "alibi")
    largest = 256
    dropout = False

    def bind(self, case, inputs):
        from flash_attn import cute

        options = dict(causal=case.kind in CAUSAL, deterministic=case.deterministic)
        if case.score == "softcap":
            options["softcap"] = CAP
        elif case.score:
            options |= _cute_alibi(case.heads)
        if case.mask == "sliding_window":
            options["window_size"] = (inputs.samples[0].number - 1, 0)
        operands, starts, to_heads = laid_out(case, inputs)
        function = cute.flash_attn_varlen_func if starts else cute.flash_attn_func

        def attention(q, k, v):
            return _first(function(q, k, v, **starts, **options))

        return through_autograd(case, attention, operands, to_heads)


def _cute_alibi(heads):
    """Return ALiBi in the language of FlashAttention-4's kernels, and its derivative."""
    import cutlass
    from cutlass import cute

    rate = -8.0 / heads

    @cute.jit
    def score_mod(s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        slope = cute.math.exp2((h + 1).to(cutlass.Float32) * rate, fastmath=True)
        return s + slope * (kv_idx - q_idx).to(cutlass.Float32)

    @cute.jit
    def score_mod_bwd(gradient, s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return gradient

    return {"score_mod": score_mod, "score_mod_bwd": score_mod_bwd}


class Fa4Packed(Fa4):
    """FlashAttention-4's ``flash_attn_varlen_func``: documents as separate sequences, back to back."""

    masks, takes = DOCUMENTS, "packs documents only"
    scores = ()


class Fa3(Fa4):
    """FlashAttention-3's ``fwd`` and ``bwd``; some builds have no softcap."""

    package = "flash_attn_3"
    compile_seconds = 0.0
    takes = "says only full, causal and window masks"
    scores = ("softcap",)

    def bind(self, case, inputs):
        operators = _flash_attn_3()
        options = dict(softmax_scale=case.head_dim**-0.5, is_causal=case.kind in CAUSAL)
        if case.score:
            options["softcap"] = CAP
        if case.mask == "sliding_window":
            options |= dict(window_size_left=inputs.samples[0].number - 1, window_size_right=0)
        (*operands, do), starts, to_heads = laid_out(case, inputs)
        options |= starts

        def forward():
            return operators.fwd(*operands, **options)[:2]

        def backward(o, lse):
            return operators.bwd(do, *operands, o, lse, deterministic=case.deterministic, **options)[:3]

        return in_turn(case, forward, backward, to_heads)


class Fa3Packed(Fa3):
    """The same with documents as separate sequences, back to back."""

    masks, takes = DOCUMENTS, "packs documents only"
    scores = ()


@functools.cache
def _flash_attn_3():
    """Load FlashAttention-3 and return its operators."""
    import torch

    folders = map(Path, importlib.util.find_spec("flash_attn_3").submodule_search_locations)
    files = [file for folder in folders for file in folder.glob("*.so*")]
    for runtime in [file for file in files if file.name.startswith("libcudart")]:
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)  # which need not be PyTorch's
    (library,) = (file for file in files if file.name.startswith("_C"))
    torch.ops.load_library(str(library))
    return torch.ops.flash_attn_3


def laid_out(case, inputs):
    """Return operands as (B, N, H, d), or documents as (total, H, d); what says where those start; the way back."""
    import torch

    swapped = [x.transpose(1, 2) for x in inputs.operands]
    if case.kind not in DOCUMENTS:
        return [x.contiguous() for x in swapped], {}, lambda x: x.transpose(1, 2)
    starts = document_starts(inputs)
    cumulative = torch.tensor(starts, dtype=torch.int32, device=inputs.q.device)
    longest = max(np.diff(starts).tolist())
    said = {f"cu_seqlens_{x}": cumulative for x in "qk"} | {f"max_seqlen_{x}": longest for x in "qk"}
    return [x.flatten(0, 1) for x in swapped], said, lambda x: x.unflatten(0, (case.batch, -1)).transpose(1, 2)


def document_starts(inputs):
    """Return where each document of the batch starts in the packed rows, and the total."""
    lengths = (length for sample in inputs.samples for length in sample.lengths)
    return [0, *itertools.accumulate(lengths)]


def _first(result):
    """Return the output alone: some versions return it together with the row sums."""
    return result[0] if isinstance(result, (tuple, list)) else result
