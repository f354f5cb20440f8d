"""Runtime and bytes against the block size."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, colour, panels, table, times

TITLE = "Runtime against block size (FlashAttention, figure 2 middle)"
COMMAND = "python -m bench.block_size"


def _found(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    cases = [x["cuattn-sm80"] for x in by_case(rows, "block-size").values() if "cuattn-sm80" in x]
    return dict(sorted((row["problem"]["block_m"], row) for row in cases))


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for block, row in _found(rows).items():
        counts = row["counters"]
        moved = counts["l2_to_sm"] / 1e9
        hbm = (counts["hbm_read"] + counts["hbm_write"]) / 1e9
        lines.append((str(block), times(row), moved, row["expected_l2_to_sm"] / 1e9, hbm))
    head = ("query rows in a block", "ms", "GB into the multiprocessors", "GB, Q + 2 T_r (K, V)", "GB of device memory")
    about = "The forward of the problem above on the portable kernel.  Larger blocks read the keys fewer times."
    return f"{about}\n\n{table(head, lines)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return what changes with the block size."""
    found = _found(rows)
    best = min(found, key=lambda block: times(found[block]))
    first = next(iter(found))
    off = max(abs(row["counters"]["l2_to_sm"] / row["expected_l2_to_sm"] - 1) for row in found.values())
    return (
        f"The forward of GPT-2 medium's attention on the portable kernel.  Larger blocks of query rows read the keys "
        f"fewer times (counted within {off:.1%} of the formula), and take {times(found[first]):.2f} ms with {first}, "
        f"{times(found[best]):.2f} ms with {best}; beyond, something else is the limit.  Device memory sees nothing of "
        f"it: the L2 cache holds the keys of the heads at work."
    )


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw time and bytes."""
    found = _found(rows)
    drawn, axes = panels(2, 4.2, 3.2)
    blocks = list(found)
    axes[0].plot(blocks, [times(row) for row in found.values()], "o-", color=colour("cuattn-sm80"))
    axes[0].set_ylabel("ms, forward")
    counts = [row["counters"] for row in found.values()]
    axes[1].plot(
        blocks, [row["expected_l2_to_sm"] / 1e9 for row in found.values()], "--", color="#8a949d", label="formula"
    )
    axes[1].plot(blocks, [c["l2_to_sm"] / 1e9 for c in counts], "o", color=colour("cuattn-sm80"), label="L2 to SM")
    axes[1].plot(
        blocks,
        [(c["hbm_read"] + c["hbm_write"]) / 1e9 for c in counts],
        "s-",
        color=colour("cudnn"),
        label="device memory",
    )
    axes[1].set_ylabel("GB")
    axes[1].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("query rows in a block")
        axis.set_ylim(bottom=0)
    return drawn
