"""Many problems in several processes: hand out numbers, gather outcomes, and notice a process that dies or hangs."""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from bench.fuzz.problems import draw_problem
from bench.fuzz.running import Outcome, Target, run

__all__ = ["CHUNK", "Settings", "check", "outcomes", "problem_of"]

CHUNK = 50  # problems that a process is handed at a time; on a GPU they share their features
POOL = 40  # sets of features, and of compiled kernels, that a GPU's problems share in turn
KERNELS = None, "sm80", "sm90"  # a GPU's problems are forced into these families in turn; None: the plan chooses
FATAL = ("CUDADriverError", "CUDARuntimeError")
PATIENCE = 300.0  # seconds that a chunk may take


class Settings(NamedTuple):
    """What to fuzz: problem i is drawn from child i of the seed's sequence, for the CPU or a GPU ("cuda")."""

    seed: int = 0
    device: str = "cpu"

    def target(self, index):
        """Return where problem `index` runs."""
        return Target(self.device, KERNELS[index % len(KERNELS)] if self.device == "cuda" else None)


def problem_of(settings, index):
    """Draw problem `index`."""
    rng = _generator(settings.seed, index)
    if settings.device == "cpu":
        return draw_problem(rng, rng)
    variant = index // CHUNK % POOL
    return draw_problem(_generator(settings.seed, variant, 1), rng, hopper=variant % 2 > 0)


def _generator(seed, *key):
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def check(settings, indices):
    """Run some problems in this process; they are small, so that products take one thread."""
    with threadpool_limits(1, "blas"):
        return [(index, _check_one(settings, index)) for index in indices]


def _check_one(settings, index):
    try:
        return run(problem_of(settings, index), settings.target(index))
    except Exception as error:
        text = "".join(traceback.format_exception(error)[-6:])
        if type(error).__name__ in FATAL:
            sys.stderr.write(f"problem {index}: {text}\n")
            os._exit(1)  # the GPU's context is lost; other problems run in another process
        return _failed(type(error).__name__, text)


def _failed(what, message):
    return Outcome(complaints=[(what, message)])


def outcomes(settings, chunks, workers, seconds=math.inf):
    """Yield the outcomes of problems; one that kills or hangs its process is found by running its chunk one by one.

    Parameters
    ----------
    settings : Settings
    chunks : iterable of range
        Numbers of problems.
    workers : int
        Processes.
    seconds : float
        How long to start new chunks.
    """
    chunks, end = iter(chunks), time.monotonic() + seconds
    pool, under_way = None, {}
    try:
        while True:
            pool = pool or ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
            while len(under_way) < workers and time.monotonic() < end and (chunk := next(chunks, None)):
                under_way[pool.submit(check, settings, chunk)] = chunk, time.monotonic()
            if not under_way:
                return
            done, _ = wait(under_way, timeout=5, return_when=FIRST_COMPLETED)
            late = any(time.monotonic() - since > PATIENCE for _, since in under_way.values())
            if late or any(isinstance(future.exception(), BrokenProcessPool) for future in done):
                lost, under_way = [chunk for chunk, _ in under_way.values()], {}
                pool = _kill(pool)
                for chunk in lost:
                    if len(chunk) == 1:
                        yield chunk[0], _failed("process", f"it died or took over {PATIENCE} s")
                    else:
                        yield from outcomes(settings, [range(index, index + 1) for index in chunk], 1)
            else:
                for future in done:
                    under_way.pop(future)
                    yield from future.result()
    finally:
        _kill(pool)


def _kill(pool):
    processes = list((getattr(pool, "_processes", None) or {}).values())
    if pool:
        pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
