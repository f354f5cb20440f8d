"""Run each feature of the portable kernels once on a tiny problem, hostile masks included, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m bench.sanitize_portable

Both directions in bfloat16, float32 and float64, few queries over many keys, merging.  ``--part 1/4`` takes every
fourth problem from number 1 on, as in ``bench.sanitize``, the same for the Hopper kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from bench.sanitize import blocks, hostile, read_arguments

_RNG = np.random.default_rng(0)


class Tiny(NamedTuple):
    """One problem: sizes, and the arguments of a forward."""

    heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    head_dim_v: int
    options: dict[str, Any]
    dtype: Any = ml_dtypes.bfloat16
    kv_heads: int | None = None
    backward: tuple[dict[str, Any], ...] = ()  # further arguments of each backward after it

    def run(self) -> None:
        """Compute it and wait for the device."""
        import cupy

        import cuattn

        kv_heads = self.kv_heads or self.heads
        shapes = (
            (self.heads, self.n_queries, self.head_dim),
            (kv_heads, self.n_keys, self.head_dim),
            (kv_heads, self.n_keys, self.head_dim_v),
        )
        arrays = [cupy.asarray(_RNG.standard_normal((1, *shape)).astype(self.dtype)) for shape in shapes]
        options = {**self.options, "kernel": "sm80", "enable_gqa": kv_heads != self.heads}
        fwd = cuattn.forward(*arrays, **options)
        options.pop("rng", None)
        for more in self.backward:
            do = cupy.asarray(_RNG.standard_normal(fwd.o.shape).astype(self.dtype))
            cuattn.backward(do, *arrays, fwd, **options, **more)
        cupy.cuda.Device().synchronize()


def problems() -> Iterator[Tiny]:
    """Yield the problems: per dtype, then decoding in parts, and heads by chunks of columns."""
    import cupy

    both = ({}, {"deterministic": True})
    for dtype in (ml_dtypes.bfloat16, np.float32, np.float64):
        bias = cupy.asarray(_RNG.standard_normal((1, 1, 70, 150)).astype(np.dtype(dtype)))
        seen = cupy.asarray(_RNG.random((1, 1, 70, 150)) < 0.6)
        for head_dim, options in [
            (64, {}),
            (128, {"mask": hostile(_RNG, 70, 150), "is_causal": "top_left"}),
            (64, {"mask": blocks(_RNG), "dropout_p": 0.2, "rng": 3}),
            (128, {"mask": seen, "bias": bias, "softcap": 4.0}),
            (40, {"window": (30, 20, "bottom_right"), "dropout_p": 0.2, "rng": 3}),
        ]:
            n_queries, n_keys = (200, 300) if head_dim == 64 and "mask" in options else (70, 150)
            yield Tiny(2, n_queries, n_keys, head_dim, head_dim, options, dtype, 1, both)
        yield Tiny(8, 1, 3000, 128, 128, {}, dtype, 2)  # parts that the last block merges
        yield Tiny(2, 20, 1500, 64, 64, {}, dtype)  # parts that another kernel merges
        yield Tiny(2, 1, 3000, 128, 128, {"mask": hostile(_RNG, 1, 3000)}, dtype)
        wide = 512 if dtype is ml_dtypes.bfloat16 else 300
        yield Tiny(1, 40, 70, wide, wide, {}, dtype, backward=() if wide == 512 else both)


def main() -> int:
    """Run the problems, naming each as it is done."""
    part, parts = read_arguments(__doc__.splitlines()[0])
    for problem in list(problems())[part::parts]:
        problem.run()
        print(np.dtype(problem.dtype), *problem[:5], *problem.options, len(problem.backward), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
