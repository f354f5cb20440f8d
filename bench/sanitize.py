"""Run each feature of the Hopper forward once on a tiny problem, hostile masks included, for compute-sanitizer.

``compute-sanitizer --tool memcheck python -m bench.sanitize``
"""

from __future__ import annotations

from typing import Any

import numpy as np

BOUND = 2**31 - 1


def problems() -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Return (heads, queries, keys, head_dim, head_dim_v) and options of the problems."""
    import cupy

    from cuattn.masks import BlockMask, ColumnMask

    rng = np.random.default_rng(0)

    def hostile(n_queries: int, n_keys: int) -> ColumnMask:
        """Return a device mask whose bounds lie anywhere: they are clamped, never trusted."""
        vectors = rng.integers(-BOUND, BOUND, (4, n_keys), dtype=np.int32)
        return ColumnMask(*map(cupy.asarray, vectors), n_queries=n_queries)

    blocks = BlockMask(rng.random((7, 8)) < 0.5, 32, 40)
    return [
        ((2, 200, 300, 64, 64), {}),
        ((2, 200, 333, 128, 128), {"is_causal": "top_left"}),
        ((2, 200, 300, 256, 256), {"is_causal": "bottom_right"}),
        ((2, 200, 300, 192, 128), {"window": (40, 30, "bottom_right")}),
        ((2, 200, 300, 128, 128), {"mask": hostile(200, 300)}),
        ((2, 300, 300, 64, 64), {"mask": hostile(300, 300)}),
        ((2, 200, 300, 256, 256), {"mask": hostile(200, 300)}),
        ((2, 200, 300, 128, 128), {"mask": blocks, "dropout_p": 0.1, "rng": 3}),
        ((2, 200, 300, 64, 64), {"dropout_p": 0.1, "rng": 3}),
        ((2, 200, 300, 64, 64), {"softcap": 3.0, "out_dtype": np.float32}),
        ((150, 200, 60, 128, 128), {}),  # more row tiles than multiprocessors
    ]


def main() -> int:
    """Run the problems, naming each as it is done."""
    import cupy
    import ml_dtypes

    import cuattn

    rng = np.random.default_rng(1)
    for (heads, n_queries, n_keys, head_dim, head_dim_v), options in problems():
        shapes = ((n_queries, head_dim), (n_keys, head_dim), (n_keys, head_dim_v))
        arrays = [cupy.asarray(rng.standard_normal((1, heads, *x)).astype(ml_dtypes.bfloat16)) for x in shapes]
        cuattn.forward(*arrays, kernel="sm90", **options)
        cupy.cuda.Device().synchronize()
        print(heads, n_queries, n_keys, head_dim, head_dim_v, *options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
