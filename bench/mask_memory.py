"""FlashMask's figure 4b: the memory of a mask against the length of the sequence, to 544K tokens.

    python -m bench.mask_memory

A column mask is four integers a key; measured is all that a forward with it allocates for it, tables of tiles included.
A dense mask is N x N; it is made (as bytes) and measured as long as it is small, and counted beyond.
"""

import functools

from bench import harness
from bench.harness import Calls, Point, peak
from bench.mask_samples import column_mask, samples

LENGTHS = tuple(n << 10 for n in (4, 8, 16, 32, 64, 128, 256, 544))
TINY = (512, 1024)
LARGEST_DENSE = 20 << 30  # bytes that are worth allocating to see them
D = 64


def measure(n, device):
    """Observe the first forward and backward with a mask: vectors on the device, tables, everything; and a matrix."""
    xp = harness.namespace(device)
    operands = harness.random_arrays(xp, 4, (1, n, D), xp.float16 if device == "cuda" else xp.float32)
    drawn = samples("causal_document", n, 1)
    plain, masked = Calls(*operands, is_causal=True), Calls(*operands, mask=column_mask(drawn))
    plain.both()
    with peak(device) as without:
        plain.both()
    with peak(device) as whole:
        masked.both()
    dense = {"problem": {"n": n}, "mask_bytes": n * n, "measured": n * n <= LARGEST_DENSE}
    if dense["measured"]:
        with peak(device) as used:
            matrix = xp.ones((n, n), dtype=bool)
        del matrix
        dense["mask_bytes"] = used.bytes
    column = {
        "problem": {"n": n, "documents": len(drawn[0].lengths)},
        "vectors_bytes": 16 * n,
        "mask_bytes": max(whole.bytes - without.bytes, 16 * n),
        "peak_bytes": whole.bytes,
        "peak_without_mask_bytes": without.bytes,
    }
    return {"cuattn-column": column, "dense": dense}


def points(arguments):
    """Return one point per length."""
    lengths = TINY if arguments.tiny else LENGTHS
    runners = ("cuattn-column", "dense")
    return [Point(f"figure-4b/N{n}/memory", runners, functools.partial(measure, n, arguments.device)) for n in lengths]


if __name__ == "__main__":
    harness.main(__doc__, "mask_memory", points)
