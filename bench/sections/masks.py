"""Masks: the FlashMask paper's tables and figures, and whether a column mask is the dense one."""

import numpy as np
import pandas as pd

from bench import sparsity
from bench.mask_samples import KINDS
from bench.report import Section, standing
from bench.style import OURS, WORSE, chart, curves, name, ours_first, panels, table

HEAD = ["method, mask", "FW ms", "BW ms", "total ms", "FW TFLOP/s", "BW TFLOP/s", "total TFLOP/s", "sparsity"]
SHADES = dict(zip(sparsity.KINDS, (OURS, WORSE, "#f2a65a"), strict=True))
RESULTS = {f"same.{key}": key for key in ("o", "l", "m", "dq", "dk", "dv")} | {"same_flags": "as flags"}


class FlashMask(Section):
    """The paper's tables 4 to 9: milliseconds, TFLOP/s and sparsity of twelve masks, and its figure 5."""

    title = "Twelve masks (FlashMask, tables 4 to 9, figure 5)"
    command = "python -m bench.hopper --tables masks-8k masks-32k masks-128k masks-8k-d64 masks-32k-d64 masks-128k-d64"
    files = ("hopper",)
    prefix = "masks-"

    def found(self):
        """Yield the name of each table, d 128 first, and a line per runner and mask that has both directions."""
        rows = self.frame[self.frame["table"].str.startswith("masks-") & self.frame["ms"].notna()]
        kind = pd.Categorical(rows["problem.mask"], KINDS, ordered=True)
        rows = rows.assign(d=-rows["problem.head_dim"].astype(int), n=rows["problem.n_keys"].astype(int), mask=kind)
        values = ["ms", "flops", "rate", "rho"]
        wide = rows.pivot_table(values, ["d", "n", "runner", "mask"], "direction", observed=True).dropna()
        wide["total", "ms"] = wide["ms"].sum(axis=1)
        wide["total", "rate"] = wide["flops"].sum(axis=1) / wide["total", "ms"] / 1e9
        for (d, n), lines in wide.groupby(["d", "n"]):
            lines = lines.droplevel(["d", "n"])
            yield f"{n // 1024}K tokens", -d, lines.loc[ours_first(lines.index.get_level_values("runner"))]

    def text(self):
        """Return the tables in the paper's form."""
        parts = []
        for title, d, lines in self.found():
            columns = [lines[value, way] for value in ("ms", "rate") for way in ("forward", "backward")]
            columns.insert(2, lines["total", "ms"])
            columns += [lines["total", "rate"], lines["rho", "forward"].map("{:.2f}".format)]
            label = pd.Series([f"{name(runner)}, {mask}" for runner, mask in lines.index], lines.index)
            shown = pd.concat([label, *columns], axis=1)
            parts.append(f"{title}, head dimension {d}:\n\n{table(shown.set_axis(HEAD, axis=1))}")
        return "\n\n".join(parts)

    def ratios(self):
        """Return, by table and mask, cuattn's total rate over that of the fastest rival."""
        totals = {f"{title}, d {d}": lines["total", "rate"].unstack("runner") for title, d, lines in self.found()}
        beside = {label: rates for label, rates in totals.items() if "cuattn" in rates and len(rates.columns) > 1}
        return pd.DataFrame(
            {label: rates["cuattn"] / rates.drop(columns="cuattn").max(axis=1) for label, rates in beside.items()}
        )

    def summary(self):
        """Return, per table, what cuattn reaches and how it stands beside the fastest rival of each mask."""
        ours = {f"{title}, d {d}": lines for title, d, lines in self.found()}
        shown = []
        for label, ratios in self.ratios().items():
            total = ours[label].loc["cuattn"]["total", "rate"]
            ahead, mean, worst, where = standing(ratios.dropna())
            shown.append({
                "": label,
                "TFLOP/s": f"{total.min():.0f} to {total.max():.0f}",
                "the fastest in": ahead,
                "geometric mean of the ratio to the fastest rival": mean,
                "worst": f"{worst} ({where})",
            })  # fmt: skip
        about = "Forward and backward together, counting visible tiles only."
        return "\n\n".join(filter(None, [about, table(pd.DataFrame(shown)), left_out(self.frame)]))

    def figure(self):
        """Draw the ratio to the fastest rival as a map, a column per table, a line per mask."""
        found = self.ratios()
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


