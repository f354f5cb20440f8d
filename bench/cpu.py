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
from bench import harness
from bench.harness import Calls, Point, peak
from bench.mask_samples import column_mask, samples
from cuattn.cpu.threads import usable_cores

HEADS, D = 8, 64
TURNS = {4096: 11, 16384: 3}  # tokens: rounds
TINY = {256: 3}
MASKS = ("none", "causal_document", "sliding_window", "share_question")


def measure(n, turns, way):
    """Time cuattn at a length under every mask, in turn."""
    operands = harness.random_arrays(np, 4, (HEADS, n, D), np.float32, seed=2)
    masks = {kind: None if kind == "none" else column_mask(samples(kind, n, 1)) for kind in MASKS}
    both = {kind: Calls(*operands, mask=mask).both for kind, mask in masks.items()}
    alone = {kind: functools.partial(cuattn.attention, *operands[:3], mask=mask) for kind, mask in masks.items()}
    found = harness.timed(alone if way == "forward" else both, "cpu", 0.0, least=turns)
    return {
        f"cuattn-{kind}": {
            **row,
            "rho": 0.0 if masks[kind] is None else masks[kind].block_sparsity(128, 128),
            "problem": {"n": n, "heads": HEADS, "head_dim": D, "mask": kind},
        }
        for kind, row in found.items()
    }


def memory(n):
    """Return the peak of memory beyond arguments and results, in bytes per thread."""
    calls = Calls(*harness.random_arrays(np, 4, (2, n, D), np.float32))
    rows = {}
    for way, results in (("forward", calls.fwd), ("backward", calls.backward())):
        with peak("cpu") as used:
            getattr(calls, way)()
        own = sum(x.nbytes for x in results if isinstance(x, np.ndarray))
        rows[f"cuattn-{way}"] = {"bytes_per_thread": (used.bytes - own) / usable_cores(), "problem": {"n": n}}
    return rows


def points(arguments):
    """Return what cuattn does alone."""
    runners, lengths = tuple(f"cuattn-{kind}" for kind in MASKS), TINY if arguments.tiny else TURNS
    found = [
        Point(f"cpu-visible/N{n}/{direction}", runners, functools.partial(measure, n, turns, direction))
        for n, turns in lengths.items()
        for direction in ("forward", "forward+backward")
    ]
    longest, ways = max(lengths), ("cuattn-forward", "cuattn-backward")
    return [*found, Point(f"cpu-memory/N{longest}/both", ways, functools.partial(memory, longest))]


if __name__ == "__main__":
    from bench.suites import main

    raise SystemExit(main("cpu"))
