"""PyTorch's FlexAttention, compiled, on its Triton and on its FLASH backend.

Each column mask is written the way that costs it least: closed forms where there are any, else per-key vectors, a
comparison or two per element.  The tables of full and partial blocks are exact, those of cuattn's own mask, and made
ahead of all timing.  Those of other masks FlexAttention makes itself.
"""

import numpy as np

from bench.mask_samples import GLOBAL_TOKENS, KINDS
from bench.peers.base import HALF, Runner
from bench.peers.pytorch import leaves, through_autograd
from bench.score_samples import FORMULAS
from cuattn import masks

TUNED = "flex-autotune"
BLOCK = 128
PARTIAL, FULL = 1, 2  # states of a tile
COMPILATIONS = 64  # variants of one function that PyTorch may keep before it gives up compiling


class Flex(Runner):
    """``torch.compile(flex_attention)`` on one of its backends, or with all that its compiler tries when told to."""

    masks = KINDS
    scores = tuple(FORMULAS)
    dropout = deterministic = False

    def __init__(self, name):
        super().__init__(name)
        self.tuned = name == TUNED
        self.backend = "" if self.tuned else name.partition("-")[2]
        self.package = "flash_attn.cute" if self.backend else ""
        self.dtypes = HALF if self.backend else (*HALF, "float32")
        self.learned = not self.backend
        self.compile_seconds = 10.0 if self.backend else 5.0  # Triton compiles for every length, FLASH need not

    def bind(self, case, inputs):
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.config.recompile_limit = COMPILATIONS
        torch._functorch.config.donated_buffer = False  # a backward may be run many times
        options = {"enable_gqa": case.heads != case.kv_heads}
        if self.backend:
            options["kernel_options"] = {"BACKEND": self.backend}
        arrays = leaves(case, inputs)
        options["score_mod"], visible = inputs.functions(arrays)
        if visible is not None:
            options["block_mask"] = own_block_mask(case, visible, inputs.mask.leading, inputs.q.device)
        elif (visible := mask_function(case, inputs.samples, to_device(inputs.q.device))) is not None:
            options["block_mask"] = block_mask(case, visible, inputs)
        mode = "max-autotune-no-cudagraphs" if self.tuned else None
        compiled = torch.compile(flex_attention, dynamic=False, mode=mode)

        def attention(q, k, v):
            return compiled(q, k, v, **options)

        return through_autograd(case, attention, inputs.operands, arrays=arrays.values())

    def close(self):
        import torch

        torch._dynamo.reset()  # what was compiled for this mask would count against the limit


def to_device(device):
    """Return a function that makes tensors there of arrays."""
    import torch

    return lambda array: torch.from_numpy(array).to(device)


def own_block_mask(case, visible, leading, device):
    """Return FlexAttention's tables of a mask function, as it makes them itself, for these axes of (B, H)."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads = (1, 1, *leading)[-2:]
    make = torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask
    return make(visible, batch, heads, case.n_queries, case.n_keys, device=device, BLOCK_SIZE=BLOCK)


def mask_function(case, drawn, to_array):
    """Return the function of (b, h, i, j) of a case's column mask, or None where everything is visible."""

    def per_key(name):
        """Return one vector of the samples' column masks as (B, N)."""
        return to_array(np.stack([getattr(sample.column_mask(), name) for sample in drawn]))

    if case.kind == "full":
        return None
    if case.kind == "causal":
        return lambda b, h, i, j: i >= j
    until, since, number = per_key("lts"), per_key("ute"), drawn[0].number
    last = to_array(np.array([sum(sample.lengths[:-1]) for sample in drawn], np.int32))
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
