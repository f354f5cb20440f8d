"""What the scripts of single questions share: points to measure, files that resume, a budget, progress, samples.

A script names its points.  Each is measured by one call that returns, per runner, the values of a row.  A point that
fails leaves a row that says why, and the others go on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import timing
from bench.rows import RowFile, environment
from bench.timing import timed

__all__ = [
    "RESULTS", "Point", "clock", "main", "namespace", "parser", "random_arrays", "run", "synchronize", "timed",
]  # fmt: skip

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Point:
    """One thing to measure.

    Attributes
    ----------
    case : str
        Unique name, ``study/label/direction``.
    runners : tuple of str
        Whose rows `measure` returns; with all of them in the file, the point is done.
    measure : callable
        Returns the values of each runner's row.
    """

    case: str
    runners: tuple[str, ...]
    measure: Callable[[], Mapping[str, Mapping[str, Any]]]


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """Return the parser of a study.

    Parameters
    ----------
    description : str
        What it answers.
    name : str
        Of the script: rows go to ``bench/results/NAME.json``.
    """
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="points whose name contains one of these")
    found.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="start no point past this time")
    found.add_argument("--seconds", type=float, default=0.5, help="device time to sample per point")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--tiny", action="store_true", help="sizes that NumPy does in seconds, to try the script")
    found.add_argument("--trees", metavar="NAME=ID,...", help="git tree ids of a copy without git")
    found.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", metavar="FILE")
    found.add_argument("--list", action="store_true", help="print the points and stop")
    return found


def run(arguments: argparse.Namespace, points: Iterable[Point], console: Console | None = None) -> list[str]:
    """Measure the points that the file lacks, until the budget is spent.

    Parameters
    ----------
    arguments : Namespace
        Of `parser`.
    points : iterable of Point
        In the order to measure them.
    console : Console, optional
        Where progress is shown.

    Returns
    -------
    list of str
        Points left for another run.
    """
    console = console or Console(width=None if Console().is_terminal else 200)
    wanted = [p for p in points if not arguments.only or any(text in p.case for text in arguments.only)]
    if arguments.list:
        for point in wanted:
            console.print(point.case, highlight=False)
        return []
    file = RowFile(arguments.out, environment(arguments.device, arguments.trees, {"tiny": arguments.tiny}))
    file.rows = [row for row in file.rows if row["status"] != "failed"]  # what failed is tried again
    todo = [point for point in wanted if not file.done(point.case, list(point.runners))]
    begin, longest = time.monotonic(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(arguments.out.stem, total=len(todo))
        for index, point in enumerate(todo):
            start = time.monotonic()
            if start - begin + longest > arguments.budget:
                left = [point.case for point in todo[index:]]
                console.print(f"{len(left)} points left: " + " ".join(left), soft_wrap=True, highlight=False)
                return left
            progress.update(task, description=point.case)
            rows = _measure(point)
            file.add(rows)
            longest = max(longest, time.monotonic() - start)
            console.print(_line(point, rows), highlight=False, soft_wrap=True)
            progress.advance(task)
    return []


def main(description: str, name: str, points: Callable[[argparse.Namespace], Iterable[Point]]) -> int:
    """Run a study's command: parse its line, measure its points, return 0.

    Parameters
    ----------
    description, name : str
        As for `parser`; of the description, the first line.
    points : callable
        Given the parsed arguments, returns the points.
    """
    arguments = parser(description.splitlines()[0], name).parse_args()
    run(arguments, points(arguments))
    return 0


def _measure(point: Point) -> list[dict[str, Any]]:
    base = {"status": "ok", "problem": {}}
    try:
        found = point.measure()
    except Exception as error:  # the other points go on; the row says what happened
        reason = f"{type(error).__name__}: {error}"[:400]
        found = {name: {"status": "failed", "reason": reason} for name in point.runners}
    return [
        {"case": point.case, "runner": name, "ours": name.startswith("cuattn"), **base, **values}
        for name, values in found.items()
    ]


def _line(point: Point, rows: list[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        if row["status"] != "ok":
            parts.append(f"{row['runner']} [red]{row['status']}[/]: {row.get('reason', '')}")
        elif "median_us" in row:
            parts.append(f"{row['runner']} [bold]{row['median_us'] / 1e3:.4g} ms[/]")
        else:
            parts.append(f"{row['runner']} done")
    return f"{point.case}: " + ", ".join(parts)


def clock(device: str) -> Any:
    """Return the clock of a device, see `bench.timing`."""
    return timing.CudaClock() if device == "cuda" else timing.HostClock()


def namespace(device: str) -> Any:
    """Return CuPy for ``"cuda"``, else NumPy."""
    if device == "cuda":
        import cupy

        return cupy
    import numpy

    return numpy


def synchronize(xp: Any) -> None:
    """Wait for the device whose library `xp` is."""
    if xp.__name__ == "cupy":
        xp.cuda.Device().synchronize()


def random_arrays(xp: Any, count: int, shape: tuple[int, ...], dtype: Any, seed: int = 1) -> list[Any]:
    """Return standard normal arrays, the same at every call with the same library."""
    generator = xp.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=xp.float32).astype(dtype) for _ in range(count)]
