"""What else is measured: training, denoising, the kernels' profiles, the CPU backend."""

import numpy as np
import pandas as pd

from bench.report import Section, by_direction
from bench.style import bars, chart

OVERHEAD = 0.1  # ms that a call on the CPU may cost beyond the formula


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


def finetune(rows):
    """Return a line per case and attention."""
    rows = rows.sort_values("documents", kind="stable")
    return pd.DataFrame({
        "sequences": rows["documents"].map(lambda count: f"of {count} documents" if count > 1 else "whole"),
        "attention": rows["runner"],
        "ms a step": rows["ms"],
        "GB at the peak beyond weights and moments": rows["MB"] / 1e3,
        "seconds of the first steps": rows["first_s"],
        "loss of the first": rows["loss"].map("{:.4f}".format),
    })  # fmt: skip


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


def over(theirs, ours):
    """Return the medians, turn by turn, of some samples over others."""
    return [np.median([x / y for x, y in zip(*turns, strict=False)]) for turns in zip(theirs, ours, strict=True)]


def pairs(rows):
    """Return a line per case, function of ours and rival: the rival's time over ours."""
    both = rows[rows["ours"]].merge(rows[~rows["ours"]], on="case", suffixes=("", "_rival"))
    times = np.array(over(both["samples_us_rival"], both["samples_us"]))
    cold = both["cold_us_rival"] / both["cold_us"]
    return both.assign(times=times, cold=cold, beyond=(both["ms"] - OVERHEAD) / both["ms"] / times)


def cpu(rows):
    """Return the least and the most of the ratios to each rival, without and with masks."""
    found = pairs(rows)
    found["mask"] = np.where(found["mask"].isna(), "without a mask", "with a mask")
    found = found.groupby(["table", "mask", "runner_rival"], sort=False)
    return found.agg({"case": "size", "times": ["min", "max"], "beyond": "max", "cold": "min"})


def cases(rows):
    """Return the time of every case, and each rival's over it."""
    return pairs(rows).pivot_table(
        ["times", "cold"], ["label", "direction", "runner", "ms"], "runner_rival", sort=False
    )


def draw_cpu(rows):
    """Draw the milliseconds of all where tiles are many, under every mask."""
    parts = by_direction(rows[rows["table"] == "cpu"], "ms")
    return chart(parts, bars, "title", numbers=".0f", xlabel="ms (less is better)")


def visible(rows):
    """Return the time under a mask over that without, beside the share of the tiles that is visible."""
    plain = rows[rows["mask"] == "none"].set_index("case")["samples_us"]
    rows = rows.assign(share=1 - rows["rho"], time=over(rows["samples_us"], rows["case"].map(plain)))
    return rows[rows["mask"] != "none"].pivot_table("time", ["n", "mask", "share"], "direction", sort=False)


def memory(rows):
    """Return the megabytes of a thread."""
    return rows.set_index("runner")[["thread"]]


def named(rows):
    """Return rows of ranks with their problem in words."""
    heads = rows["heads"].astype(int).astype(str) + "/" + rows["kv_heads"].astype(int).astype(str)
    kinds = rows["mask"].str.replace("_", " ") + rows["exact"].map({True: ", deterministic"}).fillna("")
    return rows.assign(mask=kinds, n=rows["n"].astype(int), heads=heads)


def ranks(rows):
    """Return the efficiency of several GPUs, a line per problem."""
    found = named(rows.dropna(subset="efficiency"))
    return found.pivot_table("efficiency", ["mask", "n", "heads"], "direction", sort=False)


def ranks_of_all(rows):
    """Return a line per case of several GPUs."""
    one, found = rows[rows["runner"] == "cuattn-1"].set_index("case")["ms"], named(rows.dropna(subset="efficiency"))
    return pd.DataFrame({
        **{name: found[name] for name in ("mask", "n", "heads", "direction")},
        "ms of one GPU": found["case"].map(one),
        "ms of all": found["ms"],
        "efficiency": found["efficiency"],
        "algorithm": found["chosen"],
        "modelled time over measured": 1 + found["predicted_off"],
        "memory, of what is allowed": found["extra_share"],
    })  # fmt: skip


def beside_ranks(rows):
    """Return how many times the time of cuattn others take on the same ranks."""
    ours = rows.dropna(subset="efficiency").set_index("case")["ms"]
    found = named(rows[~rows["ours"]])
    found = found.assign(times=found["ms"] / found["case"].map(ours))
    return found.pivot_table("times", ["mask", "n", "heads", "direction"], "runner", sort=False)


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
    "finetune": Section(
        "A training step in Transformers",
        ("finetune",),
        ("finetune",),
        "A Llama in bfloat16, 2 layers, 16 heads of 64, 4 of keys, 2 x 4,096 random tokens; AdamW.  Of packed "
        "documents PyTorch is given a dense mask, cuattn a column mask.",
        table=finetune,
    ),
    "distributed": Section(
        "Two GPUs: half of one's time over theirs",
        ("distributed",),
        ("distributed",),
        "Head dimension 128, bfloat16; query and key heads.  By mpiexec, a process for each GPU; both GPUs are "
        "busy while one's time is taken, of which the longer counts.",
        table=ranks,
        details=ranks_of_all,
    ),
    "distributed_peers": Section(
        "Two GPUs: the time of others over cuattn's",
        ("distributed",),
        ("distributed-peers",),
        "By torchrun; the others' messages by PyTorch's NCCL.  Ulysses, written by hand, exchanges heads for rows "
        "around PyTorch's attention or FlashAttention-3; PyTorch's own context parallel takes full and causal masks.",
        table=beside_ranks,
    ),
    "denoise": Section(
        "Not only transformers: non-local means as attention",
        ("denoise", "denoise --device cpu"),
        ("denoise",),
        "A photograph of 600 x 512 pixels in float32: each pixel attends to those with similar surroundings "
        "(`bench/denoise.py`).",
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
        ("cpu", "cpu-statistics", "cpu-torch", "cpu-small"),
        "float32; a rival's time over cuattn's is the median over the turns in one run, and above 1 where cuattn is "
        "faster.  A sample of calls of less than 80 ms is the mean of several in a row; where no rival's call takes "
        "100 ms, the first after a pause of 50 ms is timed too (cold).  PyTorch takes a mask as a dense matrix.  All "
        "samples are in `bench/results/cpu.json`.",
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
