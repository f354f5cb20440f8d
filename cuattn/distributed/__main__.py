"""``python -m cuattn.distributed``, alone or under a launcher: the self-check of ranks."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from typing import Any

import numpy as np

import cuattn
from cuattn import masks
from cuattn.distributed import Layout, backward, connect, forward, plan, spawn
from cuattn.distributed.arrays import gathered

LENGTH, HEADS, HEAD_DIM = 1056, 4, 64
MEGABYTES = 32
NAMES = ("o", "dq", "dk", "dv")


def cases() -> dict[str, tuple[dict[str, Any], str | None]]:
    """Return options, and the algorithm, of each case by its name."""
    documents = masks.causal_document([LENGTH // 3, LENGTH - LENGTH // 3])
    return {
        "no mask, ring": ({}, "ring"),
        "causal": ({"is_causal": True}, None),
        "causal documents": ({"mask": documents}, None),
        "window": ({"window": (100, 20)}, None),
        "dropout, causal": ({"is_causal": True, "dropout_p": 0.2, "rng": 1}, None),
        "mask function": ({"mask": lambda b, h, i, j: (i - j) % (h + 2) != 1}, None),
        "rows travel": ({"softcap": 5.0}, "combine"),
    }


def check(comm: Any, xp: Any) -> list[tuple[str, ...]]:
    """Compute all cases over ranks, and on every rank alone; return the rows of a table."""
    rng, layout, rows = np.random.default_rng(0), Layout.zigzag(LENGTH, comm.size), []
    whole = [xp.asarray(rng.standard_normal((HEADS, LENGTH, HEAD_DIM), np.float32)) for _ in range(4)]
    mine = [layout.shard(x, comm.rank) for x in whole]
    for name, (options, algorithm) in cases().items():
        replayed = {key: value for key, value in options.items() if key != "rng"}
        placing = {"comm": comm, "layout": layout, "algorithm": algorithm}
        fwd = forward(*mine[:3], **placing, **options)
        found = (fwd.o, *backward(mine[3], *mine[:3], fwd, **placing, **replayed)[:3])
        exact = cuattn.forward(*whole[:3], **options)
        right = (exact.o, *cuattn.backward(whole[3], *whole[:3], exact, **replayed)[:3])
        errors = [
            float(abs(layout.unshard(x, comm) - y).max() / abs(y).max()) for x, y in zip(found, right, strict=True)
        ]
        told = plan(*mine[:3], **placing, **replayed)
        verdict = "ok" if max(errors) < 2e-5 else "off"
        worst = NAMES[int(np.argmax(errors))]
        rows.append(
            (name, told.algorithm, worst, f"{max(errors):.0e}", f"{told.balance:.2f}", f"{told.overlap:.0%}", verdict)
        )
    return rows


def bandwidth(comm: Any, xp: Any) -> float:
    """Return the bytes in a second that each rank receives while all send to all."""
    mine = xp.zeros(MEGABYTES << 20, np.uint8)
    best = np.inf
    for _ in range(4):
        comm.barrier()
        begin = time.perf_counter()
        parts = gathered(comm, mine, [mine.shape] * comm.size)
        float(parts[-1][-1])  # waits for a GPU
        best = min(best, time.perf_counter() - begin)
    return (comm.size - 1) * mine.nbytes / max(comm.allgather(best))


def report(comm: Any) -> bool:
    """Run the check on one rank; rank 0 prints it.  Return whether all is well."""
    cupy = sys.modules.get("cupy")
    xp = cupy if cupy is not None and cupy.is_available() else np
    rows, rate = check(comm, xp), bandwidth(comm, xp) if comm.size > 1 else 0.0
    good = all(all(verdicts) for verdicts in comm.allgather([row[-1] == "ok" for row in rows]))
    if comm.rank == 0:
        print(
            f"{comm.size} ranks ({type(comm).__name__}), {xp.__name__} arrays, {HEADS} x {LENGTH} x {HEAD_DIM}, float32"
        )
        table = [("case", "algorithm", "worst", "error", "balance", "overlap", "verdict"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        print(f"each rank receives {rate / 1e9:.2f} GB/s while all send to all")
        print("all results are those of one device" if good else "some results are off")
    return good


def main() -> int:
    """Check the ranks that a launcher has started, or threads; return the exit status."""
    with contextlib.suppress(Exception):  # a broken installation raises more than ImportError
        importlib.import_module("cupy")  # so that ranks take GPUs
    with connect() as comm:
        good = report(comm) if comm.size > 1 else all(spawn(report))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
