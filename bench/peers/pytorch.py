"""PyTorch and what builds on it: its attention on each backend, FlashAttention-4, the papers' standard attention."""

import itertools
from dataclasses import replace

import numpy as np

from bench.cases import RESULTS, TOGETHER
from bench.peers.base import ALL, BANDS, DOCUMENTS, EVERY, HALF, Bound, Runner
from bench.score_samples import CAP

BACKENDS = {  # name: (member of SDPBackend, dtypes, largest head dimension)
    "cudnn": ("CUDNN_ATTENTION", HALF, 256),
    "fa2": ("FLASH_ATTENTION", HALF, 256),
    "mem-efficient": ("EFFICIENT_ATTENTION", (*HALF, "float32"), 1024),
    "math": ("MATH", ALL, 1024),
    "sdpa": ("", ALL, 1024),
    "sdpa-dense": ("", ALL, 1024),
}
BIASES = ("keys", "pairs", "all_pairs")
SCORES_BYTES = 40 << 30  # several score matrices of up to this size have to fit


def through_autograd(case, attention, operands, to_heads=lambda x: x, arrays=()):
    """Bind a differentiable PyTorch function.

    Parameters
    ----------
    case : Case
        Says the direction.
    attention : callable
        ``attention(q, k, v) -> o``.
    operands : (q, k, v, do)
        In the function's own layout.
    to_heads : callable
        Turns an array of that layout into (B, H, N, d), where it is another one.
    arrays : iterable of tensor
        What `attention` reads besides; the gradients of those that require them follow the others.
    """
    import torch

    *operands, do = (x.detach() for x in operands)
    if case.direction != "forward":
        operands = [x.requires_grad_() for x in operands]
    leaves = [*operands, *(x for x in arrays if x.requires_grad)]
    o = attention(*operands) if case.direction == "backward" else None

    def both():
        o = attention(*operands)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    calls = {
        "forward": lambda: [attention(*operands)],
        "backward": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
        TOGETHER: both,
    }
    count = len(RESULTS[case.direction])
    return Bound(calls[case.direction], lambda found: [*map(to_heads, found[:count]), *found[count:]])


def leaves(case, inputs):
    """Return the arrays that a case's function reads, those to be differentiated as leaves."""
    wanted = case.learned and case.direction != "forward"
    return {name: x.detach().requires_grad_(wanted) for name, x in inputs.arrays.items()}


class Sdpa(Runner):
    """PyTorch's attention held to one backend; ``"sdpa"`` lets PyTorch choose, ``"sdpa-dense"`` takes any mask too.

    Masks other than causal need a boolean N x N matrix there, which is the cost that cuattn exists to avoid: only
    ``"sdpa-dense"``, which is meant for the host, makes one.
    """

    def __init__(self, name):
        super().__init__(name)
        self.member, self.dtypes, self.largest = BACKENDS[name]
        self.masks = EVERY if name == "sdpa-dense" else BANDS
        self.grouped = name != "mem-efficient"
        self.learned = self.deterministic = name != "cudnn"
        self.scores = () if name == "fa2" else BIASES
        self.scores_bytes = SCORES_BYTES if name == "math" else self.scores_bytes

    def bind(self, case, inputs):
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        options = dict(is_causal=case.kind == "causal", dropout_p=case.dropout, enable_gqa=case.heads != case.kv_heads)
        if self.name == "sdpa-dense":
            options |= _dense(inputs)
        arrays = leaves(case, inputs)

        def attention(q, k, v):
            for bias in arrays.values():
                options["attn_mask"] = bias.expand(*case.q_shape[:3], case.n_keys)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

        def scope():
            return sdpa_kernel([getattr(SDPBackend, self.member)])

        if not self.member:
            return through_autograd(case, attention, inputs.operands, arrays=arrays.values())
        torch.use_deterministic_algorithms(case.deterministic)
        with scope():
            bound = through_autograd(case, attention, inputs.operands, arrays=arrays.values())
        return replace(bound, scope=scope)

    def close(self):
        import torch

        torch.use_deterministic_algorithms(False)


