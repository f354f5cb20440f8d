"""The FlashMask paper's tables 4 to 9: milliseconds, TFLOP/s and sparsity of twelve masks, and its figure 5."""

from __future__ import annotations

from typing import Any

from bench import report
from bench.mask_samples import KINDS
from bench.sections.common import colour, masks_left_out, name, panels, table, times

TITLE = "Twelve masks (FlashMask, tables 4 to 9, figure 5)"
COMMAND = "python -m bench.hopper --tables masks-8k masks-32k masks-128k masks-8k-d64 masks-32k-d64 masks-128k-d64"
FILE = "hopper"
SHOWN = ("cuattn", "cudnn", "fa4", "fa4-varlen", "flex-FLASH", "flex")
GAP = 1.2  # between the bars of two masks, in bars


def _found(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, dict[str, dict[str, Any]]]]:
    """Return (d, N) -> runner -> mask -> {"forward": row, "backward": row}, where both directions are there."""
    found: dict[tuple[int, int], dict[str, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        if row["case"].startswith("masks-") and "median_us" in row:
            p = row["problem"]
            runners = found.setdefault((-p["head_dim"], p["n_keys"]), {})
            runners.setdefault(row["runner"], {}).setdefault(p["mask"], {})[p["direction"]] = row
    for runners in found.values():
        for masks in runners.values():
            for kind in [kind for kind, both in masks.items() if len(both) < 2]:
                del masks[kind]
    return dict(sorted(found.items()))


def total(both: dict[str, Any]) -> float:
    """Return TFLOP/s of forward and backward together."""
    return sum(row["flops"] for row in both.values()) / sum(row["median_us"] for row in both.values()) / 1e6


def text(rows: list[dict[str, Any]]) -> str:
    """Return the tables in the paper's form."""
    parts = []
    head = ("method, mask", "FW ms", "BW ms", "total ms", "FW TFLOP/s", "BW TFLOP/s", "total TFLOP/s", "sparsity")
    for (d, n), runners in _found(rows).items():
        lines = []
        for runner in sorted(runners, key=lambda runner: not runner.startswith("cuattn")):
            for kind in (kind for kind in KINDS if kind in runners[runner]):
                both = runners[runner][kind]
                spent = [times(both[direction]) for direction in ("forward", "backward")]
                rates = [both[direction]["rate"] for direction in ("forward", "backward")]
                rho = f"{both['forward']['rho']:.2f}"
                lines.append((f"{name(runner)}, {kind}", *spent, sum(spent), *rates, total(both), rho))
        parts.append(f"{n // 1024}K tokens, head dimension {-d}:\n\n{table(head, lines)}")
    return "\n\n".join(parts)


def summary(rows: list[dict[str, Any]]) -> str:
    """Return, per table, what cuattn reaches and how it stands beside the fastest rival of each mask."""
    lines = []
    for (d, n), runners in _found(rows).items():
        ours = {kind: total(both) for kind, both in runners.get("cuattn", {}).items()}
        rivals = [masks for runner, masks in runners.items() if not runner.startswith("cuattn")]
        best = {kind: max((total(x[kind]) for x in rivals if kind in x), default=None) for kind in ours}
        ratios = {kind: ours[kind] / rival for kind, rival in best.items() if rival}
        if not ratios:
            continue
        worst = min(ratios, key=ratios.__getitem__)
        lines.append(
            (
                f"{n // 1024}K tokens, d {-d}",
                f"{min(ours.values()):.0f} to {max(ours.values()):.0f}",
                f"{sum(ratio >= 1 for ratio in ratios.values())} of {len(ratios)}",
                f"{report.geometric_mean(ratios.values()):.2f}",
                f"{ratios[worst]:.2f} ({worst})",
            )
        )
    head = ("", "TFLOP/s", "the fastest in", "mean ratio to the fastest rival", "worst")
    about = "Forward and backward together, counting visible tiles only."
    return "\n\n".join(filter(None, [about, table(head, lines), masks_left_out(rows)]))


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw the total rate of every mask, a panel per table."""
    from matplotlib.patches import Patch

    found = _found(rows)
    drawn, axes = panels(max(len(found), 1), 5.0, 5.4, rows=2 if len(found) > 3 else 1)
    for axis, ((d, n), runners) in zip(axes, found.items(), strict=False):
        _panel(axis, runners)
        axis.set_title(f"{n // 1024}K tokens, head dimension {-d}", fontsize=10)
        axis.set_xlabel("TFLOP/s, forward and backward")
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    who = [runner for runner in SHOWN if any(runner in runners for runners in found.values())]
    handles = [Patch(color=colour(runner), label=name(runner)) for runner in who]
    drawn.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawn


def _panel(axis: Any, runners: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Draw the masks of one table from top to bottom; a mask takes as much room as it has bars."""
    place, centres = 0.0, {}
    for kind in (kind for kind in KINDS if any(kind in masks for masks in runners.values())):
        who = [runner for runner in SHOWN if kind in runners.get(runner, {})]
        for offset, runner in enumerate(who):
            axis.barh(place + offset, total(runners[runner][kind]), 0.92, color=colour(runner))
        centres[kind] = place + (len(who) - 1) / 2
        place += len(who) + GAP
    axis.set_yticks(list(centres.values()), list(centres), fontsize=8)
    axis.set_ylim(max(place - GAP / 2, 1), -0.5 - GAP / 2)
