"""The FlashAttention paper's figures and theorems: runtime, memory, bytes, loops."""

import numpy as np
import pandas as pd

from bench.report import Section
from bench.sparsity import fit
from bench.style import bars, chart, curves, legend, name, ours_first, panels, proportion

PRODUCTS = {"standard": 6}  # matrix products; the others compute the scores again in the backward
PAPER = "The paper's A100: standard 41.7 ms and 40.3 GB, FlashAttention 7.3 ms and 4.4 GB."
VALUES = {"ms": "ms", "GB": "GB of device memory traffic"}
DIRECTIONS = ["forward", "backward"]
STUDIES = {
    "theorem-2": "forward",
    "theorem-5": "backward",
    "proposition-4": "block-sparse",
    "beyond-l2": "one long head",
}
SHOWN = (1024, 4096)  # tokens of standard attention in the table


class Gpt2(Section):
    """GPT-2 medium's attention: runtime, operations, bytes."""

    title = "GPT-2 medium's attention, forward and backward (FlashAttention, figure 2 left)"
    command = "python -m bench.gpt2"

    def found(self):
        """Return ms and GB by runner (cuattn first), and dropout: columns ("ms", 0.0) and so on."""
        rows = self.of("gpt2", "gpt2-bytes")
        found = rows.pivot_table([value for value in VALUES if value in rows], "runner", "problem.dropout")
        return found.loc[ours_first(rows["runner"])]

    about = f"Batch 64, 16 heads, 1024 tokens, head dimension 64, float16.  {PAPER}"

    def lines(self):
        found = self.found()
        p = self.of("gpt2").iloc[0]
        work = 2 * p["problem.batch"] * p["problem.heads"] * p["problem.n_queries"] ** 2 * p["problem.head_dim"] / 1e9
        cells = {"": found.index.map(name), "GFLOP": [work * PRODUCTS.get(runner, 7) for runner in found.index]}
        for dropout in found.columns.levels[1]:
            behind = f", dropout {dropout:g}" if dropout else ""
            cells |= {label + behind: found.get((value, dropout)) for value, label in VALUES.items()}
        return cells

    def text(self):
        found, what = self.found(), {"ms": "time", "GB": "bytes"}
        said = "  ".join(_standing(found[value], what[value]) for value in what if value in found)
        return f"{super().text()}\n\n{said}".rstrip()

    def figure(self):
        """Draw bars of time and bytes, without and with dropout."""
        found = self.found().rename(columns=lambda p: f"dropout {p:g}" if p else "no dropout", level=1)
        parts = [(found[value].T, label) for value, label in VALUES.items() if value in found]
        about = dict(numbers=".3g")
        return chart(*((bars, x, {**about, "xlabel": f"{label}, forward and backward"}) for x, label in parts))


def _standing(found, what):
    """Say how cuattn's time, or bytes, compares with the best rival's."""
    parts = []
    for dropout, spent in found.items():
        rivals = spent[~spent.index.str.startswith("cuattn")].dropna()
        if len(rivals) and spent.get("cuattn", 0) > 0:
            where = f"with dropout {dropout:g}" if dropout else "without dropout"
            parts.append(f"{where} {spent['cuattn'] / rivals.min():.3f} times that of {name(rivals.idxmin())}")
    return f"cuattn's {what}: {', '.join(parts)}." if parts else ""


