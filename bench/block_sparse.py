"""FlashAttention's figure 2, right: block-sparse runtime in proportion to the density, forward and backward.

    python -m bench.block_sparse

4096 tokens, head dimension 64, float16; blocks of 128 x 128, drawn at random, each row of blocks with the same share.
"""

import functools

import numpy as np

from bench import harness
from bench.harness import Calls, Point
from cuattn.masks import BlockMask

SHAPE = (16, 16, 4096, 64)
TINY = (1, 2, 256, 16)
BLOCK = 128
DENSITIES = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625)


def block_mask(n, density, block=BLOCK, seed=5):
    """Return a mask whose rows of blocks each see a share `density` of the blocks, the diagonal one always."""
    rng = np.random.default_rng(seed)
    count = -(-n // block)
    wanted = max(round(density * count), 1)
    blocks = np.eye(count, dtype=bool)
    for row in range(count):
        others = np.delete(np.arange(count), row)
        blocks[row, rng.choice(others, wanted - 1, replace=False)] = True
    return BlockMask(blocks, block, block)


def measure(density, device, shape, seconds):
    """Check one head against the dense twin of the mask, then time both directions."""
    xp = harness.namespace(device)
    operands = harness.random_arrays(xp, 4, shape, xp.float16 if device == "cuda" else xp.float32)
    n = shape[-2]
    mask = block_mask(n, density, BLOCK if n > BLOCK * 8 else 32)
    calls = Calls(*operands, mask=harness.placed(mask, device))
    twin = Calls(*(x[:1, :1] for x in operands), mask=xp.asarray(mask.dense(n, n)))
    far = float(abs(calls.fwd.o[:1, :1] - twin.fwd.o).max())
    if not far < 0.01:
        raise ValueError(f"the dense twin of the mask gives another result, {far:.2g} away")
    problem = {"shape": shape, "block": mask.block_m, "density": density}
    timed = harness.timed({"forward": calls.forward, "backward": calls.backward}, device, seconds)
    return {
        f"cuattn-{way}": {"problem": problem, "density": float(np.mean(mask.blocks)), **row, "plan": calls.plan(way)}
        for way, row in timed.items()
    }


def points(arguments):
    """Return one point per density."""
    about = arguments.device, TINY if arguments.tiny else SHAPE, arguments.seconds
    runners = ("cuattn-forward", "cuattn-backward")
    return [Point(f"block-sparse/s{s:g}/both", runners, functools.partial(measure, s, *about)) for s in DENSITIES]


if __name__ == "__main__":
    harness.main(__doc__, "block_sparse", points)
