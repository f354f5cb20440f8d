"""Without a mask: the sweep of the FlashAttention papers, 16K tokens, from 1K to 16K in a sequence."""

from __future__ import annotations

from typing import Any

from bench import report
from bench.sections.common import colour, name, panels, table

TITLE = "Full and causal attention, d 64 to 256 (as in the FlashAttention papers)"
COMMAND = "python -m bench.hopper --tables dense"
FILE = "hopper"
DIRECTIONS = ("forward", "backward")
WIDTH = 0.8  # of a group of bars


def _found(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[tuple[bool, int], report.Line]]:
    """Return (direction, d) -> (causal, N) -> line."""
    found: dict[tuple[str, int], dict[tuple[bool, int], report.Line]] = {}
    for part in report.tables(row for row in rows if row["case"].startswith("dense/")):
        for line in part.lines:
            p = next(iter(line.rows.values()))["problem"]
            found.setdefault((part.direction, p["head_dim"]), {})[p["causal"], p["n_keys"]] = line
    order = sorted(found, key=lambda key: (DIRECTIONS.index(key[0]), key[1]))
    return {key: dict(sorted(found[key].items())) for key in order}


def _runners(lines: dict[Any, dict[Any, report.Line]]) -> list[str]:
    timed = [runner for group in lines.values() for line in group.values() for runner in line.rows if line.rate(runner)]
    return sorted(dict.fromkeys(timed), key=lambda runner: not runner.startswith("cuattn"))


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table: a line per shape, TFLOP/s of each runner in both directions."""
    found = _found(rows)
    who = _runners(found)
    lines = []
    for d in sorted({d for _, d in found}):
        for causal, n in found.get(("forward", d), found.get(("backward", d), {})):
            shape = f"d {d}, N {n}, {'causal' if causal else 'full'}"
            cells = [found.get((way, d), {}).get((causal, n)) for way in DIRECTIONS]
            rates = [line.rate(runner) if line else None for line in cells for runner in who]
            lines.append((shape, *(rate if rate is None else float(round(rate)) for rate in rates)))
    head = ("TFLOP/s", *(f"{name(runner)}, {way}" for way in DIRECTIONS for runner in who))
    return f"16K tokens, hidden size 2048, bfloat16.\n\n{table(head, lines)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return in how many shapes cuattn is ahead, and the shape in which it is furthest behind."""
    parts = []
    for way in DIRECTIONS:
        ratios = {
            f"d {d}, N {n}, {'causal' if causal else 'full'}": line.ratio
            for (direction, d), group in _found(rows).items()
            for (causal, n), line in group.items()
            if direction == way and line.ratio is not None
        }
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            ahead = sum(ratio >= 1 for ratio in ratios.values())
            parts.append(
                f"{way}, cuattn is the fastest in {ahead} of {len(ratios)} shapes, {ratios[worst]:.2f} times the "
                f"fastest rival's speed in its worst ({worst}) and {report.geometric_mean(ratios.values()):.2f} times "
                f"in the mean"
            )
    return "16K tokens, hidden size 2048, bfloat16.  " + "  ".join(f"{part[0].upper()}{part[1:]}." for part in parts)


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw bars of TFLOP/s, a panel per direction and head dimension."""
    found = _found(rows)
    who = _runners(found)
    drawn, axes = panels(max(len(found), 1), 4.4, 2.9, rows=len({way for way, _ in found}) or 1)
    for axis, ((way, d), group) in zip(axes, found.items(), strict=False):
        for offset, runner in enumerate(who):
            places = [place + WIDTH * (offset + 0.5) / len(who) for place in range(len(group))]
            rates = [line.rate(runner) or 0.0 for line in group.values()]
            axis.bar(places, rates, 0.95 * WIDTH / len(who), color=colour(runner), label=name(runner))
        labels = [f"{n // 1024}K\n{'causal' if causal else 'full'}" for causal, n in group]
        axis.set_xticks([place + WIDTH / 2 for place in range(len(group))], labels, fontsize=8)
        axis.set_title(f"{way}, head dimension {d}", fontsize=10)
        axis.set_ylabel("TFLOP/s")
    if found:
        handles, labels = axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(who), frameon=False, fontsize=9)
    return drawn
