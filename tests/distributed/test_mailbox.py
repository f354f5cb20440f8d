"""Short messages through shared memory, between ranks that are threads here, each with a mapping of its own."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cuattn.distributed import DistributedError, mailbox, spawn
from cuattn.distributed.mailbox import LONGEST, shared


def opened(comm, timeout=5.0):
    """Return the mailbox of a rank."""
    return shared(comm.rank, comm.size, timeout, comm.allgather)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_message_arrives_in_order(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(mailbox, "_place", lambda: tmp_path)

    def work(comm):
        box, others = opened(comm), [peer for peer in range(comm.size) if peer != comm.rank]
        comm.barrier()
        assert not [*tmp_path.iterdir()]  # what ranks share has no name any more
        for turn in range(40):  # more than there are slots
            sizes = np.random.default_rng(turn).integers(0, LONGEST + 1, 3)
            sizes[0] = (0, 1, LONGEST)[turn % 3]
            sends = [
                (p, np.random.default_rng([comm.rank, p, n]).integers(0, 9, n, np.uint8)) for p in others for n in sizes
            ]
            recvs = [(peer, np.full(n, 77, np.uint8)) for peer in others for n in sizes]
            waits = [box.begin(sends[i::3], recvs[i::3]) for i in range(3)]
            for wait in waits:
                wait()
            for peer, array in recvs:
                sent = np.random.default_rng([peer, comm.rank, array.size]).integers(0, 9, array.size, np.uint8)
                np.testing.assert_array_equal(array, sent)
        box.end()

    spawn(work, ranks=ranks)


def test_slots_are_not_written_again_before_they_are_read():
    def work(comm):
        box, count = opened(comm), mailbox._SLOTS + 5
        if comm.rank == 0:
            for number in range(count):
                box.begin([(1, np.full(4, number, np.uint8))], [])
            return None
        time.sleep(0.05)
        found = [(0, np.zeros(4, np.uint8)) for _ in range(count)]
        for each in found:
            box.begin([], [each])()
        return [int(array[0]) for _, array in found]

    assert spawn(work, ranks=2)[1] == [*range(mailbox._SLOTS + 5)]


def test_half_a_message_is_none():
    """A number that is seen before what belongs to it, as processors may show it, is waited for."""

    def work(comm):
        box = opened(comm, 0.2)
        if comm.rank == 0:
            box._sent[1] = 1
            slot = box._slots[0, 1, 1]
            slot[: 3 * 8].view(np.int64)[:] = 1, 4, 5
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(DistributedError, match=r"no answer within 0\.2 s"):
                box.begin([], [(0, np.zeros(4, np.uint8))])()
        comm.barrier()

    spawn(work, ranks=2)


def test_a_message_of_another_size():
    def work(comm):
        box, peer = opened(comm), 1 - comm.rank
        with pytest.raises(DistributedError, match=f"a message has {8 - peer} bytes; expected {7 - peer}"):
            box.begin([(peer, np.zeros(8 - comm.rank, np.uint8))], [(peer, np.zeros(7 - peer, np.uint8))])()

    spawn(work, ranks=2)


@pytest.mark.parametrize("how", ["end", "process"])
def test_a_rank_that_ends_is_not_waited_for(how):
    """What it said before counts."""

    def work(comm):
        box = opened(comm, 60.0)
        if comm.rank == 0:
            box.begin([(1, np.ones(3, np.uint8))], [])
            if how == "end":
                box.end()
            else:  # a process that is no more
                box._ranks[0] = int(subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"]))
        comm.barrier()
        if comm.rank == 1:
            found = np.zeros(3, np.uint8)
            box.begin([], [(0, found)])()
            assert found.all()
            begin = time.monotonic()
            with pytest.raises(DistributedError, match="ended before it answered rank 1"):
                box.begin([], [(0, found)])()
            assert time.monotonic() - begin < 5

    spawn(work, ranks=2)


def test_none_where_memory_cannot_be_shared(monkeypatch):
    monkeypatch.setattr(mailbox, "_place", lambda: Path("/nowhere/at/all"))
    assert spawn(opened, ranks=2) == [None, None]
