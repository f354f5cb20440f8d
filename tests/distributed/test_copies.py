"""How ranks on GPUs of one machine fetch messages: with host memory that stands for that of GPUs."""

import contextlib
import ctypes
import time
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cuattn.distributed import DistributedError, gpu, spawn

EVERY = []  # pieces of memory


class Memory:
    """A piece of memory that other ranks can find."""

    hidden = False  # from other processes

    def __init__(self, size):
        self._held = np.zeros(size, np.uint8)
        self.ptr, self.size, self.number = self._held.ctypes.data, size, len(EVERY)
        EVERY.append(self)


class Event:
    """Happens as soon as it is recorded."""

    def __init__(self, **_):
        self.done = False

    def record(self, stream=None):
        self.done = True


class Stream:
    """Does at once what it is told."""

    ptr = 7

    def __init__(self, **_):
        pass

    def record(self):
        event = Event()
        event.record()
        return event


class Runtime:
    """The calls of CUDA that copies make; `mapped` are the handles that are open."""

    memcpyDefault = 4

    def __init__(self):
        self.mapped, self.rows, self.opened = [], [], 0

    def deviceSynchronize(self):
        pass

    def memset(self, address, value, size):
        ctypes.memset(address, value, size)

    def memsetAsync(self, address, value, size, stream):
        ctypes.memset(address, value, size)

    def memcpy(self, target, source, size, kind):
        ctypes.memmove(target, source, size)

    def memcpyAsync(self, target, source, size, kind, stream):
        self.rows.append(1)
        ctypes.memmove(target, source, size)

    def memcpy2DAsync(self, target, stride, source, its_stride, nbytes, count, kind, stream):
        self.rows.append(count)
        for i in range(count):
            ctypes.memmove(target + i * stride, source + i * its_stride, nbytes)

    class CUDARuntimeError(Exception):
        pass

    def ipcGetMemHandle(self, address):
        if any(x.ptr == address and x.hidden for x in EVERY):
            raise self.CUDARuntimeError
        return address.to_bytes(8, "little") * 8

    def ipcOpenMemHandle(self, handle):
        self.mapped.append(handle)
        self.opened += 1
        return int.from_bytes(handle[:8], "little")

    def ipcCloseMemHandle(self, address):
        self.mapped.remove(self.ipcGetMemHandle(address))


class Driver:
    """The same of its driver: a wait that nothing has met yet, of a stream that does all at once, waits itself."""

    def cuMemGetAddressRange_v2(self, begin, size, address):
        (found,) = (x for x in EVERY if x.ptr <= address.value < x.ptr + x.size)
        begin._obj.value, size._obj.value = found.ptr, found.size
        return 0

    def cuPointerGetAttribute(self, number, attribute, address):
        (number._obj.value,) = (x.number for x in EVERY if x.ptr <= address.value < x.ptr + x.size)
        return 0

    def cuStreamWriteValue32_v2(self, stream, address, value, flags):
        ctypes.c_uint32.from_address(address).value = value
        return 0

    def cuStreamWaitValue32_v2(self, stream, address, value, flags):
        end = time.monotonic() + 5
        while ctypes.c_uint32.from_address(address).value < value:
            assert time.monotonic() < end
            time.sleep(1e-4)
        return 0


@pytest.fixture
def runtime(monkeypatch):
    runtime, driver = Runtime(), Driver()
    parts = dict(Memory=Memory, alloc=Memory, Event=Event, Stream=Stream, Device=contextlib.nullcontext)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=Stream, **parts)
    monkeypatch.setattr(gpu, "load_cupy", lambda name: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu, "_driver", lambda: driver)
    EVERY.clear()
    return runtime


class Array:
    """Part of an array on a GPU: rows of bytes that are a stride apart."""

    def __init__(self, memory, offset, nbytes, rows=1, stride=None):
        self.data, self.nbytes = SimpleNamespace(ptr=memory.ptr + offset), nbytes * rows
        self.shape, self.strides = (rows, nbytes), (stride or nbytes, 1)
        self.flags = SimpleNamespace(c_contiguous=self.strides[0] == nbytes)
        self.numbers = as_strided(memory._held[offset:], self.shape, self.strides)


