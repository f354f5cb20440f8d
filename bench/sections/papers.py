"""The FlashAttention paper's figures and theorems: runtime, memory, bytes, loops."""

import numpy as np
import pandas as pd

from bench.report import Section
from bench.sections.masks import draw_line, line
from bench.style import bars, chart, dots

PANELS = {  # of the figure of bytes: its rows, its axis
    "forward, d 64: tokens": ("study == 'theorem-2' and d == 64 and block == 0", "n"),
    "backward, d 64: tokens": ("study == 'theorem-5' and d == 64 and block == 0", "n"),
    "query rows in a block, N 4096": ("study == 'theorem-2' and block > 0", "block"),
    "keys in a block, N 4096": ("study == 'theorem-5' and block > 0", "block"),
    "density s, N 4096": ("study == 'proposition-4'", "density"),
    "one head, d 128: tokens": ("study == 'beyond-l2'", "n"),
}


def against(found):
    """Return cuattn's values over those of the best rival, by the columns of a frame whose lines are runners."""
    return found.loc["cuattn"] / found[~found.index.str.startswith("cuattn")].min()


def spent(rows):
    """Return ms and GB by runner, without and with dropout."""
    found = rows.pivot_table(["ms", "GB"], "runner", "dropout", sort=False)[["ms", "GB"]]
    return found.rename(columns="dropout {:g}".format, level=1)


def gpt2(rows):
    """Return ms and GB by runner and dropout, and how cuattn's stand to the best rival's."""
    found = spent(rows)
    ratio = against(found).rename("cuattn's over the least of other libraries'").to_frame().T
    return pd.concat([found, ratio]).rename_axis("runner")


def draw_gpt2(rows):
    """Draw bars of time and bytes, without and with dropout."""
    found = spent(rows)
    return chart({unit: found[unit].T for unit in ("ms", "GB")}, bars, "xlabel")


def lengths(rows):
    """Return milliseconds and megabytes by length and runner, and how many times faster cuattn is."""
    found = rows.pivot_table(["ms", "MB"], "n_keys", "runner", sort=False)[["ms", "MB"]].sort_index()
    found["", "least ms of a rival over cuattn's"] = 1 / against(found["ms"].T)
    return found


def draw_lengths(rows):
    """Draw time and memory against the length."""
    found = lengths(rows)
    return chart({unit: found[unit] for unit in ("ms", "MB")}, log=True, xlabel="tokens", yscale="log")


def block_size(rows):
    """Return milliseconds and gigabytes by block size."""
    return rows.set_index("block_m")[["ms", "entered", "expected", "GB"]].sort_index()


def draw_block_size(rows):
    """Draw time and bytes against the block size."""
    found = block_size(rows)
    parts = {"ms": found[["ms"]], "gigabytes": found.drop(columns="ms")}
    return chart(parts, log=True, xlabel="query rows in a block", ylim=(0, None))


def block_sparse(rows):
    """Return milliseconds, and their share of the dense time, by density and direction."""
    found = rows.pivot_table("ms", "density", "runner", sort=False)
    return pd.concat({"ms": found, "of the dense time": found / found.loc[1.0]}, axis=1)


def moved(rows):
    """Return the rows with the names of runners, and what was counted over what the algorithm moves."""
    back = rows["heads"] * rows["n"] * rows["d"] * np.ceil(rows["n"] / rows["block_n"])
    return rows.assign(
        runner=rows["runner"].where(rows["runner"] == "standard", "cuattn-" + rows["runner"]),
        counted=rows["entered"] / rows["expected"],
        seen=rows["GB"] / rows["entered"],
        back=((rows["entered"] - rows["expected"]) * 1e9 / back).where(rows["study"] == "theorem-5"),
    )


def traffic(rows):
    """Return, by study and kernel, how far the counts are from the algorithms, and what standard attention moves."""
    rows = moved(rows)
    found = rows.dropna(subset="expected").groupby(["study", "direction", "runner"], sort=False)
    found = found.agg({"counted": ["min", "max"], "back": "median", "seen": ["median", "max"]})
    found.columns = [
        "counted over the algorithm's, least", "most", "bytes more for an addition to dQ",
        "device memory over counted, median", "at most",
    ]  # fmt: skip
    plain = rows.query("n == 4096 and d == 64 and block == 0").pivot_table("GB", ["study", "direction"], "runner")
    standard, ours = (plain.reindex(columns=[runner])[runner] for runner in ("standard", "cuattn-sm90"))
    return found.join(
        (standard / ours).rename("standard attention's device memory over the Hopper kernel's, N 4096, d 64")
    )


