"""What else is measured: training, denoising, the kernels' profiles, the CPU backend."""

import numpy as np
import pandas as pd

from bench.report import Section
from bench.style import bars, chart

OVERHEAD = 0.1  # ms that a call on the CPU may cost beyond the formula
CPU = {
    "cpu": "many tiles",
    "cpu-statistics": "many tiles, with l and m",
    "cpu-torch": "shapes that PyTorch users call",
    "cpu-small": "problems of a few rows",
}


def apart(rows):
    """Return, by step and variant, how far the losses are from the first variant's."""
    losses = pd.DataFrame(dict(zip(rows["runner"], rows["losses"], strict=True)))
    return losses.sub(losses.iloc[:, 0], axis=0).abs()


def training(rows):
    """Return a line per variant, with how far its losses are from the first one's."""
    found = rows.set_index("runner")
    return pd.DataFrame({
        "everything but attention": found["framework"],
        "million parameters": found["parameters"] / 1e6,
        "documents in a sequence": found["documents"],
        "tokens/s": found["tokens_per_s"],
        "GB at the peak beyond the weights": found["MB"] / 1e3,
        "last loss": found["losses"].map(lambda losses: f"{losses[-1]:.4f}"),
        "losses apart from the first line's, at most": apart(rows).max().rename_axis("runner"),
    })  # fmt: skip


def draw_training(rows):
    """Draw how far the losses are from the first variant's."""
    found = apart(rows).iloc[:, 1:]
    return chart({"distance of the losses": found}, width=7.0, style="-", xlabel="step")


def denoise(rows):
    """Return a line per device and search."""
    pixels = rows["height"] * rows["width"]
    return pd.DataFrame({
        "runner": rows["runner"],
        "pixels": pixels,
        "GB of a dense matrix": 4 * pixels**2 / 1e9,
        "rows searched up and down": rows["rows"].astype(object).fillna("all"),
        "billion pairs": rows["pairs"] / 1e9,
        "seconds": rows["ms"] / 1e3,
        "PSNR before, dB": rows["psnr_before"],
        "after, dB": rows["psnr_after"],
    })  # fmt: skip


def profiles(rows):
    """Return the longest kernel of every call."""
    found = pd.DataFrame([max(kernels, key=lambda kernel: kernel["milliseconds"]) for kernels in rows["kernels"]])
    stalls = found["stalls"].map(lambda of: ", ".join(f"{name} {x:.0%}" for name, x in list(of.items())[:3]))
    found = found.set_index(rows["label"]).filter(regex="milli|pct|bank")
    return found.assign(stalls=stalls.array)


def pairs(rows):
    """Return a line per case, function of ours and rival: the rival's time over ours, turn by turn."""
    both = rows[rows["ours"]].merge(rows[~rows["ours"]], on="case", suffixes=("", "_rival"))
    turns = zip(both["samples_us_rival"], both["samples_us"], strict=True)
    times = [np.median([rival / ours for rival, ours in zip(*turn, strict=False)]) for turn in turns]
    return both.assign(times=times, beyond=(both["ms"] - OVERHEAD) / both["ms"] / times)


def cpu(rows):
    """Return the least and the most of the ratios to each rival, without and with masks."""
    found = pairs(rows)
    mask = found["mask"].isna().map({True: "without a mask", False: "with a mask"})
    found = found.groupby([found["table"].map(CPU), mask, found["runner_rival"]], sort=False)
    found = found.agg(cases=("case", "size"), least=("times", "min"), most=("times", "max"), beyond=("beyond", "max"))
    head = {"least": "its time over cuattn's, least", "beyond": f"cuattn's less {OVERHEAD} ms over its, at most"}
    return found.rename(columns=head).rename_axis(["table", "mask", "rival"])


def cases(rows):
    """Return the time of every case, and each rival's over it."""
    found = pairs(rows).pivot_table(["times"], ["label", "direction", "runner", "ms"], "runner_rival", sort=False)
    return found.rename(columns={"times": "its time over ours"})


def draw_cpu(rows):
    """Draw the milliseconds of all on the longest problem, under every mask."""
    rows = rows[(rows["table"] == "cpu") & (rows["n_keys"] == rows["n_keys"].max())].fillna({"mask": "no mask"})
    wide = {way: of.pivot_table("ms", "mask", "runner", sort=False) for way, of in rows.groupby("direction")}
    return chart(wide, bars, "title", numbers=".0f", xlabel="ms (less is better)")


def visible(rows):
    """Return the time under a mask over that without, beside the share of the tiles that is visible."""
    plain = rows[rows["mask"] == "none"].set_index("case")["samples_us"]
    turns = zip(rows["samples_us"], rows["case"].map(plain), strict=True)
    rows = rows.assign(share=1 - rows["rho"], time=[np.median(np.divide(*turn)) for turn in turns])
    return rows[rows["mask"] != "none"].pivot_table("time", ["n", "mask", "share"], "direction", sort=False)


def memory(rows):
    """Return the megabytes of a thread."""
    return rows.set_index("runner")[["thread"]]


SECTIONS = {
    "training": Section(
        "End to end: a small Llama on packed documents (FlashMask, sections 5.1 and 5.2)",
        ("training",),
        ("training",),
        "4 layers, 8 heads of 64, sequences of 16,384 bytes of the standard library's sources, 200 steps.  Column and "
        "dense mask run on the same kernel, with deterministic gradients: their losses agree bit for bit where the "
        "last column says 0.",
        table=training,
        figure=draw_training,
    ),
    "denoise": Section(
        "Not only transformers: non-local means as attention",
        ("denoise", "denoise --device cpu"),
        ("denoise",),
        "A photograph of 600 x 512 pixels in float32: each pixel attends to those with similar surroundings "
        "(`bench/denoise.py`).  KeOps is measured beside it where it runs; pykeops 2.3 does not under CUDA 13.",
        table=denoise,
    ),
    "kernel_profiles": Section(
        "Profiles (Nsight Compute)",
        ("kernel_profiles",),
        ("profile",),
        "The longest kernel of each call, in percent of the unit's peak; bank conflicts per shared-memory wavefront.",
        details=profiles,
    ),
    "cpu": Section(
        "On the CPU",
        ("cpu",),
        tuple(CPU),
        "float32; a rival's time over cuattn's is the median over the turns in one run, and above 1 where cuattn is "
        "faster.  PyTorch takes a mask as a dense matrix.  All samples are in `bench/results/cpu.json`.",
        table=cpu,
        details=cases,
        figure=draw_cpu,
    ),
    "cpu_visible": Section(
        "On the CPU: time under a mask over that without one",
        ("cpu",),
        ("cpu-visible",),
        "Beside the share of 128 x 128 tiles that is visible.",
        table=visible,
    ),
    "cpu_memory": Section(
        "On the CPU: extra memory of a thread at N = 16384",
        ("cpu",),
        ("cpu-memory",),
        table=memory,
    ),
}
