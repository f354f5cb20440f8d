"""Without a mask: the sweep of the FlashAttention papers, 16K tokens, from 1K to 16K in a sequence."""

import statistics

import pandas as pd

from bench import report
from bench.style import QUIET, curves, legend, name, ours_first, panels, table

TITLE = "Full and causal attention, d 64 to 256 (as in the FlashAttention papers)"
COMMAND = "python -m bench.hopper --tables dense"
FILES, PREFIX = ("hopper",), "dense"
DIRECTIONS = ("forward", "backward")
PEAK = 798  # TFLOP/s of a bfloat16 matrix product of 8192^3 on an H200


def _found(frame):
    """Return the lines with their shape in words, by direction, d, N."""
    found = report.lines(frame[frame["table"] == "dense"])
    kind = found["problem.causal"].map({True: "causal", False: "full"})
    d, n = (found[f"problem.{key}"].astype(int) for key in ("head_dim", "n_keys"))
    shape = "d " + d.astype(str) + ", N " + n.astype(str) + ", " + kind
    short = (n // 1024).astype(str) + "K " + kind
    return found.assign(d=d, n=n, shape=shape, short=short).sort_values(["d", "problem.causal", "n"])


def _rates(found, index):
    rates = pd.DataFrame(list(found["rates"]), index=found[index])
    return rates[ours_first(rates)]


def text(frame):
    """Return the table: a line per shape, TFLOP/s of each runner in both directions."""
    found = _found(frame)
    rates = {way: _rates(found[found["direction"] == way], "shape") for way in DIRECTIONS}
    joined = pd.concat(
        [rates[way].round().rename(columns=lambda runner, way=way: f"{name(runner)}, {way}") for way in DIRECTIONS],
        axis=1,
    )
    return f"16K tokens, hidden size 2048, bfloat16.\n\n{table(joined.rename_axis('TFLOP/s').reset_index())}"


def summary(frame):
    """Return in how many shapes cuattn is ahead, and the shape in which it is furthest behind."""
    said = ["16K tokens, hidden size 2048, bfloat16."]
    for way, group in _found(frame).dropna(subset="ratio").groupby("direction", sort=False):
        ratios = group.set_index("shape")["ratio"]
        said.append(
            f"{way.capitalize()}, cuattn is the fastest in {(ratios >= 1).sum()} of {len(ratios)} shapes, "
            f"{ratios.min():.2f} times the fastest rival's speed in its worst ({ratios.idxmin()}) and "
            f"{statistics.geometric_mean(ratios):.2f} times in the geometric mean."
        )
    return "  ".join(said)


def figure(frame):
    """Draw dots of TFLOP/s under the line of the peak, a panel per direction and head dimension."""
    groups = [
        (f"{way}, head dimension {d}", _rates(group, "short"))
        for way in DIRECTIONS
        for d, group in _found(frame).query("direction == @way").groupby("d")
    ]
    drawn, axes = panels(len(groups), 4.2, 3.0, rows=2)
    for axis, (title, rates) in zip(axes, groups, strict=False):
        curves(axis, rates, "o", alpha=0.9, markersize=7)
        axis.axhline(PEAK, color=QUIET, linestyle="--", linewidth=1, label=f"matrix product, {PEAK}")
        axis.set(title=title, ylabel="TFLOP/s", ylim=(0, None))
        axis.tick_params(axis="x", labelrotation=30)
    legend(drawn, 5)
    return drawn
