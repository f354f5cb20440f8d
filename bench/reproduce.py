"""Measure everything that the README shows, on a machine with a GPU, within a budget of time.

    python -m bench.reproduce --budget 1800     # again, to go on where it stopped
    python -m bench.reproduce --list

Each step is a script of its own that skips what its file already holds for this machine and these sources, so that a
run can be split in as many parts as one likes.  Pictures and tables: ``python -m bench.redraw``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import NamedTuple

from rich.console import Console

from bench.rows import ROOT


class Step(NamedTuple):
    """One command, about how many seconds it takes on an H200, and whether it knows a budget."""

    command: str
    seconds: int
    budget: bool = True


MASKS = " ".join(f"masks-{n}{d}" for d in ("", "-d64") for n in ("8k", "32k", "128k"))
STEPS = (
    Step("gpt2", 35),
    Step("lengths", 80),
    Step("block_size", 15),
    Step("block_sparse", 10),
    Step("loop_order", 30),
    Step("traffic", 110),
    Step("same_bits", 25),
    Step("mask_memory", 10),
    Step("sparsity", 30),
    Step("denoise", 15),
    Step("denoise --device cpu", 30),
    Step("training", 85),
    Step("kernel_profiles", 60),
    Step(f"prepare hopper --tables dense dropout deterministic long {MASKS}", 150, False),
    Step("hopper --tables dense dropout deterministic long", 140),
    Step(f"hopper --tables {MASKS}", 700),
    Step("portable", 130),
    Step("cpu", 400),
)


def run(arguments, steps=STEPS, console=None):
    """Run steps until the budget is spent; one that knows a budget may be begun with a quarter of its time.

    Returns
    -------
    list of str
        Commands that failed or were not begun.
    """
    console = console or Console()
    begin, left = time.monotonic(), []
    for number, step in enumerate(steps, 1):
        rest = arguments.budget - (time.monotonic() - begin)
        shown = f"python -m bench.{step.command}"
        if rest <= (step.seconds / 4 if step.budget else step.seconds):
            left.append(shown)
            continue
        console.rule(f"{number} of {len(steps)}, {rest:.0f} s left: {shown}", align="left")
        command = [sys.executable, *shown.split()[1:]]
        if step.budget:
            command += ["--budget", f"{rest:.0f}", *(["--trees", arguments.trees] if arguments.trees else [])]
        if subprocess.run(command, cwd=ROOT).returncode:
            left.append(shown)
    return left


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="begin no step past this time")
    parser.add_argument(
        "--only", nargs="+", metavar="SCRIPT", choices=sorted({step.command.split()[0] for step in STEPS})
    )
    parser.add_argument("--trees", metavar="NAME=ID,...", help="git tree ids of a copy without git")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    arguments = parser.parse_args()
    steps = [step for step in STEPS if not arguments.only or step.command.split()[0] in arguments.only]
    if arguments.list:
        for step in steps:
            print(f"{step.seconds:5d} s  python -m bench.{step.command}")
        return 0
    left = run(arguments, steps)
    for command in left:
        print(f"left or failed: {command}")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
