"""Named forward problems that between them touch every feature of the portable kernel.

A case makes NumPy arrays; the GPU tests run it on a device, and the compile test plans it for several cards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuattn import masks
from cuattn.masks import BlockMask, ColumnMask
from tests.oracle import dropped, visible_band

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
WIDE = (np.dtype(np.float32), np.dtype(np.float64))


class Case(NamedTuple):
    """One problem: shapes, options, and functions that make its mask and bias."""

    name: str
    dtype: np.dtype = BF16
    batch: tuple[int, ...] = (2,)
    heads: int = 2
    kv_heads: int = 2
    n_queries: int = 200
    n_keys: int = 333
    head_dim: int = 64
    head_dim_v: int | None = None
    options: dict[str, Any] | None = None
    mask: Callable[[Case, np.random.Generator], Any] | None = None
    bias: Callable[[Case, np.random.Generator], np.ndarray] | None = None

    def arrays(self, drawn: bool = True) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return q, k, v, zeros unless they are `drawn`, and the keyword arguments of ``cuattn.forward``."""
        rng = np.random.default_rng(sum(self.name.encode()))
        dv = self.head_dim if self.head_dim_v is None else self.head_dim_v
        shapes = {
            "q": (*self.batch, self.heads, self.n_queries, self.head_dim),
            "k": (*self.batch, self.kv_heads, self.n_keys, self.head_dim),
            "v": (*self.batch, self.kv_heads, self.n_keys, dv),
        }
        values = outliers if drawn else lambda rng, shape: np.zeros(shape)
        qkv = {name: values(rng, shape).astype(self.dtype) for name, shape in shapes.items()}
        options = dict(self.options or {})
        if self.kv_heads != self.heads:
            options["enable_gqa"] = True
        if self.mask is not None:
            options["mask"] = self.mask(self, rng)
        if self.bias is not None:
            options["bias"] = self.bias(self, rng)
        return qkv, options


def sized(name: str, n_queries: int, n_keys: int, head_dim: int = 64, **more: Any) -> Case:
    """Return a case of these lengths."""
    return Case(name, n_queries=n_queries, n_keys=n_keys, head_dim=head_dim, **more)


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values with a few large ones, so that some rows of the softmax are peaked."""
    x = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 0.002, 8 * x, x)


def visible(case: Case, options: dict[str, Any]) -> np.ndarray | None:
    """Return the boolean (..., n_queries, n_keys) of mask, causality and window together."""
    seen = None
    mask = options.get("mask")
    if isinstance(mask, ColumnMask):
        seen = mask.dense()
    elif isinstance(mask, BlockMask):
        seen = mask.dense(case.n_queries, case.n_keys)
    elif mask is not None:
        seen = mask
    causal, window = options.get("is_causal", False), options.get("window")
    if causal or window:
        window = (None, None) if window is None else window
        align = causal if isinstance(causal, str) else window[2] if len(window) == 3 else "top_left"
        offset = case.n_keys - case.n_queries if align == "bottom_right" else 0
        right = window[1] if not causal else 0 if window[1] is None else min(0, window[1])
        band = visible_band(case.n_queries, case.n_keys, window[0], right, offset)
        seen = band if seen is None else seen & band
    return seen


def oracle_options(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Return a call's options as the oracle takes them: dense booleans for what is visible and what dropout keeps."""
    shape = (*case.batch, case.heads, case.n_queries, case.n_keys)
    return {
        **dropped(options.get("rng"), options.get("dropout_p", 0.0), shape),
        "visible": visible(case, options), "bias": options.get("bias"), "scale": options.get("scale"),
        "softcap": options.get("softcap"),
    }  # fmt: skip


def same_bits(first: Any, second: Any) -> None:
    """Check that arrays are the same bit for bit, or both absent."""
    for a, b in zip(first, second, strict=True):
        assert a is b is None or a.tobytes() == b.tobytes()


