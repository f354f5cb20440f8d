"""Runtime and bytes against the block size."""

import pandas as pd

from bench import report
from bench.style import colour, panels, table

TITLE = "Runtime against block size (FlashAttention, figure 2 middle)"
COMMAND = "python -m bench.block_size"
HEAD = ["query rows in a block", "ms", "GB into the multiprocessors", "GB, Q + 2 T_r (K, V)", "GB of device memory"]


def _found(frame):
    """Return milliseconds and gigabytes by block size: ms, entered, expected, device memory."""
    rows = report.of_table(frame, "block-size").sort_values("problem.block_m")
    hbm = rows["counters.hbm_read"] + rows["counters.hbm_write"]
    bytes_ = {"entered": rows["counters.l2_to_sm"], "expected": rows["expected_l2_to_sm"], "hbm": hbm}
    gigabytes = {key: value / 1e9 for key, value in bytes_.items()}
    return pd.DataFrame({"block": rows["problem.block_m"].astype(int), "ms": rows["ms"], **gigabytes})


def text(frame):
    """Return the table."""
    about = "The forward of the problem above on the portable kernel.  Larger blocks read the keys fewer times."
    return f"{about}\n\n{table(_found(frame).set_axis(HEAD, axis=1))}"


def summary(frame):
    """Return what changes with the block size."""
    found = _found(frame).set_index("block")
    ms, best = found["ms"], found["ms"].idxmin()
    off = (found["entered"] / found["expected"] - 1).abs().max()
    shrinks = found["entered"].iloc[0] / found["entered"].iloc[-1]
    hbm = found["hbm"].max() / found["hbm"].min()
    return (
        f"The forward of GPT-2 medium's attention on the portable kernel, with {found.index[0]} to {found.index[-1]} "
        f"query rows in a block: {shrinks:.1f} times fewer bytes enter the multiprocessors (counted within {off:.1%} "
        f"of the formula), those of device memory change by at most {hbm - 1:.0%}.  It takes {ms.iloc[0]:.2f} ms with "
        f"{found.index[0]} rows, {ms[best]:.2f} ms with {best} and {ms.iloc[-1]:.2f} ms with {found.index[-1]}."
    )


def figure(frame):
    """Draw time and bytes."""
    found = _found(frame).set_index("block")
    drawn, axes = panels(2, 4.2, 3.2)
    shade = colour("cuattn-sm80")
    axes[0].plot(found["ms"], "o-", color=shade)
    axes[1].plot(found["expected"], "--", color=colour("standard"), label="formula")
    axes[1].plot(found["entered"], "o", color=shade, label="L2 to SM")
    axes[1].plot(found["hbm"], "s-", color=colour("cudnn"), label="device memory")
    axes[1].legend(frameon=False, fontsize=8)
    for axis, label in zip(axes, ("ms, forward", "GB"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set(xlabel="query rows in a block", ylabel=label, ylim=(0, None))
    return drawn
