"""The CPU backend: beside PyTorch and the NumPy formula, its time under a mask, its memory."""

import numpy as np
import pandas as pd

from bench import report
from bench.style import bars, legend, name, panels, table

TITLE = "On the CPU"
COMMAND = "python -m bench.cpu"
TABLES = ("cpu", "cpu-statistics", "cpu-torch", "cpu-small")
RIVALS = {"sdpa-dense": "PyTorch", "sdpa-documents": "PyTorch by document", "numpy": "NumPy formula"}
EXTRA_MS = 0.1  # what a call may cost beyond the formula


def _pairs(frame):
    """Return, per case and runner of ours, its milliseconds and each rival's time over its own, turn by turn."""
    lines = []
    for _, rows in report.of_table(frame, *TABLES).groupby("case", sort=False):
        samples = dict(zip(rows["runner"], rows["samples_us"], strict=True))
        for ours in [runner for runner in samples if runner.startswith("cuattn")]:
            times = {
                label: np.median(np.divide(samples[runner], samples[ours]))
                for runner, label in RIVALS.items()
                if runner in samples and len(samples[runner]) == len(samples[ours])
            }
            about = rows.iloc[0][["case", "table", "label", "direction"]]
            lines.append({**about, "runner": ours, "ms": np.median(samples[ours]) / 1e3, **times})
    return pd.DataFrame(lines)


def text(frame):
    """Return the table: a line per case and function of ours."""
    found = _pairs(frame)
    label = found["label"] + ", " + found["direction"] + ", " + found["runner"].map(name)
    lines = pd.concat([label.rename(""), found["ms"]], axis=1)
    lines = lines.assign(**{f"{rival}, times that": found[rival] for rival in RIVALS.values() if rival in found})
    about = (
        "float32; batch x heads first in each name.  Results are checked before they are timed, rivals run in turn; "
        "a ratio is the median over the turns, and above 1 where cuattn is faster."
    )
    return f"{about}\n\n{table(lines)}"


def summary(frame):
    """Return the paragraph of the README."""
    found = _pairs(frame)
    return "  ".join(filter(None, [*_beside(found), _small(found), _visible(frame), _memory(frame)]))


def _beside(found):
    """Say how many times PyTorch's speed cuattn has, without and with masks."""
    masked = ~found["label"].str.contains("full")
    said = []
    for which, about, rows in (
        ("cpu", "without a mask", ~masked),
        ("cpu", "with one, which PyTorch takes as a dense matrix", masked),
        ("cpu-torch", "for the shapes and biases that PyTorch users call", masked | ~masked),
    ):
        found_here = found[rows & found["table"].isin([which, f"{which}-statistics"])]
        for rival in ("PyTorch", "PyTorch by document"):
            ratios = found_here.get(rival, pd.Series(dtype=float)).dropna()
            if len(ratios):
                said.append(f"{rival}'s time over cuattn's {about}: {ratios.min():.2f} to {ratios.max():.2f}.")
    return said


def _small(found):
    """Say how far small problems are above the formula and its allowance."""
    small = found[(found["table"] == "cpu-small") & (found["runner"] != "cuattn-cpu")]
    if not len(small) or "NumPy formula" not in small:
        return ""
    share = (small["ms"] - EXTRA_MS) / (small["NumPy formula"] * small["ms"])
    worst = small.loc[share.idxmax()]
    return (
        f"Problems of a few rows take at most {max(share.max(), 0):.2f} times the three lines of NumPy and "
        f"{EXTRA_MS} ms ({worst['label']}, {worst['direction']})."
    )


def _visible(frame):
    """Say what share of its unmasked time cuattn takes under a mask, beside the share of visible tiles."""
    rows = report.of_table(frame, "cpu-visible").query("direction == 'forward'")
    said = []
    for n, group in rows.groupby("problem.n") if len(rows) else ():
        plain = group.loc[group["problem.mask"] == "none", "samples_us"].iloc[0]
        shares = [
            f"{np.median(np.divide(row['samples_us'], plain)):.3f} for {1 - row['rho']:.3f} ({row['problem.mask']})"
            for row in group.to_dict("records")
            if row["problem.mask"] != "none"
        ]
        said.append(f"at N = {n:.0f} {', '.join(shares)}")
    about = "Its time under a mask over that without, forward, for the share of 128 x 128 tiles that is visible"
    return f"{about}: {'; '.join(said)}." if said else ""


def _memory(frame):
    rows = report.of_table(frame, "cpu-memory")
    return f"Extra memory at N = 16384 is {rows['bytes_per_thread'].max() / 1e6:.0f} MB a thread." if len(rows) else ""


def figure(frame):
    """Draw the seconds of both under every mask."""
    rows = report.of_table(frame, "cpu")
    drawn, axes = panels(2, 4.8, 3.6)
    for axis, (direction, group) in zip(axes, rows.groupby("direction"), strict=False):
        group = group[group["problem.n_keys"] == group["problem.n_keys"].max()]
        wide = group.assign(mask=group["problem.mask"].fillna("no mask"))
        wide = wide.pivot_table(index="mask", columns="runner", values="ms", sort=False)
        bars(axis, wide.dropna(axis="columns", how="all"), ".0f")
        axis.set(title=direction.replace("+", " and "), xlabel="ms (less is better)")
    legend(drawn, 3)
    return drawn
