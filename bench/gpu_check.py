"""Run the tests marked ``gpu`` on a GPU and write what they gave to ``bench/results/gpu-tests.json``.

    python bench/gpu_check.py [--full] [--workers N] [--trees kernels=ID,cuattn=ID,tests=ID] [-- pytest arguments]

The report names the device, the versions, the counts, the failures and the git tree ids of kernels/, cuattn/ and
tests/, so that a reader can tell which files were tested.  The ids are read from git here, or handed in where the copy
has no .git (``--trees`` or ``$CUATTN_TREES``).  With ``--full`` the product of all
features runs, and property tests look at more examples.

Compiling kernels and computing oracles keeps processors busier than the GPU, so the tests run in several processes,
each with one BLAS thread: process I of N takes every N-th test.
"""

import argparse
import contextlib
import datetime
import json
import multiprocessing
import os
import pathlib
import platform
import queue
import signal
import sys

import pytest
from rich.console import Console
from rich.progress import Progress

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.harness import COLUMNS  # noqa: E402
from bench.rows import cores, sources  # noqa: E402

REPORT = ROOT / "bench" / "results" / "gpu-tests.json"
TREES = ("kernels", "cuattn", "tests")
EXAMPLES = {False: "20", True: "400"}  # of each property, by --full: every example may compile kernels of its own
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Collector:
    """Counts outcomes, moves a progress bar and tells of failures as they come."""

    def __init__(self, progress):
        self.progress = progress
        self.task = progress.add_task("gpu tests", total=0)
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures, self.running, self.total = [], set(), 0

    def take(self, kind, value):
        """Take one message of a process: how many tests it will run, or what became of one."""
        if kind == "total":
            self.total += value
            self.progress.update(self.task, total=self.total)
        elif kind == "start":
            self.running.add(value)
        elif kind == "finish":
            self.running.discard(value)
            self.progress.update(self.task, advance=1, description=value[-60:])
        else:
            self.counts[kind] += 1
            if kind == "failed":
                self.failures.append(value)
                self.progress.console.print(" ".join(value.values()), style="red", markup=False, highlight=False)


class Reporter:
    """A pytest plugin that leaves every N-th test, from number I on, to this process, and sends what happens."""

    def __init__(self, send, part, parts):
        self.send, self.part, self.parts = send, part, parts

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = items[self.part :: self.parts]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session):
        self.send("total", len(session.items))

    def pytest_runtest_logstart(self, nodeid):
        self.send("start", nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self.send("finish", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.send(report.outcome, {"test": report.nodeid, "error": reason(report.longrepr)})

    def pytest_collectreport(self, report):
        if report.failed:
            self.send("failed", {"test": report.nodeid, "error": reason(report.longrepr)})


def reason(longrepr):
    """Return the message of a failure, or the last line of what is known about it."""
    crash = getattr(longrepr, "reprcrash", None)
    return (crash.message if crash is not None else (str(longrepr).splitlines() or [""])[-1])[:500]


def environment():
    """Return the device and the versions of what the tests ran on."""
    import cupy
    import numpy

    import cuattn

    device = cupy.cuda.Device()
    return {
        "device": cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode(),
        "compute_capability": device.compute_capability,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        **{module.__name__: module.__version__ for module in (cupy, numpy)},
        "python": platform.python_version(),
        "cuattn": cuattn.__version__,
    }


def _child(arguments, part, parts, messages):
    """Run one process's share of the tests; end with pytest's exit status."""
    # Without the terminal plugin its options do not exist either, those of pyproject.toml included.
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-o", "addopts=", "--strict-markers", "-m", "gpu"]
    reporter = Reporter(lambda *message: messages.put(message), part, parts)
    sys.exit(int(pytest.main([*quiet, *arguments], plugins=[reporter])))


def main(arguments=None):
    """Run the tests, write the report, return 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", metavar="NAME=ID,...", help="git tree ids where the copy has no .git")
    parser.add_argument("--full", action="store_true", help="all variants, more examples")
    parser.add_argument("--workers", type=int, default=min(cores(), 8), help="processes")
    parser.add_argument("pytest", nargs="*", help="further pytest arguments, after --")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUATTN_EXAMPLES", EXAMPLES[options.full])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else one process takes 75 % of the GPU's memory
    os.environ.update({**ONE_THREAD, **({"CUATTN_FULL": "1"} if options.full else {})})
    os.chdir(ROOT)
    console = Console(stderr=True)
    with Progress(*COLUMNS, console=console) as progress:
        collector = Collector(progress)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does: what has run is reported
        status = in_processes(options.pytest or ["tests"], options.workers, collector)
    _, trees = sources(options.trees, TREES)
    report = {
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **environment(),
        "full": options.full,
        "counts": collector.counts,
        "failures": collector.failures,
        "unfinished": sorted(collector.running),
        "trees": {name: None if (tree := trees.get(name, "+")).endswith("+") else tree for name in TREES},
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    console.print(f"{collector.counts} on {report['device']}; report in {REPORT.relative_to(ROOT)}")
    return status


def in_processes(tests, workers, collector):
    """Run the tests in several processes; return 0 when all of them ended well."""
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    children = [context.Process(target=_child, args=(tests, part, workers, messages)) for part in range(workers)]
    for child in children:
        child.start()
    try:
        while any(child.is_alive() for child in children) or not messages.empty():
            with contextlib.suppress(queue.Empty):
                collector.take(*messages.get(timeout=0.5))
    except KeyboardInterrupt:
        for child in children:
            child.terminate()
    for child in children:
        child.join()
    return next((child.exitcode for child in children if child.exitcode not in (0, 5)), 0)  # 5: no tests in this share


if __name__ == "__main__":
    sys.exit(main())
