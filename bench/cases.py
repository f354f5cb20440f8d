"""The named problems that are measured: the papers' tables and the claims beside them.

A case says what is computed and how its work is counted; it never times anything.

Work is counted as the papers do.  Forward: 4 B H Nq Nk d floating-point operations, halved under a causal band, times
1 - rho under a mask, with rho the share of fully hidden 128 x 128 tiles.  Backward: 2.5 times the forward's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

from bench.mask_samples import KINDS

__all__ = ["TABLES", "Case", "select"]

WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # in forwards
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
BOTH = ("forward", "backward")
TOGETHER = "forward+backward"  # one after the other, as a training step does


@dataclass(frozen=True)
class Case:
    """One problem, in one direction.

    Attributes
    ----------
    table : str
        The table that it belongs to.
    direction : {"forward", "backward", "forward+backward"}
        What is timed.
    batch, heads, kv_heads, n_queries, n_keys, head_dim : int
        Shape: q is (batch, heads, n_queries, head_dim), k and v (batch, kv_heads, n_keys, head_dim).
    dtype : str
        Of q, k, v and do.
    causal : bool
        Causal by a band, without a mask object.
    mask : str, optional
        One of `bench.mask_samples.KINDS`, or ``"random"``, a boolean matrix.
    documents : int, optional
        Documents per sequence, instead of the mask's own random number.
    bias : {"keys", "scores"}, optional
        A bias of shape (B, 1, 1, N), or one N x N for all heads.
    dropout : float
        Probability of dropping.
    deterministic : bool
        Ask for bitwise reproducible gradients.
    host : bool
        Time the host, not the device.
    rivals : tuple of str
        Peers that the stated bar counts; empty = all.
    bar : float
        Smallest ratio to the best rival that the claim needs; 0 where the claim is no ratio.
    """

    table: str
    direction: str
    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    mask: str | None = None
    documents: int | None = None
    bias: str | None = None
    dropout: float = 0.0
    deterministic: bool = False
    host: bool = False
    rivals: tuple[str, ...] = ()
    bar: float = 1.0

    @property
    def pattern(self):
        """What is visible, in a word: ``"full"``, ``"causal"`` or the mask's name."""
        if self.mask is None:
            return "causal" if self.causal else "full"
        return self.mask if self.documents is None else f"{self.mask}-{self.documents}"

    @property
    def label(self):
        """The case without table and direction, as a table's row calls it."""
        n = f"N{self.n_keys}" if self.n_queries == self.n_keys else f"{self.n_queries}xN{self.n_keys}"
        parts = [f"{self.batch}x{self.heads}"] if self.table.startswith("cpu") else []
        parts += [f"d{self.head_dim}", n, self.pattern]
        parts += [] if self.dtype == "bfloat16" else [self.dtype]
        parts += [f"bias_{self.bias}"] if self.bias else []
        parts += [f"drop{self.dropout:g}"] if self.dropout else []
        parts += ["deterministic"] if self.deterministic else []
        return "-".join(parts)

    @property
    def name(self):
        """Unique name, ``table/label/direction``."""
        return f"{self.table}/{self.label}/{self.direction}"

    @property
    def problem(self):
        """The case without what does not change its inputs and results: cases of one problem share them."""
        return replace(self, direction="forward", deterministic=False, host=False, rivals=(), bar=1.0)

    @property
    def unit(self):
        """What the rate counts: ``"us"`` for host cost, ``"TB/s"`` for few queries, else ``"TFLOP/s"``."""
        if self.host:
            return "us"
        return "TB/s" if self.n_queries < 16 else "TFLOP/s"

    def flops(self, rho=0.0):
        """Return the floating-point operations that count, with `rho` of the tiles hidden by a mask."""
        work = 4.0 * self.batch * self.heads * self.n_queries * self.n_keys * self.head_dim
        visible = 1.0 - rho if self.mask is not None else 0.5 if self.causal else 1.0
        return work * visible * WORK[self.direction]

    def bytes(self):
        """Return the fewest bytes that the forward moves: q, k, v and o once."""
        rows = 2 * self.heads * self.n_queries + 2 * self.kv_heads * self.n_keys
        return self.batch * rows * self.head_dim * ITEM_BYTES[self.dtype]

    def rate(self, seconds, rho=0.0):
        """Return the rate in `unit` (for host cost: the cost in microseconds)."""
        if self.host:
            return seconds * 1e6
        return (self.bytes() if self.unit == "TB/s" else self.flops(rho)) / seconds / 1e12

    def as_dict(self):
        """Return the fields, for a row."""
        return {**asdict(self), "rivals": list(self.rivals)}


