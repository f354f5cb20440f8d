"""Runtime and memory against the length of the sequence."""

import pandas as pd

from bench import report
from bench.style import curves, name, ours_first, panels, table

TITLE = "Runtime and memory from 128 to 64K tokens (FlashAttention, figure 3)"
COMMAND = "python -m bench.lengths"


def _found(frame):
    """Return milliseconds and megabytes by length and runner."""
    rows = report.of_table(frame, "lengths")
    rows = rows.assign(n=rows["problem.n_keys"].astype(int), MB=rows["peak_bytes"] / 1e6)
    order = ours_first(rows["runner"])
    return {unit: rows.pivot_table(index="n", columns="runner", values=unit)[order] for unit in ("ms", "MB")}


def text(frame):
    """Return the table."""
    found = _found(frame)
    parts = [found[unit].rename(columns=lambda runner, unit=unit: f"{name(runner)}, {unit}") for unit in found]
    lines = pd.concat(parts, axis=1).rename(index="{:,}".format).rename_axis("tokens").reset_index()
    about = "Batch 8, 8 heads, head dimension 64, float16, forward and backward; memory beyond the inputs, at its peak."
    return f"{about}\n\n{table(lines)}"


def summary(frame):
    """Return the longest length at which standard attention runs, the longest of all, and where a rival is faster."""
    found = _found(frame)
    ms, mb = found["ms"], found["MB"]
    parts = []
    both = ms[["standard", "cuattn"]].dropna().index.max() if "standard" in ms else None
    if both:
        (plain, ours), (plain_mb, ours_mb) = (of.loc[both, ["standard", "cuattn"]] for of in (ms, mb))
        parts.append(
            f"At {both:,} tokens, the longest that standard attention can do here, cuattn takes {ours:.3g} ms for "
            f"{plain:.3g} and {ours_mb:,.0f} MB for {plain_mb:,.0f}."
        )
    rivals = ms.loc[:, ~ms.columns.str.startswith("cuattn")]
    longest = ms["cuattn"].last_valid_index()
    beside = ", ".join(f"{name(runner)} {spent:.0f}" for runner, spent in rivals.loc[longest].dropna().items())
    parts.append(f"At {longest:,} tokens it takes {ms['cuattn'][longest]:.0f} ms ({beside}).")
    behind = rivals[rivals.min(axis=1) < ms["cuattn"]]
    if len(behind):
        said = ", ".join(
            f"{name(line.idxmin())} at {n:,} ({line.min() / ms['cuattn'][n]:.2f} times the speed)"
            for n, line in behind.iterrows()
        )
        parts.append(f"A rival is faster at {len(behind)} of {len(ms)} lengths: {said}.")
    return "  ".join(parts)


def figure(frame):
    """Draw both against the length."""
    drawn, axes = panels(2)
    labels = ("ms, forward and backward", "MB at the peak, beyond the inputs")
    for axis, found, label in zip(axes, _found(frame).values(), labels, strict=True):
        curves(axis, found, markersize=4)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="tokens", ylabel=label, yscale="log")
    axes[0].legend(frameon=False, fontsize=8)
    return drawn