class Lengths(Section):
    """Runtime and memory against the length of the sequence."""

    title = "Runtime and memory from 128 to 64K tokens (FlashAttention, figure 3)"
    command = "python -m bench.lengths"

    def found(self):
        """Return milliseconds and megabytes by length and runner."""
        rows = self.of("lengths").astype({"problem.n_keys": int})
        wide = rows.assign(MB=rows["peak_bytes"] / 1e6).pivot(index="problem.n_keys", columns="runner")
        return {unit: wide[unit][ours_first(rows["runner"])] for unit in ("ms", "MB")}

    about = "Batch 8, 8 heads, head dimension 64, float16, forward and backward; memory beyond the inputs, at its peak."

    def lines(self):
        lines = pd.concat(self.found(), axis=1)
        lines.columns = [f"{name(runner)}, {unit}" for unit, runner in lines.columns]
        return lines.rename(index="{:,}".format).rename_axis("tokens").reset_index()

    def summary(self):
        """Return the longest length at which standard attention runs, the longest, and where a rival is faster."""
        ms, mb = self.found().values()
        parts = []
        if "standard" in ms:
            both = ms[["standard", "cuattn"]].dropna().index.max()
            (plain, ours), (plain_mb, ours_mb) = (of.loc[both, ["standard", "cuattn"]] for of in (ms, mb))
            parts.append(
                f"At {both:,} tokens, the longest that standard attention can do here, cuattn takes {ours:.3g} ms for "
                f"{plain:.3g} and {ours_mb:,.0f} MB for {plain_mb:,.0f}."
            )
        rivals = ms.loc[:, ~ms.columns.str.startswith("cuattn")]
        longest = ms["cuattn"].last_valid_index()
        beside = ", ".join(f"{name(runner)} {spent:.0f}" for runner, spent in rivals.loc[longest].dropna().items())
        parts.append(f"At {longest:,} tokens it takes {ms['cuattn'][longest]:.0f} ms ({beside}).")
        said = [
            f"{name(line.idxmin())} at {n:,} ({line.min() / ms['cuattn'][n]:.2f} times the speed)"
            for n, line in rivals[rivals.min(axis=1) < ms["cuattn"]].iterrows()
        ]
        if said:
            parts.append(f"A rival is faster at {len(said)} of {len(ms)} lengths: {', '.join(said)}.")
        return "  ".join(parts)

    def figure(self):
        labels = ("ms, forward and backward", "MB at the peak, beyond the inputs")
        about = dict(log=True, xlabel="tokens", yscale="log")
        return chart(*((curves, x, {**about, "ylabel": y}) for x, y in zip(self.found().values(), labels, strict=True)))


class BlockSize(Section):
    """Runtime and bytes against the block size."""

    title = "Runtime against block size (FlashAttention, figure 2 middle)"
    command = "python -m bench.block_size"

    def found(self):
        """Return milliseconds and gigabytes by block size."""
        rows = self.of("block-size").astype({"problem.block_m": int}).set_index("problem.block_m")
        return rows.sort_index()[["ms", "entered", "expected", "GB"]]

    about = "The forward of the problem above on the portable kernel.  Larger blocks read the keys fewer times."

    def lines(self):
        head = ["ms", "GB into the multiprocessors", "GB, Q + 2 T_r (K, V)", "GB of device memory"]
        return self.found().set_axis(head, axis=1).rename_axis("query rows in a block").reset_index()

    def summary(self):
        """Return what changes with the block size."""
        found = self.found()
        ms, best = found["ms"], found["ms"].idxmin()
        first, last = found.index[[0, -1]]
        off = (found["entered"] / found["expected"] - 1).abs().max()
        return (
            f"The forward of GPT-2 medium's attention on the portable kernel, with {first} to {last} query rows in a "
            f"block: {found['entered'][first] / found['entered'][last]:.1f} times fewer bytes enter the "
            f"multiprocessors (counted within {off:.1%} of the formula), those of device memory change by at most "
            f"{found['GB'].max() / found['GB'].min() - 1:.0%}.  It takes {ms[first]:.2f} ms with {first} rows, "
            f"{ms[best]:.2f} ms with {best} and {ms[last]:.2f} ms with {last}."
        )

    def figure(self):
        about = dict(log=True, xlabel="query rows in a block", ylim=(0, None))
        names = {"expected": "formula", "entered": "L2 to SM", "GB": "device memory"}
        parts = {"ms, forward": self.found()[["ms"]], "GB": self.found()[list(names)].rename(columns=names)}
        return chart(*((curves, x, {**about, "ylabel": y}) for y, x in parts.items()))


class BlockSparse(Section):
    """Block-sparse runtime against density."""

    title = "Block-sparse attention takes time in proportion to its density (FlashAttention, figure 2 right)"
    command = "python -m bench.block_sparse"

    def found(self):
        """Return milliseconds by density and direction, the densest first."""
        found = self.of("block-sparse").pivot_table("ms", "density", "runner").sort_index(ascending=False)
        return found.rename(columns=lambda runner: runner.removeprefix("cuattn-"))[DIRECTIONS]

    about = "4096 tokens, 256 heads in all, head dimension 64, float16, random 128 x 128 blocks."

    def lines(self):
        found = self.found()
        cells = {"density s": [f"{s:g}" for s in found.index]}
        for way in DIRECTIONS:
            cells |= {f"{way}, ms": found[way].array, f"{way}, of dense": (found[way] / found[way].iloc[0]).array}
        return cells

    def summary(self):
        """Return the line through the times, and its lower end."""
        found = self.found()
        fits = {way: fit(1 - found.index.to_numpy(), found[way]) for way in DIRECTIONS}
        said = ", ".join(f"{way} {x['intercept']:.2f} + {x['slope']:.2f} s ms" for way, x in fits.items())
        shares = ", ".join(f"{way} {share:.1%}" for way, share in (found.iloc[-1] / found.iloc[0]).items())
        return (
            f"With a share s of the 128 x 128 blocks of 4096 tokens it takes {said} (correlation at least "
            f"{min(x['correlation'] for x in fits.values()):.4f}): at s = {found.index[-1]:.2%}, of the dense time, "
            f"{shares}."
        )

    def figure(self):
        """Draw time against density, and what proportion would be."""
        about = dict(xlabel="density s", ylabel="ms", xlim=(0, 1.03), ylim=(0, None))
        return chart((curves, proportion(self.found()), about), width=5.0, columns=2)


