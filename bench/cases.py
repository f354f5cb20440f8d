"""The named problems that are measured: the papers' tables and the claims beside them.

A case says what is computed and how its work is counted; it never times anything.

Work is counted as the papers do.  Forward: 4 B H Nq Nk d floating-point operations (2 (d + dv) where v is of another
width), halved under a causal band, times 1 - rho under a mask, with rho the share of fully hidden 128 x 128 tiles.
Backward: 2.5 times the forward's.
"""

import math
from dataclasses import asdict, dataclass, replace
from itertools import product

from bench.mask_samples import KINDS
from bench.score_samples import MASKS, formula

WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # in forwards
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
BOTH = ("forward", "backward")
TOGETHER = "forward+backward"  # one after the other, as a training step does
FEW = 16  # queries that wait for keys to be read, not for products
RESULTS = {"forward": ("o",), "backward": ("dq", "dk", "dv"), TOGETHER: ("o", "dq", "dk", "dv")}


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
        Shape: q is (batch, heads, n_queries, head_dim), k (batch, kv_heads, n_keys, head_dim).
    head_dim_v : int
        Of v, which has k's other axes; 0 = `head_dim`.
    use : str
        What calls such a shape, where a table holds shapes of many kinds.
    dtype : str
        Of q, k, v and do.
    causal : bool
        Causal by a band, without a mask object.
    mask : str, optional
        One of `bench.mask_samples.KINDS`, or ``"random"``, a boolean matrix.
    dropout : float
        Probability of dropping.
    deterministic : bool
        Ask for bitwise reproducible gradients.
    host : bool
        Time the host, not the device.
    score : str, optional
        One of `bench.score_samples.FORMULAS`: a function of the scores, of what is visible, or both; or a bias.
    learned : bool
        The function's float arrays are differentiated too.
    rivals : tuple of str
        Peers that the ratio counts; empty = all.
    """

    table: str
    direction: str
    batch: int
    heads: int
    kv_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    head_dim_v: int = 0
    use: str = ""
    dtype: str = "bfloat16"
    causal: bool = False
    mask: str | None = None
    dropout: float = 0.0
    deterministic: bool = False
    host: bool = False
    score: str | None = None
    learned: bool = False
    rivals: tuple[str, ...] = ()

    @property
    def kind(self):
        """The mask's name, bands included: ``"full"`` and ``"causal"`` need no mask object."""
        return self.mask or ("causal" if self.causal else "full")

    @property
    def label(self):
        """The case without table and direction, as a table's row calls it."""
        n = f"N{self.n_keys}" if self.n_queries == self.n_keys else f"{self.n_queries}xN{self.n_keys}"
        named = self.use or self.table.startswith("cpu")
        parts = [*filter(None, [self.use]), f"{self.batch}x{self.heads}"] if named else []
        parts += [f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else ""), n, self.kind]
        parts += [] if self.dtype == "bfloat16" else [self.dtype]
        parts += [self.score] if self.score else []
        parts += ["learned"] if self.learned else []
        parts += [f"kv{self.kv_heads}"] if (self.score or self.use) and self.heads != self.kv_heads else []
        parts += [f"drop{self.dropout:g}"] if self.dropout else []
        parts += ["deterministic"] if self.deterministic else []
        return "-".join(parts)

    @property
    def name(self):
        """Unique name, ``table/label/direction``."""
        return f"{self.table}/{self.label}/{self.direction}"

    @property
    def results(self):
        """Names of what is computed: o, and gradients, those of learned arrays behind the others."""
        learned = formula(self).arrays if self.learned and self.direction != "forward" else ()
        return (*RESULTS[self.direction], *(f"d{name}" for name in learned))

    @property
    def problem(self):
        """The case without what does not change its inputs and results: cases of one problem share them."""
        return replace(self, direction="forward", deterministic=False, host=False, rivals=())

    @property
    def tiny(self):
        """The case at a size that NumPy does in seconds."""
        n_queries, n_keys = min(self.n_queries, 192), min(self.n_keys, 192)
        return replace(self, batch=min(self.batch, 2), n_queries=n_queries, n_keys=n_keys)

    @property
    def unit(self):
        """What the rate counts: ``"us"`` for host cost, ``"TB/s"`` for few queries, else ``"TFLOP/s"``."""
        if self.host:
            return "us"
        return "TB/s" if self.n_queries <= FEW < self.n_keys else "TFLOP/s"

    def flops(self, rho=0.0):
        """Return the floating-point operations that count, with `rho` of the tiles hidden by a mask."""
        work = 2.0 * self.batch * self.heads * self.n_queries * self.n_keys * (self.head_dim + self.shapes[2][-1])
        visible = 0.5 if self.causal else 1.0 - rho
        return work * visible * WORK[self.direction]

    @property
    def shapes(self):
        """Shapes of q, k, v and do."""
        q, k = (self.batch, self.heads, self.n_queries), (self.batch, self.kv_heads, self.n_keys)
        dv = self.head_dim_v or self.head_dim
        return (*q, self.head_dim), (*k, self.head_dim), (*k, dv), (*q, dv)

    def bytes(self):
        """Return the fewest bytes that the forward moves: q, k, v and o once."""
        return sum(map(math.prod, self.shapes)) * ITEM_BYTES[self.dtype]

    def rate(self, seconds, rho=0.0):
        """Return the rate in `unit` (for host cost: the cost in microseconds)."""
        if self.host:
            return seconds * 1e6
        return (self.bytes() if self.unit == "TB/s" else self.flops(rho)) / seconds / 1e12

    def as_dict(self):
        """Return the fields, for a row."""
        return {**asdict(self), "rivals": list(self.rivals)}


