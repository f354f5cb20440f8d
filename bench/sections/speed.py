"""The README's summary of speed: kinds of problems, the strongest rivals, where cuattn is behind, in words too."""

import itertools
import statistics

import pandas as pd

from bench.report import Section, lines
from bench.style import NOISE, name, ratios

SLOW = 0.95  # a mean below it is said in words
AREAS = {  # kind of problem: its rows, of those that no kind before has
    "FlashAttention's sweep, full and causal": "table == 'dense'",
    "FlashMask's twelve masks, 8K to 128K tokens": "table.str.startswith('masks-')",
    "score functions, mask functions, biases": "table in ('scores', 'scores-bias', 'scores-masks')",
    "float32 and float64": "table == 'portable' and dtype in ('float32', 'float64')",
    "decoding, one query": "use == 'decode' and n_queries == 1",
    "decoding, 2 to 16 queries": "use == 'decode'",
    "one key head for all query heads": "use != '' and kv_heads == 1 and heads > 1",
    "few heads (batch times heads up to 8)": "use != '' and batch * heads <= 8",
    "up to 512 tokens": "use != '' and n_queries <= 512 and n_keys <= 512",
    "cross attention": "use == 'cross'",
    "grouped key heads": "use != '' and kv_heads < heads",
    "other models, 729 to 33K tokens": "use != ''",
    "CPU, 2K and 4K tokens, no mask": "table == 'cpu' and mask.isna()",
    "CPU, 4K tokens, with a mask": "table == 'cpu'",
    "CPU, shapes that PyTorch users call": "table == 'cpu-torch'",
    "CPU, problems of a few rows": "table == 'cpu-small'",
}
PARTS = {  # the rest is attention without masks on the GPU
    "FlashMask's twelve masks, 8K to 128K tokens": "with masks or functions on the GPU",
    "score functions, mask functions, biases": "with masks or functions on the GPU",
    "CPU, 4K tokens, with a mask": "with masks on the CPU",
    **{area: "on the CPU" for area in AREAS if area.startswith("CPU") and not area.endswith("with a mask")},
}
CALLED = {
    "sdpa-dense": "PyTorch",
    "sdpa-documents": "PyTorch (a call per document)",
    "math": "PyTorch (math)",
    "mem-efficient": "PyTorch (memory-efficient)",
}
WAYS = {"forward": "forward", "backward": "backward", "forward+backward": "backward"}


def sorted_out(rows):
    """Return a line per case that has a rival, with its ``area`` and the ``way`` that its column is called by."""
    found = lines(rows).dropna(subset="ratio").reset_index()
    found["use"] = found["use"].fillna("") if "use" in found else ""
    found["area"] = None
    for area, which in AREAS.items():
        found.loc[found["area"].isna() & found.index.isin(found.query(which).index), "area"] = area
    order = list(AREAS).index
    found = found.assign(way=found["direction"].map(WAYS)).dropna(subset=["area", "way"])
    return found.sort_values("area", key=lambda of: of.map(order), kind="stable")


def by_area(found):
    """Return the ratios by area and way."""
    return {key: of["ratio"] for key, of in found.groupby(["area", "way"], sort=False)}


def _strongest(found):
    """Return the rivals of some cases, the one that is the fastest most often first."""
    wins = found["rival"].value_counts()
    ordered = dict.fromkeys([*wins.index, *itertools.chain(*found["rivals"])])
    return ", ".join(CALLED.get(rival, name(rival)) for rival in ordered)


def speed(rows):
    """Return, by area, the rivals, and in each direction the geometric mean of the ratios and the worst one."""
    found = sorted_out(rows)
    shown = {key: f"{statistics.geometric_mean(x):.2f} ({x.min():.2f})" for key, x in by_area(found).items()}
    return pd.DataFrame.from_dict({
        area: {"the fastest of": _strongest(of), **{way: shown.get((area, way)) for way in ("forward", "backward")}}
        for area, of in found.groupby("area", sort=False)
    }, "index").rename_axis("table")  # fmt: skip


def said(rows):
    """Return the conclusions in words, with the strongest rivals, and a list of what is slower on average."""
    found = sorted_out(rows)
    behind = found[found["ratio"] < 1 - NOISE]
    means = {key: statistics.geometric_mean(x) for key, x in by_area(found).items()}
    slow = [
        f"{area}, {way}: {x:.2f} of the fastest rival's speed"
        for (area, way), x in sorted(means.items(), key=lambda of: of[1])
        if x < SLOW
    ]
    strongest = []
    for part, of in behind.groupby(behind["area"].map(PARTS).fillna("without masks on the GPU"), sort=False):
        wins = of["rival"].value_counts()
        strongest.append(f"{CALLED.get(wins.index[0], name(wins.index[0]))} {part} ({wins.iloc[0]} of {len(of)})")
    words = (
        f"In {len(found) - len(behind)} of {len(found)} cases no rival is faster by more than half a percent.  "
        f"In the other {len(behind)} the strongest rivals, the fastest most often: {', '.join(strongest) or 'none'}.  "
        f"Slower on average by more than {1 - SLOW:.0%}:"
    )
    return words, slow or ["nothing"]


def draw_speed(rows):
    """Draw the ratio of every case, a line per area: right of 1 cuattn is faster."""
    return ratios(by_area(sorted_out(rows)))


SPEED = Section(
    "In short: beside the fastest rival of each case",
    ("hopper", "shapes", "portable", "scores", "cpu"),
    (
        "dense", "masks-8k", "masks-32k", "masks-128k", "masks-8k-d64", "masks-32k-d64", "masks-128k-d64", "scores",
        "scores-bias", "scores-masks", "portable", "shapes", "cpu", "cpu-torch", "cpu-small",
    ),
    "Times the speed of the fastest rival in the same run, above 1 where cuattn is faster: geometric mean, in brackets "
    "the worst case.  One NVIDIA H200, bfloat16 unless said; 2 cores of a CPU, float32.  Every case stands "
    "further below.",
    table=speed,
    figure=draw_speed,
)  # fmt: skip
SECTIONS = {"speed": SPEED}
