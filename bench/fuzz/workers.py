"""Many problems in several processes: hand out numbers, gather outcomes, and notice a process that dies or hangs."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from threadpoolctl import threadpool_limits

from bench.fuzz.problems import Problem, draw_problem, draw_variant
from bench.fuzz.running import Outcome, Target, run

__all__ = ["Settings", "outcomes", "prepare_all", "problem_of"]

CHUNK = 20  # problems that a process is handed at a time
PREPARED = 3  # problems of each variant that are run ahead
FATAL = ("CUDADriverError", "CUDARuntimeError")
PATIENCE = 300.0  # seconds that a chunk may take


@dataclass(frozen=True)
class Settings:
    """What to fuzz.

    Attributes
    ----------
    seed : int
        Problem i is drawn from child i of its seed sequence.
    device : {"cpu", "cuda"}
    kernels : tuple of (str or None)
        Problem i is forced into family i modulo their number; None lets the plan choose.
    variants : int
        Size of the pool of compiled variants; 0: every problem has its own.
    """

    seed: int = 0
    device: str = "cpu"
    kernels: tuple[str | None, ...] = (None,)
    variants: int = 0


def problem_of(settings: Settings, index: int) -> Problem:
    """Draw problem `index`."""
    rng = _generator(settings.seed, index)
    if not settings.variants:
        return draw_problem(draw_variant(rng), rng)
    chosen = int(rng.integers(settings.variants))
    return draw_problem(draw_variant(_generator(settings.seed, chosen, 1)), rng, shared=True)


def prepare(settings: Settings, variant: int, kernel: str | None) -> None:
    """Compile what problems of one variant need, into the disk cache."""
    for turn in range(PREPARED):
        rng = _generator(settings.seed, variant, 2, turn)
        problem = draw_problem(draw_variant(_generator(settings.seed, variant, 1)), rng, shared=True)
        problem.checks = set(problem.variant.checks)
        run(problem, Target(settings.device, kernel))


def prepare_all(settings: Settings, workers: int) -> Iterator[None]:
    """Compile for all variants and kernel families, in many processes; yield after each."""
    pool = _pool(workers)
    jobs = [
        pool.submit(prepare, settings, variant, kernel)
        for variant in range(settings.variants)
        for kernel in settings.kernels
    ]
    try:
        for job in as_completed(jobs):
            job.exception()
            yield
    finally:
        _kill(pool)


def _generator(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


def check(settings: Settings, indices: range) -> list[tuple[int, Outcome]]:
    """Run some problems in this process; they are small, so that products take one thread."""
    with threadpool_limits(1, "blas"):
        return [(index, _check_one(settings, index)) for index in indices]


def _check_one(settings: Settings, index: int) -> Outcome:
    try:
        problem = problem_of(settings, index)
    except Exception as error:  # of a mask's constructor
        return Outcome([], [(type(error).__name__, "".join(traceback.format_exception(error)[-3:]))])
    outcome = run(problem, Target(settings.device, settings.kernels[index % len(settings.kernels)]))
    if any(what in FATAL for what, _ in outcome.complaints):
        sys.stderr.write(f"problem {index}: {outcome.complaints}\n")
        os._exit(1)  # the GPU's context is lost; other problems run in another process
    return outcome


def outcomes(
    settings: Settings, workers: int, first: int, most: int | None, seconds: float
) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcomes of problems from number `first` on until their number or the time is up.

    Parameters
    ----------
    settings : Settings
    workers : int
        Processes.
    first : int
        Number of the first problem.
    most : int or None
        How many at most.
    seconds : float
        How long to start new ones.
    """
    end = time.monotonic() + seconds
    stop = first + most if most is not None else 1 << 62
    starts = iter(range(first, stop, CHUNK))
    pool = _pool(workers)
    under_way: dict[Future, tuple[range, float]] = {}
    try:
        while True:
            while len(under_way) < 2 * workers and time.monotonic() < end:
                start = next(starts, None)
                if start is None:
                    break
                indices = range(start, min(start + CHUNK, stop))
                under_way[pool.submit(check, settings, indices)] = indices, time.monotonic()
            if not under_way:
                return
            done, _ = wait(under_way, timeout=5, return_when=FIRST_COMPLETED)
            late = any(time.monotonic() - since > PATIENCE for _, since in under_way.values())
            if late or any(isinstance(future.exception(), BrokenProcessPool) for future in done):
                _kill(pool)
                lost = [indices for indices, _ in under_way.values()]
                pool, under_way = _pool(workers), {}
                for indices in lost:
                    yield from _one_by_one(settings, indices)
                continue
            for future in done:
                under_way.pop(future)
                yield from future.result()
    finally:
        _kill(pool)


def _one_by_one(settings: Settings, indices: range) -> Iterator[tuple[int, Outcome]]:
    """Run problems in a process each, to find the one that kills or hangs it."""
    for index in indices:
        pool = _pool(1)
        future = pool.submit(check, settings, range(index, index + 1))
        try:
            yield from future.result(timeout=PATIENCE)
        except (BrokenProcessPool, TimeoutError) as error:
            yield index, Outcome([], [("process", f"{type(error).__name__}: it died or took over {PATIENCE} s")])
        finally:
            _kill(pool)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


def _kill(pool: ProcessPoolExecutor) -> None:
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
