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
TINY = 256  # tokens


def expected(heads, n, d, block_m, density=1.0):
    """Return the bytes that a forward reads from the L2 cache: q once, k and v once per block of rows (float16)."""
    return 2 * heads * n * d * (1 + density * 2 * math.ceil(n / block_m))


def counted(name):
    """Return the call of a block and a number of tokens, for `bench.counters`."""
    block, n = map(int, name.split("-"))
    calls = Calls(*_operands(n), kernel="sm80")

    def call():
        with portable_tile(TILES[block]):
            return calls.forward()

    return call


def _operands(n):
    return harness.random_arrays(harness.namespace("cuda"), 3, (*SHAPE[:2], n, SHAPE[3]), "float16")


def measure(block, n, seconds):
    """Check, time and count one block size."""
    name = f"{block}-{n}"
    call, plain = counted(name), Calls(*_operands(n)).forward()
    far = float(abs(call().o.astype("float32") - plain.o.astype("float32")).max())
    if not far < 0.01:
        raise ValueError(f"blocks of {block} rows give another result, {far:.2g} away")
    return {
        **harness.timed({"": call}, "cuda", seconds)[""],
        "problem": {"shape": plain.o.shape, "block_m": block, "tile": TILES[block]._asdict()},
        "expected_l2_to_sm": expected(SHAPE[0] * SHAPE[1], n, SHAPE[3], block),
        "counters": counters.total(counters.count("bench.block_size", name, tuple(f"{b}-{n}" for b in TILES))),
    }


def points(arguments):
    """Return what is measured: on a GPU alone, for the CPU has no such blocks."""
    n, blocks = TINY if arguments.tiny else SHAPE[2], TILES if arguments.device == "cuda" else ()
    return [one(f"block-size/B{b}/forward", "cuattn-sm80", measure, b, n, arguments.seconds) for b in blocks]


if __name__ == "__main__":
    harness.main(__doc__, "block_size", points)
