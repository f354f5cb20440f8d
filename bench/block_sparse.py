"""FlashAttention's figure 2, right: block-sparse runtime in proportion to the density, forward and backward.

    python -m bench.block_sparse

4096 tokens, head dimension 64, float16; blocks of 128 x 128, drawn at random, each row of blocks with the same share.
"""

import numpy as np

import cuattn
from bench import harness, timing
from bench.harness import Point
from cuattn.masks import BlockMask

__all__ = ["block_mask", "points"]

STUDY = "block-sparse"
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
    q, k, v, do = harness.random_arrays(xp, 4, shape, xp.float16 if device == "cuda" else xp.float32)
    n = shape[-2]
    mask = block_mask(n, density, BLOCK if n > BLOCK * 8 else 32)
    blocks = float(np.mean(mask.blocks))
    one = (slice(0, 1), slice(0, 1))
    o = cuattn.forward(q, k, v, mask=mask).o[one]
    dense = xp.asarray(mask.dense(n, n))
    far = float(abs(o - cuattn.forward(q[one], k[one], v[one], mask=dense).o).max())
    if not far < 0.01:
        raise ValueError(f"the dense twin of the mask gives another result, {far:.2g} away")
    mask = mask.to_device() if device == "cuda" else mask
    fwd = cuattn.forward(q, k, v, mask=mask)
    samples = timing.measure(
        {
            "forward": lambda: cuattn.forward(q, k, v, mask=mask),
            "backward": lambda: cuattn.backward(do, q, k, v, fwd, mask=mask),
        },
        harness.clock(device),
        seconds=seconds,
    )
    common = {"problem": {"shape": shape, "block": mask.block_m, "density": density}, "density": blocks}
    return {
        f"cuattn-{direction}": {
            **common,
            **timing.timed(taken),
            "plan": str(cuattn.plan(q, k, v, mask=mask, direction=direction)),
        }
        for direction, taken in samples.items()
    }


def points(arguments):
    """Return one point per density."""
    device, shape = arguments.device, TINY if arguments.tiny or arguments.device == "cpu" else SHAPE
    runners = ("cuattn-forward", "cuattn-backward")
    return [
        Point(f"{STUDY}/s{s:g}/both", runners, lambda s=s: measure(s, device, shape, arguments.seconds))
        for s in DENSITIES
    ]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "block_sparse", points))
