"""FlashAttention's figure 2, middle: the forward's runtime and bytes against the size of its blocks.

    python -m bench.block_size

GPT-2 medium's attention (batch 64, 16 heads, 1024 tokens, head dimension 64, float16) on the portable kernel, with
16 to 256 query rows to a block.  Each block reads all keys and values once: larger blocks read less, until something
else is the limit.
"""

import functools

import cuattn
from bench import counters, harness
from bench.harness import one
from bench.internals import TILES, portable_tile

__all__ = ["counted", "expected", "points"]

STUDY = "block-size"
SHAPE = (64, 16, 1024, 64)
TINY = (2, 2, 96, 16)
RUNNER = "cuattn-sm80"


def expected(shape, block_m):
    """Return the bytes that a forward reads from the L2 cache: q once, k and v once per block of rows (float16)."""
    batch, heads, n, d = shape
    return 2 * batch * heads * n * d * (1 + 2 * -(-n // block_m))


def forward(xp, shape, block_m):
    """Return a call of the forward, with the portable kernel's blocks of `block_m` rows where there are any."""
    q, k, v = harness.random_arrays(xp, 3, shape, xp.float16)
    if block_m is None:
        return lambda: cuattn.forward(q, k, v)
    tile = TILES[block_m]

    def call():
        with portable_tile(tile):
            return cuattn.forward(q, k, v, kernel="sm80")

    return call


def counted(name):
    """Return the call with blocks of `name` rows, for `bench.counters`."""
    import cupy

    return forward(cupy, SHAPE, int(name))


@functools.lru_cache(maxsize=1)
def traffic():
    """Count all calls in one process."""
    names = [str(block_m) for block_m in TILES]
    return {name: counters.total(kernels) for name, kernels in counters.count("bench.block_size", names).items()}


def measure(block_m, seconds):
    """Check, time and count one block size."""
    import cupy

    call = forward(cupy, SHAPE, block_m)
    plain = forward(cupy, SHAPE, None)
    far = float(abs(call().o.astype(cupy.float32) - plain().o.astype(cupy.float32)).max())
    if not far < 0.01:
        raise ValueError(f"blocks of {block_m} rows give another result, {far:.2g} away")
    return {
        **harness.timed(call, "cuda", seconds),
        "problem": {"shape": SHAPE, "block_m": block_m, "tile": TILES[block_m]._asdict()},
        "expected_l2_to_sm": expected(SHAPE, block_m),
        "counters": traffic()[str(block_m)],
    }


def measure_host(seconds):
    """Time the CPU backend, which has tiles of its own."""
    import numpy as np

    return {**harness.timed(forward(np, TINY, None), "cpu", seconds), "problem": {"shape": TINY}}


def points(arguments):
    """Return what is measured."""
    if arguments.device == "cpu":
        return [one(f"{STUDY}/cpu/forward", "cuattn-cpu", measure_host, arguments.seconds)]
    return [one(f"{STUDY}/B{block}/forward", RUNNER, measure, block, arguments.seconds) for block in TILES]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "block_size", points))
