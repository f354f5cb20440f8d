"""Draw tables of rows as PNG: bars by case, and time against what a mask leaves visible."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.report import Line, Table, picture

__all__ = ["draw"]

INK, QUIET = "#22303c", "#6b7a86"
OURS = ("#24658f", "#5b9bc4", "#9cc4de")
PEERS = {
    "cudnn": "#f2a65a",
    "fa4": "#d9674f",
    "fa4-varlen": "#e79c8b",
    "flex-FLASH": "#8c6bb1",
    "flex": "#bfa9d6",
    "fa2": "#b8bfc6",
    "mem-efficient": "#c9b458",
    "math": "#8a949d",
    "jax": "#7fb285",
    "sdpa": "#b5703a",
}
DPI = 130
GAP = 1.2  # between the bars of two cases, in bars


def draw(tables: Iterable[Table], folder: Path) -> list[Path]:
    """Draw every table that has a picture.

    Parameters
    ----------
    tables : iterable of Table
        From `bench.report.tables`.
    folder : Path
        Where the files go, named by `bench.report.picture`, both directions side by side.

    Returns
    -------
    list of Path
        The files written.
    """
    by_name: dict[str, list[Table]] = {}
    for table in tables:
        if table.runners:
            by_name.setdefault(table.name, []).append(table)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, group in by_name.items():
        figure = _proportion(group) if name == "sparsity" else _bars(name, group)
        path = folder / picture(name)
        figure.savefig(path, dpi=DPI, facecolor="white")
        written.append(path)
    return written


def _colours(runners: list[str]) -> dict[str, str]:
    ours = [name for name in runners if name.startswith("cuattn")]
    return {
        **{name: OURS[min(index, len(OURS) - 1)] for index, name in enumerate(ours)},
        **{name: PEERS.get(name, QUIET) for name in runners if name not in ours},
    }


def _bars(name: str, group: list[Table]) -> Figure:
    """Draw one panel per direction, a group of horizontal bars per case."""
    runners = list(dict.fromkeys(runner for table in group for runner in table.runners))
    colours = _colours(runners)
    bars = max(sum(len(_present(line, runners)) + GAP for line in table.lines) for table in group)
    figure = Figure(figsize=(0.8 + 4.6 * len(group), 1.2 + 0.125 * bars), layout="constrained")
    panels = figure.subplots(1, len(group), squeeze=False)[0]
    for axes, table in zip(panels, group, strict=True):
        _panel(axes, table, colours)
    handles = [Patch(color=colours[runner], label=runner) for runner in runners]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(runners), 3 * len(group)), frameon=False, fontsize=9
    )
    subject = ", ".join([name, *filter(None, [group[0].common.replace("-", " ").strip()])])
    figure.suptitle(subject, color=INK, fontsize=12, fontweight="bold")
    return figure


def _present(line: Line, runners: Iterable[str]) -> list[str]:
    return [runner for runner in runners if line.rate(runner)]


def _panel(axes: Any, table: Table, colours: dict[str, str]) -> None:
    """Draw the bars of one direction; a case takes only as much room as it has bars."""
    place, centres = 0.0, []
    for line in table.lines:
        shown = _present(line, colours)
        centres.append(place + (len(shown) - 1) / 2)
        for offset, runner in enumerate(shown):
            rate = line.rate(runner)
            axes.barh(place + offset, rate, 0.92, color=colours[runner])
            if runner.startswith("cuattn"):
                axes.text(rate, place + offset, f" {rate:.3g}", va="center", fontsize=7, color=INK)
        place += len(shown) + GAP
    axes.margins(x=0.18)
    axes.set_ylim(place - GAP / 2, -1 - GAP / 2)
    _annotate_ratios(axes, table.lines, centres)
    axes.set_yticks(centres, [table.short(line) for line in table.lines], fontsize=8)
    axes.set_title(table.direction, color=INK, fontsize=11)
    axes.set_xlabel(next((line.unit for line in table.lines if line.unit), ""), color=QUIET)
    axes.tick_params(colors=QUIET, length=0)
    axes.grid(axis="x", color=QUIET, alpha=0.2, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _annotate_ratios(axes: Any, lines: tuple[Line, ...], centres: list[float]) -> None:
    """Write cuattn's ratio to the best rival at the right edge of each group."""
    for place, line in zip(centres, lines, strict=True):
        if line.ratio:
            colour = OURS[0] if line.ratio >= 1 else PEERS["fa4"]
            axes.text(
                1.0, place, f"{line.ratio:.2f}x", transform=axes.get_yaxis_transform(), ha="right", va="center",
                fontsize=8, color=colour, fontweight="bold",
            )  # fmt: skip


def _proportion(group: list[Table]) -> Figure:
    """Draw time against the share of visible tiles, with the line that proportion would be."""
    figure = Figure(figsize=(5.2 * len(group), 4.2), layout="constrained")
    panels = figure.subplots(1, len(group), squeeze=False)[0]
    for axes, table in zip(panels, group, strict=True):
        for runner, colour in _colours(table.runners).items():
            rows = [line.rows[runner] for line in table.lines if "median_us" in line.rows.get(runner, {})]
            visible = [1 - row["rho"] for row in rows]
            times = [row["median_us"] / 1e3 for row in rows]
            axes.plot(visible, times, "o", color=colour, label=runner, markersize=5)
            full = next((time for share, time in zip(visible, times, strict=True) if share == 1), None)
            if full is not None:
                axes.plot([0, 1], [0, full], "--", color=colour, linewidth=1, alpha=0.6)
        axes.set_title(table.direction, color=INK, fontsize=11)
        axes.set_xlabel("share of visible tiles, 1 - ρ", color=QUIET)
        axes.set_ylabel("ms", color=QUIET)
        axes.set_xlim(0, 1.03)
        axes.set_ylim(bottom=0)
        axes.grid(color=QUIET, alpha=0.2, linewidth=0.6)
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle("time is proportional to what is visible", color=INK, fontsize=13, fontweight="bold")
    return figure
