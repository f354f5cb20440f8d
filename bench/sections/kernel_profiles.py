"""Profiles of the kernels."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, table

TITLE = "Profiles (Nsight Compute)"
COMMAND = "python -m bench.kernel_profiles"


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table: the longest kernel of every call."""
    lines = []
    for case, x in by_case(rows, "profile").items():
        row = x["cuattn"]
        kernel = max(row["kernels"], key=lambda kernel: kernel["milliseconds"])
        stalls = ", ".join(f"{name} {share:.0%}" for name, share in list(kernel["stalls"].items())[:3])
        shares = (
            kernel["tensor_pct"],
            kernel["issue_pct"],
            kernel["l2_pct"],
            kernel["dram_pct"],
            kernel["occupancy_pct"],
        )
        lines.append((case.split("/")[1], kernel["milliseconds"], *shares, f"{kernel['bank_conflicts']:.2f}", stalls))
    head = (
        "call", "ms", "tensor %", "issue %", "L2 %", "DRAM %", "occupancy %", "bank conflicts", "warps' time"
    )  # fmt: skip
    about = (
        "The longest kernel of each call, in percent of the unit's peak; bank conflicts per shared-memory wavefront."
    )
    return f"{about}\n\n{table(head, lines)}"
