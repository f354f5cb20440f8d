"""Block-sparse runtime against density."""

import pandas as pd

from bench import report
from bench.sparsity import fit
from bench.style import colour, panels, table

TITLE = "Block-sparse attention takes time in proportion to its density (FlashAttention, figure 2 right)"
COMMAND = "python -m bench.block_sparse"
DIRECTIONS = ("forward", "backward")


def _found(frame):
    """Return milliseconds by density and direction, the densest first."""
    rows = report.of_table(frame, "block-sparse")
    found = rows.pivot_table(index="density", columns="runner", values="ms").sort_index(ascending=False)
    return found.rename(columns=lambda runner: runner.removeprefix("cuattn-"))[list(DIRECTIONS)]


def text(frame):
    """Return the table."""
    found = _found(frame)
    cells = {"density s": [f"{s:g}" for s in found.index]}
    for way in DIRECTIONS:
        cells |= {f"{way}, ms": found[way].array, f"{way}, of dense": (found[way] / found[way].iloc[0]).array}
    about = "4096 tokens, 256 heads in all, head dimension 64, float16, random 128 x 128 blocks."
    return f"{about}\n\n{table(pd.DataFrame(cells))}"


def summary(frame):
    """Return the line through the times, and its lower end."""
    found = _found(frame)
    fits = {way: fit(1 - found.index.to_numpy(), found[way]) for way in DIRECTIONS}
    said = ", ".join(f"{way} {x['intercept']:.2f} + {x['slope']:.2f} s ms" for way, x in fits.items())
    shares = ", ".join(f"{way} {found[way].iloc[-1] / found[way].iloc[0]:.1%}" for way in DIRECTIONS)
    return (
        f"With a share s of the 128 x 128 blocks of 4096 tokens it takes {said} (correlation at least "
        f"{min(x['correlation'] for x in fits.values()):.4f}): at s = {found.index[-1]:.2%}, of the dense time, "
        f"{shares}."
    )


def figure(frame):
    """Draw time against density, and the line of proportion."""
    found = _found(frame)
    drawn, (axis,) = panels(1, 5.0, 3.4)
    for way, shade in zip(DIRECTIONS, (colour("cuattn"), colour("cuattn-sm80")), strict=True):
        axis.plot(found[way], "o", color=shade, label=way)
        axis.plot([0, 1], [0, found[way].iloc[0]], "--", color=shade, alpha=0.6)
    axis.set(xlabel="density s (dashed: in proportion)", ylabel="ms", xlim=(0, 1.03), ylim=(0, None))
    axis.legend(frameon=False)
    return drawn
