"""A small Llama trained on packed documents, three ways to mask."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, panels, table

TITLE = "End to end: a small Llama on packed documents (FlashMask, sections 5.1 and 5.2)"
COMMAND = "python -m bench.training"
LABELS = {
    "cuattn-column": "column mask, deterministic",
    "cuattn-dense": "the same mask dense, same kernel",
    "cuattn-documents": "one call per document",
    "cuattn-column-free": "column mask, the plan's choice",
}
SHADES = {
    "cuattn-column": "#24658f",
    "cuattn-dense": "#8a949d",
    "cuattn-documents": "#f2a65a",
    "cuattn-column-free": "#5b9bc4",
}


def _found(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {runner: row for x in by_case(rows, "training").values() for runner, row in x.items()}
    return {runner: found[runner] for runner in LABELS if runner in found}


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    found = _found(rows)
    first = found["cuattn-column"]
    lines = []
    for runner, row in found.items():
        apart = max(abs(a - b) for a, b in zip(row["losses"], first["losses"], strict=True))
        same = "–" if runner == "cuattn-column" else "the same bits" if apart == 0 else f"{apart:.1e} apart"
        memory = row["peak_bytes"] / 1e9 if "peak_bytes" in row else None
        lines.append((LABELS[runner], row["tokens_per_s"], memory, f"{row['losses'][-1]:.4f}", same))
    p = first["problem"]
    about = (
        f"{p['layers']} layers, {p['heads']} heads of {p['head_dim']}, {first['parameters'] / 1e6:.1f} M parameters, "
        f"sequences of {p['n']:,} bytes of the standard library's sources, {first['documents']:g} documents in each, "
        f"{p['steps']} steps; everything but attention in CuPy."
    )
    head = ("attention", "tokens/s", "peak GB beyond the weights", "last loss", "losses against the first row's")
    return f"{about}\n\n{table(head, lines)}"


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw the losses and the speeds."""
    found = _found(rows)
    drawn, axes = panels(2, 4.8, 3.2)
    for runner, row in found.items():
        style = "--" if runner == "cuattn-dense" else "-"
        axes[0].plot(row["losses"], style, color=SHADES[runner], linewidth=1.4, label=LABELS[runner])
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("loss (nats a byte)")
    axes[0].legend(frameon=False, fontsize=7)
    for place, (runner, row) in enumerate(reversed(found.items())):
        axes[1].barh(place, row["tokens_per_s"], color=SHADES[runner])
        memory = f" {row['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in row else ""
        axes[1].text(row["tokens_per_s"], place, memory, va="center", fontsize=8)
    axes[1].set_yticks(range(len(found)), [LABELS[runner] for runner in reversed(found)], fontsize=8)
    axes[1].set_xlabel("tokens/s, and peak memory beside the bars")
    axes[1].margins(x=0.2)
    return drawn
