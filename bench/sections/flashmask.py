"""The FlashMask paper's tables 4 to 9: milliseconds, TFLOP/s and sparsity of twelve masks, and its figure 5."""

import statistics

import numpy as np
import pandas as pd

from bench.mask_samples import KINDS
from bench.style import name, ours_first, panels, table

TITLE = "Twelve masks (FlashMask, tables 4 to 9, figure 5)"
COMMAND = "python -m bench.hopper --tables masks-8k masks-32k masks-128k masks-8k-d64 masks-32k-d64 masks-128k-d64"
FILES, PREFIX = ("hopper",), "masks-"
HEAD = ["method, mask", "FW ms", "BW ms", "total ms", "FW TFLOP/s", "BW TFLOP/s", "total TFLOP/s", "sparsity"]
KEYS = ["d", "n", "runner", "mask"]


def _found(frame):
    """Return a line per d, N, runner and mask of which both directions are there: ms, flops, rates, total."""
    rows = frame[frame["table"].str.startswith("masks-") & frame["ms"].notna()]
    kind = pd.Categorical(rows["problem.mask"], KINDS, ordered=True)
    rows = rows.assign(d=rows["problem.head_dim"].astype(int), n=rows["problem.n_keys"].astype(int), mask=kind)
    wide = rows.pivot_table(index=KEYS, columns="direction", values=["ms", "flops", "rate", "rho"], observed=True)
    wide = wide.dropna()
    total = wide["flops"].sum(axis=1) / wide["ms"].sum(axis=1) / 1e9
    both = {f"{value} {way}": wide[value, way] for value in ("ms", "rate") for way in ("forward", "backward")}
    return pd.DataFrame({**both, "total": total, "rho": wide["rho", "forward"]}).reset_index()


def _titled(found):
    """Yield the title and the lines of each table, d 128 first."""
    for (d, n), group in sorted(found.groupby(["d", "n"]), key=lambda item: (-item[0][0], item[0][1])):
        yield f"{n // 1024}K tokens", d, group


def text(frame):
    """Return the tables in the paper's form."""
    parts = []
    for title, d, group in _titled(_found(frame)):
        order = ours_first(group["runner"])
        group = group.sort_values("runner", key=lambda x, order=order: x.map(order.index), kind="stable")
        label = group["runner"].map(name) + ", " + group["mask"].astype(str)
        both = group["ms forward"] + group["ms backward"]
        columns = [label, group["ms forward"], group["ms backward"], both]
        columns += [group["rate forward"], group["rate backward"], group["total"], group["rho"].map("{:.2f}".format)]
        lines = pd.concat(columns, axis=1).set_axis(HEAD, axis=1)
        parts.append(f"{title}, head dimension {d}:\n\n{table(lines)}")
    return "\n\n".join(parts)


def ratios(frame):
    """Return, by table and mask, cuattn's total rate over that of the fastest rival."""
    found = {}
    for title, d, group in _titled(_found(frame)):
        rates = group.pivot_table(index="mask", columns="runner", values="total", observed=True)
        if "cuattn" in rates and len(rates.columns) > 1:
            found[f"{title}, d {d}"] = rates["cuattn"] / rates.drop(columns="cuattn").max(axis=1)
    return pd.DataFrame(found)


def summary(frame):
    """Return, per table, what cuattn reaches and how it stands beside the fastest rival of each mask."""
    against = ratios(frame)
    ours = {f"{title}, d {d}": group.query("runner == 'cuattn'") for title, d, group in _titled(_found(frame))}
    lines = [
        {
            "": label,
            "TFLOP/s": f"{ours[label]['total'].min():.0f} to {ours[label]['total'].max():.0f}",
            "the fastest in": f"{(found >= 1).sum()} of {len(found)}",
            "geometric mean of the ratio to the fastest rival": f"{statistics.geometric_mean(found):.2f}",
            "worst": f"{found.min():.2f} ({found.idxmin()})",
        }
        for label, found in ((label, against[label].dropna()) for label in against)
    ]
    about = "Forward and backward together, counting visible tiles only."
    return "\n\n".join(filter(None, [about, table(pd.DataFrame(lines)), left_out(frame)]))


def left_out(frame):
    """Say which of the twelve masks a table of masks lacks; nothing where all of them were measured."""
    rows = frame[frame["table"].str.startswith("masks-") & (frame["ours"] == True) & frame["ms"].notna()]  # noqa: E712
    if not len(rows):
        return ""
    measured = rows.groupby(["problem.n_keys", "problem.head_dim"])["problem.mask"].agg(set)
    return "  ".join(
        f"Not measured at {n // 1024:.0f}K tokens, d {d:.0f}: {', '.join(kind for kind in KINDS if kind not in kinds)}."
        for (n, d), kinds in measured.items()
        if kinds < set(KINDS)
    )


def figure(frame):
    """Draw the ratio to the fastest rival as a map, a column per table, a line per mask."""
    found = ratios(frame)
    drawn, (axis,) = panels(1, 3.2 + 0.95 * len(found.columns), 4.8)
    axis.imshow(np.log2(found), cmap="RdBu", vmin=-1.5, vmax=1.5, aspect="auto")
    axis.grid(visible=False)
    for (row, column), ratio in np.ndenumerate(found):
        if ratio > 0:
            axis.text(column, row, f"{ratio:.2f}", ha="center", va="center", fontsize=9)
    axis.set_yticks(range(len(found)), found.index)
    axis.set_xticks(range(len(found.columns)), [label.replace(" tokens, ", "\n") for label in found])
    axis.set_title("times the fastest rival's speed, forward and backward", fontsize=10)
    return drawn
