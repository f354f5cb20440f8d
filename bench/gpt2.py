"""FlashAttention's first figure on this GPU: GPT-2 medium's attention, forward and backward, by clock and by counters.

    python -m bench.gpt2

Batch 64, 16 heads, 1024 tokens, head dimension 64, float16, without and with dropout 0.1: the runtime of standard
attention, cuattn, FlashAttention-2, cuDNN, and the bytes that each moves to and from device memory (``ncu``).
"""

import functools

from bench import counters, inputs
from bench.cases import select
from bench.harness import Point
from bench.peers import make

RUNNERS = ("cuattn", "cuattn-sm80", "standard", "fa2", "cudnn")
KEPT = 4  # kernels that a row names, the ones that move most


def counted(name):
    """Return the call of ``CASE:RUNNER``, for `bench.counters`."""
    label, _, runner = name.partition(":")
    (case,) = (case for case in select(["gpt2"]) if case.label == label)
    bound = make([runner])[0].bind(case, inputs.make(case.problem, "cuda"))

    def call():
        with bound.scope():
            bound.call()

    return call


def count(case):
    """Return the bytes that each runner moves in a case."""
    names = tuple(f"{case.label}:{runner}" for case in select(["gpt2"]) for runner in RUNNERS)
    counts, rows = counters.count("bench.gpt2", names, counters.HBM), {}
    for runner in RUNNERS:
        kernels = sorted(counts[f"{case.label}:{runner}"], key=counters.moved, reverse=True)
        rows[runner] = {
            "problem": case.as_dict(),
            "counters": counters.total(kernels),
            "kernels": len(kernels),
            "heaviest": [{**kernel, "kernel": kernel["kernel"][:80]} for kernel in kernels[:KEPT]],
        }
        if not kernels:
            rows[runner] = {"status": "failed", "reason": "no kernel was counted; see the messages of the run"}
    return rows


def points(arguments):
    """Return what is counted."""
    return [
        Point(f"gpt2-bytes/{case.label}/{case.direction}", RUNNERS, functools.partial(count, case))
        for case in select(["gpt2"])
        if arguments.device == "cuda"
    ]


if __name__ == "__main__":
    from bench.suites import main

    raise SystemExit(main("gpt2"))
