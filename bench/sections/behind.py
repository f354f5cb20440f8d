"""Where another library is faster, by how much, and why: every case behind its fastest rival, in groups with one cause.

The figures come from the rows, the causes from ``bench/NOTES.md``; a group without such a case is not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bench import report
from bench.sections.common import name, table

TITLE = "Where it is behind, and why"
COMMAND = "python -m bench.hopper`, `python -m bench.portable` and `python -m bench.lengths"
FILES = ("hopper", "portable", "lengths", "gpt2")
NOTICEABLE = 0.995  # ratios above it are called equal


class Group(NamedTuple):
    """Cases that are slow for the same reason."""

    label: str
    holds: Callable[[dict[str, Any]], bool]  # of a row's problem
    why: str


def _table(*names: str, **values: Any) -> Callable[[dict[str, Any]], bool]:
    """Return whether a problem is of one of the tables and has these values."""
    return lambda p: p["table"] in names and all(p[key] == value for key, value in values.items())


def _sort(direction: str, d: int, masked: bool) -> Callable[[dict[str, Any]], bool]:
    """Return whether a problem of a Hopper table is of this direction, head dimension, and with or without a mask."""
    return lambda p: (
        p["table"].partition("-")[0] in (("masks",) if masked else ("dense", "long", "deterministic"))
        and (p["direction"], p["head_dim"]) == (direction, d)
    )


GROUPS = (  # the first that holds a case takes it
    Group(
        "deterministic gradients",
        lambda p: p["deterministic"],
        "as in any order: the fixed one costs FlashAttention-4 the same share",
    ),
    Group("host time", lambda p: p["host"], "checks, plan and two frameworks' arrays in Python, before one launch"),
    Group("one query", _table("decode"), "both read k and v at the memory's speed"),
    Group(
        "dropout, backward",
        _table("dropout", direction="backward"),
        "drawing a weight's bits from its place again takes longer than the softmax leaves time for",
    ),
    Group(
        "dropout, forward",
        _table("dropout"),
        "drawing a weight's bits from its place shares the issue slots with the softmax",
    ),
    Group(
        "backward, d 128, no mask",
        _sort("backward", 128, False),
        "shared memory: products with both operands in it, and dQ's way out",
    ),
    Group(
        "backward, d 128, masks",
        _sort("backward", 128, True),
        "as without a mask; beside packed documents presumably also tiles that two documents share",
    ),
    Group(
        "backward, d 64, no mask",
        _sort("backward", 64, False),
        "presumably the ends of key tiles, and the launches around the backward, on short rows",
    ),
    Group(
        "backward, d 64, masks",
        _sort("backward", 64, True),
        "presumably tiles that two documents share, which packed documents do not have",
    ),
    Group("backward, d 256", _sort("backward", 256, False), "two kernels instead of one"),
    *(
        Group(f"forward, d {d}, {kind}", _sort("forward", d, kind == "masks"), why)
        for d in (128, 64, 256)
        for kind, why in (
            ("no mask", "a step of the softmax outlasts the other warpgroup's products"),
            ("masks", "presumably tiles that two documents share, which packed documents do not have"),
        )
    ),
    Group(
        "float64",
        _table("portable", dtype="float64"),
        "the rival is matrix products of N x N in device memory; loads from shared memory beside the products",
    ),
    Group("portable kernel", _table("portable"), "written for every GPU, not for this one"),
    Group(
        "short sequences, forward and backward",
        _table("lengths", "gpt2"),
        "presumably the launches around the backward (row sums before, dq behind), on little work",
    ),
)


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table, the groups in which it is furthest behind first."""
    cases: dict[str, list[report.Line]] = {}
    for line in (line for part in report.tables(rows) for line in part.lines if line.ratio is not None):
        problem = next(iter(line.rows.values()))["problem"]
        label = next((group.label for group in GROUPS if group.holds(problem)), problem["table"])
        cases.setdefault(label, []).append(line)
    why = {group.label: group.why for group in GROUPS}
    lines = []
    for label, found in cases.items():
        slow = sorted((line for line in found if line.ratio < NOTICEABLE), key=lambda line: line.ratio)
        if slow:
            rivals = ", ".join(dict.fromkeys(name(line.best(False)) for line in slow))
            share = f"{slow[0].ratio:.2f}" if len(slow) == 1 else f"{slow[0].ratio:.2f} to {slow[-1].ratio:.2f}"
            lines.append((label, f"{len(slow)} of {len(found)}", share, rivals, why.get(label, "not looked into yet")))
    if not lines:
        return "In no case that was measured."
    lines.sort(key=lambda line: line[2])
    head = ("", "cases", "of the fastest rival's speed", "which is", "why")
    about = (
        "Every case in which a rival was more than half a percent faster in the same run.  `bench/NOTES.md` says what "
        "was tried against each, and what comes next."
    )
    return f"{about}\n\n{table(head, lines)}"
