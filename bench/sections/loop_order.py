"""Which loop outside: bytes and time."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, colour, name, panels, runners, table, times

TITLE = "Does swapping the loops win? (the lecture's open question)"
COMMAND = "python -m bench.loop_order"
LABELS = {
    "keys-outside": "keys outside, O in float32",
    "keys-outside-o16": "keys outside, O in float16",
    "queries-outside": "queries outside",
}


def _lines(rows: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    cases = by_case(rows, "loop-order")
    return [(case.split("/")[1], r, x[r]) for case, x in cases.items() for r in runners(cases) if r in x]


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for label, runner, row in _lines(rows):
        counts = row["counters"]
        hbm = (counts["hbm_read"] + counts["hbm_write"]) / 1e9
        expected = (row["expected_read"] + row["expected_write"]) / 1e9 if "expected_read" in row else None
        lecture = row["lecture"] / 1e9 if "lecture" in row else None
        lines.append((label, LABELS.get(runner, name(runner)), hbm, expected, lecture, times(row)))
    about = (
        "`keys outside` is algorithm 1 with O, l and m in device memory; `queries outside` the lecture's change; both "
        "with one block per head and one inner code (`bench/studies/loop_order.cu`).  The formulas are "
        "12 N²d²/M + 16 N²d/M + 3 N d and 8 N²d²/M + 3 N d + 2 N elements of two bytes, M = 4 d B."
    )
    head = ("problem", "", "GB counted", "GB by the algorithm", "GB by the lecture's formula", "ms")
    return f"{about}\n\n{table(head, lines)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the answer."""
    found = list(by_case(rows, "loop-order").values())
    gains = [times(x["keys-outside-o16"]) / times(x["queries-outside"]) for x in found]
    beside = [times(x["queries-outside"]) / times(x["cuattn-sm80"]) for x in found]
    shares = []
    for x in found:
        for runner in ("keys-outside", "keys-outside-o16"):
            row = x[runner]
            counted = row["counters"]["hbm_read"] + row["counters"]["hbm_write"]
            shares.append(abs(counted / (row["expected_read"] + row["expected_write"]) - 1))
    return (
        f"Yes: queries outside is {min(gains):.1f} to {max(gains):.1f} times faster, with one block per head and the "
        f"same inner code in both, and moves the fewer bytes that the lecture's formula promises.  What algorithm 1 "
        f"moves is counted within {max(shares):.1%} of what its lines say.  It pays once more that query blocks need "
        f"nothing from each other: side by side they share keys in the L2 cache, and cuattn's portable kernel is "
        f"another {min(beside):.1f} to {max(beside):.1f} times faster."
    )


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw bytes and time per problem."""
    cases = by_case(rows, "loop-order")
    who = [*LABELS, "cuattn-sm80"]
    drawn, axes = panels(2, 5.2, 3.8)
    labels = [case.split("/")[1] for case in cases]
    for offset, runner in enumerate(who):
        at = [place + 0.2 * (offset - 1.5) for place in range(len(cases))]
        found = [x.get(runner) for x in cases.values()]
        moved = [(r["counters"]["hbm_read"] + r["counters"]["hbm_write"]) / 1e9 if r else 0 for r in found]
        axes[0].bar(at, moved, 0.19, color=colour(runner), label=LABELS.get(runner, name(runner)))
        formula = [(x, r["lecture"] / 1e9) for x, r in zip(at, found, strict=True) if r and "lecture" in r]
        axes[0].plot([x for x, _ in formula], [y for _, y in formula], "_", color="black", markersize=9)
        axes[1].bar(at, [times(r) if r else 0 for r in found], 0.19, color=colour(runner))
    for axis, label in zip(axes, ("GB of device memory\n(lines: the lecture's formula)", "ms, forward"), strict=True):
        axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(label)
        axis.set_yscale("log")
    drawn.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return drawn
