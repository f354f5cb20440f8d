"""Where another library is faster, and by how much: every case behind its fastest rival, in groups of one kind.

The figures come from the rows; ``bench/NOTES.md`` says what was tried against each group, and what comes next.
"""

import pandas as pd

from bench import report
from bench.style import name, table

TITLE = "Where it is behind"
COMMAND = "python -m bench.hopper`, `python -m bench.portable` and `python -m bench.lengths"
FILES = ("hopper", "portable", "lengths", "gpt2")
NOTICEABLE = 0.995  # ratios above it are called equal
SINGLE = {
    "host": "host time",
    "decode": "one query",
    "dropout": "dropout",
    "portable": "portable kernel",
    "lengths": "short sequences",
    "gpt2": "short sequences",
}


def group(line):
    """Return the kind of a case, in words: what it computes that others do not."""
    if line.get("problem.deterministic") is True:
        return "deterministic gradients"
    if line["table"] == "portable" and line["problem.dtype"] == "float64":
        return "float64"
    if line["table"] in SINGLE:
        direction = {"host": "", "decode": ""}.get(line["table"], line["direction"].replace("+", " and "))
        return ", ".join(filter(None, [SINGLE[line["table"]], direction]))
    masks = "masks" if line["table"].startswith("masks") else "no mask"
    return f"{line['direction']}, d {line['problem.head_dim']:.0f}, {masks}"


def text(frame):
    """Return the table, the groups in which it is furthest behind first."""
    found = report.lines(frame).dropna(subset="ratio")
    found = found.assign(group=found.apply(group, axis=1))
    rows = []
    for label, cases in found.groupby("group", sort=False):
        slow = cases[cases["ratio"] < NOTICEABLE].sort_values("ratio")
        if len(slow):
            share = " to ".join(f"{ratio:.2f}" for ratio in slow["ratio"].iloc[[0, -1] if len(slow) > 1 else [0]])
            rivals = ", ".join(map(name, slow["rival"].unique()))
            rows.append((slow["ratio"].iloc[0], label, f"{len(slow)} of {len(cases)}", share, rivals))
    if not rows:
        return "In no case that was measured."
    head = ["", "cases", "of the fastest rival's speed", "which is"]
    about = (
        "Every case in which a rival was more than half a percent faster in the same run.  `bench/NOTES.md` says what "
        "was tried against each, and what comes next."
    )
    return f"{about}\n\n{table(pd.DataFrame([row[1:] for row in sorted(rows, key=lambda row: row[0])], columns=head))}"
