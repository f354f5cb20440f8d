"""What every measuring command shares: points to measure, files that resume, a budget, progress, clocks, arrays.

A command names its points.  Each is measured by one call that returns, per runner, the values of a row.  A point that
fails leaves rows that say why, and the others go on.  What a file of rows already holds for the same machine and
sources is not measured again.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import timing
from bench.rows import RESULTS, Row, RowFile, environment

__all__ = [
    "Point",
    "clock",
    "console",
    "main",
    "matches",
    "namespace",
    "one",
    "parser",
    "random_arrays",
    "run",
    "synchronize",
    "timed",
]


@dataclass(frozen=True)
class Point:
    """One thing to measure.

    Attributes
    ----------
    case : str
        Unique name, ``table/label/direction``.
    runners : tuple of str
        Whose rows `measure` returns; with all of them in the file, the point is done.
    measure : callable
        Returns the values of each runner's row.
    retry : bool
        Measure again in a later process when a runner failed.
    """

    case: str
    runners: tuple[str, ...]
    measure: Callable[[], Mapping[str, Row]]
    retry: bool = True


def one(case, runner, measure, *arguments):
    """Return the point of a single runner, whose values are ``measure(*arguments)``."""
    return Point(case, (runner,), lambda: {runner: measure(*arguments)})


def parser(description, name):
    """Return the parser of a command.

    Parameters
    ----------
    description : str
        What it measures.
    name : str
        Rows go to ``bench/results/NAME.json``.
    """
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="cases whose name or a word matches")
    found.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="start no case past this time")
    found.add_argument("--seconds", type=float, default=0.5, help="device time to sample per case")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="sizes that NumPy does in seconds, to try the command")
    found.add_argument("--trees", metavar="NAME=ID,...", help="git ids of a copy without git (or $CUATTN_TREES)")
    found.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", metavar="FILE")
    found.add_argument("--list", action="store_true", help="print the cases and stop")
    return found


def main(description, name, points, more=None, **defaults):
    """Run a command: parse its line, measure its points, return 0.

    Parameters
    ----------
    description, name : str
        As for `parser`; of the description, the first line.
    points : callable
        Given the parsed arguments, returns the points.
    more : mapping of str to dict, optional
        Options of its own, as ``add_argument`` takes them.
    **defaults
        Other defaults of the shared options.
    """
    found = parser(description.splitlines()[0], name)
    for option, settings in (more or {}).items():
        found.add_argument(option, **settings)
    found.set_defaults(**defaults)
    arguments = found.parse_args()
    run(arguments, points(arguments), {"tiny": arguments.tiny})
    return 0


def console():
    """Return the terminal, or wide lines where the output is none."""
    return Console(width=None if Console().is_terminal else 200)


def matches(name, patterns):
    """Return whether a name, or a part of it between slashes and dashes, matches a shell pattern; without any, True.

    Examples
    --------
    >>> matches("dense/d64-N1024-causal/forward", ["N1024"]), matches("dense/d64-N1024-causal/forward", ["*N10*"])
    (True, True)
    """
    words = (name, *name.replace("/", "-").split("-"))
    patterns = list(patterns)
    return not patterns or any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def run(arguments, points, options=None, show=None):
    """Measure the points that the file lacks, until the budget is spent.

    Parameters
    ----------
    arguments : Namespace
        Of `parser`.
    points : iterable of Point
        In the order to measure them.
    options : dict, optional
        Settings that change what is measured; rows of other settings do not count as done.
    show : Console, optional
        Where progress is shown.

    Returns
    -------
    list of str
        Cases left for another run.
    """
    show = show or console()
    wanted = [point for point in points if matches(point.case, arguments.only)]
    if arguments.list:
        for point in wanted:
            show.print(point.case, highlight=False)
        return []
    file = RowFile(arguments.out, environment(arguments.device, arguments.trees, options))
    todo = [point for point in wanted if not file.done(point.case, point.runners, point.retry)]
    begin, longest = time.monotonic(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=show, transient=True, disable=not show.is_terminal) as progress:
        task = progress.add_task(arguments.out.stem, total=len(todo))
        for index, point in enumerate(todo):
            start = time.monotonic()
            if start - begin + longest > arguments.budget:
                left = [point.case for point in todo[index:]]
                show.print(f"{len(left)} cases left: " + " ".join(left), soft_wrap=True, highlight=False)
                return left
            progress.update(task, description=point.case)
            rows = _measure(point)
            file.add(rows)
            longest = max(longest, time.monotonic() - start)
            said = ", ".join(_said(row) for row in rows if row["status"] != "unsupported")
            show.print(f"{point.case}: {said}", highlight=False, soft_wrap=True)
            progress.advance(task)
    return []


def _measure(point):
    try:
        found = point.measure()
    except Exception as error:  # the other points go on; the row says what happened
        reason = f"{type(error).__name__}: {error}"[:400]
        found = {name: {"status": "failed", "reason": reason} for name in point.runners}
    return [
        {"case": point.case, "runner": name, "ours": name.startswith("cuattn"), "status": "ok", "problem": {}, **values}
        for name, values in found.items()
    ]


def _said(row):
    if row["status"] != "ok":
        return f"{row['runner']} [red]{row['status']}[/]: {row.get('reason', '')}"
    if "rate" in row:
        return f"{row['runner']} [bold]{row['rate']:.4g}[/] {row['unit']}"
    return f"{row['runner']} " + (f"[bold]{row['median_us'] / 1e3:.4g} ms[/]" if "median_us" in row else "done")


def clock(device):
    """Return the clock of a device, see `bench.timing`."""
    return timing.CudaClock() if device == "cuda" else timing.HostClock()


def namespace(device):
    """Return CuPy for ``"cuda"``, else NumPy."""
    return importlib.import_module("cupy" if device == "cuda" else "numpy")


def synchronize(xp):
    """Wait for the device whose library `xp` is."""
    if xp.__name__ == "cupy":
        xp.cuda.Device().synchronize()


def random_arrays(xp, count, shape, dtype, seed=1):
    """Return standard normal arrays, the same at every call with the same library."""
    generator = xp.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=xp.float32).astype(dtype) for _ in range(count)]


def timed(call, device, seconds, **rounds):
    """Time one call alone; return the values of `timing.timed`."""
    return timing.timed(timing.measure({"": call}, clock(device), seconds=seconds, **rounds)[""])
