"""FlashMask's figure 4b: the memory of a mask against the length of the sequence, to 544K tokens.

    python -m bench.mask_memory

A column mask is four integers a key; measured is all that a forward with it allocates for it, tables of tiles included.
A dense mask is N x N; it is made (as bytes) and measured as long as it is small, and counted beyond.
"""

import cuattn
from bench import harness
from bench.harness import Point
from bench.mask_samples import column_mask, samples
from bench.memory import peak

__all__ = ["LENGTHS", "points"]

K = 1024
LENGTHS = tuple(n * K for n in (4, 8, 16, 32, 64, 128, 256, 544))
TINY = (512, 1024)
LARGEST_DENSE = 20 << 30  # bytes that are worth allocating to see them
D = 64


def measure_column(n, device):
    """Observe the first forward and backward with a mask: vectors on the device, tables, everything."""
    xp = harness.namespace(device)
    q, k, v, do = harness.random_arrays(xp, 4, (1, n, D), xp.float16 if device == "cuda" else xp.float32)
    mask = column_mask(samples("causal_document", n, 1))
    lengths = list(samples("causal_document", n, 1)[0].lengths)
    run(q, k, v, do, is_causal=True)
    with peak(device) as plain:
        run(q, k, v, do, is_causal=True)
    with peak(device) as masked:
        run(q, k, v, do, mask=mask)
    return {
        "problem": {"n": n, "documents": len(lengths)},
        "vectors_bytes": 16 * n,
        "mask_bytes": max(masked.bytes - plain.bytes, 16 * n),
        "peak_bytes": masked.bytes,
        "peak_without_mask_bytes": plain.bytes,
    }


def run(q, k, v, do, **options):
    """Compute forward and backward."""
    cuattn.backward(do, q, k, v, cuattn.forward(q, k, v, **options), **options)


def measure_dense(n, device):
    """Allocate a boolean matrix where that is reasonable."""
    found = {"problem": {"n": n}, "mask_bytes": n * n, "measured": False}
    if n * n <= LARGEST_DENSE:
        xp = harness.namespace(device)
        with peak(device) as used:
            mask = xp.ones((n, n), dtype=bool)
        del mask
        found |= {"mask_bytes": used.bytes, "measured": True}
    return found


def points(arguments):
    """Return one point per length."""

    def measure(n):
        return {"cuattn-column": measure_column(n, arguments.device), "dense": measure_dense(n, arguments.device)}

    lengths = TINY if arguments.tiny else LENGTHS
    return [Point(f"figure-4b/N{n}/memory", ("cuattn-column", "dense"), lambda n=n: measure(n)) for n in lengths]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "mask_memory", points))
