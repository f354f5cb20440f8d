"""Measure the CPU backend beside PyTorch's ``scaled_dot_product_attention``, in one process.

    python bench/cpu.py                 # measures, writes bench/results/cpu.json and cpu.png
    python bench/cpu.py --plot          # redraws the picture from the committed rows

float32, 8 heads, N = 4096, d = 64, both with as many threads as the machine has cores.  PyTorch takes a mask as a
dense boolean matrix.  "forward" gives o alone, as PyTorch's function does (``cuattn.attention``); "forward, l, m" is
``cuattn.forward``, whose statistics PyTorch has no counterpart for, beside the same call of PyTorch's.  Results are
compared before anything is timed; rivals run in turn, after a pause, all samples are kept.  To see whether its time
under a mask follows the visible tiles, cuattn alone is timed under every mask and without one in each turn, at N = 4096
and 16384.

Where other work runs, ``chrt -f 1 python bench/cpu.py`` gives the cores to whichever rival is being timed; the report
names the scheduling policy.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import cuattn  # noqa: E402
from bench.mask_samples import column_mask, samples  # noqa: E402

RESULTS = ROOT / "bench" / "results"
HEADS, N, D = 8, 4096, 64
MASKS = (None, "causal_document", "sliding_window", "share_question")
DIRECTIONS = ("forward", "forward, l, m", "forward+backward")
LONG_N = 16384
TURNS = {N: 11, LONG_N: 3}  # of cuattn alone, by length
PAUSE = 0.05  # seconds: for 7 to 9 ms after a call PyTorch's OpenMP threads spin, on cores that the next one needs


def mask_of(kind: str | None, n: int = N):
    """Return the mask of a kind, with the paper's data, or None."""
    return None if kind is None else column_mask(samples(kind, n, 1))


def rivals(kind: str | None, q, k, v, do):
    """Return, per rival, what it does in each of DIRECTIONS: (o,), (o,) and (o, dq, dk, dv) as NumPy arrays."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    mask = mask_of(kind)
    tensors = [torch.from_numpy(x)[None].requires_grad_() for x in (q, k, v)]
    seed = torch.from_numpy(do)[None]
    dense = None if mask is None else torch.from_numpy(np.broadcast_to(mask.dense(), (1, 1, N, N)).copy())

    def ours():
        return (cuattn.attention(q, k, v, mask=mask),)

    def ours_with_statistics():
        return (cuattn.forward(q, k, v, mask=mask).o,)

    def ours_both():
        fwd = cuattn.forward(q, k, v, mask=mask)
        grads = cuattn.backward(do, q, k, v, fwd, mask=mask)
        return fwd.o, *grads[:3]

    def theirs():
        with torch.no_grad():
            return (scaled_dot_product_attention(*tensors, attn_mask=dense)[0].numpy(),)

    def theirs_both():
        for x in tensors:
            x.grad = None
        o = scaled_dot_product_attention(*tensors, attn_mask=dense)
        o.backward(seed)
        return o.detach()[0].numpy(), *(x.grad[0].numpy() for x in tensors)

    return {"cuattn": (ours, ours_with_statistics, ours_both), "torch": (theirs, theirs, theirs_both)}


def check(results: dict[str, tuple]) -> None:
    """Stop when the rivals disagree by more than float32 rounding explains."""
    for a, b in zip(results["cuattn"], results["torch"], strict=True):
        error = float(np.abs(a - b).max() / np.abs(b).max())
        if not error < 1e-4:
            raise SystemExit(f"results differ by {error:.2g}; nothing was timed")


def measure(repeats: int) -> list[dict]:
    """Time every mask and direction; return one row each."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((HEADS, N, D), np.float32) for _ in range(4))
    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("CPU", total=len(DIRECTIONS) * len(MASKS) * repeats)
        for kind in MASKS:
            calls = rivals(kind, q, k, v, do)
            visible = 1.0 if kind is None else float(mask_of(kind).dense().mean())
            rho = 0.0 if kind is None else mask_of(kind).block_sparsity(128, 128)
            for index, direction in enumerate(DIRECTIONS):
                check({name: pair[index]() for name, pair in calls.items()})
                seconds = {name: [] for name in calls}
                for turn in range(repeats):
                    order = list(calls) if turn % 2 else list(calls)[::-1]
                    for name in order:
                        time.sleep(PAUSE)
                        begin = time.perf_counter()
                        calls[name][index]()
                        seconds[name].append(time.perf_counter() - begin)
                    progress.advance(task)
                rows.append(
                    {"mask": kind or "none", "direction": direction, "visible": visible, "rho": rho, "seconds": seconds}
                )
    return rows


