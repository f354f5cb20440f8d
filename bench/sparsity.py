"""FlashMask's figure 4a: latency is linear in the mask's block sparsity.

    python -m bench.sparsity

32K tokens, 32 heads, head dimension 128, bfloat16, forward and backward.  As in the paper's appendix A.4, masks of
three kinds are drawn until every bucket of 0.05 in sparsity has its samples; a row holds one mask.
"""

import collections
import functools
import itertools

import ml_dtypes
import numpy as np

from bench import harness
from bench.harness import Calls, one
from bench.mask_samples import Sample, question_and_answers, split
from cuattn.reference.textbook import solve

HEADS, N, D = 32, 32768, 128
TINY = (2, 1024, 16)
WIDTH = 0.05
KINDS = {  # kind: documents at least and at most, lowest sparsity that has a bucket
    "causal_document": (2, 20, 0.5),
    "share_question": (1, 5, 0.5),
    "document": (2, 10, 0.0),
}
TRIES = 1000  # draws; a bucket that found too few samples by then is given up


def draw(kind, n, rng):
    """Draw a number of documents and their lengths, uniformly among all ways to cut the sequence."""
    fewest, most, _ = KINDS[kind]
    lengths = split(n, rng.exponential(size=int(rng.integers(fewest, most + 1))))
    lengths = parts = tuple(length for length in lengths if length)
    if kind == "share_question":
        parts = tuple(question_and_answers(rng, length) for length in lengths)
    return Sample(kind, n, (parts,), lengths)


def buckets(kind, n, count):
    """Return up to `count` masks of every bucket, with their sparsity, from the densest to the sparsest.

    Parameters
    ----------
    kind : str
        Key of `KINDS`.
    n, count : int
        Tokens, and masks per bucket of `WIDTH`.
    """
    rng, lowest = np.random.default_rng((7, list(KINDS).index(kind))), KINDS[kind][2]
    found = collections.defaultdict(list)
    for sample in (draw(kind, n, rng) for _ in range(TRIES)):
        rho = sample.column_mask().block_sparsity()
        place = int((rho - lowest) / WIDTH)
        if lowest <= rho < 1 and len(found[place]) < count:
            found[place].append((rho, sample))
    return sorted(itertools.chain(*found.values()), key=lambda pair: pair[0])


def measure(sample, rho, first, shape, device, seconds):
    """Time forward and backward with one mask; check the first."""
    heads, n, d = shape
    calls = Calls(*_arrays(device, shape), mask=harness.placed(sample.column_mask(), device))
    if first:
        check(sample, *calls.operands, calls.fwd.o)
    return {
        **harness.timed({"": calls.both}, device, seconds, least=3, most=20)[""],
        "rho": round(rho, 6),
        "problem": {"kind": sample.kind, "heads": heads, "n": n, "d": d, "documents": len(sample.lengths)},
    }


@functools.lru_cache(maxsize=1)
def _arrays(device, shape):
    dtype = ml_dtypes.bfloat16 if device == "cuda" else np.float32
    return harness.random_arrays(harness.namespace(device), 4, shape, dtype)


def check(sample, *operands):
    """Compare some rows of one head, of q, k, v and o, with the textbook's, on the host in float64."""
    q, k, v, o = (np.asarray(x[0].get() if hasattr(x, "get") else x[0], np.float32) for x in operands)
    rows = np.unique(np.linspace(0, len(q) - 1, 24).astype(int))
    visible = sample.column_mask().restrict([(i, i + 1) for i in rows]).dense()
    far = np.abs(o[rows] - solve(q[rows], k, v, visible=visible).o).max()
    if not far < 0.02:
        raise ValueError(f"{sample.kind}: o is {far:.2g} from the textbook's")


def points(arguments):
    """Yield one point per mask."""
    shape, device = TINY if arguments.tiny else (HEADS, N, D), arguments.device
    for kind in KINDS:
        for index, (rho, sample) in enumerate(buckets(kind, shape[1], arguments.samples)):
            case = f"figure-4a/{kind}-{index}-rho{rho:.3f}/both"
            yield one(case, "cuattn", measure, sample, rho, index == 0, shape, device, arguments.seconds)


SAMPLES = {"--samples": {"type": int, "default": 2, "help": "masks per bucket of sparsity"}}

if __name__ == "__main__":
    harness.main(__doc__, "sparsity", points, SAMPLES, seconds=0.0)
