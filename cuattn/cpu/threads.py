"""Threads of the CPU backend: each runs whole items of work, with the BLAS library held to one thread meanwhile.

Many small products with one BLAS thread each use the cores better than one product on all of them: nothing is
synchronised between the steps of the softmax.  The number of threads is the one that the BLAS library would have
used, so whatever already controls NumPy (OPENBLAS_NUM_THREADS, ``threadpoolctl.threadpool_limits``) controls this.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

_WORTHWHILE = 1_000_000  # nanoseconds of work for which a thread is worth its start

_lock = threading.Lock()
_depth = 0  # how many callers hold the BLAS library to one thread just now
_saved: list[tuple[object, int]] = []  # the libraries and what to give back to them


@cache
def _libraries() -> list:
    """Return the controllers of NumPy's BLAS library; finding them scans the loaded libraries, so it is done once."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return [library for library in found if "numpy" in library.filepath] or found


def worker_count() -> int:
    """Return how many threads the BLAS library would use."""
    with _lock:
        counts = [count for _, count in _saved] if _depth else [library.num_threads for library in _libraries()]
    return max(counts, default=usable_cores())


def usable_cores() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def useful(items: int, nanoseconds: float) -> int:
    """Return how many threads are worth their start for some items of work, which take one so long."""
    most = min(items, int(nanoseconds / _WORTHWHILE))
    return min(worker_count(), most) if most > 1 else 1


class SingleThreadedBlas:
    """Holds NumPy's BLAS library to one thread; the last of several concurrent callers gives the old count back.

    The setting belongs to the process, not to the thread, so callers that saved and restored it each for
    themselves could leave it at one for ever.
    """

    def __enter__(self) -> None:
        global _depth
        with _lock:
            if _depth == 0:
                _saved[:] = [(library, library.num_threads) for library in _libraries()]
                _set_threads(1)
            _depth += 1

    def __exit__(self, *_: object) -> None:
        global _depth
        with _lock:
            _depth -= 1
            if _depth == 0:
                _set_threads(None)


def _set_threads(count: int | None) -> None:
    """Give libraries so many threads, or what they had; those that have as many are left alone."""
    for library, before in _saved:
        if before != 1:
            library.set_num_threads(before if count is None else count)


single_threaded_blas = SingleThreadedBlas()


class Aborted(Exception):
    """Another thread failed while this one waited for its turn; never seen outside the backend."""


class Turns:
    """Turns at adding to sums, in an order that does not depend on the threads; a sum is named by any key.

    Every item of work takes its turns when it is handed out, and adds when all earlier turns at a sum are over.  Nobody
    waits for ever: the first item that has not finished never waits, as all turns before its own are over.
    """

    def __init__(self) -> None:
        self._changed, self._aborted = threading.Condition(), False
        self._taken: defaultdict[Hashable, int] = defaultdict(int)
        self._over: defaultdict[Hashable, int] = defaultdict(int)

    def take(self, key: Hashable) -> AbstractContextManager[None]:
        """Return the next turn at a sum, which begins when the ones before are over."""
        self._taken[key] += 1
        return self._turn(key, self._taken[key] - 1)

    @contextmanager
    def _turn(self, key: Hashable, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._over[key] == number)
        if self._aborted:
            raise Aborted
        yield
        with self._changed:
            self._over[key] += 1
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake everybody who waits, with :class:`Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class Dispatcher:
    """Hands out the items of several groups of work, in order within each group.

    A thread stays in its group while that has items, then opens the next group, and at the end helps in the one
    with the most items left.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._lock, self._sizes = threading.Lock(), sizes
        self._left = {group: size for group, size in enumerate(sizes) if size}
        self._unopened = iter(list(self._left))

    def items(self, prepare: Callable[[int, int], object]) -> Iterator[object]:
        """Yield the items of one thread, as ``prepare(group, n)`` makes them.

        That runs under the lock, so in the order of the items of each group.
        """
        group = None
        while True:
            with self._lock:
                if group not in self._left:
                    group = next(self._unopened, None)
                    if group is None:
                        group = max(self._left, key=self._left.__getitem__, default=None)
                if group is None:
                    return
                left = self._left.pop(group)
                if left > 1:
                    self._left[group] = left - 1
                item = prepare(group, self._sizes[group] - left)
            yield item

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._left, self._unopened = {}, iter(())


def run(task: Any, make_worker: Callable[[], Callable[[Any], None]], threads: int) -> None:
    """Run the items of a task on `threads` threads, the caller's included; raise the first error.

    ``task.item(group, n)`` returns an item, for one after the other of each of the groups whose sizes ``task.sizes``
    tells.  ``make_worker()`` is called once in each thread and returns what computes an item; it may wait for its
    ``task.turns``.  Where threads cannot be started, fewer do the work.
    """
    if threads == 1:
        with single_threaded_blas, np.errstate(all="ignore"):  # -inf and NaN are values here
            worker = make_worker()
            for group, size in enumerate(task.sizes):
                for n in range(size):
                    worker(task.item(group, n))
        return
    dispatcher, errors = Dispatcher(task.sizes), []

    def loop() -> None:
        try:
            with np.errstate(all="ignore"):  # the setting is each thread's own
                worker = make_worker()
                for item in dispatcher.items(task.item):
                    worker(item)
        except BaseException as error:  # also KeyboardInterrupt: the other threads must end first
            errors.append(error)
            dispatcher.stop()
            task.turns.abort()

    with single_threaded_blas:
        _on_threads(loop, threads, dispatcher.stop)
    if errors:
        raise errors[0]


def _on_threads(loop: Callable[[], None], threads: int, stop: Callable[[], None]) -> None:
    """Run a function that raises nothing in the caller's thread and in new ones; return when all have ended."""
    pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="cuattn-")
    try:
        with suppress(RuntimeError):  # the system has no more threads to give: those that there are do the work
            for _ in range(1, threads):
                pool.submit(loop)
        loop()
        pool.shutdown()
    except BaseException:  # interrupted: the BLAS setting and the results must outlive the other threads
        stop()
        pool.shutdown()
        raise
