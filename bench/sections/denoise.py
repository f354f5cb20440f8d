"""Denoising a photograph."""

import pandas as pd

from bench import report
from bench.style import table

TITLE = "Not only transformers: non-local means as attention"
COMMAND = "python -m bench.denoise` and `python -m bench.denoise --device cpu"
WHERE = {"cuattn-cupy": "GPU", "cuattn-numpy": "CPU", "keops": "KeOps, GPU"}
HEAD = ["search", "billion pairs", "seconds", "PSNR before, dB", "after, dB"]


def text(frame):
    """Return the table."""
    rows = report.of_table(frame, "denoise")
    lines = []
    for row in rows.to_dict("records"):
        height, width, near = (row.get(f"problem.{key}") for key in ("height", "width", "rows"))
        search = f"{near:.0f} rows up and down" if near == near else f"all of {height} x {width} pixels"
        spent = (row["pairs"] / 1e9, row["ms"] / 1e3, row["psnr_before"], row["psnr_after"])
        lines.append((f"{WHERE[row['runner']]}, {search}", *spent))
    height, width = rows["problem.height"].max(), rows["problem.width"].max()
    n = height * width
    about = (
        f"A photograph of {height} x {width} = {n:,} pixels in float32: each pixel attends to those with "
        f"similar surroundings (`bench/denoise.py`).  A dense N x N matrix would take {4 * n * n / 1e9:.0f} GB."
    )
    if "keops" not in set(rows["runner"]):
        about += "  KeOps is measured beside it where it runs; pykeops 2.3 does not under CUDA 13."
    return f"{about}\n\n{table(pd.DataFrame(lines, columns=HEAD))}"
