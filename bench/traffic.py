"""Do the bytes follow the papers' theorems?  Theorem 2, Theorem 5 and Proposition 4 by hardware counters.

    python -m bench.traffic                       # a GPU and ncu
    python -m bench.traffic --device cpu --tiny   # the algorithms of cuattn.reference, which count their accesses

The theorems know one fast and one slow memory.  A GPU has an L2 cache between the two: what enters and leaves the
multiprocessors follows the theorems with M = their shared memory; what enters and leaves device memory is less, as long
as the L2 cache holds the keys of the heads at work.  Both are counted, and standard attention beside them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

import numpy as np

import cuattn
from bench import counters, harness
from bench.block_sparse import block_mask
from bench.harness import Point, one
from bench.internals import BACKWARD_TILES, TILES, portable_tile
from cuattn import io_model, reference

__all__ = ["Call", "counted", "expected_reads", "points"]

HEADS = 64
LARGEST_SCORES = 4096  # tokens up to which standard attention is counted: ncu saves and restores its score matrices


@dataclass(frozen=True)
class Call:
    """One call to count: `heads` heads of (n, d) float16 arrays.

    Attributes
    ----------
    study : str
        What it belongs to: "theorem-2", "theorem-5", "proposition-4" or "beyond-l2".
    kernel : str
        "sm80", "sm90", or "standard" for standard attention in PyTorch.
    heads, n, d : int
        Shape.
    block : int
        Size of the block that stays on the chip where the study varies it (forward: rows, backward: keys); 0 = the
        plan's.
    density : float
        Share of blocks that a block mask shows.
    """

    study: str
    kernel: str
    heads: int
    n: int
    d: int
    block: int = 0
    density: float = 1.0

    @property
    def direction(self):
        """What is computed."""
        return "backward" if self.study == "theorem-5" else "forward"

    @property
    def case(self):
        """Name of the row, without its runner."""
        label = f"d{self.d}-N{self.n}" + (f"-B{self.block}" if self.block else "")
        label += f"-s{self.density:g}" if self.study == "proposition-4" else ""
        return f"{self.study}/{label}/{self.direction}"

    @property
    def name(self):
        """Unique name."""
        return f"{self.case}:{self.kernel}"


def calls():
    """Return everything that is counted (32 columns are 64 to the Hopper kernel and left out there)."""
    sizes = [(n, 64) for n in (512, 1024, 2048, 4096, 8192)] + [(4096, 32), (4096, 128)]
    with_scores = [(n, d) for n, d in sizes if n <= LARGEST_SCORES]
    ours = [(kernel, n, d) for n, d in sizes for kernel in ("sm80", "sm90") if kernel == "sm80" or d >= 64]
    found = [Call("theorem-2", kernel, HEADS, n, d) for kernel, n, d in ours]
    found += [Call(study, "standard", HEADS, n, d) for study in ("theorem-2", "theorem-5") for n, d in with_scores]
    found += [Call("theorem-2", "sm80", HEADS, 4096, 64, block) for block in TILES]
    found += [Call("theorem-5", kernel, HEADS, n, d) for kernel, n, d in ours]
    found += [Call("theorem-5", "sm80", HEADS, 4096, 64, block) for block in BACKWARD_TILES]
    found += [Call("proposition-4", "sm80", HEADS, 4096, 64, 0, 2.0**-i) for i in range(6)]
    found += [Call("beyond-l2", kernel, 1, n, 128) for n in (65536, 131072, 262144) for kernel in ("sm80", "sm90")]
    return found


def expected_reads(call, block_m):
    """Return the bytes that a forward reads with `block_m` query rows on the chip: q once, k and v once per block."""
    once = 2 * call.n * call.d
    return call.heads * (once + call.density * 2 * once * math.ceil(call.n / block_m))


def backward_reads(call, block_n):
    """Return the bytes that a backward with keys outside reads: k, v once; q, do and two statistics per block of keys.

    Before it o and do are read for D, and behind it the float32 sums of dq to round them.
    """
    once = 2 * call.n * call.d
    return call.heads * (2 * once + math.ceil(call.n / block_n) * (2 * once + 8 * call.n) + 2 * once + 2 * once)


def tile_of(call):
    """Return the block sizes that a kernel of ours works with."""
    import cupy

    if call.kernel == "standard":
        return {}
    q = cupy.empty((call.heads, call.n, call.d), cupy.float16)
    tile = tile_in(call) if call.block else cuattn.plan(q, q, q, direction=call.direction, **options(call))
    return {"block_m": tile.block_m, "block_n": tile.block_n}


def tile_in(call):
    """Return the tile of a call that names its block."""
    return BACKWARD_TILES[call.block] if call.direction == "backward" else TILES[call.block]


def options(call):
    """Return the keyword arguments of `cuattn.forward` and `backward`."""
    mask = {"mask": block_mask(call.n, call.density).to_device()} if call.study == "proposition-4" else {}
    return {"kernel": call.kernel, **mask}


def counted(name):
    """Return the call of a name, for `bench.counters`."""
    import cupy

    (call,) = (call for call in calls() if call.name == name)
    q, k, v, do = harness.random_arrays(cupy, 4, (call.heads, call.n, call.d), cupy.float16)
    if call.kernel == "standard":
        return _standard(call, q, k, v, do)
    wanted = options(call)
    if call.direction == "backward":
        fwd = cuattn.forward(q, k, v, **wanted)

    def ours():
        with portable_tile(tile_in(call)) if call.block else contextlib.nullcontext():
            if call.direction == "backward":
                return cuattn.backward(do, q, k, v, fwd, **wanted)
            return cuattn.forward(q, k, v, **wanted)

    return ours


def _standard(call, *arrays):
    import torch

    q, k, v, do = map(torch.from_dlpack, arrays)
    scale = call.d**-0.5
    if call.direction == "forward":
        return lambda: torch.softmax(scale * q @ k.transpose(-2, -1), dim=-1) @ v
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = torch.softmax(scale * leaves[0] @ leaves[1].transpose(-2, -1), dim=-1) @ leaves[2]
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


@functools.lru_cache(maxsize=8)
def kernels_of(study):
    """Count all calls of a study in one process."""
    return counters.count("bench.traffic", [call.name for call in calls() if call.study == study], timeout=120)


def measure(call):
    """Return the counters of a call beside what the papers expect."""
    kernels = kernels_of(call.study)[call.name]
    if not kernels:
        return {"status": "failed", "reason": "no kernel was counted; see the messages of the run"}
    tile = tile_of(call)
    backward = call.direction == "backward"
    block = tile.get("block_n" if backward else "block_m", 0)
    row = {"problem": {**vars(call), **tile}, "counters": counters.total(kernels)}
    row["kernels"] = {kernel["kernel"][:60]: counters.moved(kernel) for kernel in kernels}
    if block:
        row["expected_l2_to_sm"] = backward_reads(call, block) if backward else expected_reads(call, block)
    return row


def measure_reference(n, d, m):
    """Count the accesses of the papers' algorithms in NumPy, in elements of one head."""
    q, k, v, do = (x.astype(np.float64) for x in harness.random_arrays(np, 4, (n, d), np.float32))
    flash, standard = reference.flash_forward(q, k, v, m), reference.standard_forward(q, k, v, m)
    back = reference.flash_backward(do, q, k, v, flash, m)
    rows = {
        "algorithm-2": (flash.counts, io_model.theorem_2_flash(n, d, m)),
        "algorithm-4": (back.counts, io_model.theorem_2_flash(n, d, m)),
        "algorithm-0": (standard.counts, io_model.theorem_2_standard(n, d)),
    }
    return {
        name: {"problem": {"n": n, "d": d, "m": m}, "elements": counts.reads + counts.writes, "theorem": theorem}
        for name, (counts, theorem) in rows.items()
    }


def points(arguments):
    """Return what is counted."""
    if arguments.device == "cuda":
        return [one(call.case, call.kernel, measure, call) for call in calls()]
    sizes = [(128, 16), (256, 16)] if arguments.tiny else [(n, 64) for n in (256, 512, 1024)]
    runners = ("algorithm-2", "algorithm-4", "algorithm-0")
    return [
        Point(f"theorems/d{d}-N{n}/both", runners, lambda n=n, d=d: measure_reference(n, d, 8 * d * d))
        for n, d in sizes
    ]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "traffic", points))
