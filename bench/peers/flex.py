"""PyTorch's FlexAttention, compiled, on its Triton and on its FLASH backend.

Each mask is written the way that costs it least: closed forms where there are any, else per-key vectors, a comparison
or two per element.  The tables of full and partial blocks are exact and made ahead of all timing, in slices, so that
a mask of 128K needs no N x N matrix.
"""

import functools

import numpy as np

from bench.mask_samples import GLOBAL_TOKENS
from bench.peers.base import Runner, through_autograd
from bench.peers.fa4 import installed

__all__ = ["Flex", "block_tables", "mask_function"]

BLOCK = 128
COMPILATIONS = 64  # variants of one function that PyTorch may keep before it gives up compiling


class Flex(Runner):
    """``torch.compile(flex_attention)`` on one of its backends."""

    def __init__(self, name, backend):
        self.name = name
        self._backend = backend
        self.compile_seconds = 10.0 if backend else 5.0  # Triton compiles anew for every length, which FLASH need not

    def unsupported_reason(self, case):
        if self._backend and not installed():
            return "the FLASH backend needs flash_attn.cute, which is not installed"
        if case.dropout:
            return "has no dropout"
        if case.deterministic:
            return "has no deterministic backward"
        if case.dtype == "float64" or (case.dtype == "float32" and self._backend == "FLASH"):
            return f"does not compute in {case.dtype}"
        return None

    def bind(self, case, inputs):
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        _raise_compile_limit(torch)
        torch._functorch.config.donated_buffer = False  # a backward may be run many times
        options = {"enable_gqa": case.heads != case.kv_heads}
        if self._backend:
            options["kernel_options"] = {"BACKEND": self._backend}
        visible = mask_function(case, inputs.samples, inputs.q.device)
        if visible is not None:
            options["block_mask"] = _block_mask(case, visible, inputs)
        compiled = torch.compile(flex_attention, dynamic=False)

        def attention(q, k, v):
            return compiled(q, k, v, **options)

        operands = (inputs.q, inputs.k, inputs.v, inputs.do)
        return through_autograd(case, attention, operands)

    def close(self):
        import torch

        torch._dynamo.reset()  # what was compiled for this mask would count against the limit


def _raise_compile_limit(torch):
    config = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, max(getattr(config, name), COMPILATIONS))


def mask_function(case, drawn, device):
    """Return FlexAttention's mask function of a case, or None where everything is visible."""
    kind = case.mask or ("causal" if case.causal else "full")
    if kind == "full":
        return None
    if kind == "causal":
        return lambda b, h, i, j: i >= j
    number = drawn[0].number
    if kind == "sliding_window":
        return lambda b, h, i, j: (i >= j) & (i - j < number)
    if kind == "global_sliding_window":
        return lambda b, h, i, j: ((i - j <= number) & (j - i <= number)) | (i < GLOBAL_TOKENS) | (j < GLOBAL_TOKENS)
    if kind == "prefix_lm_causal":
        return lambda b, h, i, j: (i >= j) | (j < number)
    if kind == "causal_blockwise":
        end, last = _per_key(drawn, device, "lts"), _last_block(drawn, device)
        return lambda b, h, i, j: (i >= j) & ((i < end[b, j]) | (i >= last[b]))
    until = _per_key(drawn, device, "lts")
    if kind in ("causal_document", "share_question", "random_eviction"):
        return lambda b, h, i, j: (i >= j) & (i < until[b, j])
    since = _per_key(drawn, device, "ute")
    if kind == "qk_sparse":
        return lambda b, h, i, j: i >= since[b, j]
    return lambda b, h, i, j: (i >= since[b, j]) & (i < until[b, j])


def _per_key(drawn, device, name):
    """Return one vector of the samples' column masks as a (B, N) tensor."""
    import torch

    return torch.from_numpy(np.stack([getattr(sample.column_mask(), name) for sample in drawn])).to(device)


def _last_block(drawn, device):
    """Return the first row of each sequence's last block, (B,)."""
    import torch

    return torch.tensor([sample.n - sample.lengths[-1] for sample in drawn], dtype=torch.int32, device=device)


def block_tables(visible, batch, n_queries, n_keys, device):
    """Return which blocks have any and which have all elements visible, two (batch, Tr, Tc) boolean tensors."""
    import torch

    rows, columns = -(-n_queries // BLOCK), -(-n_keys // BLOCK)
    some = torch.zeros(batch, rows, columns, dtype=torch.bool, device=device)
    every = torch.zeros_like(some)
    b = torch.arange(batch, device=device)[:, None, None]
    j = torch.arange(n_keys, device=device)
    for row in range(rows):
        i = torch.arange(row * BLOCK, min((row + 1) * BLOCK, n_queries), device=device)[:, None]
        strip = visible(b, 0, i, j).expand(batch, i.shape[0], n_keys)
        missing = columns * BLOCK - n_keys
        any_, all_ = strip.any(1), strip.all(1)
        some[:, row] = torch.nn.functional.pad(any_, (0, missing)).unflatten(1, (columns, BLOCK)).any(2)
        every[:, row] = torch.nn.functional.pad(all_, (0, missing), value=True).unflatten(1, (columns, BLOCK)).all(2)
    return some, every


@functools.lru_cache(maxsize=1)
def _tables(problem, drawn, batch, device):
    """Return a problem's block tables, kept for the other backend and direction."""
    visible = mask_function(problem, drawn, device)
    return block_tables(visible, batch, problem.n_queries, problem.n_keys, device)


def _block_mask(case, visible, inputs):
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    batch = case.batch if any(sample != inputs.samples[0] for sample in inputs.samples) else 1
    if inputs.blank:  # nothing but the kernel is wanted: one block per row
        shape = (batch, -(-case.n_queries // BLOCK), -(-case.n_keys // BLOCK))
        some = every = torch.eye(*shape[1:], dtype=torch.bool, device=inputs.q.device).expand(shape)
    else:
        some, every = _tables(case.problem, inputs.samples, batch, inputs.q.device)

    def ordered(chosen):
        """Return, per row of blocks, how many are chosen and their columns, the chosen ones first."""
        columns = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None].contiguous()

    return BlockMask.from_kv_blocks(
        *ordered(some & ~every),
        *ordered(every),
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
        seq_lengths=(case.n_queries, case.n_keys),
    )
