"""A mask's memory against the length."""

import pandas as pd

from bench import report
from bench.style import colour, panels, table

TITLE = "A mask's memory (FlashMask, figure 4b)"
COMMAND = "python -m bench.mask_memory"


def _found(frame):
    """Return megabytes by length: ours, dense, and the dense ones that were really allocated."""
    rows = report.of_table(frame, "figure-4b")
    rows = rows.assign(n=rows["problem.n"].astype(int), MB=rows["mask_bytes"] / 1e6)
    wide = rows.pivot(index="n", columns="runner", values=["MB", "measured"]).sort_index()
    dense = wide["MB", "dense"].astype(float)
    seen = dense.where(wide["measured", "dense"] == True)  # noqa: E712
    return pd.DataFrame({"ours": wide["MB", "cuattn-column"].astype(float), "dense": dense, "seen": seen})


def text(frame):
    """Return the table."""
    found = _found(frame)
    counted = found["seen"].isna().map({True: " (counted)", False: ""})
    lines = {
        "tokens": [f"{n // 1024}K" for n in found.index],
        "column mask with its tables, MB": found["ours"],
        "dense boolean mask, MB": found["dense"].map("{:,.0f}".format) + counted,
    }
    about = "What a forward and a backward allocate for the mask, beyond the same call without one."
    return f"{about}\n\n{table(pd.DataFrame(lines))}"


def summary(frame):
    """Return the longest."""
    last = _found(frame).iloc[-1]
    long = f"At {last.name // 1024}K tokens a column mask takes {last['ours']:.0f} MB with all its tables"
    return f"{long}; a dense one would take {last['dense'] / 1e3:.0f} GB."


def figure(frame):
    """Draw both."""
    found = _found(frame)
    drawn, (axis,) = panels(1, 5.0, 3.4)
    for column, style, shade, label in (
        ("ours", "o-", "cuattn", "column mask"),
        ("dense", "--", "standard", "dense"),
        ("seen", "s", "standard", ""),
    ):
        axis.loglog(found[column], style, color=colour(shade))
        axis.annotate(label, (found.index[-1], found[column].max()), ha="right", va="bottom")
    axis.set_xscale("log", base=2)
    axis.set_xticks(found.index, [f"{n // 1024}K" for n in found.index])
    axis.set(xlabel="tokens", ylabel="MB")
    return drawn
