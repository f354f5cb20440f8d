"""Committed rows as one frame, and each case beside its rivals; needs no GPU.

A ratio compares cuattn with the fastest rival of the same run; what an earlier run measured enters no table.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from bench.cases import TABLES, select

VERSIONS = ("cupy-cuda13x", "cupy-cuda12x", "torch", "cuda", "nvrtc", "cudnn", "flash-attn-4")
LOWER_IS_BETTER = ("us", "s")
NESTED = ("problem", "counters", "same")
NUMBERS = ("rho", "q1_us", "q3_us", "cold_us")
EMPTY = {"rivals": (), "reason": None, **dict.fromkeys(NUMBERS, math.nan)}  # what not all rows have
DERIVED = {  # column: its unit, and the columns that it adds up
    "ms": (1e3, ["median_us"]),
    "MB": (1e6, ["peak_bytes"]),
    "thread": (1e6, ["bytes_per_thread"]),
    "tables": (1e6, ["mask_bytes"]),
    "GB": (1e9, ["hbm_read", "hbm_write"]),
    "entered": (1e9, ["l2_to_sm"]),
    "expected": (1e9, ["expected_l2_to_sm"]),
    "algorithm": (1e9, ["expected_read", "expected_write"]),
    "lectured": (1e9, ["lecture"]),
}


class Section(NamedTuple):
    """What is shown of some rows.  Its functions take the rows of its tables that succeeded, as `framed` returns them.

    Attributes
    ----------
    title, about : str
        Its heading, and what stands above the table.
    commands : tuple of str
        What measures it, behind ``python -m bench.``; the rows are in the files of these names.
    tables : tuple of str
        The tables whose rows it reads.
    table, details : callable, optional
        Return the frame that the README shows, and the longer one of ``bench/results/tables.md``.
    figure : callable, optional
        Returns the figure.
    """

    title: str
    commands: tuple[str, ...]
    tables: tuple[str, ...]
    about: str = ""
    table: Callable[..., pd.DataFrame] | None = None
    details: Callable[..., pd.DataFrame] | None = None
    figure: Callable | None = None


@functools.cache
def read(path):
    """Return the rows of a file; each gets its ``run``, "FILE NUMBER", and the ``machine`` in words."""
    content = json.loads(path.read_text())
    machines = {run["id"]: _machine(run) for run in content["runs"]}
    of = [{"machine": machines.get(row["run"]), "run": f"{path.name} {row['run']:03d}"} for row in content["rows"]]
    return [row | about for row, about in zip(content["rows"], of, strict=True)]


def _machine(run):
    versions = [f"{name} {run['versions'][name]}" for name in VERSIONS if name in run["versions"]]
    driver = run.get("driver") and f"driver {run['driver']}"
    commit = run.get("commit") and f"commit {run['commit']}"
    return ", ".join(filter(None, [run["device"], driver, *versions, commit]))


def framed(rows):
    """Return rows as a frame in the order of `bench.cases`, cuattn's first, unknown cases last.

    ``table``, ``label`` and ``direction`` are columns, and so are the values inside a problem and its counters.
    ``ms`` and the like come beside them: megabytes, ``GB`` of device memory traffic, those that ``entered`` the
    multiprocessors, were ``expected`` to enter, are moved by the ``algorithm``.
    """
    frame = pd.DataFrame(
        [EMPTY | {k: x for of in (*map(row.get, NESTED), row) for k, x in (of or {}).items()} for row in rows]
    )
    if not len(frame):
        return frame
    frame[["table", "label", "direction"]] = frame["case"].str.split("/", expand=True)
    for name, (unit, columns) in DERIVED.items():
        frame[name] = frame.reindex(columns=columns).sum(axis=1, skipna=False) / unit
    order = {case.name: place for place, case in enumerate(select(TABLES))}
    return frame.sort_values(["ours", "case"], key=lambda x: x.map(order) if x.name == "case" else ~x)


def compared(rows):
    """Return the rows that have a rate, of one run per case: the latest of ours, or the latest of all."""
    rows = rows.dropna(subset="rate")
    latest = rows.sort_values(["ours", "run"]).groupby("case")["run"].last()
    return rows[rows["run"] == rows["case"].map(latest)]


def lines(rows):
    """Return one line per case, from its first row.

    Beside that row's columns: the fastest of ours (`best`; the one that chooses its kernel itself, if timed) and its
    ``±``, half the distance of the quartiles over the median; the ``rivals`` (those that the case names, else all) and
    the fastest ``rival``; and ``ratio``, how many times faster ours is.
    """
    rows = compared(rows)
    named = [who in ("cuattn", *stated) for who, stated in zip(rows["runner"], rows["rivals"], strict=True)]
    speed = rows["rate"].where(~rows["unit"].isin(LOWER_IS_BETTER), 1 / rows["rate"])
    rows = rows.assign(named=named, speed=speed)
    rows = rows[rows["named"] == rows.groupby(["case", "ours"])["named"].transform("any")]
    fastest = rows.sort_values("speed").drop_duplicates(["case", "ours"], keep="last").set_index("case")
    best, rival = fastest[fastest["ours"]], fastest[~fastest["ours"]]
    spread = (best["q3_us"] - best["q1_us"]) / 2 / best["median_us"]
    found = rows.drop_duplicates("case").set_index("case")
    return found.assign(
        best=best["runner"],
        rival=rival["runner"],
        rivals=rows[~rows["ours"]].groupby("case")["runner"].agg(list),
        ratio=best["speed"] / rival["speed"],
        spread=spread.map("{:.1%}".format, na_action="ignore"),
    )


def by_direction(rows, value):
    """Return a value by case and runner, a frame per direction."""
    groups = rows.groupby("direction", sort=False)
    return {way: of.pivot_table(value, "label", "runner", sort=False) for way, of in groups}


def standing(ratios):
    """Return in how many cases cuattn is the fastest, the geometric mean of its ratios, the worst and its case.

    A case that cuattn failed has no ratio; it counts as one in which it is not the fastest.
    """
    return {
        "ahead in": f"{(ratios >= 1).sum()} of {len(ratios)}",
        "geometric mean": f"{statistics.geometric_mean(ratios.dropna()):.2f}",
        "worst": f"{ratios.min():.2f} ({ratios.idxmin()})",
    }
