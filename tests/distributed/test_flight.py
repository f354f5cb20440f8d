"""Streams of a rank: lanes beside the caller's stream, by stand-ins that tell what they are told."""

from types import SimpleNamespace

import numpy as np
import pytest

from cuattn.distributed import flight
from cuattn.distributed.tape import Tape


@pytest.fixture
def log(monkeypatch):
    """What streams do: the name of each, what, and of which state of which other."""
    log, state = [], {}

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_event(self, event):
            log.append((self.name, "waits for", *event.recorded))

        def use(self):
            log.append((self.name, "is current"))

    class Event:
        def record(self, stream):
            state[stream.name] = state.get(stream.name, 0) + 1
            self.recorded = stream.name, state[stream.name]

    made = iter("abcdefgh")
    cuda = SimpleNamespace(
        Stream=lambda **_: Stream(next(made)), Event=lambda **_: Event(), runtime=SimpleNamespace(getDevice=lambda: 0)
    )
    monkeypatch.setattr(flight, "load_cupy", lambda name: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(flight, "_here", SimpleNamespace())
    return SimpleNamespace(told=log, caller=Stream("caller"))


def test_a_lane_goes_on_from_where_the_caller_was(log):
    """Each waits for the caller's stream once; that waits for all of them, and they for its end."""
    lanes = flight.Lanes(log.caller)
    assert [lanes.go(number).name for number in (0, 1, 0)] == ["a", "b", "a"]
    current = ("is current",)
    assert log.told == [
        ("a", "waits for", "caller", 1),
        ("a", *current),
        ("b", "waits for", "caller", 2),
        ("b", *current),
        ("a", *current),
    ]
    log.told.clear()
    assert lanes.go(None) is log.caller
    assert {*log.told[:2]} == {("caller", "waits for", "a", 1), ("caller", "waits for", "b", 1)}
    assert log.told[2:] == [("caller", *current)]
    log.told.clear()
    lanes.go(1)
    assert log.told == [("b", "waits for", "caller", 3), ("b", *current)]
    log.told.clear()
    lanes.end()
    assert log.told[:2] == [("caller", "waits for", "b", 2), ("caller", *current)]
    assert log.told[2:] == [(name, "waits for", "caller", 4) for name in "abcd"]  # whose memory they may be given


def test_a_tape_goes_to_lanes_on_a_gpu_alone():
    tape = Tape({"x": np.zeros(3)})
    with tape.lane(1):
        assert not tape.is_laned(tape.empty((2,), np.float32))
    tape._xp = None  # as on a GPU
    with tape.lane(1):
        one = tape._described((2,), np.float32)
        with tape.lane(2):  # one within another is that
            other = tape._described((2,), np.float32)
    assert tape.is_laned(one) and tape._lane_of[one.number] == tape._lane_of[other.number] == 1
    assert not tape.is_laned(tape._described((2,), np.float32))