def measure_alone(n: int, turns: int) -> list[dict]:
    """Time cuattn at a length under every mask; return one row per mask and direction."""
    rng = np.random.default_rng(2)
    q, k, v, do = (rng.standard_normal((HEADS, n, D), np.float32) for _ in range(4))
    masks = {kind: mask_of(kind, n) for kind in MASKS}
    samples = {(kind, name): [] for kind in MASKS for name in DIRECTIONS}
    for _ in range(turns):
        for kind, mask in masks.items():
            begin = time.perf_counter()
            cuattn.attention(q, k, v, mask=mask)
            samples[kind, "forward"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            fwd = cuattn.forward(q, k, v, mask=mask)
            samples[kind, "forward, l, m"].append(time.perf_counter() - begin)
            cuattn.backward(do, q, k, v, fwd, mask=mask)
            samples[kind, "forward+backward"].append(time.perf_counter() - begin)
    rhos = {kind: 0.0 if mask is None else mask.block_sparsity(128, 128) for kind, mask in masks.items()}
    return [
        {"mask": kind or "none", "direction": direction, "n": n, "rho": rhos[kind], "seconds": {"cuattn": seconds}}
        for (kind, direction), seconds in samples.items()
    ]


def memory() -> dict[str, float]:
    """Return the peak of memory beyond arguments and results at N = 16384, in MB per thread."""
    rng = np.random.default_rng(1)
    q, k, v, do = (rng.standard_normal((2, LONG_N, D), np.float32) for _ in range(4))
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    peaks = {}
    fwd = cuattn.forward(q, k, v)
    for name, call in (
        ("forward", lambda: cuattn.forward(q, k, v)),
        ("backward", lambda: cuattn.backward(do, q, k, v, fwd)),
    ):
        tracemalloc.start()
        result = call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        own = sum(x.nbytes for x in result if isinstance(x, np.ndarray))
        peaks[name] = (peak - own) / threads / 1e6
    return peaks


def environment() -> dict[str, object]:
    """Return what the figures depend on."""
    import torch

    try:
        model = next(
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        model = platform.processor()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "scheduling": policy(),
        "shape": {"heads": HEADS, "n": N, "head_dim": D, "dtype": "float32"},
        "command": "python bench/cpu.py",
    }


def policy() -> str:
    """Return the scheduling policy of this process: "SCHED_OTHER" is the usual one."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    names = {getattr(os, name): name for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_FIFO", "SCHED_RR")}
    return names.get(os.sched_getscheduler(0), "unknown")


def best(row: dict, name: str) -> float:
    """Return the fastest of a rival's samples: on a machine with other work, what the code can do."""
    return min(row["seconds"][name])


def pairs(row: dict) -> float:
    """Return the median, over the turns, of PyTorch's time / cuattn's: what a lucky sample of one does not move."""
    ours, theirs = row["seconds"]["cuattn"], row["seconds"]["torch"]
    return float(np.median(np.divide(theirs, ours)))


def show(report: dict) -> None:
    """Print the table."""
    table = Table("mask", "tiles skipped", "direction", "cuattn, s", "torch, s", "torch / cuattn", "median of pairs")
    for row in report["rows"]:
        ours, theirs = best(row, "cuattn"), best(row, "torch")
        cells = (row["mask"], f"{row['rho']:.0%}", row["direction"], f"{ours:.3f}", f"{theirs:.3f}")
        table.add_row(*cells, f"{theirs / ours:.2f}", f"{pairs(row):.2f}")
    console = Console()
    console.print(table)
    console.print(shares(report))
    for name, megabytes in report["memory_mb_per_thread"].items():
        console.print(f"peak memory of a {name} at N = {LONG_N}: {megabytes:.1f} MB per thread")


def shares(report: dict) -> Table:
    """Return the table of cuattn's time under each mask, as a share of its time without, beside the visible tiles."""
    table = Table("mask", "direction", "N", "visible tiles", "time / unmasked, fastest", "median of turns")
    for row in report["rows_alone"]:
        if row["mask"] != "none":
            fastest, median = share(row, report)
            visible = f"{1 - row['rho']:.3f}"
            table.add_row(row["mask"], row["direction"], str(row["n"]), visible, f"{fastest:.3f}", f"{median:.3f}")
    return table


def share(row: dict, report: dict) -> tuple[float, float]:
    """Return the time of a row of cuattn alone over that without a mask: of the fastest calls, and median of turns."""
    (unmasked,) = (
        other
        for other in report["rows_alone"]
        if (other["mask"], other["direction"], other["n"]) == ("none", row["direction"], row["n"])
    )
    ours, all_of_it = row["seconds"]["cuattn"], unmasked["seconds"]["cuattn"]
    return min(ours) / min(all_of_it), float(np.median(np.divide(ours, all_of_it)))


def plot(report: dict, path: Path) -> None:
    """Draw the bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=False)
    for panel, direction in zip(axes, ("forward", "forward+backward"), strict=True):
        rows = [row for row in report["rows"] if row["direction"] == direction]
        places = np.arange(len(rows))
        for shift, (name, colour, label) in enumerate(
            (("cuattn", "#24658f", "cuattn"), ("torch", "#f2a65a", "PyTorch, dense mask"))
        ):
            heights = [best(row, name) for row in rows]
            bars = panel.bar(places + 0.38 * (shift - 0.5), heights, 0.36, color=colour, label=label)
            panel.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        panel.set_xticks(places, [row["mask"].replace("_", "\n") for row in rows], fontsize=9)
        panel.set_title(direction.replace("+", " + "), fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("seconds (lower is better)")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    shape = f"float32, {HEADS} heads, N = {N}, d = {D}, {report['environment']['cores']} cores"
    figure.suptitle(shape, fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Measure, or redraw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", action="store_true", help="only redraw the picture from the committed rows")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    path = RESULTS / "cpu.json"
    if options.plot:
        report = json.loads(path.read_text())
    else:
        report = {
            "environment": environment(),
            "rows": measure(options.repeats),
            "rows_alone": [row for n, turns in TURNS.items() for row in measure_alone(n, turns)],
            "memory_mb_per_thread": memory(),
        }
        path.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    plot(report, RESULTS / "cpu.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
