"""FlashAttention's figure 2, middle: the forward's runtime and bytes against the size of its blocks.

    python -m bench.block_size

GPT-2 medium's attention (batch 64, 16 heads, 1024 tokens, head dimension 64, float16) on the portable kernel, with
16 to 256 query rows to a block.  Each block reads all keys and values once: larger blocks read less, until something
else is the limit.
"""

import math

from bench import counters, harness
from bench.harness import Calls, one
from bench.internals import TILES, portable_tile

SHAPE = (64, 16, 1024, 64)
NAMES = tuple(map(str, TILES))


def expected(heads, n, d, block_m, density=1.0):
    """Return the bytes that a forward reads from the L2 cache: q once, k and v once per block of rows (float16)."""
    return 2 * heads * n * d * (1 + density * 2 * math.ceil(n / block_m))


def counted(name):
    """Return the call with blocks of `name` rows, for `bench.counters`."""
    calls = Calls(*harness.random_arrays(harness.namespace("cuda"), 3, SHAPE, "float16"), kernel="sm80")

    def call():
        with portable_tile(TILES[int(name)]):
            return calls.forward()

    return call


def measure(name, seconds):
    """Check, time and count one block size."""
    call = counted(name)
    plain = Calls(*harness.random_arrays(harness.namespace("cuda"), 3, SHAPE, "float16")).forward()
    far = float(abs(call().o.astype("float32") - plain.o.astype("float32")).max())
    if not far < 0.01:
        raise ValueError(f"blocks of {name} rows give another result, {far:.2g} away")
    return {
        **harness.timed({"": call}, "cuda", seconds)[""],
        "problem": {"shape": SHAPE, "block_m": int(name), "tile": TILES[int(name)]._asdict()},
        "expected_l2_to_sm": expected(SHAPE[0] * SHAPE[1], *SHAPE[2:], int(name)),
        "counters": counters.total(counters.count("bench.block_size", NAMES)[name]),
    }


def points(arguments):
    """Return what is measured."""
    return [one(f"block-size/B{name}/forward", "cuattn-sm80", measure, name, arguments.seconds) for name in NAMES]


if __name__ == "__main__":
    harness.main(__doc__, "block_size", points)
