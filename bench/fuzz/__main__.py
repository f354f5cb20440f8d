"""The fuzzer's command line.

    python -m bench.fuzz --seconds 60 --seed 1                  # on the CPU
    python -m bench.fuzz --device cuda --seconds 300            # on a GPU, each kernel family in turn
    python -m bench.fuzz --replay 1:4711                        # one problem again, in full

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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import rows
from bench.fuzz.running import Outcome, Target, run
from bench.fuzz.workers import Settings, outcomes, prepare_all, problem_of

POOL = 60  # variants that a GPU's problems share
KEPT = 200  # complaints that a report holds in full


class Tally:
    """What has been found so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.problems = 0
        self.features: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.beyond_plain: Counter[str] = Counter()
        self.worst: dict[str, float] = {}
        self.complaints: list[dict[str, Any]] = []

    def add(self, index: int, outcome: Outcome) -> list[dict[str, Any]]:
        """Count one outcome; return its complaints."""
        self.problems += 1
        kernel = self.settings.kernels[index % len(self.settings.kernels)] or "chosen"
        if outcome.refused is not None:
            self.refused[f"{kernel}: {outcome.refused}"] += 1
            if kernel != "sm90":  # the one family that leaves problems to another
                outcome.complaints.append(("refused", outcome.refused))
        else:
            self.kernels[kernel] += 1
            self.features.update(outcome.features)
            self.beyond_plain.update(outcome.plain)
        for name, share in outcome.worst.items():
            self.worst[name] = max(self.worst.get(name, 0.0), share)
        new = [{"replay": self.replay(index), "what": what, "message": text} for what, text in outcome.complaints]
        self.complaints += new
        return new

    def replay(self, index: int) -> str:
        """Return the command that runs a problem again."""
        device = "" if self.settings.device == "cpu" else f" --device {self.settings.device}"
        only = self.settings.kernels
        kernel = f" --kernel {only[0]}" if len(only) == 1 and only[0] else ""
        pool = f" --variants {self.settings.variants}" if self.settings.variants not in (0, POOL) else ""
        return f"python -m bench.fuzz{device}{kernel}{pool} --replay {self.settings.seed}:{index}"

    def report(self, seconds: float, trees: str | None = None) -> dict[str, Any]:
        """Return what is written as JSON."""
        return {
            **rows.environment("cpu", trees),
            **(_gpu() if self.settings.device == "cuda" else {}),
            "command": " ".join(["python -m bench.fuzz", *sys.argv[1:]]),
            "seed": self.settings.seed,
            "seconds": round(seconds, 1),
            "problems": self.problems,
            "kernels": dict(self.kernels),
            "refused": dict(self.refused.most_common()),
            "complaints": self.complaints[:KEPT],
            "complaint_count": len(self.complaints),
            "largest_share_of_allowed": {name: round(min(x, 1e30), 4) for name, x in sorted(self.worst.items())},
            "beyond_twice_the_textbook": dict(self.beyond_plain),
            "features": dict(sorted(self.features.items())),
        }


def main(argv: list[str] | None = None) -> int:
    """Fuzz, or replay one problem; return the exit status."""
    args = _parse(argv)
    settings = _settings(args)
    console = Console(stderr=True)
    if args.replay:
        return max([_replay(settings, int(index)) for index in args.replay.split(":")[1].split(",")])
    tally = Tally(settings)
    bar = Progress(
        TextColumn("{task.completed} problems, {task.fields[rate]:.0f}/s, {task.fields[bad]} complaints"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=args.quiet,
    )
    with bar:
        task = bar.add_task("", total=settings.variants * len(settings.kernels) or None, rate=0.0, bad=0)
        for _ in prepare_all(settings, os.cpu_count() or 1):
            bar.advance(task)
        bar.reset(task, total=args.problems, rate=0.0, bad=0)
        start = time.monotonic()
        for index, outcome in outcomes(settings, args.workers, args.first, args.problems, args.seconds):
            for complaint in tally.add(index, outcome):
                bar.console.print(*complaint.values(), sep="  ", markup=False, highlight=False, soft_wrap=True)
            rate = tally.problems / (time.monotonic() - start)
            bar.update(task, completed=tally.problems, rate=rate, bad=len(tally.complaints))
    report = tally.report(time.monotonic() - start, args.trees)
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"{tally.problems} problems in {report['seconds']} s, {len(tally.complaints)} complaints")
    return int(bool(tally.complaints))


def _gpu() -> dict[str, Any]:
    """Describe the GPU; nothing here needs PyTorch."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return {"device": name, "driver": cupy.cuda.runtime.driverGetVersion(), "nvrtc": nvrtc}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="start problems for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", type=int, help="stop after so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--kernel", choices=("sm80", "sm90"), help="this family alone; a GPU's are forced in turn")
    parser.add_argument("--replay", metavar="SEED:INDEX[,INDEX...]", help="run these problems and say all about them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--variants", type=int, default=POOL, help="compiled variants that a GPU's problems share")
    parser.add_argument("--report", type=Path, help="JSON file to write")
    parser.add_argument("--trees", help="what python -m bench.rows prints, for a copy without git")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser.parse_args(argv)


def _settings(args: argparse.Namespace) -> Settings:
    seed = int(args.replay.split(":")[0]) if args.replay else args.seed
    if args.device == "cpu":
        return Settings(seed)
    return Settings(seed, args.device, (args.kernel,) if args.kernel else (None, "sm80", "sm90"), args.variants)


def _replay(settings: Settings, index: int) -> int:
    problem = problem_of(settings, index)
    print(f"{settings.seed}:{index}", problem.describe())
    outcome = run(problem, Target(settings.device, settings.kernels[index % len(settings.kernels)]))
    if outcome.refused:
        print("refused:", outcome.refused)
    print("share of what is allowed:", {name: round(share, 4) for name, share in outcome.worst.items()})
    for what, message in outcome.complaints:
        print(f"{what}: {message}")
    return int(bool(outcome.complaints))


if __name__ == "__main__":
    sys.exit(main())
