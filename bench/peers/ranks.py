"""Other attention over the ranks of PyTorch's process group: its own context parallel, and Ulysses written by hand.

Both in the way that costs them least: rows dealt out as their own balancers do, keys gathered or heads exchanged in one
collective, documents packed for the kernels that take them so.
"""

from types import SimpleNamespace

from bench.peers.base import DOCUMENTS, installed

CAUSAL = ("causal", "causal_document", "window")
WINDOW = 4096


class Unsupported(Exception):
    """A peer cannot compute a case; the message says why."""


class Peer:
    """One way to compute attention over ranks.

    Parameters
    ----------
    case : Case
        Of :mod:`bench.distributed`.
    lengths : sequence of int
        Of the documents.
    device : {"cuda", "cpu"}
    rank, size : int

    Raises
    ------
    Unsupported
        In the same cases on all ranks.

    Attributes
    ----------
    rows : tensor
        Those of the whole problem that this rank holds, in its order.
    heads_axis, rows_axis : int
        Of the operands' four axes, the first a batch of one and the last the head dimension.
    """

    masks = ("full", "causal")
    package = ""
    cpu = True
    deterministic = False
    heads_axis, rows_axis = 1, 2

    def __init__(self, case, lengths, device, rank, size):
        import torch

        self.torch, self.case, self.lengths = torch, case, lengths
        self.device, self.rank, self.size = device, rank, size
        if case.mask not in self.masks:
            raise Unsupported(f"takes the masks {', '.join(self.masks)}")
        if case.dropout:
            raise Unsupported("its dropout depends on the number of ranks")
        if case.exact and not self.deterministic:
            raise Unsupported("has no deterministic backward")
        if self.package and not installed(self.package):
            raise Unsupported(f"{self.package} is not installed")
        if device == "cpu" and not self.cpu:
            raise Unsupported("knows the operators of GPUs only")
        self.prepare()

    def prepare(self):
        """Say which rows this rank holds, and make what calls need."""
        raise NotImplementedError

    def forward(self, q, k, v):
        """Return o, and what `backward` takes: by default by autograd."""
        leaves = [x.detach().requires_grad_(self.case.direction == "backward") for x in (q, k, v)]
        o = self.attend(*leaves)
        return o, (o, leaves)

    def backward(self, do, kept):
        """Return dq, dk, dv."""
        o, leaves = kept
        return self.torch.autograd.grad(o, leaves, do, retain_graph=True)

    def attend(self, q, k, v):
        """Return o, differentiable."""
        raise NotImplementedError


class ContextParallelSdpa(Peer):
    """PyTorch's context parallel over ``scaled_dot_product_attention``: keys in a ring, heads and tails balanced."""

    kind = "SDPA"
    cpu = False

    def prepare(self):
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import _attention as found

        mesh, n = init_device_mesh(self.device, (self.size,)), self.case.n
        if n % (2 * self.size):
            raise Unsupported(f"{n} rows are no multiple of {2 * self.size}")
        visible = self.visible()
        buffers = [self.torch.arange(n, device=self.device)[None], *([] if visible is None else [visible])]
        balancer = self.balancer(found, visible)
        axes = [1, 2][: len(buffers)]
        shards = found._context_parallel_shard(mesh, buffers, axes, balancer)
        self.rows, self.options = shards[0][0], self.said(*shards[1:])

        class Module(nn.Module):
            def forward(_, q, k, v):
                return self.kernel(q, k, v, **self.options)

        kinds = found._ContextParallel.AttentionType
        self.attend = found._ContextParallel(2, kinds[self.kind])._apply(Module(), mesh)
        if self.kind == "SDPA":
            found._enable_context_parallel_dispatcher()

    def visible(self):
        """Return the table of what is visible, if there is one."""
        return None

    def balancer(self, found, visible):
        """Return what deals rows out."""
        return found._HeadTailLoadBalancer(self.case.n, self.size, self.device) if self.case.mask == "causal" else None

    def said(self):
        """Return the options of the kernel."""
        return dict(is_causal=self.case.mask == "causal", enable_gqa=self.case.heads != self.case.kv_heads)

    def kernel(self, *operands, **options):
        """Compute this rank's part."""
        return self.torch.nn.functional.scaled_dot_product_attention(*operands, **options)


class ContextParallelFlex(ContextParallelSdpa):
    """PyTorch's context parallel over FlexAttention: all keys gathered; documents dealt out by the time they take."""

    kind = "FLEX"
    masks = ("full", *CAUSAL, "document")
    cpu = True

    def visible(self):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self.device == "cpu" and self.case.direction == "backward":
            raise Unsupported("FlexAttention has no gradients on the CPU")
        self.compiled = self.torch.compile(flex_attention, dynamic=False) if self.device == "cuda" else flex_attention
        torch, kind = self.torch, self.case.mask
        if kind == "full":
            return None
        of_row = torch.repeat_interleave(torch.tensor(self.lengths, device=self.device))
        tests = {
            "causal": lambda b, h, i, j: i >= j,
            "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
            "document": lambda b, h, i, j: of_row[i] == of_row[j],
            "causal_document": lambda b, h, i, j: (i >= j) & (of_row[i] == of_row[j]),
        }
        make = torch.compile(create_block_mask) if self.device == "cuda" else create_block_mask
        return make(tests[kind], 1, 1, self.case.n, self.case.n, device=self.device)

    def balancer(self, found, visible):
        if self.case.mask in DOCUMENTS:
            return found._PTRRLoadBalancer(visible, self.size)
        return super().balancer(found, visible)

    def said(self, *masks):
        found = dict(zip(("block_mask",), masks, strict=False))
        return dict(enable_gqa=self.case.heads != self.case.kv_heads) | found

    def kernel(self, *operands, **options):
        return self.compiled(*operands, **options)


