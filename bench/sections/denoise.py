"""Denoising a photograph."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, table, times

TITLE = "Not only transformers: non-local means as attention"
COMMAND = "python -m bench.denoise` and `python -m bench.denoise --device cpu"
LABELS = {"cuattn-cupy": "GPU", "cuattn-numpy": "CPU"}


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for x in by_case(rows, "denoise").values():
        for runner, row in x.items():
            p = row["problem"]
            search = f"{p['rows']} rows up and down" if p["rows"] else f"all of {p['height']} x {p['width']} pixels"
            where = LABELS.get(runner) or f"KeOps, {next(LABELS[other] for other in x if other in LABELS)}"
            lines.append(
                (
                    f"{where}, {search}",
                    row["pairs"] / 1e9,
                    times(row) / 1e3,
                    row["psnr_before"],
                    row["psnr_after"],
                )
            )
    p = max((row["problem"] for row in rows if row["status"] == "ok"), key=lambda p: p["height"])
    n = p["height"] * p["width"]
    about = (
        f"A photograph of {p['height']} x {p['width']} = {n:,} pixels in float32: each pixel attends to those with "
        f"similar surroundings (`bench/denoise.py`).  A dense N x N matrix would take {4 * n * n / 1e9:.0f} GB."
    )
    if not any(row["runner"] == "keops" for row in rows):
        about += "  KeOps could not be measured beside it: its runtime compiler (pykeops 2.3) crashes under CUDA 13."
    head = ("search", "billion pairs", "seconds", "PSNR before, dB", "after, dB")
    return f"{about}\n\n{table(head, lines)}"