def calls(rows):
    """Return the gigabytes of every call."""
    index = ["study", "direction", "n", "d", "density", "runner"]
    kept = rows["block_m"].where(rows["direction"] == "forward", rows["block_n"])
    found = moved(rows).assign(block=kept).set_index(index)
    return found[["block", "entered", "expected", "GB"]]


def draw_traffic(rows):
    """Draw forward and backward against N, block sizes, densities, one long head; a panel each that has rows."""
    values = {"entered": "o", "expected": "--", "GB": "s:"}
    parts = {
        label: of.pivot_table(list(values), key, "runner")
        for label, (which, key) in PANELS.items()
        if len(of := moved(rows).query(which))
    }
    about = dict(style=values, log=True, ylabel="GB", yscale="log")
    return chart(parts, says="xlabel", width=4.0, height=3.5, rows=2, columns=3, **about)


def loop_order(rows):
    """Return gigabytes, counted, by the algorithm and by the lecture's formula, and the time of every runner."""
    found = rows.pivot_table(["GB", "algorithm", "lectured", "ms"], ["label", "runner"], sort=False).sort_index()
    queries = found.xs("queries-outside", level="runner")
    times = found[["ms", "GB"]].div(queries[["ms", "GB"]], level="label")
    return found.join(times.rename(columns={"ms": "times the time of queries outside", "GB": "times the bytes"}))


def draw_loop_order(rows):
    """Draw dots of bytes and time per problem."""
    parts = {unit: rows.pivot_table(unit, "label", "runner", sort=False) for unit in ("GB", "lectured", "ms")}
    return chart(parts, dots, "xlabel", width=3.6, height=3.2, columns=4, xscale="log")


SECTIONS = {
    "gpt2": Section(
        "GPT-2 medium's attention, forward and backward (FlashAttention, figure 2 left)",
        ("gpt2",),
        ("gpt2", "gpt2-bytes"),
        "Batch 64, 16 heads, 1024 tokens, head dimension 64, float16: 962 GFLOP, standard attention 825, since it "
        "keeps the probabilities.  The paper's A100: standard 41.7 ms and 40.3 GB, FlashAttention 7.3 ms and 4.4 GB.",
        table=gpt2,
        figure=draw_gpt2,
    ),
    "lengths": Section(
        "Runtime and memory from 128 to 64K tokens (FlashAttention, figure 3)",
        ("lengths",),
        ("lengths",),
        "Batch 8, 8 heads, head dimension 64, float16, forward and backward; memory beyond the inputs, at its peak.  "
        "A dash: more than the device has, or not asked.",
        table=lengths,
        figure=draw_lengths,
    ),
    "block_size": Section(
        "Runtime against block size (FlashAttention, figure 2 middle)",
        ("block_size",),
        ("block-size",),
        "The forward of GPT-2 medium's attention on the portable kernel.  Larger blocks read the keys fewer times: "
        "Q + 2 T_r (K, V) bytes by the algorithm.",
        table=block_size,
        figure=draw_block_size,
    ),
    "block_sparse": Section(
        "Does block-sparse attention take time in proportion to its density? (FlashAttention, figure 2 right)",
        ("block_sparse",),
        ("block-sparse",),
        "4096 tokens, 256 heads in all, head dimension 64, float16, random 128 x 128 blocks; the line through the "
        "times, s is the share of visible tiles.",
        table=line,
        details=block_sparse,
        figure=draw_line,
    ),
    "traffic": Section(
        "Bytes against the theorems (FlashAttention, theorems 2 and 5, proposition 4)",
        ("traffic",),
        ("theorem-2", "theorem-5", "proposition-4", "beyond-l2"),
        "64 heads (one beyond the L2 cache), float16.  What enters the multiprocessors is counted, and stands to what "
        "the algorithm reads, tile by tile: T passes over the operand outside the chip, with M = the tile that is "
        "kept.  Device memory sees less of it while the L2 cache holds the keys of the heads at work.  In the backward "
        "the portable kernel adds to dQ from registers, four bytes each, of which some come back.",
        table=traffic,
        details=calls,
        figure=draw_traffic,
    ),
    "loop_order": Section(
        "Does swapping the loops win? (the lecture's open question)",
        ("loop_order",),
        ("loop-order",),
        "`keys outside` is algorithm 1 with O, l and m in device memory; `queries outside` the lecture's change; both "
        "with one block per head and one inner code (`bench/studies/loop_order.cu`).  The change wins where keys "
        "outside take more than once the time of queries outside.  The lecture's formulas are 12 N²d²/M + 16 N²d/M + "
        "3 N d and 8 N²d²/M + 3 N d + 2 N elements of two bytes, M = 4 d B.  Query blocks need nothing from each "
        "other: side by side they can share keys in the L2 cache, as in cuattn's portable kernel.",
        table=loop_order,
        figure=draw_loop_order,
    ),
}