class Ulysses(Peer):
    """Heads for rows by an all-to-all, PyTorch's attention over some heads, and an all-to-all back."""

    heads_axis, rows_axis = 2, 1

    def prepare(self):
        case, size = self.case, self.size
        if case.n % size or case.kv_heads % size:
            raise Unsupported(f"{size} ranks do not divide {case.n} rows and {case.kv_heads} key heads")
        self.rows = self.torch.arange(case.n, device=self.device).chunk(size)[self.rank]

    def swapped(self, x, inward):
        """Return all rows of some heads, of some rows of all heads; or back."""
        from torch.distributed import all_to_all_single

        x = x[0].unflatten(1, (self.size, -1)).transpose(0, 1) if inward else x[0].unflatten(0, (self.size, -1))
        found = self.torch.empty_like(x, memory_format=self.torch.contiguous_format)
        all_to_all_single(found, x.contiguous())
        return (found.flatten(0, 1) if inward else found.transpose(0, 1).flatten(1, 2))[None]

    def forward(self, q, k, v):
        o, kept = super().forward(*(self.swapped(x, True) for x in (q, k, v)))
        return self.swapped(o.detach(), False), kept

    def backward(self, do, kept):
        return [self.swapped(x, False) for x in super().backward(self.swapped(do, True), kept)]

    def attend(self, q, k, v):
        operands = (x.transpose(1, 2) for x in (q, k, v))
        options = dict(is_causal=self.case.mask == "causal", enable_gqa=q.shape[2] != k.shape[2])
        return self.torch.nn.functional.scaled_dot_product_attention(*operands, **options).transpose(1, 2)


class UlyssesFa4(Ulysses):
    """The same over FlashAttention-4."""

    masks = ("full", *CAUSAL, "document")
    package = "flash_attn.cute"
    cpu = False
    deterministic = True

    @property
    def options(self):
        """What is said of the mask; documents are sequences, back to back."""
        kind, found = self.case.mask, {}
        if kind in DOCUMENTS:
            starts = self.torch.tensor([0, *self.lengths], device=self.device).cumsum(0).to(self.torch.int32)
            found = {f"cu_seqlens_{x}": starts for x in "qk"} | {f"max_seqlen_{x}": max(self.lengths) for x in "qk"}
        return SimpleNamespace(packed=found, causal=kind in CAUSAL, window=kind == "window")

    def attend(self, q, k, v):
        from flash_attn import cute

        said = self.options
        window = {"window_size": (WINDOW - 1, 0)} if said.window else {}
        options = dict(causal=said.causal, deterministic=self.case.exact, **window, **said.packed)
        if not said.packed:
            return _first(cute.flash_attn_func(q, k, v, **options))
        return _first(cute.flash_attn_varlen_func(*(x[0] for x in (q, k, v)), **options))[None]


class UlyssesFa3(UlyssesFa4):
    """The same over FlashAttention-3, by its operators."""

    package = "flash_attn_3"

    def prepare(self):
        from bench.peers.flash import _flash_attn_3

        super().prepare()
        self.operators, said = _flash_attn_3(), self.options
        self.said = dict(softmax_scale=128**-0.5, is_causal=said.causal, **said.packed)
        if said.window:
            self.said |= dict(window_size_left=WINDOW - 1, window_size_right=0)

    def forward(self, q, k, v):
        operands = [self.swapped(x, True) for x in (q, k, v)]
        if self.options.packed:
            operands = [x[0] for x in operands]
        o, lse = self.operators.fwd(*operands, **self.said)[:2]
        return self.swapped(o.reshape(1, self.case.n, *o.shape[-2:]), False), (*operands, o, lse)

    def backward(self, do, kept):
        do = self.swapped(do, True).reshape(kept[3].shape)
        found = self.operators.bwd(do, *kept, deterministic=self.case.exact, **self.said)[:3]
        return [self.swapped(x.reshape(1, self.case.n, *x.shape[-2:]), False) for x in found]


def _first(result):
    return result[0] if isinstance(result, (tuple, list)) else result


PEERS = {
    "torch-cp-sdpa": ContextParallelSdpa,
    "torch-cp-flex": ContextParallelFlex,
    "ulysses-sdpa": Ulysses,
    "ulysses-fa3": UlyssesFa3,
    "ulysses-fa4": UlyssesFa4,
}
