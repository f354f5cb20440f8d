"""A small Llama trained on packed documents, three ways to mask."""

import numpy as np
import pandas as pd

from bench import report
from bench.style import colour, panels, table

TITLE = "End to end: a small Llama on packed documents (FlashMask, sections 5.1 and 5.2)"
COMMAND = "python -m bench.training"
FIRST = "cuattn-column"
LABELS = {
    FIRST: "column mask, deterministic",
    "cuattn-dense": "the same mask dense, same kernel",
    "cuattn-documents": "one call per document",
    "cuattn-column-free": "column mask, the plan's choice",
}
SHADES = dict(zip(LABELS, map(colour, ("cuattn", "standard", "cudnn", "cuattn-sm80")), strict=True))


def _found(frame):
    """Return a row per variant, with its losses and how far they are from the first one's at each step."""
    found = report.of_table(frame, "training").drop_duplicates("runner", keep="last").set_index("runner")
    found = found.loc[[runner for runner in LABELS if runner in found.index]]
    apart = [np.abs(np.subtract(losses, found["losses"][FIRST])) for losses in found["losses"]]
    return found.assign(apart=apart, GB=found.get("peak_bytes", np.nan) / 1e9)


def text(frame):
    """Return the table."""
    found = _found(frame)
    first = found.loc[FIRST]
    far = [x.max() for x in found["apart"]]
    same = ["the same bits" if x == 0 else f"{x:.1e} apart" for x in far]
    lines = {
        "attention": found.index.map(LABELS),
        "tokens/s": found["tokens_per_s"].array,
        "peak GB beyond the weights": found["GB"].array,
        "last loss": [f"{losses[-1]:.4f}" for losses in found["losses"]],
        "losses against the first row's": ["–", *same[1:]],
    }
    p = {key: first[f"problem.{key}"] for key in ("layers", "heads", "head_dim", "n", "steps")}
    about = (
        f"{p['layers']} layers, {p['heads']} heads of {p['head_dim']}, {first['parameters'] / 1e6:.1f} M parameters, "
        f"sequences of {p['n']:,} bytes of the standard library's sources, {first['documents']:g} documents in each, "
        f"{p['steps']} steps; everything but attention in {first.get('problem.framework', 'CuPy')}."
    )
    return f"{about}\n\n{table(pd.DataFrame(lines))}"


def figure(frame):
    """Draw how far the losses are from the first variant's, and the speeds."""
    found = _found(frame)
    drawn, axes = panels(2, 4.8, 3.2)
    for runner, apart in found["apart"].drop(FIRST).items():
        none = "" if apart.any() else " (0 at every step)"
        axes[0].plot(apart, color=SHADES[runner], linewidth=1.2, label=LABELS[runner] + none)
    axes[0].set(xlabel="step", ylabel="loss: distance from the column mask's")
    axes[0].legend(frameon=False, fontsize=7)
    speeds = found["tokens_per_s"][::-1]
    axes[1].barh([LABELS[runner] for runner in speeds.index], speeds, color=[SHADES[x] for x in speeds.index])
    for place, (speed, memory) in enumerate(zip(speeds, found["GB"][::-1], strict=True)):
        axes[1].text(speed, place, f" {memory:.2f} GB" if memory > 0 else "", va="center", fontsize=8)
    axes[1].tick_params(axis="y", labelsize=8)
    axes[1].set_xlabel("tokens/s, and peak memory beside the bars")
    axes[1].margins(x=0.2)
    return drawn
