"""Threads: the dispatcher, the BLAS setting, errors, and turns at sums (cuattn.cpu.threads)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

import cuattn
from cuattn.cpu import backward, threads
from cuattn.cpu.arithmetic import summed_to
from cuattn.cpu.threads import Aborted, Turns
from tests.cpu.sizes import tiled


def task_of(sizes, item=lambda group, n: n):
    return SimpleNamespace(sizes=sizes, item=item, turns=Turns())


def blas_threads():
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


@given(sizes=st.lists(st.integers(0, 9), max_size=6), workers=st.integers(1, 4))
def test_every_item_is_handed_out_once_and_in_order_within_its_group(sizes, workers):
    prepared, done = [], []

    def prepare(group, item):
        prepared.append((group, item))
        return group, item

    threads.run(task_of(sizes, prepare), lambda: done.append, workers)
    everything = [(group, item) for group, size in enumerate(sizes) for item in range(size)]
    assert sorted(done) == sorted(prepared) == everything
    for group in range(len(sizes)):
        items = [item for g, item in prepared if g == group]
        assert items == sorted(items)


def test_a_thread_stays_in_its_group_then_opens_the_next_then_helps():
    dispatcher = threads.Dispatcher([3, 2])
    one, other = (dispatcher.items(lambda *place: place) for _ in range(2))
    assert [next(one), next(one)] == [(0, 0), (0, 1)]
    assert list(other) == [(1, 0), (1, 1), (0, 2)]
    assert list(one) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_error_of_any_thread_is_raised_and_blas_gets_its_threads_back(workers):
    before = blas_threads()

    def worker(item):
        assert set(blas_threads()) <= {1, *before}
        if item == 5:
            raise ValueError("five")

    task = task_of([20])
    with pytest.raises(ValueError, match="five"):
        threads.run(task, lambda: worker, workers)
    if workers > 1:  # else nobody waits
        with pytest.raises(Aborted), task.turns.take("key"):
            pass
    assert blas_threads() == before


def test_concurrent_calls_leave_the_blas_setting_as_it_was():
    x = np.random.default_rng(0).standard_normal((4, 300, 32), np.float32)
    expected = cuattn.attention(x, x, x)
    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        results = []
        callers = [
            threading.Thread(target=lambda: results.append([cuattn.attention(x, x, x) for _ in range(5)]))
            for _ in range(3)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert blas_threads() == before
    assert len(results) == 3
    for result in results:
        for o in result:
            np.testing.assert_array_equal(o, expected)


def test_workers_are_as_many_as_blas_threads():
    for count in (1, 2):
        with threadpool_limits(count, user_api="blas"):
            assert threads.worker_count() == count
            with threads.single_threaded_blas:
                assert threads.worker_count() == count
                assert 1 in blas_threads()


@pytest.mark.parametrize("started", [0, 1, 2])
def test_where_threads_cannot_be_started_those_that_there_are_do_the_work(monkeypatch, started):
    before, done = blas_threads(), []
    start, count = threading.Thread.start, iter(range(9))

    def refuse(self):
        if self.name.startswith("cuattn-") and next(count) >= started:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads.run(task_of([20]), lambda: done.append, 4)
    assert sorted(done) == list(range(20))
    assert blas_threads() == before
    x = np.random.default_rng(0).standard_normal((2, 400, 16), np.float32)
    with tiled(32, 32, workers=4):
        fwd = cuattn.forward(x, x, x)
        cuattn.backward(x, x, x, x, fwd)


def test_an_interrupt_waits_for_the_other_threads(monkeypatch):
    """Their results and the BLAS setting must not change when the call is over."""
    started, finished = threading.Event(), []
    shutdown, calls = ThreadPoolExecutor.shutdown, iter(range(9))

    def worker(item):
        if threading.current_thread() is threading.main_thread():
            started.wait()
        else:
            started.set()
            time.sleep(0.2)
            finished.append(item)

    def interrupted(self, *args, **options):
        if next(calls) == 0:
            raise KeyboardInterrupt
        shutdown(self, *args, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.run(task_of([2]), lambda: worker, 2)
    assert finished


def test_turns_come_in_order():
    turns, seen = Turns(), []
    taken = [turns.take("key") for _ in range(4)]
    with turns.take("other"):
        pass

    def take(number):
        with taken[number]:
            seen.append(number)

    waiting = [threading.Thread(target=take, args=(n,)) for n in (3, 1, 2)]
    for thread in waiting:
        thread.start()
    take(0)
    for thread in waiting:
        thread.join()
    assert seen == [0, 1, 2, 3]


def test_an_abort_wakes_those_who_wait():
    turns, caught = Turns(), []
    _, later = turns.take("key"), turns.take("key")

    def wait():
        try:
            with later:
                pass
        except Aborted:
            caught.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    turns.abort()
    thread.join()
    assert caught == [True]


def test_an_error_in_the_backward_wakes_the_threads_that_wait(monkeypatch):
    count = iter(range(1000))

    def failing(*arguments):
        if next(count) == 5:
            raise MemoryError("no room")
        return summed_to(*arguments)

    x = np.random.default_rng(0).standard_normal((1, 400, 16), np.float32)
    fwd = cuattn.forward(x, x, x, is_causal=True)
    monkeypatch.setattr(backward, "summed_to", failing)
    with tiled(workers=3), pytest.raises(MemoryError, match="no room"):
        cuattn.backward(x, x, x, x, fwd, is_causal=True)