def _case(table, direction, *, tokens, hidden, n, head_dim, **options):
    heads = hidden // head_dim
    return Case(table, direction, max(tokens // n, 1), heads, heads, n, n, head_dim, **options)


def dense():
    """16K tokens, hidden size 2048, full and causal: the sweep of the FlashAttention papers."""
    for d, n, causal, direction in product((128, 64, 256), (1024, 4096, 16384), (False, True), BOTH):
        yield _case("dense", direction, tokens=16384, hidden=2048, n=n, head_dim=d, causal=causal, bar=0.92)


def masks(n, head_dim):
    """One of the FlashMask paper's tables 4-9: twelve masks, 128K tokens, hidden size 4096."""
    for kind, direction in product(KINDS, BOTH):
        shape = dict(tokens=131072, hidden=4096, n=n, head_dim=head_dim)
        yield _case(_mask_table(n, head_dim), direction, **shape, mask=kind, bar=0.92)


def _mask_table(n, head_dim):
    return f"masks-{n // 1024}k" + ("" if head_dim == 128 else f"-d{head_dim}")


def dropout():
    """Dropout 0.1 at N = 4096, beside the peers that can drop on chip."""
    for d, direction in product((128, 64), BOTH):
        bar = 1.4 if direction == "forward" else 1.25
        yield _case("dropout", direction, tokens=16384, hidden=2048, n=4096, head_dim=d, dropout=0.1, bar=bar)


def deterministic():
    """Bitwise reproducible gradients beside the fastest ones, N = 8192, d = 128."""
    shape = dict(tokens=16384, hidden=2048, n=8192, head_dim=128)
    for causal, exact in product((False, True), (False, True)):
        yield _case("deterministic", "backward", **shape, causal=causal, deterministic=exact)
    for kind, exact in product(("causal_document", "share_question"), (False, True)):
        yield _case("deterministic", "backward", **shape, mask=kind, deterministic=exact)


def long():
    """One long sequence, few heads."""
    for (n, heads), causal, direction in product(((131072, 8), (524288, 2)), (False, True), BOTH):
        yield _case("long", direction, tokens=n, hidden=128 * heads, n=n, head_dim=128, causal=causal)


def portable():
    """16-bit, float32 and float64 at N = 4096, batch 4, hidden size 2048, each beside the peer that it must reach."""
    shape = dict(tokens=16384, hidden=2048, n=4096)
    for d, drop, direction in product((128, 64), (0.0, 0.1), BOTH):
        yield _case("portable", direction, **shape, head_dim=d, dropout=drop, rivals=("fa2",))
    for (dtype, bars), d, direction in product((("float32", (1.3, 1.1)), ("float64", (1.2, 1.0))), (64, 128), BOTH):
        bar = bars[direction == "backward"]
        rivals = ("mem-efficient", "math")
        yield _case("portable", direction, **shape, head_dim=d, dtype=dtype, rivals=rivals, bar=bar)


def decode():
    """One query per sequence, 32 heads over 8 key/value heads: bound by reading k and v."""
    for batch, n in ((1, 65536), (16, 8192)):
        yield Case("decode", "forward", batch, 32, 8, 1, n, 128)


def gpt2():
    """FlashAttention's first figure: the attention of GPT-2 medium, forward and backward, without and with dropout."""
    for dropped in (0.0, 0.1):
        yield Case("gpt2", TOGETHER, 64, 16, 16, 1024, 1024, 64, dtype="float16", dropout=dropped)


def lengths():
    """FlashAttention's figure 3: runtime and memory from 128 to 64K tokens."""
    for exponent in range(7, 17):
        yield Case("lengths", TOGETHER, 8, 8, 8, 2**exponent, 2**exponent, 64, dtype="float16")


def host():
    """Host cost of a warm call on a tiny problem, without and with a mask."""
    for mask, direction in product((None, "causal_document"), BOTH):
        yield Case("host", direction, 1, 2, 2, 256, 256, 64, mask=mask, host=True, bar=0.0)


def sparsity():
    """Column masks from rho = 0.5 to 0.95 at N = 32768: time in proportion to what is visible."""
    shape = dict(tokens=32768, hidden=2048, n=32768, head_dim=128)
    counts = {"full": (None,), "document": (2, 3, 5, 10, 18), "causal_document": (1, 2, 4, 9)}
    for kind in counts:
        for documents, direction in product(counts[kind], BOTH):
            yield _case("sparsity", direction, **shape, mask=kind, documents=documents)


def cpu():
    """8 heads in float32, without a mask and with three: the CPU backend where its tiles are many."""
    shape = dict(tokens=4096, hidden=512, n=4096, head_dim=64, dtype="float32")
    for direction in ("forward", TOGETHER):
        yield _case("cpu", direction, **{**shape, "tokens": 2048, "n": 2048})
        for kind in (None, "causal_document", "sliding_window", "share_question"):
            yield _case("cpu", direction, **shape, mask=kind)


def cpu_torch():
    """Shapes that PyTorch users call, with a bias for padding, a dense bias, a boolean matrix."""
    for direction in ("forward", TOGETHER):
        yield Case("cpu-torch", direction, 8, 12, 12, 128, 128, 64, "float32")
        yield Case("cpu-torch", direction, 1, 16, 16, 512, 512, 64, "float32")
        yield Case("cpu-torch", direction, 1, 8, 8, 1024, 1024, 64, "float32", mask="random")
    for bias in ("keys", "scores"):
        yield Case("cpu-torch", "forward", 8, 8, 8, 256, 256, 64, "float32", bias=bias)


def cpu_small():
    """Problems of a few rows, beside the three lines of NumPy that compute them."""
    shapes = (
        (1, 8, 1, 128, 64), (1, 8, 1, 4096, 64), (1, 8, 16, 16, 64), (1, 64, 32, 32, 32), (1024, 4, 49, 49, 32),
        (1, 512, 16, 16, 32), (64, 8, 64, 64, 32), (32, 12, 128, 128, 64), (1, 32, 1, 4096, 128), (8, 16, 1, 512, 64),
    )  # fmt: skip
    for (batch, heads, n_queries, n_keys, d), direction in product(shapes, BOTH):
        yield Case("cpu-small", direction, batch, heads, heads, n_queries, n_keys, d, "float32")


OTHERS = (dropout, deterministic, long, portable, decode, gpt2, lengths, host, sparsity, cpu, cpu_torch, cpu_small)
TABLES = {
    "dense": dense,
    **{_mask_table(n, d): partial(masks, n, d) for d in (128, 64) for n in (8192, 32768, 131072)},
    **{table.__name__.replace("_", "-"): table for table in OTHERS},
}


def select(tables, directions=BOTH):
    """Return the cases of some tables.

    Parameters
    ----------
    tables : iterable of str
        Names in `TABLES`.
    directions : iterable of str, optional
        Of "forward" and "backward"; cases of both together are always kept.

    Returns
    -------
    list of Case
        In the tables' order.

    Examples
    --------
    >>> select(["dense"], ["forward"])[0].name
    'dense/d128-N1024-full/forward'
    """
    wanted = (*directions, TOGETHER)
    return [case for table in tables for case in TABLES[table]() if case.direction in wanted]