class Sparsity(Section):
    """Latency against a mask's sparsity."""

    title = "Latency is linear in a mask's sparsity (FlashMask, figure 4a)"
    command = "python -m bench.sparsity"

    def found(self):
        """Yield, per kind of mask, its rows and the line through them."""
        rows = self.of("figure-4a")
        for kind in sparsity.KINDS:
            if len(lines := rows[rows["problem.kind"] == kind]):
                yield kind, lines, sparsity.fit(lines["rho"], lines["ms"])

    about = (
        "32K tokens, 32 heads, head dimension 128, bfloat16, forward and backward; masks drawn as in the paper's A.4."
    )

    def lines(self):
        return [
            {
                "mask": kind,
                "samples": len(rows),
                "sparsity ρ": f"{rows['rho'].min():.2f} to {rows['rho'].max():.2f}",
                "ms per (1 - ρ)": line["slope"],
                "ms at ρ = 1": line["intercept"],
                "correlation": f"{line['correlation']:.4f}",
            }
            for kind, rows, line in self.found()
        ]

    def figure(self):
        """Draw every sample and the fitted lines."""
        drawn, (axis,) = panels(1, 5.4, 3.8)
        for kind, rows, line in self.found():
            label = f"{kind}, r = {line['correlation']:.4f}"
            axis.plot(rows["rho"], rows["ms"], "o", markersize=4, color=SHADES[kind], label=label)
            axis.plot(rows["rho"], line["slope"] * (1 - rows["rho"]) + line["intercept"], color=SHADES[kind])
        axis.set(xlabel="block sparsity ρ", ylabel="ms, forward and backward", ylim=(0, None))
        axis.legend(frameon=False, fontsize=8)
        return drawn


class MaskMemory(Section):
    """A mask's memory against the length."""

    title = "A mask's memory (FlashMask, figure 4b)"
    command = "python -m bench.mask_memory"

    def found(self):
        """Return megabytes by length: ours, dense, and the dense ones that were really allocated."""
        rows = self.of("figure-4b").astype({"problem.n": int})
        rows = rows.assign(seen=rows["mask_bytes"].where(rows["measured"] == True))  # noqa: E712
        wide = rows.pivot(index="problem.n", columns="runner", values=["mask_bytes", "seen"]).astype(float) / 1e6
        ours, dense, seen = ("mask_bytes", "cuattn-column"), ("mask_bytes", "dense"), ("seen", "dense")
        return wide[[ours, dense, seen]].set_axis(["cuattn", "dense", "seen"], axis=1)

    about = "What a forward and a backward allocate for the mask, beyond the same call without one."

    def lines(self):
        found = self.found()
        return {
            "tokens": [f"{n // 1024}K" for n in found.index],
            "column mask with its tables, MB": found["cuattn"].array,
            "dense boolean mask, MB": [
                f"{dense:,.0f}" + (" (counted)" if seen != seen else "")
                for dense, seen in zip(found["dense"], found["seen"], strict=True)
            ],
        }

    def summary(self):
        """Return the longest."""
        last = self.found().iloc[-1]
        long = f"At {last.name // 1024}K tokens a column mask takes {last['cuattn']:.0f} MB with all its tables"
        return f"{long}; a dense one would take {last['dense'] / 1e3:.0f} GB."

    def figure(self):
        names = {"cuattn": "column mask", "dense": "dense, counted", "seen": "dense, allocated"}
        about = dict(log=True, xlabel="tokens", ylabel="MB", yscale="log")
        return chart((curves, self.found().rename(columns=names), about), width=6.0)


class SameBits(Section):
    """Column masks and dense masks, bit for bit."""

    title = "A column mask and its dense twin give the same bits (FlashMask, sections 4.4 and 5.2)"
    command = "python -m bench.same_bits"

    about = (
        "Of the paper's twelve masks, how many give the same bits as a column mask and as a boolean matrix on the same "
        "kernel, forward and deterministic backward; and, where `is_causal` or `window` say the same, as flags."
    )

    def lines(self):
        """Return how many of the twelve masks agree, per kernel."""
        for runner, rows in self.of("same-bits").groupby("runner", sort=False):
            found = {label: rows[key].dropna() for key, label in RESULTS.items()}
            yield {"kernel": runner} | {x: f"{of.sum()} of {len(of)}" if len(of) else None for x, of in found.items()}

    def text(self):
        rows = self.of("same-bits")
        reasons = rows.dropna(subset="reason") if "reason" in rows else rows[:0].assign(reason="")
        notes = dict.fromkeys("- " + reasons["runner"] + ": " + reasons["reason"])
        return "\n".join([super().text(), "", *notes]).rstrip()
