"""Masks: time in proportion to what is visible, memory, and whether a column mask is the dense one."""

import numpy as np
import pandas as pd

from bench.report import Section
from bench.style import chart

SAME = ["o", "l", "m", "dq", "dk", "dv", "same_flags"]


def timed(rows):
    """Return milliseconds by the share of visible tiles and the kind of mask, or the runner."""
    rows = rows.assign(share=rows["density"] if "density" in rows else 1 - rows["rho"])
    return rows.pivot_table("ms", "share", "kind" if "kind" in rows else "runner", sort=False)


def line(rows):
    """Return the lines through the milliseconds against the share of visible tiles."""
    found = {}
    for kind, ms in timed(rows).items():
        ms = ms.dropna()
        share = ms.index.to_numpy()
        slope, start = np.polyfit(share, ms, 1)
        found[kind] = {
            "samples": len(ms),
            "share of visible tiles": f"{share.min():.2f} to {share.max():.2f}",
            "ms": f"{ms.min():.3g} to {ms.max():.3g}",
            "ms per share": slope,
            "ms at share 0": start,
            "correlation": f"{np.corrcoef(share, ms)[0, 1]:.4f}",
        }
    return pd.DataFrame.from_dict(found, "index").rename_axis("kind")


def draw_line(rows):
    """Draw every sample, and the lines."""
    ms, found = timed(rows), line(rows)
    through = np.outer(ms.index, found["ms per share"]) + found["ms at share 0"].to_numpy()
    both = pd.concat({"samples": ms, "line": pd.DataFrame(through, ms.index, ms.columns)}, axis=1)
    about = dict(style={"samples": "o", "line": "-"}, xlabel="share of visible tiles", xlim=(0, None), ylim=(0, None))
    return chart({"ms": both}, width=5.6, **about)


def memory(rows):
    """Return a mask's megabytes by length: ours, dense, and the dense ones that were not allocated."""
    counted = rows["runner"].where(rows["measured"].ne(False), "dense, not allocated")
    return rows.assign(runner=counted).pivot_table("tables", "n", "runner", sort=False)


def draw_memory(rows):
    """Draw a mask's megabytes against the length."""
    return chart({"MB": memory(rows)}, width=6.0, log=True, xlabel="tokens", yscale="log")


def same(rows):
    """Return how many of the masks give the same bits, per kernel."""
    counts = {key: lambda x: f"{x.sum()} of {x.count()}" if x.count() else None for key in SAME}
    return rows.groupby("runner", sort=False).agg({**counts, "reason": "first"})


SECTIONS = {
    "sparsity": Section(
        "Is latency linear in a mask's sparsity? (FlashMask, figure 4a)",
        ("sparsity",),
        ("figure-4a",),
        "32K tokens, 32 heads, head dimension 128, bfloat16, forward and backward; masks drawn as in the paper's A.4; "
        "the share of visible tiles is 1 - ρ.",
        table=line,
        figure=draw_line,
    ),
    "mask_memory": Section(
        "A mask's memory (FlashMask, figure 4b)",
        ("mask_memory",),
        ("figure-4b",),
        "Megabytes that a forward and a backward allocate for the mask, beyond the same call without one; a column "
        "mask with all its tables.",
        table=memory,
        figure=draw_memory,
    ),
    "same_bits": Section(
        "Do a column mask and its dense twin give the same bits? (FlashMask, sections 4.4 and 5.2)",
        ("same_bits",),
        ("same-bits",),
        "Of the paper's twelve masks, how many give the same bits as a column mask and as a boolean matrix on the same "
        "kernel, forward and deterministic backward; and, where `is_causal` or `window` say the same, as flags.",
        table=same,
    ),
}
