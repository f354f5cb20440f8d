"""PyTorch's attention on each backend, and the papers' standard attention written in PyTorch and in NumPy."""

from dataclasses import replace

import numpy as np

from bench.cases import RESULTS, TOGETHER
from bench.peers.base import ALL, BANDS, DOCUMENTS, EVERY, HALF, Bound, Runner

BACKENDS = {  # name: (member of SDPBackend, dtypes, largest head dimension)
    "cudnn": ("CUDNN_ATTENTION", HALF, 256),
    "fa2": ("FLASH_ATTENTION", HALF, 256),
    "mem-efficient": ("EFFICIENT_ATTENTION", (*HALF, "float32"), 1024),
    "math": ("MATH", ALL, 1024),
    "sdpa": ("", ALL, 1024),
    "sdpa-dense": ("", ALL, 1024),
}
BIASES = ("keys", "matrix", "pairs", "all_pairs")
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


def in_turn(case, forward, backward, convert):
    """Bind functions of their own: ``forward() -> o, kept``, and ``backward(o, kept)``, which gives the gradients."""

    def both():
        o, kept = forward()
        return o, *backward(o, kept)

    o, kept = forward()
    calls = {"forward": lambda: forward()[:1], "backward": lambda: backward(o, kept), TOGETHER: both}
    return Bound(calls[case.direction], lambda found: map(convert, found))


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
                options["attn_mask"] = bias.expand(case.batch, case.heads, case.n_queries, case.n_keys)
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
    """Return the mask of a problem as PyTorch's ``attn_mask``."""
    import torch

    if inputs.mask is not None:
        seen = torch.from_numpy(np.array(inputs.mask.dense())).to(inputs.q.device)
        return {"attn_mask": seen, "is_causal": False}
    return {"attn_mask": inputs.visible}


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

        return in_turn(case, forward, backward, torch.from_numpy)
