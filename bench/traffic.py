"""Do the bytes follow the papers' theorems?  Theorem 2, Theorem 5 and Proposition 4 by hardware counters.

    python -m bench.traffic                       # a GPU and ncu

The theorems know one fast and one slow memory.  A GPU has an L2 cache between the two: what enters and leaves the
multiprocessors follows the theorems with M = their shared memory; what enters and leaves device memory is less, as long
as the L2 cache holds the keys of the heads at work.  Both are counted, and standard attention beside them.
"""

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass, replace

import cuattn
from bench import counters, harness, inputs
from bench.block_size import expected
from bench.block_sparse import block_mask
from bench.cases import Case
from bench.harness import one
from bench.internals import BACKWARD_TILES, TILES, portable_tile
from bench.peers import make

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


def problem(call):
    """Return the case and the inputs of a call, and the options of its plan."""
    case = Case(call.study, call.direction, 1, call.heads, call.heads, call.n, call.n, call.d, dtype="float16")
    made, options = inputs.make(case, "cuda"), {"kernel": call.kernel, "direction": call.direction}
    if call.study == "proposition-4":
        options["mask"] = block_mask(call.n, call.density)
        made = replace(made, mask=options["mask"])
    return case, made, options


def counted(name):
    """Return the call of a name, for `bench.counters`."""
    call = {call.name: call for call in calls()}[name]
    case, made, _ = problem(call)
    (runner,) = make(["standard" if call.kernel == "standard" else f"cuattn-{call.kernel}"])
    bound = runner.bind(case, made)

    def run():
        with portable_tile(tile_in(call)) if call.block else contextlib.nullcontext():
            return bound.call()

    return run


def measure(call):
    """Return the counters of a call beside what the papers expect."""
    kernels = counters.count("bench.traffic", call.name, tuple(x.name for x in calls() if x.study == call.study))
    row = {"problem": vars(call), "counters": counters.total(kernels)}
    row["kernels"] = {kernel["kernel"][:60]: counters.moved(kernel) for kernel in kernels}
    if call.kernel == "standard":
        return row
    _, made, options = problem(call)
    tile = tile_in(call) if call.block else cuattn.plan(*made.operands[:3], **options)
    row["problem"] = {**vars(call), "block_m": tile.block_m, "block_n": tile.block_n}
    backward = call.direction == "backward"
    forward = expected(call.heads, call.n, call.d, tile.block_m, call.density)
    return {**row, "expected_l2_to_sm": backward_reads(call, tile.block_n) if backward else forward}


def points(arguments):
    """Return what is counted, on a GPU alone: what the algorithms count in NumPy is in tests/reference."""
    return [one(call.case, call.kernel, measure, call) for call in calls() if arguments.device == "cuda"]


if __name__ == "__main__":
    harness.main(__doc__, "traffic", points)
