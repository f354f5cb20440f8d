"""Beside all peers: the mean and the worst ratio, where another library is faster, the sweep without masks."""

import itertools
import statistics

import pandas as pd

from bench import report
from bench.sections.masks import left_out
from bench.style import INK, OURS, QUIET, WORSE, chart, curves, name, ours_first, panels, table

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
SINGLE = {
    "host": "host time",
    "decode": "one query",
    "dropout": "dropout",
    "portable": "portable kernel",
    "lengths": "short sequences",
    "gpt2": "short sequences",
}
PEAK = 798  # TFLOP/s of a bfloat16 matrix product of 8192^3 on an H200


class Peers(report.Section):
    """All tables beside all peers, in one line each: the mean and the worst ratio to the best peer."""

    title = "Beside other libraries"
    command = "python -m bench.hopper` and `python -m bench.portable"
    files = ("hopper", "portable")

    def found(self):
        """Yield, per table and direction that has ratios: what it is, its lines, its ratios."""
        for (which, direction), lines, _ in report.tables(self.frame):
            ratios = lines.set_index("short")["ratio"].dropna()
            if len(ratios):
                yield f"{ABOUT.get(which, which)}, {direction}", lines, ratios

    def text(self):
        wrong = set(self.frame.loc[(self.frame["status"] == "wrong") & self.frame["ours"], "case"])
        rows = []
        for about, lines, ratios in self.found():
            refused = list(lines.loc[lines["case"].isin(wrong) & lines["ratio"].isna(), "short"])
            row = {"": about, "beside": ", ".join(map(name, dict.fromkeys(itertools.chain(*lines["rivals"]))))}
            row["ahead in"] = f"{(ratios >= 1).sum()} of {len(ratios) + len(refused)}"
            _, row["geometric mean"], worst, where = report.standing(ratios)
            row["worst"] = f"{worst} ({where})"
            rows.append({**row, "refused": ", ".join(refused) or None})
        shown = pd.DataFrame(rows).dropna(axis="columns", how="all")
        note = "Refused: not timed, since the error was above the bound." if "refused" in shown else ""
        intro = (
            "How many times faster cuattn is than the fastest of the rivals named in each line, case by case in one "
            "run.  Below 1 it is slower.  Every case, and every runner that was timed: "
            "[bench/results/tables.md](bench/results/tables.md)."
        )
        return "\n\n".join(filter(None, [intro, table(shown), note, left_out(self.frame), self.determinism()]))

    def determinism(self):
        """Return what reproducible gradients cost each runner."""
        tables = [lines for (which, _), lines, _ in report.tables(self.frame) if which == "deterministic"]
        costs = pd.DataFrame([case for lines in tables for case in report.costs_of_determinism(lines).values()])
        said = [f"{name(runner)} {costs[runner].min():.0%} to {costs[runner].max():.0%}" for runner in costs]
        return f"`deterministic=True`, in the plain backward's time, costs {', '.join(said)}." if said else ""

    def figure(self):
        """Draw the ratio of every case, a line per table and direction: right of 1 cuattn is faster."""
        found = list(self.found())
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


class Behind(report.Section):
    """Where another library is faster, and by how much: every case behind its fastest rival, in groups of one kind.

    The figures come from the rows; ``bench/NOTES.md`` says what was tried against each group, and what comes next.
    """

    title = "Where it is behind"
    command = "python -m bench.hopper`, `python -m bench.portable` and `python -m bench.lengths"
    files = ("hopper", "portable", "lengths", "gpt2")

    def text(self):
        """Return the table, the groups in which it is furthest behind first."""
        found = report.lines(self.frame).dropna(subset="ratio")
        rows = []
        for label, cases in found.groupby(found.apply(group, axis=1), sort=False):
            slow = cases[cases["ratio"] < 1 - NOISE].sort_values("ratio")
            if len(slow):
                share = " to ".join(f"{slow['ratio'].iloc[i]:.2f}" for i in sorted({0, len(slow) - 1}))
                rivals = ", ".join(map(name, slow["rival"].unique()))
                rows.append((slow["ratio"].iloc[0], label, f"{len(slow)} of {len(cases)}", share, rivals))
        if not rows:
            return "In no case that was measured."
        shown = pd.DataFrame(rows, columns=["worst", "", "cases", "of the fastest rival's speed", "which is"])
        about = (
            "Every case in which a rival was more than half a percent faster in the same run.  `bench/NOTES.md` says "
            "what was tried against each, and what comes next."
        )
        return f"{about}\n\n{table(shown.sort_values('worst', kind='stable').drop(columns='worst'))}"


