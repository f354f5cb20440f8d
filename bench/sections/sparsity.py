"""Latency against a mask's sparsity."""

import pandas as pd

from bench import report
from bench.sparsity import KINDS, fit
from bench.style import OURS, WORSE, panels, table

TITLE = "Latency is linear in a mask's sparsity (FlashMask, figure 4a)"
COMMAND = "python -m bench.sparsity"
SHADES = dict(zip(KINDS, (OURS, WORSE, "#f2a65a"), strict=True))


def _found(frame):
    """Yield, per kind of mask, its rows and the line through them."""
    rows = report.of_table(frame, "figure-4a")
    for kind in KINDS:
        group = rows[rows["problem.kind"] == kind]
        if len(group):
            yield kind, group, fit(group["rho"], group["ms"])


def text(frame):
    """Return the table of fits."""
    lines = [
        {
            "mask": kind,
            "samples": len(group),
            "sparsity ρ": f"{group['rho'].min():.2f} to {group['rho'].max():.2f}",
            "ms per (1 - ρ)": line["slope"],
            "ms at ρ = 1": line["intercept"],
            "correlation": f"{line['correlation']:.4f}",
        }
        for kind, group, line in _found(frame)
    ]
    about = (
        "32K tokens, 32 heads, head dimension 128, bfloat16, forward and backward; masks drawn as in the paper's A.4."
    )
    return f"{about}\n\n{table(pd.DataFrame(lines))}"


def figure(frame):
    """Draw every sample and the fitted lines."""
    drawn, (axis,) = panels(1, 5.4, 3.8)
    for kind, group, line in _found(frame):
        label = f"{kind}, r = {line['correlation']:.4f}"
        axis.plot(group["rho"], group["ms"], "o", markersize=4, color=SHADES[kind], label=label)
        fitted = line["slope"] * (1 - group["rho"]) + line["intercept"]
        axis.plot(group["rho"], fitted, color=SHADES[kind], linewidth=1)
    axis.set(xlabel="block sparsity ρ", ylabel="ms, forward and backward", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return drawn
