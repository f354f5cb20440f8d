"""Bytes against the papers' theorems."""

import numpy as np
import pandas as pd

from bench import report
from bench.style import colour, name, panels, table

TITLE = "Bytes against the theorems (FlashAttention, theorems 2 and 5, proposition 4)"
COMMAND = "python -m bench.traffic"
STUDIES = {
    "theorem-2": "forward",
    "theorem-5": "backward",
    "proposition-4": "block-sparse",
    "beyond-l2": "one long head",
}
SHOWN = (1024, 4096)  # tokens of standard attention in the table
HEAD = ["", "block", "GB into the multiprocessors", "GB by the algorithm", "GB of device memory"]


def _found(frame, *studies, **wanted):
    """Return the rows of studies in gigabytes, ``hbm``, ``entered``, ``expected``; only those with wanted values."""
    rows = report.of_table(frame, *studies)
    columns = {key.removeprefix("problem."): rows[key] for key in rows if key.startswith("problem.")}
    hbm = rows["counters.hbm_read"] + rows["counters.hbm_write"]
    kept = "block_n" if studies == ("theorem-5",) else "block_m"
    found = rows.assign(
        **columns,
        hbm=hbm / 1e9,
        entered=rows["counters.l2_to_sm"] / 1e9,
        expected=rows.get("expected_l2_to_sm", np.nan) / 1e9,
        kept=columns.get(kept),
        varied=rows["case"].str.contains("-B"),
        who=columns["kernel"].map(lambda kernel: kernel if kernel == "standard" else f"cuattn-{kernel}"),
    )
    for key, value in wanted.items():
        found = found[found[key] == value]
    return found.sort_values(["n"], kind="stable") if wanted else found


def text(frame):
    """Return the table."""
    lines = []
    for study, label in STUDIES.items():
        for row in _found(frame, study).to_dict("records"):
            if row["who"] == "standard" and row["n"] not in SHOWN:
                continue
            sparse = f", s {row['density']:g}" if study == "proposition-4" else ""
            shape = f"{label}, N {row['n']:.0f}, d {row['d']:.0f}{sparse}: {name(row['who'])}"
            kept = f"{row['kept']:.0f}" if row["kept"] > 0 else None
            lines.append((shape, kept, row["entered"], row["expected"], row["hbm"]))
    about = (
        "64 heads (one in the last lines), float16.  What enters the multiprocessors is what the algorithm reads, "
        "tile by tile: T passes over the operand outside the chip, with M = the tile that is kept.  Device memory "
        "sees less of it while the L2 cache holds the keys of the heads at work."
    )
    return f"{about}\n\n{table(pd.DataFrame(lines, columns=HEAD))}"


def summary(frame):
    """Return how far the counts are from the algorithms."""
    found = _found(frame, "theorem-2", "proposition-4", "beyond-l2").dropna(subset="expected")
    off, most = (found["entered"] / found["expected"] - 1).abs().max(), (found["hbm"] / found["entered"]).max()
    return (
        f"What enters the multiprocessors is what the algorithms read, counted within {off:.1%} over all lengths, head "
        f"dimensions, block sizes and densities of the forward.  {_backward(frame)}Device memory sees "
        f"{(found['hbm'] / found['entered']).median():.0%} of it in the median, {most:.0%} at most.{_standard(frame)}"
    )


def _backward(frame):
    """Return how the backward's counts stand to algorithm 4."""
    found = _found(frame, "theorem-5").dropna(subset="expected")
    said = [
        f"{name(who)} {share.min():.2f} to {share.max():.2f} times"
        for who, share in (found["entered"] / found["expected"]).groupby(found["who"])
    ]
    if not said:
        return ""
    sm80 = found[found["kernel"] == "sm80"]
    added = sm80["heads"] * sm80["n"] * sm80["d"] * np.ceil(sm80["n"] / sm80["block_n"])
    back = ((sm80["entered"] - sm80["expected"]) * 1e9 / added).median()
    return (
        f"The backward reads what algorithm 4 reads: {', '.join(said)}; the portable kernel adds to dQ from registers, "
        f"and {back:.1f} bytes come back for every four that it adds.  "
    )


def _standard(frame):
    """Return how many times cuattn's bytes standard attention moves to and from device memory, forward and backward."""
    shares = {}
    for study in ("theorem-2", "theorem-5"):
        plain, ours = (_found(frame, study, who=who, n=4096, d=64) for who in ("standard", "cuattn-sm90"))
        if len(plain) and len(ours):
            shares[STUDIES[study]] = plain["hbm"].iloc[0] / ours["hbm"].iloc[0]
    said = ", ".join(f"{direction} {share:.0f} times" for direction, share in shares.items())
    return f"  At 4,096 tokens standard attention moves more to and from it: {said} as much." if said else ""


def figure(frame):
    """Draw forward and backward against N, block sizes, densities, one long head; a panel each that has rows."""
    parts = [
        *(
            (_found(frame, study, d=64, varied=False), "n", f"{STUDIES[study]}, d 64: tokens")
            for study in list(STUDIES)[:2]
        ),
        (_found(frame, "theorem-2", varied=True), "kept", "query rows in a block, N 4096"),
        (_found(frame, "theorem-5", varied=True), "kept", "keys in a block, N 4096"),
        (_found(frame, "proposition-4"), "density", "density s, N 4096"),
        (_found(frame, "beyond-l2"), "n", "one head, d 128: tokens"),
    ]
    parts = [part for part in parts if len(part[0])]
    drawn, axes = panels(len(parts), 4.0, 3.5, rows=2 if len(parts) > 3 else 1)
    for axis, (found, key, label) in zip(axes, parts, strict=False):
        for who, group in found.sort_values(key).groupby("who"):
            shade = dict(color=colour(who))
            axis.plot(group[key], group["hbm"], "s-", alpha=0.5, markersize=4, **shade)
            if who != "standard":
                axis.plot(group[key], group["entered"], "o", **shade)
                axis.plot(group[key], group["expected"], "--", **shade)
            axis.plot([], [], "s-", label=name(who), **shade)
        axis.set(xlabel=label, ylabel="GB")
        if key == "n":
            axis.set_yscale("log")
        if key != "density":
            axis.set_xscale("log", base=2)
    axes[0].legend(frameon=False, fontsize=7)
    drawn.suptitle("circles: into the multiprocessors; dashed: by the algorithm;\nsquares: device memory", fontsize=9)
    return drawn
