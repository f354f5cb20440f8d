"""The fuzzer's command line.

    python -m bench.fuzz --seconds 60 --seed 1                  # on the CPU
    python -m bench.fuzz --device cuda --seconds 300            # on a GPU, each kernel family in turn
    python -m bench.fuzz --replay 1:4711,4712                   # some problems again, in full

It ends with status 1 when there is a complaint.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.pretty import pprint
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import rows
from bench.fuzz.running import run
from bench.fuzz.workers import CHUNK, Settings, outcomes, problem_of

KEPT = 200  # complaints that a report holds in full


def report(settings, outcomes, complaints, seconds, trees=None):
    """Return what is written as JSON."""
    worst = functools.reduce(operator.or_, (Counter(x.worst) for x in outcomes), Counter())  # the larger of each
    counts = {
        "kernels": chain.from_iterable(x.kernels for x in outcomes),
        "refused": [x.refused for x in outcomes if x.refused],
        "beyond_twice_the_textbook": chain.from_iterable(x.plain for x in outcomes),
        "features": chain.from_iterable(x.features for x in outcomes),
    }
    return {
        **rows.environment(settings.device, trees),
        "command": " ".join(["python -m bench.fuzz", *sys.argv[1:]]),
        "seed": settings.seed,
        "seconds": round(seconds, 1),
        "problems": len(outcomes),
        "complaints": complaints[:KEPT],
        "complaint_count": len(complaints),
        "largest_share_of_allowed": {name: round(min(share, 1e30), 4) for name, share in sorted(worst.items())},
        **{name: dict(sorted(Counter(items).items())) for name, items in counts.items()},
    }


def complaints_of(settings, index, outcome):
    """Return the complaints of a problem, each with the command that runs it again."""
    device = "" if settings.device == "cpu" else f" --device {settings.device}"
    replay = f"python -m bench.fuzz{device} --replay {settings.seed}:{index}"
    return [{"replay": replay, "what": what, "message": text} for what, text in outcome.complaints]


def main(argv=None):
    """Fuzz, or replay some problems; return the exit status."""
    args = _parser().parse_args(argv)
    seed, _, indices = (args.replay or str(args.seed)).partition(":")
    settings = Settings(int(seed), args.device)
    if args.replay:
        return max([_replay(settings, int(index)) for index in indices.split(",")])
    found, complaints, start = [], [], time.monotonic()
    stop = args.problems or 1 << 62
    chunks = (range(at, min(at + CHUNK, stop)) for at in range(0, stop, CHUNK))
    columns = TextColumn("{task.completed} problems, {task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=args.quiet) as bar:
        task = bar.add_task("", total=args.problems)
        for index, outcome in outcomes(settings, chunks, args.workers, args.seconds):
            found.append(outcome)
            for complaint in complaints_of(settings, index, outcome):
                complaints.append(complaint)
                bar.console.print(*complaint.values(), sep="  ", markup=False, highlight=False, soft_wrap=True)
            seconds = time.monotonic() - start
            bar.update(task, advance=1, description=f"{len(found) / seconds:.0f}/s, {len(complaints)} complaints")
    seconds = time.monotonic() - start
    if args.report:
        written = report(settings, found, complaints, seconds, args.trees)
        args.report.write_text(json.dumps(written, indent=1) + "\n")
    bar.console.print(f"{len(found)} problems in {seconds:.1f} s, {len(complaints)} complaints")
    return int(bool(complaints))


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seconds", type=float, default=60.0, help="start problems for so long")
    add("--seed", type=int, default=0)
    add("--problems", type=int, help="stop after so many")
    add("--replay", metavar="SEED:INDEX[,INDEX...]", help="run these problems and say all about them")
    add("--workers", type=int, default=os.cpu_count() or 1)
    add("--report", type=Path, help="JSON file to write")
    add("--trees", help="what python -m bench.rows prints, for a copy without git")
    add("--quiet", action="store_true", help="no progress")
    return parser


def _replay(settings, index):
    problem, target = problem_of(settings, index), settings.target(index)
    print(f"{settings.seed}:{index} on {target.kernel or target.device}: {problem.describe()}")
    outcome = run(problem, target)
    pprint(outcome)
    return int(bool(outcome.complaints))


if __name__ == "__main__":
    sys.exit(main())
