"""Compile what a run will need, in many processes, so that the run itself waits for no compiler.

    python -m bench.prepare hopper --tables masks-8k masks-32k --site SITE
    python -m bench.hopper --tables masks-8k masks-32k --site SITE

Nothing is timed or checked.  The kernels go to the disk caches of cuattn, CuPy, Triton, TorchInductor and
FlashAttention-4, each of which has an environment variable that moves it.
"""

import argparse
import os
import subprocess
import sys
import time

from bench.rows import ROOT
from bench.suites import SUITES

__all__ = ["run"]

MOST = 1000  # portions that a run may have
ONE_WORKER = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # processes are the parallelism


def run(suite, arguments, processes, seconds):
    """Start the processes, wait for them, return how many failed or were ended after `seconds`."""
    command = [sys.executable, "-m", f"bench.{suite}", *arguments, "--compile"]
    deadline = time.monotonic() + seconds
    numbers, writer = os.pipe()  # of portions: each process takes the next when it has compiled one
    os.write(writer, b"".join(b"%4d" % number for number in range(MOST)))
    os.close(writer)
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, **ONE_WORKER}, stdin=numbers) for _ in range(processes)
    ]
    os.close(numbers)
    failed = 0
    for process in started:
        try:
            failed += process.wait(max(deadline - time.monotonic(), 0)) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            failed += 1
    return failed


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    half = max((os.cpu_count() or 2) // 2, 1)
    parser.add_argument("--processes", type=int, default=half, help="each takes 1 to 8 GB of the GPU's memory")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="end what runs longer")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the suite")
    options = parser.parse_args()
    begin = time.monotonic()
    failed = run(options.suite, options.arguments, options.processes, options.timeout)
    print(f"compiled in {time.monotonic() - begin:.0f} s, {failed} of {options.processes} processes failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
