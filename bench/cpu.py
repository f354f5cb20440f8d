"""Measure the CPU backend: beside PyTorch and the NumPy formula, its own time under a mask, its memory.

    python -m bench.cpu
    python -m bench.cpu --beside PATH    # another checkout of cuattn instead of PyTorch

float32, with as many threads as the machine has cores.  ``cuattn-attention`` gives o alone, as PyTorch's function does,
``cuattn`` the statistics l and m too.  PyTorch takes a mask as a dense boolean matrix (``sdpa-dense``), or is called
once per document (``sdpa-documents``); ``numpy`` are the three lines of the formula.  Results are checked before
anything is timed; rivals run in turn, after a pause.  To see whether its time under a mask follows the visible tiles,
cuattn alone is timed under every mask and without one in turn, at N = 4096 and 16384.

Where other work runs, ``chrt -f 1 python -m bench.cpu`` gives the cores to whichever rival is being timed.
"""

import functools

import numpy as np

import cuattn
from bench import harness, timing
from bench.harness import Point
from bench.mask_samples import column_mask, samples
from bench.memory import peak
from bench.rows import cores

__all__ = ["points"]

HEADS, D = 8, 64
TURNS = {4096: 11, 16384: 3}
LONG = 16384
MASKS = ("none", "causal_document", "sliding_window", "share_question")


def measure(n, backward):
    """Time cuattn at a length under every mask, in turn."""
    q, k, v, do = harness.random_arrays(np, 4, (HEADS, n, D), np.float32, seed=2)
    masks = {kind: None if kind == "none" else column_mask(samples(kind, n, 1)) for kind in MASKS}

    def both(mask):
        cuattn.backward(do, q, k, v, cuattn.forward(q, k, v, mask=mask), mask=mask)

    def forward(mask):
        cuattn.attention(q, k, v, mask=mask)

    calls = {kind: functools.partial(both if backward else forward, mask) for kind, mask in masks.items()}
    found = timing.measure(calls, timing.HostClock(), seconds=0.0, least=TURNS[n])
    return {
        f"cuattn-{kind}": {
            **timing.timed(spent),
            "rho": 0.0 if masks[kind] is None else masks[kind].block_sparsity(128, 128),
            "problem": {"n": n, "heads": HEADS, "head_dim": D, "mask": kind},
        }
        for kind, spent in found.items()
    }


def memory():
    """Return the peak of memory beyond arguments and results at N = 16384, in bytes per thread."""
    q, k, v, do = harness.random_arrays(np, 4, (2, LONG, D), np.float32)
    fwd = cuattn.forward(q, k, v)
    calls = {"forward": lambda: cuattn.forward(q, k, v), "backward": lambda: cuattn.backward(do, q, k, v, fwd)}
    rows = {}
    for name, call in calls.items():
        with peak("cpu") as used:
            results = call()
        own = sum(x.nbytes for x in results if isinstance(x, np.ndarray))
        rows[f"cuattn-{name}"] = {"bytes_per_thread": (used.bytes - own) / cores(), "problem": {"n": LONG}}
    return rows


def points(arguments):
    """Return what cuattn does alone."""
    runners = tuple(f"cuattn-{kind}" for kind in MASKS)
    found = [
        Point(f"cpu-visible/N{n}/{direction}", runners, functools.partial(measure, n, direction != "forward"))
        for n in TURNS
        for direction in ("forward", "forward+backward")
    ]
    return [*found, Point(f"cpu-memory/N{LONG}/both", ("cuattn-forward", "cuattn-backward"), memory)]


if __name__ == "__main__":
    from bench.suites import main

    raise SystemExit(main("cpu"))
