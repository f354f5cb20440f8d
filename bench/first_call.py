"""Time the first call of a direction in a fresh process: with an empty disk cache, and from the disk cache.

A table of ``python -m bench.portable``.  ``python -m bench.first_call forward`` is the child: it prints the seconds of
its first call.
"""

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time

from bench import timing
from bench.harness import Point
from bench.rows import ROOT

__all__ = ["points"]

TABLE = "first-call"
PROBLEMS = (("forward", "full"), ("forward", "causal_document"), ("backward", "full"))
FROM_DISK = 3  # times that the call from the disk cache is measured
SHAPE = (2, 4, 1024, 128)


def child(direction, mask, kernel):
    """Return the seconds of this process's first call of `direction`, until its result is there.

    The CUDA context, the arrays and, for a backward, the forward exist before.
    """
    import cupy

    import cuattn

    rng = cupy.random.default_rng(1)
    q, k, v, do = (rng.standard_normal(SHAPE, dtype=cupy.float32).astype(cupy.float16) for _ in range(4))
    options = {"kernel": kernel}
    if mask != "full":
        options["mask"] = getattr(cuattn.masks, mask)([SHAPE[2] // 4] * 4)
    fwd = cuattn.forward(q, k, v, **options) if direction == "backward" else None
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    if fwd is None:
        cuattn.forward(q, k, v, **options)
    else:
        cuattn.backward(do, q, k, v, fwd, **options)
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - begin


def _in_child(cache, direction, mask, kernel):
    command = [sys.executable, "-m", "bench.first_call", direction, "--mask", mask]
    command += ["--kernel", kernel] if kernel else []
    folders = {"CUATTN_CACHE_DIR": f"{cache}/cuattn", "CUPY_CACHE_DIR": f"{cache}/cupy"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **folders}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1][:300])
    return float(done.stdout.split()[-1])


@functools.cache
def samples(runner, direction, mask):
    """Return the seconds of the first calls, with an empty cache and from the disk cache."""
    with tempfile.TemporaryDirectory() as cache:
        cold, *disk = (_in_child(cache, direction, mask, runner.partition("-")[2]) for _ in range(1 + FROM_DISK))
    return {"cold": [cold], "disk": disk}


def measure(state, runners, direction, mask):
    """Return the rows of every runner."""
    rows = {}
    for runner in runners:
        found = timing.timed(samples(runner, direction, mask)[state])
        problem = {"table": TABLE, "shape": SHAPE, "dtype": "float16"}
        rows[runner] = {**found, "rate": round(found["median_us"] / 1e6, 4), "unit": "s", "problem": problem}
    return rows


def points(arguments):
    """Return two points per problem, for the runners of ``--ours``."""
    runners = tuple(arguments.ours)
    return [
        Point(
            f"{TABLE}/{state}-d{SHAPE[3]}-{mask}/{direction}",
            runners,
            functools.partial(measure, state, runners, direction, mask),
        )
        for direction, mask in PROBLEMS
        for state in ("cold", "disk")
        if direction in arguments.directions
    ]


def main():
    """Run the child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("--mask", default="full")
    parser.add_argument("--kernel")
    arguments = parser.parse_args()
    print(child(arguments.direction, arguments.mask, arguments.kernel))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
