"""Counters belong to one stream, and addresses to one GPU."""

import gc
from types import SimpleNamespace

import pytest

from cuattn.cuda import device
from cuattn.errors import DtypeError


class Stream:
    """A stream of CuPy's, which may have taken the handle of one that is gone."""

    def __init__(self, number, ptr=64):
        self.number, self.ptr = number, ptr


@pytest.fixture
def memory(monkeypatch):
    """Hand out memory that is not there; the list grows by what is zeroed, on which stream."""
    zeroed = []

    def allocate(size):
        return SimpleNamespace(ptr=4096 * (len(zeroed) + 1), size=size)

    monkeypatch.setattr(pytest.importorskip("cupy").cuda, "Memory", allocate)
    monkeypatch.setattr(device, "zero", lambda address, size, stream: zeroed.append((address, size, stream.number)))
    monkeypatch.setattr(device, "_counters", {})
    return zeroed


def numbers(monkeypatch, *streams):
    """Let the driver know these streams, of which the last has each handle."""
    known = {stream.ptr: stream.number for stream in streams}
    monkeypatch.setattr(device, "_stream_number", known.__getitem__)


def test_a_stream_keeps_its_counters(memory, monkeypatch):
    stream = Stream(1)
    numbers(monkeypatch, stream)
    first = device.counters_of(stream, 0)
    assert device.counters_of(stream, 0) == first and memory == [(first, 4 * device.COUNTERS, 1)]
    assert device.counters_of(Stream(1), 0) == first, "another object for the same stream"
    assert device.counters_of(stream, 1) != first, "CuPy's default stream stands for every GPU's"


def test_a_handle_that_is_used_again_has_new_counters(memory, monkeypatch):
    """The old stream's launches may still be counting when a new stream is given its handle."""
    old = Stream(1)
    numbers(monkeypatch, old)
    first = device.counters_of(old, 0)
    del old
    gc.collect()
    new = Stream(2)
    numbers(monkeypatch, new)
    assert device.counters_of(new, 0) != first
    assert [number for *_, number in memory] == [1, 2], "zeroed by the stream that counts"


def test_threads_have_default_streams_of_their_own(memory, monkeypatch):
    stream = Stream(1, ptr=2)
    numbers(monkeypatch, stream)
    first = device.counters_of(stream, 0)
    monkeypatch.setattr(device.threading, "get_ident", lambda: -1)
    assert device.counters_of(stream, 0) != first


def test_few_streams_are_remembered(memory, monkeypatch):
    monkeypatch.setattr(device, "_stream_number", lambda handle: handle)
    for number in range(2 * device._STREAMS_KEPT):
        device.counters_of(Stream(number, ptr=number + 3), 0)
    assert len(device._counters) == device._STREAMS_KEPT


@pytest.mark.parametrize(("kind", "owner", "good"), [(2, 0, True), (2, 1, False), (3, 1, True), (1, 0, True)])
def test_memory_of_another_gpu_is_refused(kind, owner, good, monkeypatch):
    cupy = pytest.importorskip("cupy")
    found = SimpleNamespace(type=kind, device=owner)
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda address: found)
    if good:
        device.check_reachable(4096, 0)
    else:
        with pytest.raises(DtypeError, match=r"rng\.offset is on GPU 1 but q is on GPU 0; expected the same GPU"):
            device.check_reachable(4096, 0)
