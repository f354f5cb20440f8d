"""What the sections share: rows by case, markdown, axes that look alike.  Only figures import matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.mask_samples import KINDS

__all__ = [
    "COLOURS",
    "INK",
    "NAMES",
    "QUIET",
    "by_case",
    "colour",
    "masks_left_out",
    "name",
    "panels",
    "runners",
    "table",
    "times",
]

INK, QUIET = "#22303c", "#6b7a86"
COLOURS = {
    "cuattn": "#24658f",
    "cuattn-sm90": "#24658f",
    "cuattn-sm80": "#5b9bc4",
    "standard": "#8a949d",
    "math": "#8a949d",
    "dense": "#8a949d",
    "cudnn": "#f2a65a",
    "fa2": "#b8bfc6",
    "fa4": "#d9674f",
    "fa4-varlen": "#e79c8b",
    "flex": "#bfa9d6",
    "flex-FLASH": "#8c6bb1",
    "mem-efficient": "#c9b458",
    "jax": "#7fb285",
    "keys-outside": "#d9674f",
    "keys-outside-o16": "#e79c8b",
    "queries-outside": "#24658f",
}
NAMES = {
    "standard": "standard attention",
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "fa4": "FlashAttention-4",
    "fa4-varlen": "FlashAttention-4 (packed)",
    "flex": "FlexAttention",
    "flex-FLASH": "FlexAttention (FLASH)",
    "mem-efficient": "memory-efficient",
    "jax": "JAX",
    "cuattn-sm80": "cuattn, portable kernel",
    "cuattn-sm90": "cuattn, Hopper kernel",
}


def name(runner: str) -> str:
    """Return what a reader calls a runner."""
    return NAMES.get(runner, runner)


def colour(runner: str) -> str:
    """Return the colour that a runner has in every figure."""
    return COLOURS.get(runner, "#24658f" if runner.startswith("cuattn") else QUIET)


def by_case(rows: Iterable[dict[str, Any]], table: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the rows that succeeded, by case and runner; of one table only, where one is named."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok" and (table is None or row["case"].startswith(table + "/")):
            found.setdefault(row["case"], {})[row["runner"]] = row
    return found


def masks_left_out(rows: Iterable[dict[str, Any]]) -> str:
    """Say which of the twelve masks a table of masks lacks; nothing where all of them were measured."""
    found: dict[tuple[int, int], set[str]] = {}
    for row in rows:
        p = row["problem"]
        if row["case"].startswith("masks-") and row["ours"] and "median_us" in row:
            found.setdefault((p["n_keys"], p["head_dim"]), set()).add(p["mask"])
    return "  ".join(
        f"Not measured at {n // 1024}K tokens, d {d}: {', '.join(kind for kind in KINDS if kind not in kinds)}."
        for (n, d), kinds in sorted(found.items())
        if kinds < set(KINDS)
    )


def runners(cases: dict[str, dict[str, Any]]) -> list[str]:
    """Return all runners, cuattn's first."""
    seen = dict.fromkeys(runner for rows in cases.values() for runner in rows)
    return sorted(seen, key=lambda runner: not runner.startswith("cuattn"))


def times(row: dict[str, Any]) -> float:
    """Return a row's median in milliseconds."""
    return row["median_us"] / 1e3


def table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a markdown table; floats get three digits, None a dash, the first column is text.

    Examples
    --------
    >>> print(table(("who", "ms"), [("a", 1.23456), ("b", None)]))
    | who | ms |
    |---|--:|
    | a | 1.23 |
    | b | – |
    """
    rows = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    return "\n".join(rows + ["| " + " | ".join(map(_cell, line)) + " |" for line in lines])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def panels(count: int, width: float = 4.6, height: float = 3.7, rows: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure and its axes, all with the same quiet frame."""
    from matplotlib.figure import Figure

    columns = -(-count // rows)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.tick_params(colors=QUIET)
        axis.grid(color=QUIET, alpha=0.2, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