def connected(comm):
    """Return copies that have met."""
    made = gpu.Copies(comm.rank, comm.size, lambda *pairs: lambda: comm.exchange(*pairs), 5.0)
    names = comm.allgather(made.allocation)
    assert made.meet(names)
    comm.barrier()
    assert made.works(names)
    comm.barrier()
    return made


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_message_arrives(runtime, ranks, monkeypatch):
    """Group after group, from several allocations; rows at equal distances, of which each end may have its own."""
    forms = [(0, 100, 6, 512), (1, 100, 6, 100), (0, 11, 1, 11), (1, 7, 3, 900), (1, 8, 4, 1000)]
    theirs = [(3, 100, 6, 100), (700, 100, 6, 300), (2500, 11, 1, 11), (2600, 7, 3, 40), (3000, 32, 1, 32)]
    monkeypatch.setattr(gpu, "_MOST", 950)  # longer strides are no rows to the driver

    def work(comm):
        copies, others = connected(comm), [peer for peer in range(comm.size) if peer != comm.rank]
        for turn in range(3):
            ours, rooms = [Memory(8192) for _ in range(2)], {peer: Memory(8192) for peer in others}
            for i, memory in enumerate(ours):
                memory._held[:] = np.random.default_rng([comm.rank, turn, i]).integers(0, 256, memory.size)
            comm.barrier()
            sends = [(peer, Array(ours[i], 64 * i + turn, *form)) for peer in others for i, *form in forms]
            recvs = [(peer, Array(rooms[peer], *form)) for peer in others for form in theirs]
            copies.begin(sends, recvs)()
            comm.barrier()
            for (peer, target), (i, *form) in zip(recvs, forms * len(others), strict=True):
                sent = Memory(8192)
                sent._held[:] = np.random.default_rng([peer, turn, i]).integers(0, 256, sent.size)
                np.testing.assert_array_equal(target.numbers.ravel(), Array(sent, 64 * i + turn, *form).numbers.ravel())
            touched = sum(array.nbytes for _, array in recvs)
            assert sum(np.count_nonzero(memory._held) for memory in rooms.values()) <= touched
        comm.barrier()
        copies.close()

    spawn(work, ranks=ranks)
    assert not runtime.mapped
    assert max(runtime.rows) == 6  # copies of rows, not of single ones


def test_what_others_cannot_find_is_copied(runtime):
    """Memory of pools of CUDA's own, which has no handle; the copies live until they are fetched."""

    def work(comm):
        copies, (ours, theirs) = connected(comm), (Memory(64), Memory(64))
        ours.hidden, ours._held[:] = comm.rank == 0, 7 + comm.rank
        comm.barrier()
        finish = copies.begin(
            [(1 - comm.rank, Array(ours, 8, 4, 4, 8)), (1 - comm.rank, Array(ours, 40, 8))],
            [(1 - comm.rank, Array(theirs, 0, 16)), (1 - comm.rank, Array(theirs, 16, 8))],
        )
        comm.barrier()
        finish()
        comm.barrier()
        assert (theirs._held[:24] == 8 - comm.rank).all() and not theirs._held[24:].any()
        copies.close()

    spawn(work, ranks=2)


def test_what_is_begun_first_is_fetched_first(runtime):
    """Whoever is waited for first: a count that says that the second was taken lets the first be written again."""

    def work(comm):
        copies, peer, (ours, theirs) = (
            connected(comm),
            1 - comm.rank,
            ([Memory(64), Memory(64)], [Memory(64), Memory(64)]),
        )
        for number, memory in enumerate(ours):
            memory._held[:] = 10 * comm.rank + number
        comm.barrier()
        first, second = (
            copies.begin([(peer, Array(mine, 0, 64))], [(peer, Array(room, 0, 64))])
            for mine, room in zip(ours, theirs, strict=True)
        )
        second()
        first()
        ours[0]._held[:] = 99  # as soon as streams let it be
        comm.barrier()
        assert [*(memory._held[0] for memory in theirs)] == [10 * peer, 10 * peer + 1]
        comm.barrier()
        copies.close()

    spawn(work, ranks=2)


def test_a_message_of_another_size(runtime):
    def work(comm):
        copies, memory = connected(comm), Memory(64)
        with pytest.raises(DistributedError, match=f"a message has {8 - comm.rank} bytes; expected {7 + comm.rank}"):
            copies.begin(
                [(1 - comm.rank, Array(memory, 0, 7 + comm.rank))], [(1 - comm.rank, Array(memory, 32, 7 + comm.rank))]
            )()

    spawn(work, ranks=2)


def test_what_does_not_happen_is_let_go(runtime):
    """Streams that wait for a peer go on, and the comm says why."""
    copies = gpu.Copies(0, 2, None, 0.05)
    copies._device = contextlib.nullcontext()
    copies._pending.put(([], Event(), time.monotonic()))
    end = time.monotonic() + 5
    while not copies.failed and time.monotonic() < end:
        time.sleep(0.01)
    assert "did not finish within 0.05 s" in copies.failed
    assert (copies._counts._held == 0x7F).all()
    copies.close()


def test_others_memory_is_let_go_of(runtime, monkeypatch):
    """Where there are many allocations, and where another has taken the place of one."""
    monkeypatch.setattr(gpu, "_MAPPED", 3)
    copies = gpu.Copies(0, 2, None, 5.0)

    def name(address, number):
        return np.frombuffer(runtime.ipcGetMemHandle(address) + number.to_bytes(8, "little"), np.int64)

    copies.meet([copies.allocation, name(64, 1).tobytes()])
    for i in range(20):
        assert copies._map(name(1024 * (i % 7), i)) == 1024 * (i % 7)
        assert len(runtime.mapped) == len({*runtime.mapped}) <= 4 and runtime.ipcGetMemHandle(64) in runtime.mapped
    opened = runtime.opened
    assert copies._map(name(1024 * 5, 19)) == 1024 * 5 and runtime.opened == opened
    assert copies._map(name(1024 * 5, 20)) == 1024 * 5 and runtime.opened == opened + 1
    copies.close()
    assert not runtime.mapped
