"""Which loop outside: bytes and time."""

import pandas as pd

from bench import report
from bench.style import curves, legend, name, panels, table

TITLE = "Does swapping the loops win? (the lecture's open question)"
COMMAND = "python -m bench.loop_order"
RUNNERS = ("cuattn-sm80", "keys-outside", "keys-outside-o16", "queries-outside")
COLUMNS = {"hbm": "GB counted", "expected": "GB by the algorithm", "lecture": "GB by the lecture's formula", "ms": "ms"}


def _found(frame):
    """Return the rows with their gigabytes: counted, by the algorithm, by the lecture's formula."""
    rows = report.of_table(frame, "loop-order")
    hbm = (rows["counters.hbm_read"] + rows["counters.hbm_write"]) / 1e9
    expected = (rows["expected_read"] + rows["expected_write"]) / 1e9
    return rows.assign(hbm=hbm, expected=expected, lecture=rows["lecture"] / 1e9)


def _wide(frame, value):
    """Return one value by problem and runner."""
    return _found(frame).pivot_table(index="label", columns="runner", values=value, sort=False)


def text(frame):
    """Return the table."""
    found = _found(frame)
    place = found["runner"].map(RUNNERS.index)
    found = found.assign(place=place, first=found.groupby("label", sort=False).ngroup()).sort_values(["first", "place"])
    lines = pd.DataFrame({"problem": found["label"], "": found["runner"].map(name)})
    lines = pd.concat([lines, found[list(COLUMNS)].rename(columns=COLUMNS)], axis=1)
    about = (
        "`keys outside` is algorithm 1 with O, l and m in device memory; `queries outside` the lecture's change; both "
        "with one block per head and one inner code (`bench/studies/loop_order.cu`).  The formulas are "
        "12 N²d²/M + 16 N²d/M + 3 N d and 8 N²d²/M + 3 N d + 2 N elements of two bytes, M = 4 d B."
    )
    return f"{about}\n\n{table(lines)}"


def summary(frame):
    """Return the answer, as the rows give it."""
    ms, moved = _wide(frame, "ms"), _wide(frame, "hbm")
    swapped = ms["keys-outside-o16"] / ms["queries-outside"]
    fewer = moved["keys-outside-o16"] / moved["queries-outside"]
    beside = ms["queries-outside"] / ms["cuattn-sm80"]
    found = _found(frame).query("runner in ('keys-outside', 'keys-outside-o16')")
    off = (found["hbm"] / found["expected"] - 1).abs().max()
    answer = "Yes" if swapped.min() > 1 else "No" if swapped.max() < 1 else "Not always"
    return (
        f"{answer}: with one block per head and the same inner code in both, keys outside takes {swapped.min():.1f} to "
        f"{swapped.max():.1f} times the time of queries outside, and moves {fewer.min():.1f} to {fewer.max():.1f} "
        f"times the bytes.  Algorithm 1 is counted within {off:.1%} of what its lines say.  Query blocks need "
        f"nothing from each other: side by side they can share keys in the L2 cache; cuattn's portable kernel, which "
        f"works so, is {beside.min():.1f} to {beside.max():.1f} times as fast as queries outside."
    )


def figure(frame):
    """Draw dots of bytes and time per problem."""
    drawn, axes = panels(2, 5.2, 3.8)
    for axis, value, label in zip(axes, ("hbm", "ms"), ("GB of device memory", "ms, forward"), strict=True):
        curves(axis, _wide(frame, value), "o", markersize=8)
        axis.set(ylabel=label, yscale="log")
        axis.tick_params(axis="x", labelrotation=30)
    lecture = _wide(frame, "lecture")
    axes[0].plot(lecture, "_", color="black", markersize=14)
    axes[0].plot([], [], "_", color="black", label="the lecture's formula")
    legend(drawn, 3)
    return drawn