def _dense(inputs):
    """Return the mask and the bias of a problem as PyTorch's ``attn_mask``."""
    import torch

    if inputs.mask is not None:
        seen = torch.from_numpy(np.array(inputs.mask.dense())).to(inputs.q.device)
        return {"attn_mask": seen, "is_causal": False}
    return {"attn_mask": inputs.visible if inputs.bias is None else inputs.bias}


class Documents(Runner):
    """PyTorch's attention called once per document, causal or not: what one does there without a mask's matrix."""

    masks, takes = DOCUMENTS, "loops over documents"

    def bind(self, case, inputs):
        import torch

        (sample,) = inputs.samples

        def attention(q, k, v):
            parts = zip(*(x.split(sample.lengths, dim=-2) for x in (q, k, v)), strict=True)
            attend = torch.nn.functional.scaled_dot_product_attention
            return torch.cat([attend(*part, is_causal=case.mask == "causal_document") for part in parts], dim=-2)

        return through_autograd(case, attention, inputs.operands)


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
        from flash_attn.cute import flash_attn_func

        options = dict(causal=case.kind == "causal", deterministic=case.deterministic)
        if case.score == "softcap":
            options["softcap"] = CAP
        elif case.score:
            options |= _cute_alibi(case.heads)
        if case.mask == "sliding_window":
            options["window_size"] = (inputs.samples[0].number - 1, 0)

        def attention(q, k, v):
            return _first(flash_attn_func(q, k, v, **options))

        # This library's own layout is (B, N, H, d).
        swapped = [x.transpose(1, 2).contiguous() for x in inputs.operands]
        return through_autograd(case, attention, swapped, lambda x: x.transpose(1, 2))


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

    def bind(self, case, inputs):
        import torch
        from flash_attn.cute import flash_attn_varlen_func

        starts = document_starts(inputs)
        cumulative = torch.tensor(starts, dtype=torch.int32, device=inputs.q.device)
        longest = max(np.diff(starts).tolist())
        options = {f"cu_seqlens_{x}": cumulative for x in "qk"} | {f"max_seqlen_{x}": longest for x in "qk"}
        options |= dict(causal=case.mask == "causal_document", deterministic=case.deterministic)

        def attention(q, k, v):
            return _first(flash_attn_varlen_func(q, k, v, **options))

        packed = [x.transpose(1, 2).flatten(0, 1) for x in inputs.operands]
        return through_autograd(case, attention, packed, lambda x: x.unflatten(0, (case.batch, -1)).transpose(1, 2))


def document_starts(inputs):
    """Return where each document of the batch starts in the packed rows, and the total."""
    lengths = (length for sample in inputs.samples for length in sample.lengths)
    return [0, *itertools.accumulate(lengths)]


def _first(result):
    """Return the output alone: some versions return it together with the row sums."""
    return result[0] if isinstance(result, (tuple, list)) else result


class Standard(Runner):
    """``softmax(q k^T) v``, the papers' algorithms 0 and 3, every step an operation of its own."""

    masks, takes = ("full",), "written without masks"
    grouped = False
    scores_bytes = SCORES_BYTES  # in float32; three or four of them live at a time in 16 bits

    def bind(self, case, inputs):
        import torch

        scale = case.head_dim**-0.5

        def attention(q, k, v):
            weights = torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1)
            return torch.nn.functional.dropout(weights, case.dropout) @ v

        return through_autograd(case, attention, inputs.operands)


class Formula(Standard):
    """The three lines of NumPy, and the five of their gradients."""

    dtypes = ("float16", "float32", "float64")
    dropout = False

    def bind(self, case, inputs):
        import torch

        q, k, v, do = (x.numpy() for x in inputs.operands)
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

        kept = forward()
        calls = {"forward": lambda: forward()[:1], "backward": lambda: backward(*kept), TOGETHER: both}
        return Bound(calls[case.direction], lambda found: map(torch.from_numpy, found))
