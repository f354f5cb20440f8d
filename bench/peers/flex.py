"""PyTorch's FlexAttention, compiled, on its Triton and on its FLASH backend.

Each mask is written the way that costs it least: closed forms where there are any, else per-key vectors, a comparison
or two per element.  The tables of full and partial blocks are exact, those of cuattn's own mask, and made ahead of all
timing.
"""

import numpy as np

from bench.mask_samples import GLOBAL_TOKENS, KINDS
from bench.peers.base import HALF, Runner
from bench.peers.pytorch import through_autograd
from cuattn import masks

BLOCK = 128
PARTIAL, FULL = 1, 2  # states of a tile
COMPILATIONS = 64  # variants of one function that PyTorch may keep before it gives up compiling


class Flex(Runner):
    """``torch.compile(flex_attention)`` on one of its backends."""

    masks = KINDS
    dropout = deterministic = False

    def __init__(self, name):
        super().__init__(name)
        self.backend = name.partition("-")[2]
        self.package = "flash_attn.cute" if self.backend else ""
        self.dtypes = HALF if self.backend else (*HALF, "float32")
        self.compile_seconds = 10.0 if self.backend else 5.0  # Triton compiles for every length, FLASH need not

    def bind(self, case, inputs):
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = COMPILATIONS
        torch._functorch.config.donated_buffer = False  # a backward may be run many times
        options = {"enable_gqa": case.heads != case.kv_heads}
        if self.backend:
            options["kernel_options"] = {"BACKEND": self.backend}
        visible = mask_function(case, inputs.samples, inputs.q.device)
        if visible is not None:
            options["block_mask"] = block_mask(case, visible, inputs)
        compiled = torch.compile(flex_attention, dynamic=False)

        def attention(q, k, v):
            return compiled(q, k, v, **options)

        return through_autograd(case, attention, inputs.operands)

    def close(self):
        import torch

        torch._dynamo.reset()  # what was compiled for this mask would count against the limit


def mask_function(case, drawn, device):
    """Return FlexAttention's mask function of a case, or None where everything is visible."""
    import torch

    def per_key(name):
        """Return one vector of the samples' column masks as a (B, N) tensor."""
        return torch.from_numpy(np.stack([getattr(sample.column_mask(), name) for sample in drawn])).to(device)

    if case.kind == "full":
        return None
    if case.kind == "causal":
        return lambda b, h, i, j: i >= j
    until, since, number = per_key("lts"), per_key("ute"), drawn[0].number
    last = torch.tensor([sum(sample.lengths[:-1]) for sample in drawn], dtype=torch.int32, device=device)
    closed_forms = {
        "sliding_window": lambda b, h, i, j: (i >= j) & (i - j < number),
        "global_sliding_window": lambda b, h, i, j: (
            ((i - j <= number) & (j - i <= number)) | (i < GLOBAL_TOKENS) | (j < GLOBAL_TOKENS)
        ),
        "prefix_lm_causal": lambda b, h, i, j: (i >= j) | (j < number),
        "causal_blockwise": lambda b, h, i, j: (i >= j) & ((i < until[b, j]) | (i >= last[b])),
        "qk_sparse": lambda b, h, i, j: i >= since[b, j],
        "document": lambda b, h, i, j: (i >= since[b, j]) & (i < until[b, j]),
        "prefix_lm_document": lambda b, h, i, j: (i >= since[b, j]) & (i < until[b, j]),
    }
    return closed_forms.get(case.kind, lambda b, h, i, j: (i >= j) & (i < until[b, j]))


def block_mask(case, visible, inputs):
    """Return FlexAttention's tables of the blocks that are visible in part and as a whole, and its mask function."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    mask = masks.causal(case.n_keys) if inputs.mask is None else inputs.mask
    states = torch.from_numpy(mask.tile_states(BLOCK, BLOCK)).to(inputs.q.device)
    states = states.reshape(-1, *states.shape[-2:])

    def ordered(chosen):
        """Return, per row of blocks, how many are chosen and their columns, the chosen ones first."""
        columns = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None].contiguous()

    return BlockMask.from_kv_blocks(
        *ordered(states == PARTIAL),
        *ordered(states == FULL),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
        seq_lengths=(case.n_queries, case.n_keys),
    )