def group(line):
    """Return the kind of a case, in words: what it computes that others do not."""
    which, direction = line["table"], line["direction"]
    if line.get("problem.deterministic") is True:
        return "deterministic gradients"
    if which == "portable" and line["problem.dtype"] == "float64":
        return "float64"
    if which in ("host", "decode"):
        return SINGLE[which]
    if which in SINGLE:
        return f"{SINGLE[which]}, {direction.replace('+', ' and ')}"
    masks = "masks" if which.startswith("masks") else "no mask"
    return f"{direction}, d {line['problem.head_dim']:.0f}, {masks}"


class Dense(report.Section):
    """Without a mask: the sweep of the FlashAttention papers, 16K tokens, from 1K to 16K in a sequence."""

    title = "Full and causal attention, d 64 to 256 (as in the FlashAttention papers)"
    command = "python -m bench.hopper --tables dense"
    files = ("hopper",)
    prefix = "dense"

    def found(self):
        """Yield, per direction, its lines with their shape in words, by d and N."""
        found = report.lines(self.frame[self.frame["table"] == "dense"])
        kind = ", " + found["problem.causal"].map({True: "causal", False: "full"})
        d, n = (found[f"problem.{key}"].astype(int) for key in ("head_dim", "n_keys"))
        found = found.assign(d=d, n=n, shape="d " + d.astype(str) + ", N " + n.astype(str) + kind)
        found["short"] = (n // 1024).astype(str) + "K" + kind.str.removeprefix(",")
        return found.sort_values(["d", "problem.causal", "n"]).groupby("direction", sort=False)

    def text(self):
        """Return a line per shape, TFLOP/s of each runner in both directions."""
        parts = [
            _rates(lines, "shape").round().rename(columns=lambda runner, way=way: f"{name(runner)}, {way}")
            for way, lines in self.found()
        ]
        rates = pd.concat(parts, axis=1).rename_axis("TFLOP/s").reset_index()
        return f"16K tokens, hidden size 2048, bfloat16.\n\n{table(rates)}"

    def summary(self):
        """Return in how many shapes cuattn is ahead, and the shape in which it is furthest behind."""
        said = ["16K tokens, hidden size 2048, bfloat16."]
        for way, lines in self.found():
            ahead, mean, worst, where = report.standing(lines.set_index("shape")["ratio"].dropna())
            said.append(
                f"{way.capitalize()}, cuattn is the fastest in {ahead} shapes, {worst} times the fastest rival's speed "
                f"in its worst ({where}) and {mean} times in the geometric mean."
            )
        return "  ".join(said)

    def figure(self):
        """Draw dots of TFLOP/s under the line of the peak, a panel per direction and head dimension."""
        groups = {
            f"{way}, head dimension {d}": _rates(of_d, "short")
            for way, lines in self.found()
            for d, of_d in lines.groupby("d")
        }
        about = dict(style="o", ylabel="TFLOP/s", ylim=(0, PEAK * 1.1))
        parts = ((curves, rates, {**about, "title": title}) for title, rates in groups.items())
        drawn = chart(*parts, width=4.2, height=3.0, rows=2, columns=5)
        for axis in drawn.axes:
            axis.axhline(PEAK, color=QUIET, linestyle="--", linewidth=1)
        drawn.suptitle(f"dashed: a matrix product, {PEAK} TFLOP/s")
        return drawn


def _rates(lines, index):
    rates = pd.DataFrame(list(lines["rates"]), index=lines[index])
    return rates[ours_first(rates)]