class Traffic(Section):
    """Bytes against the theorems."""

    title = "Bytes against the theorems (FlashAttention, theorems 2 and 5, proposition 4)"
    command = "python -m bench.traffic"

    def found(self, *studies):
        """Return the rows of studies, with their problem's values as columns."""
        rows = self.of(*studies).rename(columns=lambda column: column.removeprefix("problem."))
        if not len(rows):
            return rows
        return rows.assign(
            expected=rows.get("expected", np.nan),
            kept=rows.get("block_n" if studies == ("theorem-5",) else "block_m"),
            who=rows["kernel"].where(rows["kernel"] == "standard", "cuattn-" + rows["kernel"]),
        )

    about = (
        "64 heads (one in the last lines), float16.  What enters the multiprocessors is what the algorithm reads, tile "
        "by tile: T passes over the operand outside the chip, with M = the tile that is kept.  Device memory sees less "
        "of it while the L2 cache holds the keys of the heads at work."
    )

    def lines(self):
        for study, label in STUDIES.items():
            for row in self.found(study).to_dict("records"):
                if row["who"] == "standard" and row["n"] not in SHOWN:
                    continue
                sparse = f", s {row['density']:g}" if study == "proposition-4" else ""
                yield {
                    "": f"{label}, N {row['n']:.0f}, d {row['d']:.0f}{sparse}: {name(row['who'])}",
                    "block": f"{row['kept']:.0f}" if row["kept"] > 0 else None,
                    "GB into the multiprocessors": row["entered"],
                    "GB by the algorithm": row["expected"],
                    "GB of device memory": row["GB"],
                }

    def summary(self):
        """Return how far the counts are from the algorithms."""
        found = self.found("theorem-2", "proposition-4", "beyond-l2").dropna(subset="expected")
        off, seen = (found["entered"] / found["expected"] - 1).abs().max(), found["GB"] / found["entered"]
        return (
            f"What enters the multiprocessors is what the algorithms read, counted within {off:.1%} over all lengths, "
            f"head dimensions, block sizes and densities of the forward.  {self.backward()}Device memory sees "
            f"{seen.median():.0%} of it in the median, {seen.max():.0%} at most.{self.standard()}"
        )

    def backward(self):
        """Return how the backward's counts stand to algorithm 4."""
        found = self.found("theorem-5")
        if not len(found := found.dropna(subset="expected") if len(found) else found):
            return ""
        shares = (found["entered"] / found["expected"]).groupby(found["who"])
        said = ", ".join(f"{name(who)} {share.min():.2f} to {share.max():.2f} times" for who, share in shares)
        sm80 = found[found["kernel"] == "sm80"]
        added = sm80["heads"] * sm80["n"] * sm80["d"] * np.ceil(sm80["n"] / sm80["block_n"])
        back = ((sm80["entered"] - sm80["expected"]) * 1e9 / added).median()
        return (
            f"The backward reads what algorithm 4 reads: {said}; the portable kernel adds to dQ from registers, and "
            f"{back:.1f} bytes come back for every four that it adds.  "
        )

    def standard(self):
        """Return how many times cuattn's bytes standard attention moves to and from device memory."""
        said = []
        for study in ("theorem-2", "theorem-5"):
            found = self.found(study).query("n == 4096 and d == 64") if len(self.of(study)) else self.of(study)
            of = found.groupby("who")["GB"].first() if len(found) else {}
            if "standard" in of and "cuattn-sm90" in of:
                said.append(f"{STUDIES[study]} {of['standard'] / of['cuattn-sm90']:.0f} times")
        about = "  At 4,096 tokens standard attention moves more to and from it"
        return f"{about}: {', '.join(said)} as much." if said else ""

    def figure(self):
        """Draw forward and backward against N, block sizes, densities, one long head; a panel each that has rows."""
        parts = []
        for study, part, key, label in (
            ("theorem-2", "d == 64 and not varied", "n", "forward, d 64: tokens"),
            ("theorem-5", "d == 64 and not varied", "n", "backward, d 64: tokens"),
            ("theorem-2", "varied", "kept", "query rows in a block, N 4096"),
            ("theorem-5", "varied", "kept", "keys in a block, N 4096"),
            ("proposition-4", "n > 0", "density", "density s, N 4096"),
            ("beyond-l2", "n > 0", "n", "one head, d 128: tokens"),
        ):
            found = self.found(study)
            if len(found) and len(found := found.assign(varied=found["case"].str.contains("-B")).query(part)):
                parts.append((found.sort_values(key), key, label))
        drawn, axes = panels(len(parts), 4.0, 3.5, rows=2 if len(parts) > 3 else 1)
        for axis, (found, key, label) in zip(axes, parts, strict=True):
            for value, style in (("GB", "s-"), ("entered", "o"), ("expected", "--")):
                drawn_for = found if value == "GB" else found[found["who"] != "standard"]
                curves(axis, drawn_for.pivot_table(value, key, "who"), style, log=key != "density")
            axis.set(xlabel=label, ylabel="GB", yscale="log" if key == "n" else "linear")
        legend(drawn)
        drawn.suptitle(
            "circles: into the multiprocessors; dashed: by the algorithm;\nsquares: device memory", fontsize=9
        )
        return drawn


