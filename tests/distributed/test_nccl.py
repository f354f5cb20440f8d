"""How NCCL is called, and what becomes of what does not finish: with a stand-in for CuPy."""

import contextlib
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cuattn.distributed import DistributedError, connect, flight, gpu, host


class Array:
    """Stands for an array on a GPU."""

    def __init__(self, address, nbytes):
        self.data, self.nbytes = SimpleNamespace(ptr=address), nbytes


class Event:
    """An event that happens when the test says so."""

    happens = True

    def __init__(self, **_):
        self.recorded = False

    def record(self, stream):
        self.recorded = True

    @property
    def done(self):
        return self.recorded and self.happens


class NcclCommunicator:
    """Takes down what it is asked."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))

    def rank_id(self):
        return 0

    def size(self):
        return 2


@pytest.fixture
def fake(monkeypatch):
    nccl, events = NcclCommunicator(), type("Events", (Event,), {})
    library = SimpleNamespace(
        NCCL_UINT8=1,
        groupStart=lambda: nccl.calls.append(("start",)),
        groupEnd=lambda: nccl.calls.append(("end",)),
    )
    stream = SimpleNamespace(ptr=7)
    cuda = SimpleNamespace(Event=events, Device=contextlib.nullcontext, get_current_stream=lambda: stream)
    monkeypatch.setattr(gpu, "load_cupy", lambda name: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu, "load_nccl", lambda: library)
    return SimpleNamespace(nccl=nccl, events=events)


def test_messages_are_one_group_of_bytes(fake):
    with connect(fake.nccl) as comm:
        comm.exchange([(1, Array(16, 96))], [(1, Array(32, 64)), (1, Array(48, 8))])
        asked = [call for call in fake.nccl.calls if call[0] != "check_async_error"]
    assert (comm.rank, comm.size) == (0, 2)
    assert asked == [
        ("start",),
        ("send", 16, 96, 1, 1, 7),
        ("recv", 32, 64, 1, 1, 7),
        ("recv", 48, 8, 1, 1, 7),
        ("end",),
    ]
    assert ("destroy",) not in fake.nccl.calls  # it is the caller's


def test_no_thread_is_left_that_might_free_the_communicator(fake):
    comm = connect(fake.nccl)
    messages, held = comm._gpus, sys.getrefcount(fake.nccl)
    comm.close()
    assert not messages._watcher.is_alive()
    del messages
    left = sys.getrefcount(fake.nccl)
    assert left < held


def test_what_failed_before_it_was_enqueued_is_not_waited_for(fake):
    comm = connect(fake.nccl)
    with pytest.raises(DistributedError, match="messages failed"):
        comm.exchange([(1, None)], [])
    begin = time.monotonic()
    comm.close()
    assert time.monotonic() - begin < 5


def test_what_does_not_finish_is_aborted(fake):
    fake.events.happens = False
    comm = connect(fake.nccl, timeout=0.05)
    comm.exchange([(1, Array(16, 96))], [])
    end = time.monotonic() + 5
    while ("abort",) not in fake.nccl.calls and time.monotonic() < end:
        time.sleep(0.01)
    assert ("abort",) in fake.nccl.calls
    done = len(fake.nccl.calls)
    for text in ("did not finish within 0.05 s", "the comm is broken"):
        for call in (lambda: comm.exchange([(1, Array(16, 96))], []), comm.barrier, comm.check):
            with pytest.raises(DistributedError, match=text):
                call()
    comm.abort()
    assert len(fake.nccl.calls) == done  # NCCL is not asked again


def test_what_was_aborted_is_not_used_again(fake):
    comm = connect(fake.nccl)
    comm.abort()
    for call in (lambda: comm.exchange([(1, Array(16, 96))], []), comm.barrier):
        with pytest.raises(DistributedError, match="the comm is broken"):
            call()
    comm.abort()
    assert fake.nccl.calls == [("abort",)]


def test_host_arrays_are_seen():
    assert host.on_gpu([(0, Array(0, 0))]) and not host.on_gpu([(0, np.zeros(2))])


def test_kernels_leave_as_much_room_for_messages_as_a_comm_asks(monkeypatch):
    from cuattn import distributed
    from cuattn.distributed import tape

    x, seen, plain = np.ones((2, 16, 4), np.float32), [], tape.dispatch.compute
    monkeypatch.setattr(tape.dispatch, "compute", lambda call: seen.append(call.options.sm_margin) or plain(call))

    def work(comm):
        comm.sm_margin = 16
        fwd = distributed.forward(x, x, x, comm=comm)
        distributed.backward(x, x, x, x, fwd, comm=comm)

    distributed.spawn(work, ranks=2)
    assert set(seen) == {16}


class Stream:
    """Takes down what it is told to wait for."""

    def __init__(self, log, name):
        self.log, self.name, self.ptr = log, name, 7

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.number))


def test_messages_are_ordered_by_events_that_are_used_again(monkeypatch):
    """Both ways; and not before the one who waits has told its stream to."""
    log, made = [], []

    class Event:
        def __init__(self, **_):
            self.number = len(made)
            made.append(self)

        def record(self, stream):
            log.append((stream.name, "records", self.number))

    current = Stream(log, "current")
    cuda = SimpleNamespace(
        Event=Event, Stream=lambda **_: Stream(log, "side"), get_current_stream=lambda: current, Device=None
    )
    monkeypatch.setattr(flight, "load_cupy", lambda name: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(flight, "_here", SimpleNamespace())
    comm = SimpleNamespace(exchange=lambda sends, recvs, stream: log.append((stream.name, "exchanges")))
    array = SimpleNamespace(device=SimpleNamespace(id=0))

    def around(event):
        first = [("current", "records"), ("side", "waits for"), ("side", "records"), ("current", "waits for")]
        return [*((*each, event) for each in first), ("side", "exchanges"), ("side", "records", event)]

    one, two = flight.start(comm, [(1, array)], []), flight.start(comm, [], [(1, array)])
    assert log == [*around(0), *around(1)]  # the second begins before the first was waited for
    log.clear()
    one()
    flight.start(comm, [(1, array)], [])()
    two()
    assert log == [("current", "waits for", 0), *around(0), ("current", "waits for", 0), ("current", "waits for", 1)]
    assert len(made) == 2


def test_the_watch_makes_events_once(fake):
    with connect(fake.nccl) as comm:
        for _ in range(3):
            comm.exchange([(1, Array(16, 96))], [])
            end = time.monotonic() + 5
            while not comm._gpus._free and time.monotonic() < end:
                time.sleep(0.001)
            assert len(comm._gpus._free) == 1
