"""Run the tests marked ``gpu`` on a GPU and write what they gave to ``bench/results/gpu-tests.json``.

    python bench/gpu_check.py [--full] [--workers N] [--{kernels,cuattn,tests}-tree ID] [-- pytest arguments]

The report names the device, the versions, the counts, the failures and the git tree ids of kernels/, cuattn/ and
tests/, so that a reader can tell which files were tested.  The ids are read from git here, or handed in where the copy
has no .git.  With ``--full`` the product of all features runs, and property tests look at more examples.

Compiling kernels and computing oracles keeps processors busier than the GPU, so with pytest-xdist installed the tests
run in several processes, each with one BLAS thread.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "bench" / "results" / "gpu-tests.json"
TREES = ("kernels", "cuattn", "tests")
FULL_EXAMPLES = "400"
EXAMPLES = "20"  # of each property: every example may compile kernels of its own


class Collector:
    """A pytest plugin that counts outcomes, moves a progress bar and tells of failures as they come."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("gpu tests", total=None)
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: list[dict[str, str]] = []
        self.running: set[str] = set()

    def interrupt(self, *_: object) -> None:
        """Say which tests are under way and end as Ctrl-C does: what has run is reported."""
        self.progress.console.print(
            "under way when it was told to end:", *sorted(self.running), sep="\n", highlight=False
        )
        raise KeyboardInterrupt

    def pytest_collection_modifyitems(self, items):
        self.progress.update(self.task, total=len(items))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        self.progress.update(self.task, total=len(session.items))

    def pytest_runtest_logstart(self, nodeid):
        self.running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self.running.discard(nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            if report.failed:
                self._fail(report)
        if report.when == "teardown":
            self.progress.update(self.task, advance=1, description=report.nodeid[-60:])

    def pytest_collectreport(self, report):
        if report.failed:
            self.counts["failed"] += 1
            self._fail(report)

    def _fail(self, report):
        self.failures.append({"test": report.nodeid, "error": reason(report.longrepr)})
        text = " ".join(self.failures[-1].values())
        self.progress.console.print(text, style="red", markup=False, highlight=False)


def reason(longrepr: object) -> str:
    """Return the message of a failure, or the last line of what is known about it."""
    crash = getattr(longrepr, "reprcrash", None)
    return (crash.message if crash is not None else str(longrepr).splitlines()[-1])[:500]


def tree_id(name: str) -> str | None:
    """Return git's tree id of a folder as it is on disk, or None without git or with changes not committed."""

    def git(*command: str) -> str:
        done = subprocess.run(("git", "-C", str(ROOT), *command), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return None if git("status", "--porcelain", "--", name) else git("rev-parse", f"HEAD:{name}")
    except (OSError, subprocess.CalledProcessError):
        return None


def environment() -> dict[str, object]:
    """Return the device and the versions of what the tests ran on."""
    import cupy
    import numpy

    import cuattn

    device = cupy.cuda.Device()
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    return {
        "device": name,
        "compute_capability": device.compute_capability,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cupy": cupy.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cuattn": cuattn.__version__,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the tests, write the report, return 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in TREES:
        parser.add_argument(f"--{name}-tree", default=None, help=f"git tree id of {name}/ where the copy has no .git")
    parser.add_argument("--full", action="store_true", help="all variants, more examples")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="processes, with pytest-xdist"
    )
    parser.add_argument("pytest", nargs="*", help="further pytest arguments, after --")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUATTN_EXAMPLES", FULL_EXAMPLES if options.full else EXAMPLES)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else one process takes 75 % of the GPU's memory
    if options.full:
        os.environ["CUATTN_FULL"] = "1"
    parallel = []
    if options.workers > 1 and importlib.util.find_spec("xdist"):
        os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        parallel = ["-n", str(options.workers)]
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        collector = Collector(progress)
        signal.signal(signal.SIGTERM, collector.interrupt)
        # Without the terminal plugin its options do not exist either, those of pyproject.toml included.
        quiet = ["-p", "no:terminal", "-o", "addopts=", "--strict-markers"]
        chosen = [*quiet, *parallel, "-m", "gpu", *(options.pytest or ["tests"])]
        status = int(pytest.main(chosen, plugins=[collector]))
    report = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "full": options.full,
        "counts": collector.counts,
        "failures": collector.failures,
        "unfinished": sorted(collector.running),
        "trees": {name: getattr(options, f"{name}_tree") or tree_id(name) for name in TREES},
    }
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"{collector.counts} on {report['device']}; report in {REPORT.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
