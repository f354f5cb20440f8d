"""All tables beside all peers, in one line each: the mean and the worst ratio to the best peer."""

import itertools
import statistics

import pandas as pd

from bench import report
from bench.sections.flashmask import left_out
from bench.style import INK, OURS, QUIET, WORSE, name, panels, table

TITLE = "Beside other libraries"
COMMAND = "python -m bench.hopper` and `python -m bench.portable"
FILES = ("hopper", "portable")
NOISE = 0.005  # half a percent either way is called equal
ABOUT = {
    "dense": "16K tokens, d 64 to 256, full and causal",
    **{
        f"masks-{n.lower()}{end}": f"twelve masks, {n} tokens, {d}"
        for (end, d), n in itertools.product((("", "d 128"), ("-d64", "d 64")), ("8K", "32K", "128K"))
    },
    "dropout": "dropout 0.1",
    "deterministic": "bitwise reproducible gradients",
    "long": "128K and 512K tokens, few heads",
    "portable": "portable kernel: 16 bits, float32, float64",
    "decode": "one query, long caches",
    "host": "host time of a warm call",
}


def _found(frame):
    """Return what each table is about, its lines, and the ratios by short label, where there are any."""
    found = [(key, lines, lines.set_index("short")["ratio"].dropna()) for key, lines, _ in report.tables(frame)]
    return [(f"{ABOUT.get(key[0], key[0])}, {key[1]}", lines, ratios) for key, lines, ratios in found if len(ratios)]


def text(frame):
    """Return one line per table and direction."""
    wrong = set(frame.loc[(frame["status"] == "wrong") & frame["ours"], "case"])
    rows = []
    for about, lines, ratios in _found(frame):
        refused = list(lines.loc[lines["case"].isin(wrong) & lines["ratio"].isna(), "short"])
        rivals = dict.fromkeys(name(runner) for rivals in lines["rivals"] for runner in rivals)
        line = {"": about, "beside": ", ".join(rivals)}
        line["ahead in"] = f"{(ratios >= 1).sum()} of {len(ratios) + len(refused)}"
        line["geometric mean"] = f"{statistics.geometric_mean(ratios):.2f}"
        line["worst"] = f"{ratios.min():.2f} ({ratios.idxmin()})"
        rows.append({**line, "refused": ", ".join(refused)})
    lines = pd.DataFrame(rows)
    note = "Refused: not timed, since the error was above the bound." if lines["refused"].any() else ""
    lines = lines if note else lines.drop(columns="refused")
    intro = (
        "How many times faster cuattn is than the fastest of the rivals named in each line, case by case in one run.  "
        "Below 1 it is slower.  Every case, and every runner that was timed: "
        "[bench/results/tables.md](bench/results/tables.md)."
    )
    return "\n\n".join(filter(None, [intro, table(lines.replace("", "–")), note, left_out(frame), _determinism(frame)]))


def figure(frame):
    """Draw the ratio of every case, a line per table and direction: right of 1 cuattn is faster."""
    found = _found(frame)
    drawn, (axis,) = panels(1, 8.0, 0.7 + 0.27 * len(found))
    axis.axvspan(1 - NOISE, 1 + NOISE, color=QUIET, alpha=0.3, linewidth=0)
    for place, (_, _, ratios) in enumerate(found):
        shades = [OURS if ratio >= 1 else WORSE for ratio in ratios]
        axis.scatter(ratios, [place] * len(ratios), s=22, color=shades, alpha=0.55, linewidths=0, zorder=3)
        mean = statistics.geometric_mean(ratios)
        axis.plot([mean, mean], [place - 0.36, place + 0.36], color=INK, linewidth=2, zorder=4)
    ticks = (0.5, 0.75, 1, 1.5, 2, 3)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, map("{:g}".format, ticks))
    axis.set_xticks([], minor=True)
    axis.set_yticks(range(len(found)), [about for about, _, _ in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("times the fastest rival's speed (dots: cases; bar: geometric mean; grey: equal)", fontsize=9)
    return drawn


def _determinism(frame):
    """Return what reproducible gradients cost each runner."""
    tables = [lines for (table, _), lines, _ in report.tables(frame) if table == "deterministic"]
    costs = pd.DataFrame([case for lines in tables for case in report.costs_of_determinism(lines).values()])
    said = [f"{name(runner)} {costs[runner].min():.0%} to {costs[runner].max():.0%}" for runner in costs]
    return f"`deterministic=True`, in the plain backward's time, costs {', '.join(said)}." if said else ""
