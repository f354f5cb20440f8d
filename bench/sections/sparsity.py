"""Latency against a mask's sparsity."""

from __future__ import annotations

from typing import Any

from bench.sections.common import INK, by_case, panels, table, times
from bench.sparsity import KINDS, fit

TITLE = "Latency is linear in a mask's sparsity (FlashMask, figure 4a)"
COMMAND = "python -m bench.sparsity"
SHADES = {"causal_document": "#24658f", "share_question": "#d9674f", "document": "#f2a65a"}


def _found(rows: list[dict[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for x in by_case(rows, "figure-4a").values():
        row = x["cuattn"]
        rho, spent = found.setdefault(row["problem"]["kind"], ([], []))
        rho.append(row["rho"])
        spent.append(times(row))
    return {kind: found[kind] for kind in KINDS if kind in found}


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table of fits."""
    lines = []
    for kind, (rho, spent) in _found(rows).items():
        line = fit(rho, spent)
        span = f"{min(rho):.2f} to {max(rho):.2f}"
        lines.append((kind, str(len(rho)), span, line["slope"], line["intercept"], f"{line['correlation']:.4f}"))
    head = ("mask", "samples", "sparsity ρ", "ms per (1 - ρ)", "ms at ρ = 1", "correlation")
    about = (
        "32K tokens, 32 heads, head dimension 128, bfloat16, forward and backward; masks drawn as in the paper's A.4."
    )
    return f"{about}\n\n{table(head, lines)}"


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw every sample and the fitted lines."""
    drawn, axes = panels(1, 5.4, 3.8)
    for kind, (rho, spent) in _found(rows).items():
        line = fit(rho, spent)
        axes[0].plot(rho, spent, "o", markersize=4, color=SHADES[kind], label=f"{kind}, r = {line['correlation']:.4f}")
        ends = [min(rho), max(rho)]
        axes[0].plot(ends, [line["slope"] * (1 - x) + line["intercept"] for x in ends], color=SHADES[kind], linewidth=1)
    axes[0].set_xlabel("block sparsity ρ", color=INK)
    axes[0].set_ylabel("ms, forward and backward", color=INK)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    return drawn
