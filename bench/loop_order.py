"""Does swapping FlashAttention's loops win?  The lecture's open question, by counters and by the clock.

    python -m bench.loop_order            # a GPU and ncu: the kernels of bench/studies/loop_order.cu
    python -m bench.loop_order --device cpu --tiny    # the algorithms of cuattn.reference, which count their accesses

``keys-outside`` is algorithm 1 (O, l and m in device memory, O there in float32; ``-o16``: in the input's dtype, as the
papers count), ``queries-outside`` the lecture's change; both work with one block per head.  ``cuattn-sm80`` has the
inner code of both and works on all row tiles side by side.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from bench import counters, harness, internals, timing
from bench.harness import Point
from cuattn import io_model, reference

__all__ = ["Problem", "counted", "expected", "points"]

STUDY = "loop-order"
BLOCK_N = 64  # keys of one inner step
ROUNDINGS = 2.0  # times the textbook's error, and one rounding of o per block of keys where o is stored in 16 bits


@dataclass(frozen=True)
class Problem:
    """`heads` heads of (n, d) float16 arrays, and a block of `block` keys (keys outside) or rows (queries outside)."""

    heads: int
    n: int
    d: int
    block: int

    @property
    def label(self):
        """The problem in a word."""
        return f"d{self.d}-N{self.n}-B{self.block}"

    @property
    def m(self):
        """The papers' M: the on-chip memory, in elements, whose block size is `block`."""
        return 4 * self.d * self.block


PROBLEMS = (
    Problem(528, 1024, 64, 128),
    Problem(528, 4096, 64, 64),
    Problem(528, 4096, 64, 128),
    Problem(528, 4096, 64, 256),
    Problem(528, 8192, 64, 128),
    Problem(264, 4096, 128, 128),
)
TINY = (Problem(2, 128, 16, 32), Problem(2, 256, 16, 64))
KERNELS = {  # runner: kernel, C++ type and bytes of o in memory
    "keys-outside": ("attention_keys_outside", "float", 4),
    "keys-outside-o16": ("attention_keys_outside", "__half", 2),
    "queries-outside": ("attention_queries_outside", "__half", 2),
}
RUNNERS = (*KERNELS, "cuattn-sm80")


