"""FlashAttention's first figure on this GPU: GPT-2 medium's attention, forward and backward, by clock and by counters.

    python -m bench.gpt2

Batch 64, 16 heads, 1024 tokens, head dimension 64, float16, without and with dropout 0.1: the runtime of standard
attention, cuattn, FlashAttention-2, cuDNN, and the bytes that each moves to and from device memory (``ncu``).
"""

from bench import counters, inputs
from bench.cases import select
from bench.compare import scoped
from bench.harness import one
from bench.peers import make
from bench.suites import SUITES

RUNNERS = (*SUITES["gpt2"].ours, "standard", "fa2", "cudnn")  # which all can drop
KEPT = 4  # kernels that a row names, the ones that move most


def counted(name):
    """Return the call of ``CASE:RUNNER``, for `bench.counters`."""
    label, _, runner = name.partition(":")
    case = {case.label: case for case in select(["gpt2"])}[label]
    return scoped(make([runner])[0].bind(case, inputs.make(case.problem, "cuda")))


def count(case, runner):
    """Return the bytes that a runner moves in a case."""
    names = tuple(f"{case.label}:{runner}" for case in select(["gpt2"]) for runner in RUNNERS)
    kernels = counters.count("bench.gpt2", f"{case.label}:{runner}", names, counters.HBM)
    kernels = sorted(kernels, key=counters.moved, reverse=True)
    return {
        "problem": case.as_dict(),
        "counters": counters.total(kernels),
        "kernels": len(kernels),
        "heaviest": [{**kernel, "kernel": kernel["kernel"][:80]} for kernel in kernels[:KEPT]],
    }


def points(arguments):
    """Return what is counted."""
    return [
        one(f"gpt2-bytes/{case.label}/{case.direction}", runner, count, case, runner)
        for case in select(["gpt2"])
        for runner in RUNNERS
        if arguments.device == "cuda" and not arguments.tiny
    ]


if __name__ == "__main__":
    from bench.suites import main

    raise SystemExit(main("gpt2"))
