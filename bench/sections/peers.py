"""All tables beside all peers, in one line each: the mean and the worst ratio to the best peer."""

from __future__ import annotations

from typing import Any

from bench import report
from bench.sections.common import COLOURS, INK, masks_left_out, name, panels, table

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
    costs = "  ".join(_determinism(found) for found in report.tables(rows) if found.name == "deterministic")
    return "\n\n".join(filter(None, [intro, table(head, lines), masks_left_out(rows), costs]))


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw the ratio of every case, a line per table and direction: right of 1 cuattn is faster."""
    found = [part for part in report.tables(rows) if part.ratios]
    drawn, (axis,) = panels(1, 8.0, 0.7 + 0.27 * max(len(found), 1))
    for place, part in enumerate(found):
        ratios = list(part.ratios.values())
        shades = [COLOURS["cuattn" if ratio >= 1 else "fa4"] for ratio in ratios]
        axis.scatter(ratios, [place] * len(ratios), s=22, color=shades, alpha=0.55, linewidths=0, zorder=3)
        axis.plot([report.geometric_mean(ratios)] * 2, [place - 0.36, place + 0.36], color=INK, linewidth=2, zorder=4)
    axis.axvline(1, color=INK, linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks([0.5, 0.75, 1, 1.5, 2, 3], ["0.5", "0.75", "1", "1.5", "2", "3"])
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(found)), [f"{ABOUT.get(part.name, part.name)}, {part.direction}" for part in found])
    axis.tick_params(axis="y", labelsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("times the fastest rival's speed (dots: cases, bar: mean)", fontsize=9)
    return drawn


def _determinism(found: report.Table) -> str:
    """Return what reproducible gradients cost each runner."""
    costs: dict[str, list[float]] = {}
    for case in report.costs_of_determinism(found).values():
        for runner, cost in case.items():
            costs.setdefault(runner, []).append(cost)
    said = [f"{name(runner)} {min(x):.0%} to {max(x):.0%}" for runner, x in costs.items()]
    return f"`deterministic=True`, in the plain backward's time, costs {', '.join(said)}." if said else ""


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
