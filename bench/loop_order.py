"""Does swapping FlashAttention's loops win?  The lecture's open question, by counters and by the clock.

    python -m bench.loop_order            # a GPU and ncu: the kernels of bench/studies/loop_order.cu

``keys-outside`` is algorithm 1 (O, l and m in device memory, O there in float32; ``-o16``: in the input's dtype, as the
papers count), ``queries-outside`` the lecture's change; both work with one block per head.  ``cuattn-sm80`` has the
inner code of both and works on all row tiles side by side.
"""

import functools
from typing import NamedTuple

import numpy as np

import cuattn
from bench import counters, harness, internals
from bench.harness import Point
from bench.reference import Head, textbook
from cuattn import io_model

BLOCK_N = 64  # keys of one inner step
ROUNDINGS = 2.0  # times the textbook's error, and one rounding of o per block of keys where o is stored in 16 bits


class Problem(NamedTuple):
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
    *(Problem(528, 4096, 64, block) for block in (64, 128, 256)),
    Problem(528, 8192, 64, 128),
    Problem(264, 4096, 128, 128),
)
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
    heads, n, d, block = problem
    blocks = -(-n // block)
    if runner == "queries-outside":
        read, written = 2 * n * d + blocks * 4 * n * d, 2 * n * d + 8 * n
        lecture = io_model.lecture_swapped_forward(n, d, problem.m)
    else:
        output = KERNELS[runner][2] * n * d + 8 * n  # o, l and m
        read, written = 4 * n * d + blocks * (2 * n * d + output), (1 + blocks) * output
        lecture = io_model.lecture_forward(n, d, problem.m)
    return {"expected_read": heads * read, "expected_write": heads * written, "lecture": heads * 2 * lecture}


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
    return tuple(constants.items()), 2 * problem.d * (2 * keys + 2 * block_m if outside else 4 * BLOCK_N + block_m)


def launcher(problem, runner, q, k, v):
    """Return a call that computes (o, l, m) with one of the kernels."""
    if runner not in KERNELS:
        return lambda: cuattn.forward(q, k, v, kernel=runner.removeprefix("cuattn-"))[:3]
    cupy = harness.namespace("cuda")
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
    return harness.random_arrays(xp, 3, problem[:3], xp.float16)


def check(problem, runner, operands, found):
    """Raise ValueError unless o of the first and the last head is as exact as the suite's rule asks."""
    import torch

    blocks = problem.n // problem.block if runner.endswith("o16") else 0
    for place in (0, problem.heads - 1):
        head = Head(*(torch.from_dlpack(x[place]) for x in operands))
        exact, rough = textbook(head)["o"], textbook(head, torch.float16)["o"]
        far = (torch.from_dlpack(found[0][place]).double() - exact).abs().max()
        allowed = ROUNDINGS * (rough - exact).abs().max() + (1 + blocks) * 2**-10 * exact.abs().max()
        if not bool(far <= allowed):
            raise ValueError(f"{runner} is {far:.2g} from the exact o; {allowed:.2g} is allowed")


def counted(name):
    """Return the call of ``LABEL/RUNNER``, for `bench.counters`."""
    label, runner = name.split("/")
    problem = {problem.label: problem for problem in PROBLEMS}[label]
    return launcher(problem, runner, *arrays(harness.namespace("cuda"), problem))


def measure(problem, seconds):
    """Check, time and count one problem with all runners."""
    operands = arrays(harness.namespace("cuda"), problem)
    calls = {runner: launcher(problem, runner, *operands) for runner in RUNNERS}
    for runner, call in calls.items():
        check(problem, runner, operands, call())
    timed = harness.timed(calls, "cuda", seconds)
    names = tuple(f"{p.label}/{runner}" for p in PROBLEMS for runner in RUNNERS)
    return {
        runner: {
            "problem": {**problem._asdict(), "m": problem.m},
            **timed[runner],
            **(expected(problem, runner) if runner in KERNELS else {}),
            "counters": counters.total(counters.count("bench.loop_order", f"{problem.label}/{runner}", names)),
        }
        for runner in RUNNERS
    }


def points(arguments):
    """Return what is measured, on a GPU alone: what the algorithms count in NumPy is in tests/reference."""
    problems = PROBLEMS if arguments.device == "cuda" else ()
    return [
        Point(f"loop-order/{p.label}/forward", RUNNERS, functools.partial(measure, p, arguments.seconds))
        for p in problems
    ]


if __name__ == "__main__":
    harness.main(__doc__, "loop_order", points)
