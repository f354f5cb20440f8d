"""Time the first call of a direction in a fresh process: with an empty disk cache, and from the disk cache.

A table of ``python -m bench.portable`` and of ``python -m bench.scores``.  ``python -m bench.first_call forward full``
is the child: it prints the seconds of its first call.
"""

import functools
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

from bench import harness, timing
from bench.cases import Case
from bench.harness import Calls, one
from bench.rows import ROOT
from bench.score_samples import FORMULAS
from cuattn import masks

TABLES = {"portable": "first-call", "scores": "scores-first-call"}
PROBLEMS = {
    "portable": (("forward", "full"), ("forward", "causal_document"), ("backward", "full")),
    "scores": (("forward", "alibi"), ("backward", "alibi"), ("forward", "natten")),
}
FROM_DISK = 3  # times that the call from the disk cache is measured
SHAPE = (2, 4, 1024, 128)


def child(direction, what, kernel=None):
    """Return the seconds of this process's first call of `direction`, until its result is there.

    The CUDA context, the arrays and, for a backward, the forward exist before.
    """
    cupy = harness.namespace("cuda")
    options = {"mask": masks.causal_document([SHAPE[2] // 4] * 4)} if what == "causal_document" else {}
    if what in FORMULAS:
        found = FORMULAS[what](Case(what, direction, *SHAPE[:2], *SHAPE[1:3], *SHAPE[2:]), np)
        options = {"score": found.score, "mask": found.visible}
    calls = Calls(*harness.random_arrays(cupy, 4, SHAPE, cupy.float16), kernel=kernel, **options)
    if direction == "backward":
        calls.fwd  # noqa: B018
    harness.synchronize(cupy)
    begin = time.perf_counter()
    getattr(calls, direction)()
    harness.synchronize(cupy)
    return time.perf_counter() - begin


def _in_child(cache, *arguments):
    command = [sys.executable, "-m", "bench.first_call", *filter(None, arguments)]
    folders = {"CUATTN_CACHE_DIR": f"{cache}/cuattn", "CUPY_CACHE_DIR": f"{cache}/cupy"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **folders}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:300])
    return float(done.stdout.split()[-1])


@functools.cache
def samples(runner, direction, what):
    """Return the seconds of the first calls, with an empty cache and from the disk cache."""
    with tempfile.TemporaryDirectory() as cache:
        cold, *disk = (_in_child(cache, direction, what, runner.partition("-")[2]) for _ in range(1 + FROM_DISK))
    return {"cold": [cold], "disk": disk}


def measure(state, runner, direction, what):
    """Return the values of a row."""
    found = timing.timed(samples(runner, direction, what)[state])
    problem = {"shape": SHAPE, "dtype": "float16"}
    return {**found, "rate": round(found["median_us"] / 1e6, 4), "unit": "s", "problem": problem}


def points(arguments):
    """Return two points per problem and runner of ``--ours``, on a GPU alone."""
    name = arguments.name
    return [
        one(f"{TABLES[name]}/{state}-d{SHAPE[3]}-{what}/{direction}", runner, measure, state, runner, direction, what)
        for direction, what in PROBLEMS[name]
        for state in ("cold", "disk")
        for runner in arguments.ours
        if direction in arguments.directions and arguments.device == "cuda"
    ]


if __name__ == "__main__":
    print(child(*sys.argv[1:]))