class LoopOrder(Section):
    """Which loop outside: bytes and time."""

    title = "Does swapping the loops win? (the lecture's open question)"
    command = "python -m bench.loop_order"

    def found(self):
        """Return the rows with their gigabytes: counted, by the algorithm, by the lecture's formula."""
        rows = self.of("loop-order")
        return rows.assign(formula=rows["lecture"] / 1e9)

    def wide(self, value):
        """Return one value by problem and runner."""
        return self.found().pivot_table(index="label", columns="runner", values=value, sort=False)

    about = (
        "`keys outside` is algorithm 1 with O, l and m in device memory; `queries outside` the lecture's change; both "
        "with one block per head and one inner code (`bench/studies/loop_order.cu`).  The formulas are "
        "12 N²d²/M + 16 N²d/M + 3 N d and 8 N²d²/M + 3 N d + 2 N elements of two bytes, M = 4 d B."
    )

    def lines(self):
        found = self.found()
        found = found.assign(who=found["runner"].map(name), first=found.groupby("label", sort=False).ngroup())
        head = ["problem", "", "GB counted", "GB by the algorithm", "GB by the lecture's formula", "ms"]
        shown = found.sort_values(["first", "runner"])[["label", "who", "GB", "algorithm", "formula", "ms"]]
        return shown.set_axis(head, axis=1)

    def summary(self):
        """Return the answer, as the rows give it."""
        ms, moved = self.wide("ms"), self.wide("GB")
        swapped = ms["keys-outside-o16"] / ms["queries-outside"]
        fewer = moved["keys-outside-o16"] / moved["queries-outside"]
        beside = ms["queries-outside"] / ms["cuattn-sm80"]
        found = self.found().query("runner in ('keys-outside', 'keys-outside-o16')")
        off = (found["GB"] / found["algorithm"] - 1).abs().max()
        answer = "Yes" if swapped.min() > 1 else "No" if swapped.max() < 1 else "Not always"
        return (
            f"{answer}: with one block per head and the same inner code in both, keys outside takes "
            f"{swapped.min():.1f} to {swapped.max():.1f} times the time of queries outside, and moves "
            f"{fewer.min():.1f} to {fewer.max():.1f} times the bytes.  Algorithm 1 is counted within {off:.1%} of what "
            f"its lines say.  Query blocks need nothing from each other: side by side they can share keys in the L2 "
            f"cache; cuattn's portable kernel, which works so, is {beside.min():.1f} to {beside.max():.1f} times as "
            f"fast as queries outside."
        )

    def figure(self):
        """Draw dots of bytes and time per problem."""
        formula = self.wide("formula").add_suffix(", the lecture's formula")
        parts = {"GB of device memory": self.wide("GB").join(formula), "ms, forward": self.wide("ms")}
        about = dict(style="o", yscale="log")
        return chart(*((curves, x, {**about, "ylabel": y}) for y, x in parts.items()), width=6.2, columns=3)
