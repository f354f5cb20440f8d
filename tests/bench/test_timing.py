"""Timing without a GPU: order, counts, statistics."""

import gc

import pytest

from bench import timing


class FakeClock:
    """A clock whose calls take what they return, and which notes the order of things."""

    def __init__(self):
        self.log = []
        self.occupied = []

    def occupy(self, seconds, passes=1):
        self.occupied.append(seconds)

    def start(self, call, host_seconds=0.0, passes=1):
        result = call()
        self.log.append(result[0] if host_seconds is not None else f"{result[0]} alone")
        return result[1]

    def read(self, pending):
        return pending

    def synchronize(self):
        self.log.append("wait")


def calls(**seconds):
    return {name: (lambda name=name: (name, seconds[name])) for name in seconds}


def test_every_call_is_sampled_equally_often_and_all_samples_are_kept():
    samples = timing.measure(calls(a=0.1, b=0.3), FakeClock(), seconds=4.0, least=2, most=50)
    assert samples == {"a": [0.1] * 10, "b": [0.3] * 10}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 3), (1.0, 5), (100.0, 20)])
def test_rounds_stay_within_their_bounds(seconds, rounds):
    samples = timing.measure(calls(a=0.2), FakeClock(), seconds=seconds, least=3, most=20)
    assert len(samples["a"]) == rounds


def test_rivals_take_turns_and_turns_rotate():
    clock = FakeClock()
    timing.measure(calls(a=0.1, b=0.1, c=0.1), clock, seconds=0.0, least=3)
    warm_up, rounds = clock.log[:6], clock.log[6:]
    assert warm_up == ["a", "a", "b", "b", "c", "c"]
    assert rounds == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_the_warm_up_of_a_long_call_is_its_first_sample():
    clock = FakeClock()
    samples = timing.measure(calls(a=1.0, b=0.1), clock, seconds=0.0, least=2)
    assert clock.log == ["a", "b", "b", "a", "b", "b"]
    assert samples == {"a": [1.0, 1.0], "b": [0.1, 0.1]}


def test_calls_on_streams_of_their_own_begin_on_an_idle_device():
    clock = FakeClock()
    timing.measure(calls(a=0.1, b=0.1), clock, seconds=0.0, least=1, alone={"b"})
    assert clock.log == ["a", "a", "b", "b", "a", "b alone"]


def test_with_a_long_call_the_device_recovers_after_each_whosever_it_is():
    """A call just short of TIRING would else leave less of a pause to its rival than it was given itself."""
    clock = FakeClock()
    timing.measure(calls(a=0.001, b=0.03, c=0.1), clock, seconds=0.0, least=2)
    assert clock.log[6:] == ["a", "b", "c", "b", "c", "a"]
    assert clock.occupied[6:] == [timing.RECOVERY, 0.001, 0.03, timing.RECOVERY, 0.03, timing.RECOVERY]


def test_the_collector_sleeps_while_samples_are_taken_and_wakes_again():
    seen = []

    def call():
        seen.append(gc.isenabled())
        return "a", 0.1

    assert gc.isenabled()
    timing.measure({"a": call}, FakeClock(), seconds=0.0, least=2)
    assert not any(seen)
    assert gc.isenabled()


def test_host_cost_waits_between_bursts_only():
    clock, made = FakeClock(), []
    samples = timing.host_cost(lambda: made.append(clock.log.append("call")), clock, samples=100, burst=40)
    assert len(samples) == 120
    assert all(sample >= 0 for sample in samples)
    bursts = " ".join(clock.log).split("wait")
    assert [part.split().count("call") for part in bursts[-4:-1]] == [40, 40, 40]
    assert len(clock.occupied) == 3


def test_summary_is_the_usual_quartiles():
    found = timing.timed([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found["samples_us"] == [5e6, 1e6, 2e6, 4e6, 3e6]
    assert (found["median_us"], found["q1_us"], found["q3_us"]) == (3e6, 2e6, 4e6)


def test_short_calls_on_the_host_are_timed_warm(monkeypatch):
    ticks = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: sum(ticks))
    monkeypatch.setattr(timing.time, "sleep", ticks.append)

    def call():  # its first call after a pause takes longer
        ticks.append(0.25 if ticks[-1] == 10 else 0.125)

    for batch, calls, spent in ((1.0, 1 + 2 + 4, 0.125), (0.0, 1, 0.25), (0.12, 1, 0.25)):
        ticks.clear()
        assert timing.HostClock(pause=10, batch=batch).start(call) == spent
        assert len(ticks) == 1 + calls


def test_the_host_clock_times_the_call_itself():
    clock = timing.HostClock()
    assert clock.read(clock.start(lambda: sum(range(1000)))) > 0
