"""Profiles of the kernels."""

import pandas as pd

from bench import report
from bench.style import table

TITLE = "Profiles (Nsight Compute)"
COMMAND = "python -m bench.kernel_profiles"
SHARES = {f"{unit}_pct": f"{unit} %" for unit in ("tensor", "issue")}
SHARES |= {"l2_pct": "L2 %", "dram_pct": "DRAM %", "occupancy_pct": "occupancy %"}


def text(frame):
    """Return the table: the longest kernel of every call."""
    lines = []
    for row in report.of_table(frame, "profile").to_dict("records"):
        kernel = max(row["kernels"], key=lambda kernel: kernel["milliseconds"])
        stalls = ", ".join(f"{name} {share:.0%}" for name, share in list(kernel["stalls"].items())[:3])
        shares = {label: kernel[key] for key, label in SHARES.items()}
        conflicts = f"{kernel['bank_conflicts']:.2f}"
        line = {"call": row["label"], "ms": kernel["milliseconds"], **shares}
        lines.append({**line, "bank conflicts": conflicts, "warps' time": stalls})
    about = (
        "The longest kernel of each call, in percent of the unit's peak; bank conflicts per shared-memory wavefront."
    )
    return f"{about}\n\n{table(pd.DataFrame(lines))}"
