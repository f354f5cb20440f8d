"""GPT-2 medium's attention: runtime, operations, bytes."""

import pandas as pd

from bench import report
from bench.style import bars, legend, name, ours_first, panels, table

TITLE = "GPT-2 medium's attention, forward and backward (FlashAttention, figure 2 left)"
COMMAND = "python -m bench.gpt2"
PRODUCTS = {"standard": 6}  # matrix products; the others compute the scores again in the backward
PAPER = "The paper's A100: standard 41.7 ms and 40.3 GB, FlashAttention 7.3 ms and 4.4 GB."
VALUES = {"ms": "ms", "GB": "GB of device memory traffic"}


def _found(frame):
    """Return ms and GB by runner (cuattn first), and dropout: columns ("ms", 0.0) and so on."""
    rows = report.of_table(frame, "gpt2", "gpt2-bytes")
    if "counters.hbm_read" in rows:
        rows = rows.assign(GB=(rows["counters.hbm_read"] + rows["counters.hbm_write"]) / 1e9)
    values = [value for value in VALUES if value in rows]
    found = rows.pivot_table(index="runner", columns="problem.dropout", values=values)
    return found.loc[ours_first(rows["runner"])]


def text(frame):
    """Return the table."""
    found = _found(frame)
    p = report.of_table(frame, "gpt2").iloc[0]
    work = 2 * p["problem.batch"] * p["problem.heads"] * p["problem.n_queries"] ** 2 * p["problem.head_dim"] / 1e9
    cells = {"": found.index.map(name), "GFLOP": [work * PRODUCTS.get(runner, 7) for runner in found.index]}
    for dropout in found.columns.levels[1]:
        behind = f", dropout {dropout:g}" if dropout else ""
        cells |= {label + behind: found.get((value, dropout)) for value, label in VALUES.items()}
    about = f"Batch 64, 16 heads, 1024 tokens, head dimension 64, float16.  {PAPER}"
    said = "  ".join(
        _standing(found[value], what) for value, what in (("ms", "time"), ("GB", "bytes")) if value in found
    )
    return f"{about}\n\n{table(pd.DataFrame(cells))}\n\n{said}".rstrip()


def _standing(found, what):
    """Say how cuattn's time, or bytes, compares with the best rival's."""
    parts = []
    for dropout in found:
        rivals = found[dropout].dropna()
        rivals = rivals[~rivals.index.str.startswith("cuattn")]
        if len(rivals) and found[dropout].get("cuattn", 0) > 0:
            where = f"with dropout {dropout:g}" if dropout else "without dropout"
            share = found[dropout]["cuattn"] / rivals.min()
            parts.append(f"{where} {share:.3f} times that of {name(rivals.idxmin())}")
    return f"cuattn's {what}: {', '.join(parts)}." if parts else ""


def figure(frame):
    """Draw bars of time and bytes, without and with dropout."""
    found = _found(frame)
    drawn, axes = panels(2, 5.0, 3.2)
    for axis, (value, label) in zip(axes, VALUES.items(), strict=True):
        if value in found:
            lines = found[value].T
            lines.index = [f"dropout {dropout:g}" if dropout else "no dropout" for dropout in lines.index]
            bars(axis, lines, ".3g")
        axis.set_xlabel(f"{label}, forward and backward")
    legend(drawn, 3)
    return drawn