def expected(problem, runner):
    """Return the bytes that a kernel reads and writes in all, and what the lecture's formula says.

    float16 arrays, float32 l and m; o as the kernel stores it.
    """
    n, d, m = problem.n, problem.d, problem.m
    blocks = -(-n // problem.block)
    if runner == "queries-outside":
        read = 2 * n * d + blocks * 4 * n * d
        written = 2 * n * d + 8 * n
        lecture = io_model.lecture_swapped_forward(n, d, m)
    else:
        output = KERNELS[runner][2] * n * d + 8 * n  # o, l and m
        read = 4 * n * d + blocks * (2 * n * d + output)
        written = (1 + blocks) * output
        lecture = io_model.lecture_forward(n, d, m)
    found = {"expected_read": read, "expected_write": written, "lecture": 2 * lecture}
    return {key: problem.heads * value for key, value in found.items()}


def geometry(problem, runner):
    """Return the kernel's constants and its shared memory."""
    outside = runner.startswith("keys")
    block_m = min(problem.block, problem.d) if outside else problem.block
    warps = 4 if block_m <= 64 else 8
    keys = problem.block if outside else BLOCK_N
    constants = {
        "elem": "__half", "acc": "float", "out": KERNELS[runner][1], "bias_elem": "float",
        "head_dim": problem.d, "head_dim_v": problem.d, "block_m": block_m, "block_n": BLOCK_N, "keys_on_chip": keys,
        "warps": warps, "stages": 2, "min_blocks": 2 if warps == 4 else 1, "mask": 0, "dropout": 0, "tf32": False,
    }  # fmt: skip
    row = 2 * problem.d
    shared = row * (2 * keys + 2 * block_m) if outside else row * (4 * BLOCK_N + block_m)
    return tuple(constants.items()), shared


def launcher(problem, runner, q, k, v):
    """Return a call that computes (o, l, m) with one of the kernels."""
    import cupy

    import cuattn

    if runner not in KERNELS:
        return lambda: cuattn.forward(q, k, v, kernel=runner.removeprefix("cuattn-"))[:3]
    name, out, _ = KERNELS[runner]
    constants, shared = geometry(problem, runner)
    kernel = internals.study_kernel("loop_order.cu", name, constants, shared)
    threads = 32 * dict(constants)["warps"]
    scale = np.float32(problem.d**-0.5)

    def call():
        o = cupy.empty(q.shape, cupy.float32 if out == "float" else cupy.float16)
        l, m = (cupy.empty(q.shape[:-1], cupy.float32) for _ in range(2))
        kernel((problem.heads,), (threads,), (q, k, v, o, l, m, np.int32(problem.n), scale), shared)
        return o, l, m

    return call


def arrays(xp, problem):
    """Return q, k and v."""
    return harness.random_arrays(xp, 3, (problem.heads, problem.n, problem.d), xp.float16)


def check(problem, runner, operands, found):
    """Raise ValueError unless o of the first and the last head is as exact as the suite's rule asks."""
    import torch

    from bench.reference import Visible, textbook

    blocks = problem.n // problem.block if runner.endswith("o16") else 0
    for head in (0, problem.heads - 1):
        q, k, v = (torch.from_dlpack(x[head]) for x in operands)
        exact = textbook(q, k, v, None, Visible())["o"]
        rough = textbook(q, k, v, None, Visible(), rounded_to=torch.float16)["o"]
        o = torch.from_dlpack(found[0][head]).double()
        allowed = ROUNDINGS * (rough - exact).abs().max() + (1 + blocks) * 2**-10 * exact.abs().max()
        if not bool((o - exact).abs().max() <= allowed):
            raise ValueError(f"{runner} is {(o - exact).abs().max():.2g} from the exact o; {allowed:.2g} is allowed")


def counted(name):
    """Return the call of ``LABEL/RUNNER``, for `bench.counters`."""
    import cupy

    label, runner = name.split("/")
    (problem,) = (problem for problem in PROBLEMS if problem.label == label)
    return launcher(problem, runner, *arrays(cupy, problem))


@functools.lru_cache(maxsize=1)
def traffic(names):
    """Count all calls in one process."""
    found = counters.count("bench.loop_order", names, timeout=240)
    return {name: counters.total(kernels) for name, kernels in found.items()}


def measure(problem, seconds):
    """Check, time and count one problem with all runners."""
    import cupy

    q, k, v = arrays(cupy, problem)
    calls = {runner: launcher(problem, runner, q, k, v) for runner in RUNNERS}
    for runner, call in calls.items():
        check(problem, runner, [q, k, v], call())
    samples = timing.measure(calls, harness.clock("cuda"), seconds=seconds)
    counts = traffic(tuple(f"{p.label}/{runner}" for p in PROBLEMS for runner in RUNNERS))
    rows = {}
    for runner in RUNNERS:
        model = expected(problem, runner) if runner in KERNELS else {}
        rows[runner] = {**describe(problem), **timing.timed(samples[runner]), **model}
        rows[runner]["counters"] = counts[f"{problem.label}/{runner}"]
    return rows


def measure_reference(problem):
    """Count the accesses of the papers' algorithms in NumPy, in elements of one head."""
    q, k, v = (x[0].astype(np.float64) for x in arrays(np, problem))
    n, d, m = problem.n, problem.d, problem.m
    rows = {}
    for name, algorithm, lecture in (
        ("keys-outside", functools.partial(reference.flash_forward, scale=1), io_model.lecture_forward(n, d, m)),
        ("queries-outside", reference.swapped_forward, io_model.lecture_swapped_forward(n, d, m)),
    ):
        counts = algorithm(q, k, v, m).counts
        rows[name] = {**describe(problem), "elements": counts.reads + counts.writes, "lecture": lecture}
    return rows


def describe(problem):
    """Return the part of a row that says what was computed."""
    return {"problem": {"heads": problem.heads, "n": problem.n, "d": problem.d, "block": problem.block, "m": problem.m}}


def points(arguments):
    """Return what is measured."""
    if arguments.device == "cpu":
        problems, runners = TINY if arguments.tiny else TINY + PROBLEMS[:1], ("keys-outside", "queries-outside")
        return [Point(f"{STUDY}/{p.label}/forward", runners, lambda p=p: measure_reference(p)) for p in problems]
    return [Point(f"{STUDY}/{p.label}/forward", RUNNERS, lambda p=p: measure(p, arguments.seconds)) for p in PROBLEMS]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "loop_order", points))
