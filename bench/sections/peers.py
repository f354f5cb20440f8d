"""Beside all peers: the mean and the worst ratio, where another library is faster, every table case by case."""

import itertools

import numpy as np
import pandas as pd

from bench.bars import BARS, standings
from bench.report import Section, by_direction, compared, lines, standing
from bench.style import INK, NOISE, bars, chart, dots, name, panels, ratios
from bench.suites import SUITES

PEAK, PRODUCT = 798, "a matrix product of 8192³"  # TFLOP/s in bfloat16 on an H200
MASKS = {  # the FlashMask paper's tables
    f"masks-{n.lower()}{end}": f"twelve masks, {n} tokens, {d}"
    for (end, d), n in itertools.product((("", "d 128"), ("-d64", "d 64")), ("8K", "32K", "128K"))
}
ABOUT = {
    "dense": "hidden size 2048, d 64 to 256, full and causal",
    **MASKS,
    "shapes": "shapes that users call",
    "dropout": "dropout 0.1",
    "deterministic": "bitwise reproducible gradients",
    "long": "128K and 512K tokens, few heads",
    "portable": "portable kernel: 16 bits, float32, float64",
    "decode": "one query, long caches",
    "host": "host time of a warm call",
    "first-call": "first call of a process",
    "scores": "functions of the scores",
    "scores-learned": "learned arrays in functions of the scores",
    "scores-bias": "biases and their gradients",
    "scores-masks": "functions of what is visible",
    "scores-columns": "column masks as functions and as boolean matrices",
    "scores-host": "host time of a function",
    "scores-first-call": "first call of a process with a function",
    "scores-tables": "tables of a mask function",
    "lengths": "short and long sequences",
    "gpt2": "GPT-2 medium's attention",
}


def names(runners):
    """Return what a reader calls some runners, once each."""
    return ", ".join(map(name, dict.fromkeys(runners)))


def beside(rows):
    """Yield, per table and direction that has ratios: what it is, the direction, and a line per case with a rival."""
    found = lines(rows).dropna(subset="rival")
    for (table, way), of in found.groupby(["table", "direction"], sort=False):
        if of["ratio"].notna().any():
            yield ABOUT[table], way, of.set_index("label")


def peers(rows):
    """Return all tables beside all peers, in one line each: the mean and the worst ratio to the best peer."""
    return pd.DataFrame([
        {"table": about, "direction": way, "beside": names(itertools.chain(*of["rivals"])), **standing(of["ratio"])}
        for about, way, of in beside(rows)
    ])  # fmt: skip


def draw_peers(rows):
    """Draw the ratio of every case, a line per table: right of 1 cuattn is faster."""
    return ratios({(about, way): of["ratio"].dropna() for about, way, of in beside(rows)})


def behind(rows):
    """Return the groups of cases in which a rival is faster, the one that is furthest behind first."""
    slow = lines(rows)
    slow = slow[slow["ratio"] < 1 - NOISE]
    return (
        slow.groupby([slow["table"].map(ABOUT), "direction"])
        .agg(cases=("ratio", "size"), least=("ratio", "min"), most=("ratio", "max"), rivals=("rival", names))
        .sort_values("least")
        .rename(columns={"least": "of the rival's speed, least", "rivals": "which is"})
    )


def scores(rows):
    """Return what functions of scores and masks reach, and what they were to reach."""
    return pd.DataFrame(
        standings((*BARS["scores"], *BARS["cpu"]), [row.dropna().to_dict() for _, row in rows.iterrows()])
    )


def shapes(rows):
    """Return, by what calls the shapes and direction, how cuattn stands beside the fastest rival of each."""
    found = lines(rows).dropna(subset="rival").set_index("label").groupby(["use", "direction"], sort=False)["ratio"]
    return pd.DataFrame({about: {"shapes": len(ratios), **standing(ratios)} for about, ratios in found}).T.rename_axis(
        ["use", "direction"]
    )


def determinism(rows):
    """Return what bitwise reproducible gradients cost each runner, in the plain backward's time of the same run."""
    rows = rows.assign(label=rows["label"].str.removesuffix("-deterministic"))
    times = rows.pivot_table("ms", ["label", "runner", "run"], "deterministic", sort=False).dropna()
    return (times[True] / times[False] - 1).droplevel("run").map("{:.1%}".format).unstack("runner")


def both(rows):
    """Return milliseconds, TFLOP/s of each direction and in total, and the sparsity, in the FlashMask paper's order."""
    rows = compared(rows)
    found = rows.pivot_table(
        ["ms", "flops", "rate", "rho"], ["table", "runner", "mask"], "direction", sort=False
    ).dropna()
    found["ms", "total"] = found["ms"].sum(axis=1)
    found["rate", "total"] = found["flops"].sum(axis=1) / found["ms", "total"] / 1e9
    shown = [(unit, way) for unit in ("ms", "rate") for way in ("forward", "backward", "total")]
    return found[[*shown, ("rho", "forward")]].rename(index=MASKS, level="table")


def in_order(values, level):
    """Return values with a column per label of a level; lines and columns stay in order of appearance."""
    lines, columns = values.index.droplevel(level).unique(), values.index.unique(level)
    return values.unstack(level).reindex(lines)[columns]


