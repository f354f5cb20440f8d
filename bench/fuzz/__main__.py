"""The fuzzer's command line.

    python -m bench.fuzz --seconds 60 --seed 1                  # on the CPU
    python -m bench.fuzz --device cuda --seconds 300            # on a GPU, each kernel family in turn
    python -m bench.fuzz --replay 1:4711,4712                   # some problems again, in full

It ends with status 1 when there is a complaint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import rows
from bench.fuzz.running import run
from bench.fuzz.workers import CHUNK, Settings, outcomes, problem_of

POOL = 40  # sets of features that a GPU's problems share
KEPT = 200  # complaints that a report holds in full


class Tally:
    """What has been found so far."""

    def __init__(self, settings):
        self.settings, self.problems, self.complaints, self.worst = settings, 0, [], {}
        self.counts = {name: Counter() for name in ("kernels", "refused", "beyond_twice_the_textbook", "features")}

    def add(self, index, outcome):
        """Count one outcome; return its complaints."""
        self.problems += 1
        kernel = self.settings.target(index).kernel or "chosen"
        if outcome.refused is not None:
            self.counts["refused"][f"{kernel}: {outcome.refused}"] += 1
            kernel = "chosen"
        self.counts["kernels"][kernel] += 1
        self.counts["features"].update(outcome.features)
        self.counts["beyond_twice_the_textbook"].update(outcome.plain)
        for name, share in outcome.worst.items():
            self.worst[name] = max(self.worst.get(name, 0.0), share)
        new = [{"replay": self.replay(index), "what": what, "message": text} for what, text in outcome.complaints]
        self.complaints += new
        return new

    def replay(self, index):
        """Return the command that runs a problem again."""
        settings = self.settings
        device = "" if settings.device == "cpu" else f" --device {settings.device}"
        kernel = f" --kernel {settings.kernels[0]}" if len(settings.kernels) == 1 and settings.kernels[0] else ""
        pool = f" --variants {settings.variants}" if settings.variants not in (0, POOL) else ""
        return f"python -m bench.fuzz{device}{kernel}{pool} --replay {settings.seed}:{index}"

    def report(self, seconds, trees=None):
        """Return what is written as JSON."""
        return {
            **rows.environment("cpu", trees),
            **(_gpu() if self.settings.device == "cuda" else {}),
            "command": " ".join(["python -m bench.fuzz", *sys.argv[1:]]),
            "seed": self.settings.seed,
            "seconds": round(seconds, 1),
            "problems": self.problems,
            "complaints": self.complaints[:KEPT],
            "complaint_count": len(self.complaints),
            "largest_share_of_allowed": {name: round(min(x, 1e30), 4) for name, x in sorted(self.worst.items())},
            **{name: dict(sorted(counter.items())) for name, counter in self.counts.items()},
        }


def main(argv=None):
    """Fuzz, or replay some problems; return the exit status."""
    args = _parser().parse_args(argv)
    seed, _, indices = (args.replay or str(args.seed)).partition(":")
    settings = Settings(int(seed))
    if args.device == "cuda":
        kernels = (args.kernel,) if args.kernel else (None, "sm80", "sm90")
        settings = Settings(int(seed), args.device, kernels, args.variants)
    if args.replay:
        return max([_replay(settings, int(index)) for index in indices.split(",")])
    tally, start = Tally(settings), time.monotonic()
    stop = 1 << 62 if args.problems is None else args.first + args.problems
    chunks = (range(at, min(at + CHUNK, stop)) for at in range(args.first, stop, CHUNK))
    columns = TextColumn("{task.completed} problems, {task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=args.quiet) as bar:
        task = bar.add_task("", total=args.problems)
        for index, outcome in outcomes(settings, chunks, args.workers, args.seconds):
            for complaint in tally.add(index, outcome):
                bar.console.print(*complaint.values(), sep="  ", markup=False, highlight=False, soft_wrap=True)
            rate = tally.problems / (time.monotonic() - start)
            bar.update(task, advance=1, description=f"{rate:.0f}/s, {len(tally.complaints)} complaints")
    report = tally.report(time.monotonic() - start, args.trees)
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    bar.console.print(f"{tally.problems} problems in {report['seconds']} s, {len(tally.complaints)} complaints")
    return int(bool(tally.complaints))


def _gpu():
    """Describe the GPU; nothing here needs PyTorch."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return {"device": name, "driver": cupy.cuda.runtime.driverGetVersion(), "nvrtc": nvrtc}


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--seconds", type=float, default=60.0, help="start problems for so long")
    add("--seed", type=int, default=0)
    add("--problems", type=int, help="stop after so many")
    add("--first", type=int, default=0, help="number of the first problem")
    add("--kernel", choices=("sm80", "sm90"), help="this family alone; a GPU's are forced in turn")
    add("--replay", metavar="SEED:INDEX[,INDEX...]", help="run these problems and say all about them")
    add("--workers", type=int, default=os.cpu_count() or 1)
    add(
        "--variants", type=int, default=POOL, help="sets of features, and compiled kernels, that a GPU's problems share"
    )
    add("--report", type=Path, help="JSON file to write")
    add("--trees", help="what python -m bench.rows prints, for a copy without git")
    add("--quiet", action="store_true", help="no progress")
    return parser


def _replay(settings, index):
    problem, target = problem_of(settings, index), settings.target(index)
    print(f"{settings.seed}:{index} on {target.kernel or target.device}: {problem.describe()}")
    outcome = run(problem, target)
    if outcome.refused:
        print("refused:", outcome.refused)
    print("share of what is allowed:", {name: round(share, 4) for name, share in outcome.worst.items()})
    for what, message in outcome.complaints:
        print(f"{what}: {message}")
    return int(bool(outcome.complaints))


if __name__ == "__main__":
    sys.exit(main())
