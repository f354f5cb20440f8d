"""FlashAttention's first figure on this GPU: GPT-2 medium's attention, forward and backward, by clock and by counters.

    python -m bench.gpt2

Batch 64, 16 heads, 1024 tokens, head dimension 64, float16, without and with dropout 0.1: the runtime of standard
attention, cuattn, FlashAttention-2, cuDNN, and the bytes that each moves to and from device memory (``ncu``).
"""

from __future__ import annotations

import functools
from typing import Any

from bench import counters, study
from bench.cases import Case, select
from bench.command import parser, run
from bench.peers import make
from bench.study import Point

__all__ = ["counted", "points"]

TABLES = ("gpt2",)
PEERS = {"": ("standard", "fa2", "cudnn")}
RUNNERS = ("cuattn", "cuattn-sm80", *PEERS[""])
KEPT = 4  # kernels that a row names, the ones that move most


def counted(name: str) -> Any:
    """Return the call of ``CASE:RUNNER``, for `bench.counters`."""
    from bench import inputs

    label, _, runner = name.partition(":")
    (case,) = (case for case in select(TABLES) if case.label == label)
    bound = make([runner])[0].bind(case, inputs.make(case.problem, "cuda"))

    def call() -> None:
        with bound.scope():
            bound.call()

    return call


@functools.lru_cache(maxsize=1)
def kernels_of_all() -> dict[str, list[dict[str, Any]]]:
    """Count all calls in one process."""
    names = [f"{case.label}:{runner}" for case in select(TABLES) for runner in RUNNERS]
    return counters.count("bench.gpt2", names, counters.HBM)


def count(case: Case) -> dict[str, dict[str, Any]]:
    """Return the bytes that each runner moves in a case."""
    rows = {}
    for runner in RUNNERS:
        kernels = kernels_of_all()[f"{case.label}:{runner}"]
        if not kernels:
            rows[runner] = {"status": "failed", "reason": "no kernel was counted; see the messages of the run"}
            continue
        heaviest = sorted(kernels, key=lambda kernel: -(kernel["hbm_read"] or 0) - (kernel["hbm_write"] or 0))
        rows[runner] = {
            "problem": case.as_dict(),
            "counters": counters.total(kernels),
            "kernels": len(kernels),
            "heaviest": [{**kernel, "kernel": kernel["kernel"][:80]} for kernel in heaviest[:KEPT]],
        }
    return rows


def points() -> list[Point]:
    """Return what is counted."""
    return [
        Point(f"gpt2-bytes/{case.label}/{case.direction}", RUNNERS, lambda case=case: count(case))
        for case in select(TABLES)
    ]


def main() -> int:
    """Time, then count."""
    found = parser(__doc__.splitlines()[0], TABLES, (), "bench/results/gpt2.json")
    found.set_defaults(ours=["cuattn", "cuattn-sm80"], most=60)
    arguments = found.parse_args()
    status = run(arguments, PEERS)
    if arguments.device == "cuda" and not arguments.list:
        arguments.tiny = False
        study.run(arguments, points())
    return status


if __name__ == "__main__":
    raise SystemExit(main())
