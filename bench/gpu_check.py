"""Run the tests marked ``gpu`` on a GPU and write what they gave to ``bench/results/gpu-tests.json``.

    python -m bench.gpu_check [--full] [--workers N] [--trees kernels=ID,cuattn=ID,tests=ID] [-- pytest arguments]

``python bench/gpu_check.py`` does the same.  The report names the device, the versions, the counts, the failures and
the git tree ids of kernels/, cuattn/ and tests/, so that a reader can tell which files were tested.  The ids are read
from git here, or handed in where the copy has no .git (``--trees`` or ``$CUATTN_TREES``).  With ``--full`` the product
of all features runs, and property tests look at more examples.

Compiling kernels and computing oracles keeps processors busier than the GPU, so the tests run in several processes
(pytest-xdist), each with one BLAS thread.  One whose GPU context breaks is replaced.  Interrupted, it reports what has
run.
"""

import argparse
import json
import os
import pathlib
import signal
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.rows import environment, sources  # noqa: E402
from cuattn.cpu.threads import usable_cores  # noqa: E402

REPORT = ROOT / "bench" / "results" / "gpu-tests.json"
TREES = ("kernels", "cuattn", "tests")
EXAMPLES = {False: "20", True: "400"}  # of each property, by --full: every example may compile kernels of its own
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
BREAKING = range(700, 720)  # cudaError: an illegal address, a failed launch and the like, after which a context is lost


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish():
    """End a process in which nothing can be computed any more, so that its other tests run in a new one."""
    if "PYTEST_XDIST_WORKER" in os.environ and context_is_broken(sys.modules.get("cupy")):
        os._exit(1)


def context_is_broken(cupy):
    """Return whether a process has lost its GPU; without CuPy it has none to lose."""
    try:
        if cupy is not None:
            cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status in BREAKING
    return False


class Collector:
    """A pytest plugin that keeps outcomes, and knows what was not begun, and what was begun and not ended."""

    def __init__(self):
        self.stats, self.found, self.begun, self.running = {}, set(), set(), set()

    def pytest_collection_finish(self, session):
        self.found.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.found.update(ids)

    def pytest_terminal_summary(self, terminalreporter):
        self.stats = terminalreporter.stats

    def pytest_runtest_logstart(self, nodeid):
        self.begun.add(nodeid)
        self.running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid):
        self.running.discard(nodeid)

    def report(self):
        """Return how many passed, failed or broke, were skipped, not begun; what failed and why; what has not ended."""
        passed, failed, broken, skipped = (
            self.stats.get(name, []) for name in ("passed", "failed", "error", "skipped")
        )
        failed = list({test.nodeid: test for test in [*broken, *reversed(failed)]}.values())[::-1]  # what it said first
        counts = {"passed": passed, "failed": failed, "skipped": skipped, "not begun": self.found - self.begun}
        return {
            "counts": {name: len(tests) for name, tests in counts.items()},
            "failures": [{"test": test.nodeid, "error": reason(test.longrepr)} for test in failed],
            "unfinished": sorted(self.running),
        }


def run(tests, workers, collector):
    """Run the marked tests in several processes; return pytest's exit status."""
    plugins = "-p no:cacheprovider -p bench.gpu_check"
    options = f"-q {plugins} -o addopts= --strict-markers -m gpu -n {workers}".split()
    return int(pytest.main([*options, "--dist", "worksteal", *tests], plugins=[collector]))


def reason(longrepr):
    """Return the message of a failure, or the last line of what is known about it."""
    crash = getattr(longrepr, "reprcrash", None)
    return (crash.message if crash is not None else (str(longrepr).splitlines() or [""])[-1])[:500]


def end(number, frame):
    """End as Ctrl-C does; `timeout` sends its signal twice, to the process and to its group."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments=None):
    """Run the tests, write the report, return 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", metavar="NAME=ID,...", help="git tree ids where the copy has no .git")
    parser.add_argument("--full", action="store_true", help="all variants, more examples")
    parser.add_argument("--workers", type=int, default=min(usable_cores(), 8), help="processes")
    parser.add_argument("pytest", nargs="*", help="further pytest arguments, after --")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUATTN_EXAMPLES", EXAMPLES[options.full])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else one process takes 75 % of the GPU's memory
    os.environ.update({**ONE_THREAD, **({"CUATTN_FULL": "1"} if options.full else {})})
    os.chdir(ROOT)
    collector = Collector()
    signal.signal(signal.SIGTERM, end)
    status = run(options.pytest or ["tests"], options.workers, collector)
    _, trees = sources(options.trees, TREES)
    report = {
        **environment("cuda", options.trees),
        "full": options.full,
        **collector.report(),
        "trees": {name: None if (tree := trees.get(name, "+")).endswith("+") else tree for name in TREES},
    }
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{report['counts']} on {report['device']}; report in {REPORT.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