def _grid(table, *, tokens=16384, hidden=2048, **axes):
    """Yield the cases of all combinations of values, the last axis fastest; what is no list holds for all.

    Where no `batch` is given, there are `tokens` of `hidden` elements in all.
    """
    axes["direction"] = axes.get("direction", list(BOTH))
    for values in product(*(x if isinstance(x, list) else [x] for x in axes.values())):
        chosen = dict(zip(axes, values, strict=True))
        n = chosen.pop("n", 0)
        heads = chosen.get("heads", hidden // chosen["head_dim"])
        usual = {"n_queries": n, "n_keys": n, "heads": heads, "kv_heads": heads, "batch": max(tokens // max(n, 1), 1)}
        yield Case(table, **usual | chosen)


def _shape(use, batch, heads, n_queries, head_dim, kv_heads=0, n_keys=0, **axes):
    """Return the grid of one shape; as many key heads and keys as there are query heads and queries, unless said."""
    usual = {"n_keys": n_keys or n_queries, "kv_heads": kv_heads or heads, **USES.get(use, {})}
    return {**usual, **dict(use=use, batch=batch, heads=heads, n_queries=n_queries, head_dim=head_dim), **axes}


def _sweep(**axes):
    """Return the grids of some scores or masks: 2K to 32K tokens, with and without groups; the most telling first."""
    sizes = (4096, 128, 16), (4096, 64, 16), (8192, 128, 4), (32768, 128, 16), (2048, 64, 16), (32768, 64, 4)
    return [dict(batch=4, heads=16, kv_heads=kv, n=n, head_dim=d, **axes) for n, d, kv in sizes]


EXACT = dict(n=8192, head_dim=128, direction="backward")
GPT2 = dict(head_dim=64, dtype="float16", direction=TOGETHER)
BIAS = dict(heads=16, learned=True)
COLUMNS = dict(batch=4, heads=16, n=8192, head_dim=[128, 64])
ON_HOST = dict(head_dim=64, dtype="float32", direction=["forward", TOGETHER])
SMALL = (  # batch, heads, queries, keys, head dimension
    (1, 8, 1, 128, 64), (1, 8, 1, 4096, 64), (1, 8, 16, 16, 64), (1, 64, 32, 32, 32), (1024, 4, 49, 49, 32),
    (1, 512, 16, 16, 32), (64, 8, 64, 64, 32), (32, 12, 128, 128, 64), (1, 32, 1, 4096, 128), (8, 16, 1, 512, 64),
)  # fmt: skip
USES = {"language": {"causal": True}, "decode": {"direction": "forward"}}
SHAPES = (  # that users call, by what calls them: batch, heads, queries, head dimension, key heads, keys
    _shape("vision", 128, 12, 197, 64),  # ViT-B/16
    _shape("vision", 32, 16, 577, 64),  # ViT-L/14, 336 x 336 pixels
    _shape("vision", 32, 16, 257, 80),  # ViT-H/14
    _shape("vision", 16, 16, 729, 72),  # SigLIP
    _shape("diffusion", 8, 10, 4096, 64),  # Stable Diffusion XL
    _shape("diffusion", 8, 20, 1024, 64),
    _shape("diffusion", 4, 24, 4250, 64),  # Stable Diffusion 3: image and text
    _shape("diffusion", 2, 24, 4608, 128),  # FLUX
    _shape("video", 1, 24, 32760, 128),
    _shape("video", 1, 12, 32760, 128),  # Wan 2.1
    _shape("video", 2, 30, 17776, 64),  # CogVideoX
    _shape("language", 4, 32, 4096, 128, 8),  # Llama 3 8B
    _shape("language", 1, 64, 8192, 128, 8),  # Llama 3 70B
    _shape("language", 1, 32, 32768, 128, 8),
    _shape("language", 2, 14, 8192, 64, 2),  # Qwen 2.5 0.5B
    _shape("language", 2, 32, 4096, 128, 1),
    _shape("language", 1, 48, 8192, 128, 1),  # StarCoder
    _shape("language", 4, 8, 4096, 256, 1),  # Gemma 2B
    _shape("language", 2, 32, 4096, 96),  # Phi 3 mini
    _shape("language", 4, 16, 4096, 128, dtype="float16"),
    _shape("language", 4, 16, 4096, 192, head_dim_v=128),  # DeepSeek V3
    _shape("language", 1, 32, 16384, 128, 8, causal=False, mask="sliding_window"),
    _shape("structure", 256, 4, 256, 32),  # triangles of AlphaFold
    _shape("structure", 128, 8, 384, 32),
    _shape("structure", 4, 20, 1024, 64),  # ESM 2
    _shape("structure", 8, 32, 2048, 32),
    _shape("short", 256, 16, 256, 64),
    _shape("short", 512, 16, 128, 64, causal=True),
    _shape("short", 64, 12, 512, 64),  # BERT
    _shape("short", 1024, 4, 49, 32),  # Swin
    _shape("odd", 1, 8, 3001, 128, causal=True),
    _shape("odd", 2, 16, 2047, 128, causal=True),
    _shape("odd", 4, 16, 1000, 64),
    _shape("odd", 16, 12, 1500, 64),  # Whisper
    _shape("few", 1, 8, 8192, 128, causal=True),
    _shape("few", 1, 4, 65536, 128, causal=True),
    _shape("few", 1, 2, 16384, 64),
    _shape("few", 1, 1, 4096, 64),
    _shape("cross", 8, 16, 1000, 64, n_keys=5000),
    _shape("cross", 8, 10, 4096, 64, n_keys=77),  # an image over its prompt
    _shape("cross", 8, 8, 512, 64, n_keys=16384),  # Perceiver
    _shape("cross", 16, 12, 448, 64, n_keys=1500),  # Whisper's text over its sound
    _shape("decode", 64, 32, 1, 128, 8, 4096),
    _shape("decode", 8, 64, 1, 128, 8, 32768),
    _shape("decode", 32, 16, 1, 64, n_keys=2048),
    _shape("decode", 4, 8, 1, 256, 1, 16384),
    _shape("decode", 1, 32, [1, 4], 128, 8, 65536),
    _shape("decode", 16, 32, [2, 8, 16], 128, 8, 8192),
)
GRIDS = {  # table: the axes of its grids
    # 16K tokens and one sequence of 32K, hidden size 2048, full and causal: the sweep of the FlashAttention papers.
    "dense": [dict(head_dim=[128, 64, 256], n=[1024, 4096, 16384, 32768], causal=[False, True])],
    "shapes": SHAPES,
    # The FlashMask paper's tables 4-9: twelve masks, 128K tokens, hidden size 4096.
    **{
        f"masks-{n // 1024}k{end}": [dict(tokens=131072, hidden=4096, n=n, head_dim=d, mask=list(KINDS))]
        for d, end in ((128, ""), (64, "-d64"))
        for n in (8192, 32768, 131072)
    },
    # Beside the peers that can drop on chip.
    "dropout": [dict(head_dim=[128, 64], n=4096, dropout=0.1)],
    # Bitwise reproducible gradients beside the fastest ones.
    "deterministic": [
        dict(EXACT, causal=[False, True], deterministic=[False, True]),
        dict(EXACT, mask=["causal_document", "share_question"], deterministic=[False, True]),
    ],
    # One long sequence, few heads.
    "long": [dict(batch=1, heads=h, n=n, head_dim=128, causal=[False, True]) for n, h in ((131072, 8), (524288, 2))],
    # 16 bits, float32 and float64, each beside the peer that it must reach.
    "portable": [
        dict(n=4096, head_dim=[128, 64], dropout=[0.0, 0.1], rivals=("fa2",)),
        dict(n=4096, dtype=["float32", "float64"], head_dim=[64, 128], rivals=("mem-efficient", "math")),
    ],
    # One query per sequence, 32 heads over 8 key/value heads: bound by reading k and v.
    "decode": [
        dict(batch=batch, heads=32, kv_heads=8, n_queries=1, n_keys=n, head_dim=128, direction="forward")
        for batch, n in ((1, 65536), (16, 8192))
    ],
    # FlashAttention's first figure: the attention of GPT-2 medium, forward and backward, without and with dropout.
    "gpt2": [dict(GPT2, batch=64, heads=16, n=1024, dropout=[0.0, 0.1])],
    # FlashAttention's figure 3: runtime and memory from 128 to 64K tokens.
    "lengths": [dict(GPT2, batch=8, heads=8, n=[2**exponent for exponent in range(7, 17)])],
    # Host cost of a warm call on a tiny problem, without and with a mask.
    "host": [dict(batch=1, heads=2, n=256, head_dim=64, mask=[None, "causal_document"], host=True)],
    # Functions of the scores whose arrays, if any, are fixed; one that does nothing.
    "scores": [
        *_sweep(causal=True, score=["softcap", "alibi", "softcap_function", "softcap_rational"]),
        *_sweep(score=["relative", "temperature"]),
        *_sweep(mask="sliding_window", score="alibi"),
        dict(batch=4, heads=16, n=4096, head_dim=[128, 64], score="identity"),
    ],
    # Arrays that are differentiated.
    "scores-learned": [
        *_sweep(causal=True, learned=True, score="slopes"),
        *_sweep(learned=True, score=["relative", "t5", "key_bias", "temperature", "natten_bias"]),
        dict(batch=4, heads=16, n=[4096, 2048], head_dim=[128, 64], learned=True, score="graphormer"),
    ],
    # Biases that are differentiated: of pairs (structure prediction), of padded keys.
    "scores-bias": [
        dict(BIAS, batch=1, n=2048, head_dim=64, score="pairs"),
        dict(BIAS, batch=256, heads=4, n=256, head_dim=32, score="pairs"),
        dict(BIAS, batch=4, n=4096, head_dim=[128, 64], score="keys"),
        dict(BIAS, batch=4, n=2048, head_dim=[128, 64], score="all_pairs"),
        dict(BIAS, batch=4, n=4096, head_dim=[128, 64], score="pairs"),
        dict(BIAS, batch=4, n=4096, head_dim=128, kv_heads=4, score=["keys", "pairs"]),
        dict(BIAS, batch=4, n=[32768, 2048], head_dim=[128, 64], score="keys"),
    ],
    # Functions of what is visible.
    "scores-masks": _sweep(score=list(MASKS)),
    # Column masks, which a function or a boolean matrix can say too.
    "scores-columns": [dict(COLUMNS, mask=["causal_document", "sliding_window", "document", "prefix_lm_causal"])],
    # Host cost of a warm call: without a function, with one, with an array.
    "scores-host": [
        dict(batch=1, heads=2, n=256, head_dim=64, host=True, score=[None, "alibi"]),
        dict(batch=1, heads=2, n=256, head_dim=64, host=True, score="slopes", learned=True),
    ],
    # The CPU backend where its tiles are many, without a mask and with three.
    "cpu": [
        dict(ON_HOST, batch=1, heads=8, n=2048),
        dict(ON_HOST, batch=1, heads=8, n=4096, mask=[None, "causal_document", "sliding_window", "share_question"]),
    ],
    # Shapes that PyTorch users call, with a boolean matrix, a bias for padding, a dense bias.
    "cpu-torch": [
        dict(ON_HOST, batch=8, heads=12, n=128),
        dict(ON_HOST, batch=1, heads=16, n=512),
        dict(ON_HOST, batch=1, heads=8, n=1024, mask="random"),
        dict(ON_HOST, batch=8, heads=8, n=256, score=["keys", "matrix"], direction="forward"),
    ],
    # Functions of the scores on the host, beside the call without them.
    "cpu-scores": [dict(ON_HOST, batch=1, heads=8, n=4096, score=["alibi", "relative"])],
    # Problems of a few rows, beside the three lines of NumPy that compute them.
    "cpu-small": [
        dict(batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys, head_dim=d, dtype="float32")
        for batch, heads, n_queries, n_keys, d in SMALL
    ],
}
TABLES = {table: [case for axes in grids for case in _grid(table, **axes)] for table, grids in GRIDS.items()}


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
    return [case for table in tables for case in TABLES[table] if case.direction in wanted]
