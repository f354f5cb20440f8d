"""A mask's memory against the length."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, colour, panels, table

TITLE = "A mask's memory (FlashMask, figure 4b)"
COMMAND = "python -m bench.mask_memory"


def _found(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    cases = by_case(rows, "figure-4b").values()
    return dict(sorted((x["cuattn-column"]["problem"]["n"], x) for x in cases if "cuattn-column" in x))


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for n, x in _found(rows).items():
        dense = x["dense"]["mask_bytes"] / 1e6
        shown = f"{dense:,.0f}" + ("" if x["dense"]["measured"] else " (counted)")
        lines.append((f"{n // 1024}K", x["cuattn-column"]["mask_bytes"] / 1e6, shown))
    head = ("tokens", "column mask with its tables, MB", "dense boolean mask, MB")
    about = "What a forward and a backward allocate for the mask, beyond the same call without one."
    return f"{about}\n\n{table(head, lines)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the longest."""
    n, x = list(_found(rows).items())[-1]
    ours, dense = x["cuattn-column"]["mask_bytes"] / 1e6, x["dense"]["mask_bytes"] / 1e9
    long = f"At {n // 1024}K tokens a column mask takes {ours:.0f} MB with all its tables"
    return f"{long}; a dense one would take {dense:.0f} GB."


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw both."""
    found = _found(rows)
    drawn, axes = panels(1, 5.0, 3.4)
    lengths = list(found)
    axes[0].loglog(
        lengths, [x["cuattn-column"]["mask_bytes"] / 1e6 for x in found.values()], "o-", color=colour("cuattn")
    )
    axes[0].loglog(lengths, [x["dense"]["mask_bytes"] / 1e6 for x in found.values()], "--", color=colour("dense"))
    seen = {n: x["dense"]["mask_bytes"] / 1e6 for n, x in found.items() if x["dense"]["measured"]}
    axes[0].loglog(list(seen), list(seen.values()), "s", color=colour("dense"))
    axes[0].annotate("dense", (lengths[-1], found[lengths[-1]]["dense"]["mask_bytes"] / 1e6), ha="right", va="bottom")
    axes[0].annotate(
        "column mask", (lengths[-1], found[lengths[-1]]["cuattn-column"]["mask_bytes"] / 1e6), ha="right", va="bottom"
    )
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    axes[0].set_xlabel("tokens")
    axes[0].set_ylabel("MB")
    return drawn
