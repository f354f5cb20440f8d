"""Compile what a run will need, in many processes, so that the run itself waits for no compiler.

    python -m bench.prepare hopper --tables masks-8k masks-32k --site SITE
    python -m bench.hopper --tables masks-8k masks-32k --site SITE

Nothing is timed or checked.  The kernels go to the disk caches of cuattn, CuPy, Triton, TorchInductor and
FlashAttention-4, each of which has an environment variable that moves it.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import time

from bench import suites
from bench.peers import make

ONE_WORKER = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}  # processes are the parallelism


def run(suite, words, processes):
    """Compile in processes, the longest portions first; return how many portions failed or did not fit the budget."""
    arguments = suites.parser(suite).parse_args(words)
    suites.comparison(arguments)  # finds peers that are unpacked somewhere
    calls = itertools.chain(*(itertools.product(runners, cases) for cases, runners in suites.tables(suite, arguments)))
    parts = [[(runner.name, case) for runner, case in part] for part in suites.portions(calls)]
    os.environ.update(ONE_WORKER)
    deadline = time.monotonic() + arguments.budget
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # ends what still runs
        started = [pool.apply_async(_compile, (suite, tuple(words), part)) for part in parts]
        for part in started:
            part.wait(max(deadline - time.monotonic(), 0))
        return sum(not (part.ready() and part.successful()) for part in started)


def _compile(suite, words, calls):
    for name, case in calls:
        print(_comparison(suite, words).compile(*make([name]), case), flush=True)


@functools.cache
def _comparison(suite, words):
    return suites.comparison(suites.parser(suite).parse_args(words))


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    half = max((os.cpu_count() or 2) // 2, 1)
    parser.add_argument("--processes", type=int, default=half, help="each takes 1 to 8 GB of the GPU's memory")
    parser.add_argument("suite", choices=suites.SUITES)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the suite; past its budget what runs is ended")
    options = parser.parse_args()
    begin = time.monotonic()
    failed = run(options.suite, options.arguments, options.processes)
    print(f"compiled in {time.monotonic() - begin:.0f} s, {failed} portions failed or took too long")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
