"""Column masks and dense masks, bit for bit."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, table

TITLE = "A column mask and its dense twin give the same bits (FlashMask, sections 4.4 and 5.2)"
COMMAND = "python -m bench.same_bits"
RESULTS = ("o", "l", "m", "dq", "dk", "dv")


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table: how many of the twelve masks agree, per kernel."""
    found: dict[str, list[dict[str, Any]]] = {}
    for x in by_case(rows, "same-bits").values():
        for runner, row in x.items():
            found.setdefault(runner, []).append(row)
    lines, notes = [], []
    for runner, group in found.items():
        dense = [row for row in group if row["same"]]
        equal = [f"{sum(row['same'][key] for row in dense)} of {len(dense)}" if dense else None for key in RESULTS]
        flags = [row["same_flags"] for row in group if row.get("same_flags") is not None]
        lines.append((runner, *equal, f"{sum(flags)} of {len(flags)}" if flags else None))
        notes += [f"- {runner}: {reason}" for reason in sorted({row["reason"] for row in group if "reason" in row})]
    about = (
        "Of the paper's twelve masks, how many give the same bits as a column mask and as a boolean matrix on the same "
        "kernel, forward and deterministic backward; and, where `is_causal` or `window` say the same, as flags."
    )
    return "\n".join([about, "", table(("kernel", *RESULTS, "as flags"), lines), "", *notes]).rstrip()
