"""Block-sparse runtime against density."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, colour, panels, table, times
from bench.sparsity import fit

TITLE = "Block-sparse attention takes time in proportion to its density (FlashAttention, figure 2 right)"
COMMAND = "python -m bench.block_sparse"
DIRECTIONS = ("forward", "backward")


def _found(rows: list[dict[str, Any]]) -> list[tuple[float, dict[str, float]]]:
    cases = by_case(rows, "block-sparse").values()
    found = [(next(iter(x.values()))["density"], {d: times(x[f"cuattn-{d}"]) for d in DIRECTIONS}) for x in cases]
    return sorted(found, reverse=True)


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    found = _found(rows)
    whole = found[0][1]
    lines = [
        (
            f"{s:g}",
            spent["forward"],
            spent["forward"] / whole["forward"],
            spent["backward"],
            spent["backward"] / whole["backward"],
        )
        for s, spent in found
    ]
    head = ("density s", "forward, ms", "of dense", "backward, ms", "of dense")
    return (
        f"4096 tokens, 256 heads in all, head dimension 64, float16, random 128 x 128 blocks.\n\n{table(head, lines)}"
    )


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the line through the times, and its lower end."""
    found = _found(rows)
    whole, (density, sparse) = found[0][1], found[-1]
    lines = {
        direction: fit([1 - s for s, _ in found], [spent[direction] for _, spent in found]) for direction in DIRECTIONS
    }
    said = ", ".join(f"{direction} {x['intercept']:.2f} + {x['slope']:.2f} s ms" for direction, x in lines.items())
    shares = ", ".join(f"{direction} {sparse[direction] / whole[direction]:.1%}" for direction in DIRECTIONS)
    return (
        f"With a share s of the 128 x 128 blocks of 4096 tokens it takes {said} (correlation at least "
        f"{min(x['correlation'] for x in lines.values()):.4f}): at s = {density:.2%}, of the dense time, {shares}."
    )


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw time against density, and the line of proportion."""
    found = _found(rows)
    drawn, axes = panels(1, 5.0, 3.4)
    shades = {"forward": colour("cuattn"), "backward": colour("cuattn-sm80")}
    for direction in DIRECTIONS:
        axes[0].plot(
            [s for s, _ in found], [x[direction] for _, x in found], "o", color=shades[direction], label=direction
        )
        axes[0].plot([0, 1], [0, found[0][1][direction]], "--", color=shades[direction], alpha=0.6)
    axes[0].set_xlabel("density s (dashed: in proportion)")
    axes[0].set_ylabel("ms")
    axes[0].set_xlim(0, 1.03)
    axes[0].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    return drawn