def totals(rows):
    """Return the total rate of cuattn and how many times the fastest rival's it is, by table and mask."""
    rates = in_order(both(rows)["rate", "total"], "runner")
    return rates["cuattn"], rates["cuattn"] / rates.drop(columns="cuattn").max(axis=1)


def masks(rows):
    """Return, per table, what cuattn reaches and how it stands beside the fastest rival of each mask."""
    ours, ratios = (of.groupby("table", sort=False) for of in totals(rows))
    reached = ours.agg(**{"TFLOP/s, least": "min", "most": "max"})
    return reached.join(pd.DataFrame({table: standing(of.droplevel("table").dropna()) for table, of in ratios}).T)


def draw_masks(rows):
    """Draw the ratio to the fastest rival as a map, a column per table, a line per mask."""
    found = in_order(totals(rows)[1], "table")
    drawn, (axis,) = panels(1, 3.2 + 0.95 * len(found.columns), 4.8)
    axis.imshow(np.log2(found), cmap="RdBu", vmin=-1.5, vmax=1.5, aspect="auto")
    axis.grid(visible=False)
    for place, ratio in np.ndenumerate(found.T):
        axis.text(*place, f"{ratio:.2f}", ha="center", va="center", fontsize=9)
    axis.set_yticks(range(len(found)), found.index)
    axis.set_xticks(range(len(found.columns)), [about.replace(", ", "\n") for about in found], fontsize=8)
    axis.set_title("times the fastest rival's speed, forward and backward", fontsize=10)
    return drawn


def cases(rows):
    """Return the rate of every runner, the fastest rival of each case and the ratio to it."""
    wide = compared(rows).pivot_table("rate", ["direction", "label"], "runner", sort=False)
    return wide.join(lines(rows).set_index(["direction", "label"])[["rho", "rival", "ratio", "spread"]])


def draw_rates(rows):
    """Draw a panel of bars per direction."""
    parts = by_direction(compared(rows), "rate")
    height = 1.4 + 0.125 * max(part.size + len(part) for part in parts.values())
    return chart(parts, bars, "title", width=4.8, height=height, xlabel=rows["unit"].iloc[0])


def draw_dense(rows):
    """Draw dots of TFLOP/s over those of a matrix product, a panel per direction."""
    parts = {way: of / PEAK for way, of in by_direction(compared(rows), "rate").items()}
    drawn = chart(parts, dots, "title", width=5.0, height=5.2, columns=4, xlabel=f"TFLOP/s over those of {PRODUCT}")
    for axis in drawn.axes:
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_xlim(0, 1.1)
    return drawn


SECTIONS = {
    "peers": Section(
        "Beside other libraries",
        ("hopper", "shapes", "portable", "scores"),
        tuple(ABOUT),
        "How many times faster cuattn is than the fastest of the rivals named in each line, case by case in one run.  "
        "Below 1 it is slower.  Every case, and every runner that was timed: "
        "[results/tables.md](results/tables.md).",
        table=peers,
        figure=draw_peers,
    ),
    "behind": Section(
        "Where it is behind",
        ("hopper", "shapes", "portable", "scores", "lengths", "gpt2"),
        tuple(ABOUT),
        "Every case in which a rival was more than half a percent faster in the same run.  [NOTES.md](NOTES.md) "
        "says what was tried against each, and what comes next.",
        table=behind,
    ),
    "shapes": Section(
        "Shapes that users call",
        ("shapes",),
        ("shapes",),
        "bfloat16 unless said; full attention, but causal in language and where a line says so.  How many times faster "
        "cuattn is than the fastest rival of the same run.",
        table=shapes,
    ),
    "scores": Section(
        "Functions of scores and masks",
        ("scores", "cpu"),
        (*(table for table in ABOUT if table.startswith("scores")), "cpu-scores"),
        "How many times faster than the fastest peer of the same run, and what was to be reached; learned arrays and "
        "biases are differentiated too.",
        table=scores,
    ),
    "deterministic": Section(
        "What reproducible gradients cost",
        ("hopper --tables deterministic",),
        ("deterministic",),
        "The time of a bitwise reproducible backward over that of the plain one, less one.",
        table=determinism,
    ),
    "dense": Section(
        "Full and causal attention, d 64 to 256 (as in the FlashAttention papers)",
        ("hopper --tables dense",),
        ("dense",),
        "Hidden size 2048, 16K tokens or one longer sequence, bfloat16.",
        figure=draw_dense,
    ),
    "flashmask": Section(
        "Twelve masks (FlashMask, tables 4 to 9, figure 5)",
        (f"hopper --tables {' '.join(MASKS)}",),
        tuple(MASKS),
        "Forward and backward together, counting visible tiles only.",
        table=masks,
        details=both,
        figure=draw_masks,
    ),
}
PEER_TABLES = {
    f"table-{table}": Section(
        f"{table}: {ABOUT[table]}", (f"{script} --tables {table}",), (table,), details=cases, figure=draw_rates
    )
    for script in ("hopper", "shapes", "portable", "scores")
    for table in (*SUITES[script].tables, *SUITES[script].optional, *SUITES[script].studies)
}
