"""Do the bytes follow the papers' theorems?  Theorem 2, Theorem 5 and Proposition 4 by hardware counters.

    python -m bench.traffic                       # a GPU and ncu
    python -m bench.traffic --device cpu --tiny   # the algorithms of cuattn.reference, which count their accesses

The theorems know one fast and one slow memory.  A GPU has an L2 cache between the two: what enters and leaves the
multiprocessors follows the theorems with M = their shared memory; what enters and leaves device memory is less, as long
as the L2 cache holds the keys of the heads at work.  Both are counted, and standard attention beside them.
"""

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

import cuattn
from bench import counters, harness
from bench.block_size import expected
from bench.block_sparse import block_mask
from bench.cases import Case
from bench.harness import Calls, Point, one
from bench.internals import BACKWARD_TILES, TILES, portable_tile
from bench.peers.pytorch import Standard
from cuattn import io_model, reference

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


@functools.cache
def calls():
    """Return everything that is counted (32 columns are 64 to the Hopper kernel and left out there)."""
    sizes = [(n, 64) for n in (512, 1024, 2048, 4096, 8192)] + [(4096, 32), (4096, 128)]
    found = [
        Call(study, kernel, HEADS, n, d)
        for study, (n, d), kernel in itertools.product(("theorem-2", "theorem-5"), sizes, ("sm80", "sm90", "standard"))
        if (kernel != "sm90" or d >= 64) and (kernel != "standard" or n <= LARGEST_SCORES)
    ]
    found += [Call("theorem-2", "sm80", HEADS, 4096, 64, block) for block in TILES]
    found += [Call("theorem-5", "sm80", HEADS, 4096, 64, block) for block in BACKWARD_TILES]
    found += [Call("proposition-4", "sm80", HEADS, 4096, 64, 0, 2.0**-i) for i in range(6)]
    found += [Call("beyond-l2", kernel, 1, n, 128) for n in (65536, 131072, 262144) for kernel in ("sm80", "sm90")]
    return found


def backward_reads(call, block_n):
    """Return the bytes that a backward with keys outside reads: k, v once; q, do and two statistics per block of keys.

    Before it o and do are read for D, and behind it the float32 sums of dq to round them.
    """
    once = 2 * call.n * call.d
    return call.heads * (6 * once + math.ceil(call.n / block_n) * (2 * once + 8 * call.n))


def tile_in(call):
    """Return the tile of a call that names its block."""
    return (BACKWARD_TILES if call.direction == "backward" else TILES)[call.block]


def ours(call):
    """Return the calls on the operands of one of ours."""
    cupy = harness.namespace("cuda")
    mask = {"mask": block_mask(call.n, call.density).to_device()} if call.study == "proposition-4" else {}
    return Calls(*arrays(cupy, call), kernel=call.kernel, **mask)


def arrays(xp, call):
    """Return q, k, v, do."""
    return harness.random_arrays(xp, 4, (call.heads, call.n, call.d), xp.float16)


def counted(name):
    """Return the call of a name, for `bench.counters`."""
    (call,) = (call for call in calls() if call.name == name)
    if call.kernel == "standard":
        return _standard(call)
    made = ours(call)
    if call.direction == "backward":
        made.fwd  # noqa: B018

    def run():
        with portable_tile(tile_in(call)) if call.block else contextlib.nullcontext():
            return getattr(made, call.direction)()

    return run


def _standard(call):
    """Return a call of the papers' standard attention, as `bench.peers` times it."""
    import torch

    operands = map(torch.from_dlpack, arrays(harness.namespace("cuda"), call))
    case = Case("", call.direction, 1, call.heads, call.heads, call.n, call.n, call.d, dtype="float16")
    return Standard().bind(case, SimpleNamespace(operands=operands)).call


def measure(call):
    """Return the counters of a call beside what the papers expect."""
    kernels = counters.count("bench.traffic", call.name, tuple(x.name for x in calls() if x.study == call.study))
    row = {"problem": vars(call), "counters": counters.total(kernels)}
    row["kernels"] = {kernel["kernel"][:60]: counters.moved(kernel) for kernel in kernels}
    if call.kernel == "standard":
        return row
    made = ours(call)
    tile = tile_in(call) if call.block else cuattn.plan(*made.operands, direction=call.direction, **made.options)
    row["problem"] = {**vars(call), "block_m": tile.block_m, "block_n": tile.block_n}
    backward = call.direction == "backward"
    forward = expected(call.heads, call.n, call.d, tile.block_m, call.density)
    return {**row, "expected_l2_to_sm": backward_reads(call, tile.block_n) if backward else forward}


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
        Point(f"theorems/d{d}-N{n}/both", runners, functools.partial(measure_reference, n, d, 8 * d * d))
        for n, d in sizes
    ]


if __name__ == "__main__":
    harness.main(__doc__, "traffic", points)