def to_device(x: Any) -> Any:
    """Copy a NumPy array to the GPU; pass anything else on."""
    import cupy

    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def columns_of(case: Case, rng: np.random.Generator) -> ColumnMask:
    n, keys = case.n_queries, case.n_keys
    a = np.sort(rng.integers(0, n + 1, (4, *case.batch, case.heads, keys)), axis=0)
    a[:, ..., : keys // 4] = 0  # visible everywhere
    a[0, ..., -70:], a[1, ..., -70:] = 0, n  # dead
    return ColumnMask(*a, n_queries=n)


def _documents(case: Case, rng: np.random.Generator) -> ColumnMask:
    third, half = case.n_keys // 3, case.n_keys // 2
    return masks.causal_document([third, half, case.n_keys - third - half])


def blocks_of(rows: int, keys: int):
    def make(case: Case, rng: np.random.Generator) -> BlockMask:
        shape = (case.heads, -(-case.n_queries // rows), -(-case.n_keys // keys))
        on = rng.random(shape) < 0.5
        on[..., -1] = False
        return BlockMask(on, rows, keys)

    return make


def dense_of(case: Case, rng: np.random.Generator) -> np.ndarray:
    seen = rng.random((case.batch[0], 1, case.n_queries, case.n_keys)) < 0.6
    seen[..., 5, :] = False
    seen[..., 100:140] = False
    return seen


def bias_of(*shape: int, dtype=np.float32):
    def make(case: Case, rng: np.random.Generator) -> np.ndarray:
        sizes = (case.batch[0], case.heads, case.n_queries, case.n_keys)
        return rng.standard_normal([n if keep else 1 for n, keep in zip(sizes, shape, strict=True)]).astype(dtype)

    return make


def _cases() -> list[Case]:
    cases = [Case(f"d{d}", head_dim=d) for d in (8, 40, 64, 80, 96, 128, 160, 192, 256)]
    cases += [Case(f"float16 d{d}", dtype=F16, head_dim=d) for d in (64, 128)]
    cases += [
        Case("d 33", head_dim=33, head_dim_v=17),
        Case("d 320", head_dim=320, head_dim_v=64),
        Case("d 512", head_dim=512, n_queries=70),
        Case("dv 300", head_dim=64, head_dim_v=300),
        Case("dv 0", head_dim=64, head_dim_v=0),
        Case("dv 256 d 64", head_dim=64, head_dim_v=256),
        Case("one key", n_keys=1),
        Case("no keys", n_keys=0),
        Case("no keys column", n_keys=0, mask=columns_of, head_dim=128),
        Case("no keys dense", n_keys=0, mask=dense_of, head_dim=128),
        Case("aligned", n_queries=256, n_keys=512, head_dim=128),
        Case("batch axes", batch=(2, 3), heads=2, kv_heads=2),
        Case("grouped", heads=6, kv_heads=2, head_dim=128),
        Case("grouped few queries", heads=8, kv_heads=2, n_queries=3, n_keys=1500, head_dim=128),
        Case("one query", heads=4, kv_heads=4, n_queries=1, n_keys=4000, head_dim=128),
        Case("few queries causal", n_queries=17, n_keys=3000, options={"is_causal": "bottom_right"}),
        Case("scale negative", options={"scale": -0.3}),
        Case("scale zero", options={"scale": 0.0}),
        Case("softcap", options={"softcap": 5.0}, head_dim=128),
        Case("softcap float16", dtype=F16, options={"softcap": 5.0}),
        Case("causal", n_queries=300, n_keys=300, options={"is_causal": True}),
        Case("causal d128", n_queries=300, n_keys=300, head_dim=128, options={"is_causal": True}),
        Case("causal top left", options={"is_causal": "top_left"}),
        Case("causal bottom right", options={"is_causal": "bottom_right"}, head_dim=128),
        Case("more queries than keys", n_queries=333, n_keys=100, options={"is_causal": "bottom_right"}),
        Case("window", options={"window": (30, 20, "top_left")}, head_dim=128),
        Case("window bottom right", options={"window": (30, None, "bottom_right")}),
        Case("column", mask=columns_of, head_dim=128),
        Case("column d64 causal", mask=columns_of, options={"is_causal": "top_left"}),
        Case("documents", n_queries=600, n_keys=600, mask=_documents, head_dim=128),
        Case("documents window", n_queries=600, n_keys=600, mask=_documents, options={"window": (200, None)}),
        Case("blocks", mask=blocks_of(128, 64), n_keys=640, head_dim=128),
        Case("small blocks", mask=blocks_of(16, 48), options={"is_causal": "top_left"}),
        Case("dense", mask=dense_of, head_dim=128),
        Case("dense causal", mask=dense_of, options={"is_causal": "top_left"}),
        Case("bias", bias=bias_of(1, 1, 1, 1), head_dim=128),
        Case("bias row", bias=bias_of(0, 1, 0, 1, dtype=BF16)),
        Case("bias column causal", bias=bias_of(1, 0, 1, 0), options={"is_causal": "top_left"}),
        Case("everything", bias=bias_of(1, 1, 1, 1), mask=dense_of, head_dim=128,
             options={"softcap": 4.0, "window": (100, 50, "top_left"), "dropout_p": 0.2, "rng": 7}),
        Case("dropout", options={"dropout_p": 0.1, "rng": 3}, head_dim=128),
        Case("dropout d64", options={"dropout_p": 0.7, "rng": 5}),
        Case("dropout column", mask=columns_of, options={"dropout_p": 0.25, "rng": 9}, head_dim=128),
        Case("dropout causal", options={"dropout_p": 0.25, "rng": 9, "is_causal": "bottom_right"}, head_dim=128),
        Case("column d256", mask=columns_of, head_dim=256),
        Case("dropout column causal d256", mask=columns_of, head_dim=256,
             options={"dropout_p": 0.25, "rng": 9, "is_causal": "top_left"}),
    ]  # fmt: skip
    cases += [
        case._replace(name=f"{dtype} {case.name}", dtype=np.dtype(dtype), head_dim=d, head_dim_v=case.head_dim_v)
        for dtype in ("float32", "float64")
        for d, case in [
            *((d, Case(f"d{d}", n_queries=150)) for d in (20, 64, 96, 128, 192, 256)),
            (33, Case("d 33 dv 300", head_dim_v=300)),
            (64, Case("causal", options={"is_causal": "bottom_right"})),
            (128, Case("column", mask=columns_of)),
            (64, Case("column causal", mask=columns_of, options={"is_causal": "top_left"})),
            (64, Case("dense", mask=dense_of)),
            (128, Case("bias", bias=bias_of(1, 1, 1, 1))),
            (64, Case("softcap", options={"softcap": 5.0})),
            (64, Case("dropout", options={"dropout_p": 0.1, "rng": 3})),
            (128, Case("dropout column", mask=columns_of, options={"dropout_p": 0.25, "rng": 9})),
            (128, Case("one query", heads=4, kv_heads=2, n_queries=1, n_keys=4000)),
        ]
    ]
    cases += [
        Case("float32 d 512", dtype=np.dtype(np.float32), head_dim=512, n_queries=50, n_keys=130),
        Case("one query column", n_queries=1, n_keys=3000, head_dim=128, mask=columns_of),
    ]
    return cases


CASES = _cases()

# Heads whose backward takes its columns in by chunks.
WIDE_HEADS = [
    Case(f"{dtype} {name}", np.dtype(dtype), n_queries=90, n_keys=200, **options)
    for dtype in ("float32", "float64")
    for name, options in {
        "wide d 512": dict(head_dim=512),
        "wide d 300 dv 40 grouped": dict(head_dim=300, head_dim_v=40, heads=4),
        "wide dv 330": dict(head_dim_v=330),
        "wide d 320 dropout column causal": dict(
            head_dim=320, mask=columns_of, options={"dropout_p": 0.25, "rng": 9, "is_causal": "top_left"}
        ),
        "wide d 288 bias softcap": dict(head_dim=288, bias=bias_of(1, 0, 1, 1), options={"softcap": 5.0}),
    }.items()
]


def case_of(name: str, cases: list[Case] = CASES) -> Case:
    """Return the case of that name."""
    return next(case for case in cases if case.name == name)
