"""Column masks and dense masks, bit for bit."""

import pandas as pd

from bench import report
from bench.style import table

TITLE = "A column mask and its dense twin give the same bits (FlashMask, sections 4.4 and 5.2)"
COMMAND = "python -m bench.same_bits"
RESULTS = {f"same.{key}": key for key in ("o", "l", "m", "dq", "dk", "dv")} | {"same_flags": "as flags"}


def text(frame):
    """Return the table: how many of the twelve masks agree, per kernel."""
    lines, notes = [], []
    for runner, group in report.of_table(frame, "same-bits").groupby("runner", sort=False):
        found = {label: group[key].dropna() for key, label in RESULTS.items()}
        counted = {label: f"{x.sum()} of {len(x)}" if len(x) else None for label, x in found.items()}
        lines.append({"kernel": runner, **counted})
        reasons = group.get("reason", pd.Series(dtype=str)).dropna()
        notes += [f"- {runner}: {reason}" for reason in sorted(set(reasons))]
    about = (
        "Of the paper's twelve masks, how many give the same bits as a column mask and as a boolean matrix on the same "
        "kernel, forward and deterministic backward; and, where `is_causal` or `window` say the same, as flags."
    )
    return "\n".join([about, "", table(pd.DataFrame(lines)), "", *notes]).rstrip()
