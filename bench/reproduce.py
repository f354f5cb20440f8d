"""Measure everything that the README shows, on a machine with a GPU, within a budget of time.

    python -m bench.reproduce --budget 1800     # again, to go on where it stopped
    python -m bench.reproduce --list

Each step is a script of its own that skips what its file already holds for this machine and these sources, so that a
run can be split in as many parts as one likes.  Pictures and tables: ``python -m bench.redraw``.
"""

import argparse
import subprocess
import sys
import time

from rich.console import Console

from bench.rows import ROOT

MASKS = " ".join(f"masks-{n}{d}" for d in ("", "-d64") for n in ("8k", "32k", "128k"))
STEPS = {  # command: about how many seconds it takes on an H200
    "gpt2": 35,
    "lengths": 80,
    "block_size": 15,
    "block_sparse": 10,
    "loop_order": 30,
    "traffic": 110,
    "same_bits": 25,
    "mask_memory": 10,
    "sparsity": 30,
    "denoise": 15,
    "denoise --device cpu": 30,
    "training": 85,
    "finetune": 90,
    "kernel_profiles": 60,
    "prepare scores": 300,
    "scores": 1500,
    f"prepare hopper --tables dense dropout deterministic long {MASKS}": 150,
    "hopper --tables dense dropout deterministic long": 140,
    f"hopper --tables {MASKS}": 700,
    "prepare shapes": 150,
    "shapes": 300,
    "portable": 130,
    "cpu": 400,
}


def run(arguments, steps=STEPS, console=None):
    """Run steps until the budget is spent; as each knows a budget, it may be begun with a quarter of its time.

    Returns
    -------
    list of str
        Commands that failed or were not begun.
    """
    console = console or Console()
    begin, left = time.monotonic(), []
    for number, (step, seconds) in enumerate(steps.items(), 1):
        rest = arguments.budget - (time.monotonic() - begin)
        shown = f"python -m bench.{step}"
        if rest <= seconds / 4:
            left.append(shown)
            continue
        console.rule(f"{number} of {len(steps)}, {rest:.0f} s left: {shown}", align="left")
        command = [sys.executable, *shown.split()[1:], "--budget", f"{rest:.0f}"]
        if subprocess.run([*command, *(["--trees", arguments.trees] if arguments.trees else [])], cwd=ROOT).returncode:
            left.append(shown)
    return left


def main():
    """Run the command."""
    scripts = sorted({step.split()[0] for step in STEPS})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="begin no step past this time")
    parser.add_argument("--only", nargs="+", metavar="SCRIPT", choices=scripts, default=scripts)
    parser.add_argument("--trees", metavar="NAME=ID,...", help="git tree ids of a copy without git")
    parser.add_argument("--list", action="store_true", help="print the steps and stop")
    arguments = parser.parse_args()
    steps = {step: seconds for step, seconds in STEPS.items() if step.split()[0] in arguments.only}
    if arguments.list:
        for step, seconds in steps.items():
            print(f"{seconds:5d} s  python -m bench.{step}")
        return 0
    left = run(arguments, steps)
    for command in left:
        print(f"left or failed: {command}")
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
