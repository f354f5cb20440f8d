"""All tables beside all peers, in one line each: the mean and the worst ratio to the best peer."""

from __future__ import annotations

from typing import Any

from bench import report
from bench.sections.common import name, table

TITLE = "Beside other libraries"
COMMAND = "python -m bench.hopper` and `python -m bench.portable"
FILES = ("hopper", "portable")
ABOUT = {
    "dense": "16K tokens, d 64 to 256, full and causal",
    "masks-8k": "twelve masks, 8K tokens, d 128",
    "masks-32k": "twelve masks, 32K tokens, d 128",
    "masks-128k": "twelve masks, 128K tokens, d 128",
    "masks-8k-d64": "twelve masks, 8K tokens, d 64",
    "masks-32k-d64": "twelve masks, 32K tokens, d 64",
    "masks-128k-d64": "twelve masks, 128K tokens, d 64",
    "dropout": "dropout 0.1",
    "deterministic": "bitwise reproducible gradients",
    "long": "128K and 512K tokens, few heads",
    "portable": "portable kernel: 16 bits, float32, float64",
    "decode": "one query, long caches",
    "host": "host time of a warm call",
}


def text(rows: list[dict[str, Any]]) -> str:
    """Return one line per table and direction."""
    lines = []
    for found in report.tables(rows):
        ratios, refused = found.ratios, _refused(found)
        if not ratios:
            continue
        worst = min(ratios, key=ratios.__getitem__)
        ahead = sum(ratio >= 1 for ratio in ratios.values())
        mean = f"{report.geometric_mean(ratios.values()):.2f}"
        about = f"{ABOUT.get(found.name, found.name)}, {found.direction}"
        count = f"{ahead} of {len(ratios) + len(refused)}"
        lines.append((about, _rivals(found), count, mean, f"{ratios[worst]:.2f} ({worst})", ", ".join(refused) or "–"))
    intro = (
        "How many times faster cuattn is than the fastest of the rivals named in each line, case by case in one run.  "
        "Below 1 it is slower.  Every case, and every runner that was timed: "
        "[bench/results/tables.md](bench/results/tables.md)."
    )
    head = ("", "beside", "ahead in", "mean ratio", "worst ratio", "not timed: error above the bound")
    return f"{intro}\n\n{table(head, lines)}"


def _rivals(found: report.Table) -> str:
    """Return the names of all whose fastest a line was compared with."""
    return ", ".join(dict.fromkeys(name(runner) for line in found.lines for runner in line.compared(False)))


def _refused(found: report.Table) -> list[str]:
    """Return the lines that have no ratio because cuattn's result was wrong."""
    return [
        found.short(line)
        for line in found.lines
        if line.ratio is None and any(row["ours"] and row["status"] == "wrong" for row in line.rows.values())
    ]
