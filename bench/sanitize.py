"""Run each feature of the Hopper kernels once on a tiny problem, hostile masks included, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m bench.sanitize

``--part 1/4`` takes every fourth problem from number 1 on, so that several processes share the work; a run without the
sanitizer before it fills the disk cache of compiled kernels.  racecheck is slow: name the kernel that it is to watch,
``--kernel-name kns=attention_backward`` (``attention_forward``, ``backward_rows``), and give it one problem at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from bench.command import read_part

__all__ = ["blocks", "hostile", "read_arguments"]

BOUND = 2**31 - 1


def read_arguments(description: str) -> tuple[int, int]:
    """Read the command line; return which part of the problems to run, and of how many parts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--part", type=read_part, default=(0, 1), metavar="I/N", help="every N-th problem from number I on"
    )
    return parser.parse_args().part


def hostile(rng: np.random.Generator, n_queries: int, n_keys: int) -> Any:
    """Return a device mask whose bounds lie anywhere: they are clamped, never trusted."""
    import cupy

    from cuattn.masks import ColumnMask

    vectors = rng.integers(-BOUND, BOUND, (4, n_keys), dtype=np.int32)
    return ColumnMask(*map(cupy.asarray, vectors), n_queries=n_queries)


def blocks(rng: np.random.Generator) -> Any:
    """Return a mask of 7 x 8 blocks of 32 x 40."""
    from cuattn.masks import BlockMask

    return BlockMask(rng.random((7, 8)) < 0.5, 32, 40)


def problems() -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """Return (heads, queries, keys, head_dim, head_dim_v) and options of the problems."""
    rng = np.random.default_rng(0)
    some = blocks(rng)
    return [
        ((2, 200, 300, 64, 64), {}),
        ((2, 330, 300, 64, 64), {"is_causal": "bottom_right"}),  # rows before the first and past the last query
        ((2, 200, 333, 128, 128), {"is_causal": "top_left"}),
        ((2, 200, 300, 256, 256), {"is_causal": "bottom_right"}),
        ((2, 200, 300, 192, 128), {"window": (40, 30, "bottom_right")}),
        ((2, 200, 300, 128, 128), {"mask": hostile(rng, 200, 300)}),
        ((2, 300, 300, 64, 64), {"mask": hostile(rng, 300, 300)}),
        ((2, 200, 300, 256, 256), {"mask": hostile(rng, 200, 300)}),
        ((2, 200, 300, 128, 128), {"mask": some, "dropout_p": 0.1}),
        ((2, 200, 300, 64, 64), {"dropout_p": 0.1}),
        ((2, 200, 300, 128, 128), {"dropout_p": 0.1}),
        ((2, 200, 300, 64, 64), {"softcap": 3.0, "out_dtype": np.float32}),
        ((150, 200, 160, 128, 128), {}),  # more row tiles than multiprocessors
        ((1, 130, 200, 128, 128), {"deterministic": True}),
        ((2, 300, 300, 64, 64), {"deterministic": True, "is_causal": "top_left"}),
        ((1, 200, 300, 128, 128), {"deterministic": True, "mask": hostile(rng, 200, 300)}),
        ((1, 200, 300, 64, 64), {"deterministic": True, "mask": some, "window": (90, 30, "top_left")}),
    ]


def run(shape: tuple[int, ...], options: dict[str, Any], rng: np.random.Generator) -> str:
    """Run forward and backward of one problem; say which directions the Hopper kernels took."""
    import cupy
    import ml_dtypes

    import cuattn
    from cuattn.errors import UnsupportedError

    heads, n_queries, n_keys, head_dim, head_dim_v = shape
    shapes = ((n_queries, head_dim), (n_keys, head_dim), (n_keys, head_dim_v), (n_queries, head_dim_v))
    q, k, v, do = (cupy.asarray(rng.standard_normal((1, heads, *x)).astype(ml_dtypes.bfloat16)) for x in shapes)
    state = {"rng": 3} if "dropout_p" in options else {}
    forward = {name: value for name, value in options.items() if name != "deterministic"}
    fwd = cuattn.forward(q, k, v, kernel="sm90", **forward, **state)
    cupy.cuda.Device().synchronize()
    again = {name: value for name, value in options.items() if name != "out_dtype"}
    try:
        cuattn.backward(do, q, k, v, fwd, kernel="sm90", **again)
    except UnsupportedError as error:
        return f"forward; no backward: {error}"
    cupy.cuda.Device().synchronize()
    return "forward and backward"


def main() -> int:
    """Run the problems, naming each as it is done."""
    part, parts = read_arguments(__doc__.splitlines()[0])
    rng = np.random.default_rng(1)
    for shape, options in problems()[part::parts]:
        print(*shape, *options, run(shape, options, rng), sep=", ", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
