"""Ranks that are threads of one process: on the CPU, or with a GPU each, or several on one."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cuattn.cpu.threads import usable_cores
from cuattn.distributed.comm import TIMEOUT, Closing, DistributedError, Messages
from cuattn.errors import ArgumentError, as_integer, shown
from cuattn.masks.device import load_cupy

_here = threading.local()
_TURN = 1e-4  # seconds that a rank's thread has Python for itself while others want it, at most
_turns = {"callers": 0, "before": 0.0}  # who wants it so now, and what it was before the first of them
_turns_lock = threading.Lock()


def current() -> ThreadComm | None:
    """Return the comm of the rank that this thread is."""
    return getattr(_here, "comm", None)


class _World:
    """What the ranks share: letter boxes, by sender and receiver."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.boxes: defaultdict[tuple[int, int], deque[_Letter]] = defaultdict(deque)
        self.gathered: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by the number of the call
        self.failed: dict[int, str] = {}
        self.ended: set[int] = set()

    @contextlib.contextmanager
    def failing(self, rank: int) -> Iterator[None]:
        """Let all ranks fail if this one does."""
        try:
            yield
        except BaseException as error:  # also KeyboardInterrupt
            self.fail(rank, f"{type(error).__name__}: {error}")
            raise

    def fail(self, rank: int, text: str) -> None:
        """Let all ranks fail that wait, or will."""
        with self.changed:
            self.failed = self.failed or {rank: text}
            self.changed.notify_all()


class _Letter:
    """Arrays on their way, which are not changed before they were taken, and what a stream did before."""

    def __init__(self, event: Any) -> None:
        self.event, self.taken = event, False
        self.arrays: list[Any] = []
        self.copied: list[Any] = []  # events

    def put_into(self, targets: list[Any], stream: Any) -> None:
        """Copy as many as there are targets: on a GPU in the order of their stream, for which the sender's will wait.

        What is left of both is in their lists.
        """
        count = min(len(self.arrays), len(targets))
        runtime = None
        if self.event is not None:
            runtime = load_cupy("array").cuda.runtime
            stream.wait_event(self.event)
        for array, target in zip(self.arrays[:count], targets[:count], strict=True):
            if array.nbytes != target.nbytes or (runtime is None) != isinstance(target, np.ndarray):
                raise DistributedError(f"a message has {array.nbytes} bytes; expected {target.nbytes}")
            if runtime is None:
                target.reshape(-1).view(np.uint8)[...] = array.reshape(-1).view(np.uint8)
                continue
            here, there = target.device.id, array.device.id
            _enable(here, there)
            runtime.memcpyPeerAsync(target.data.ptr, here, array.data.ptr, there, target.nbytes, stream.ptr)
        if runtime is not None:
            self.copied.append(_recorded(stream))
        del self.arrays[:count], targets[:count]


def _recorded(stream: Any) -> Any:
    event = load_cupy("array").cuda.Event(disable_timing=True)
    event.record(stream)
    return event


_enabled: set[tuple[int, int]] = set()


def _enable(here: int, there: int) -> None:
    """Let a GPU, the current one, reach the memory of another, if it can."""
    if here == there or (here, there) in _enabled:
        return
    _enabled.add((here, there))
    runtime = load_cupy("array").cuda.runtime
    with contextlib.suppress(runtime.CUDARuntimeError):  # it cannot, or does already
        runtime.deviceEnablePeerAccess(there)


class ThreadComm(Closing):
    """The comm of one of several threads, which `spawn` ends."""

    by_copies = True

    def __init__(self, world: _World, rank: int, local_size: int | None = None) -> None:
        self._world, self.rank, self.size, self._calls = world, rank, world.size, 0
        self.local_size, self.timeout = world.size if local_size is None else local_size, TIMEOUT

    def exchange(self, sends: Messages, recvs: Messages, /, *, stream: Any = None) -> None:
        """Send and receive, see :class:`cuattn.distributed.Comm`."""
        world, boxes = self._world, self._world.boxes
        event, letters, expected = None, {}, {}
        if any(not isinstance(array, np.ndarray) for _, array in (*sends[:1], *recvs[:1])):
            stream = stream or load_cupy("array").cuda.get_current_stream()
            event = _recorded(stream) if sends else None
        for peer, array in sends:
            letters.setdefault(peer, _Letter(event)).arrays.append(array)
        for peer, target in recvs:
            expected.setdefault(peer, []).append(target)
        with world.changed:
            for peer, letter in letters.items():
                boxes[self.rank, peer].append(letter)
            world.changed.notify_all()
        with world.failing(self.rank):
            for peer, targets in expected.items():
                while targets:
                    with world.changed:
                        box = boxes[peer, self.rank]  # of two that ask for it first one would make another
                        self._wait(lambda box=box: box, lambda peer=peer: [peer])
                    letter = box[0]
                    letter.put_into(targets, stream)
                    if not letter.arrays:
                        with world.changed:
                            box.popleft().taken = True
                            world.changed.notify_all()
            with world.changed:
                left = lambda: [peer for peer, letter in letters.items() if not letter.taken]  # noqa: E731
                self._wait(lambda: not left(), left)
            for copied in (event for letter in letters.values() for event in letter.copied):
                stream.wait_event(copied)

    def _wait(self, happened: Callable[[], Any], missing: Callable[[], Sequence[int]]) -> None:
        """Wait, with the lock held; fail as soon as a rank has, or has ended, or after the deadline."""
        world, late = self._world, f"did not answer rank {self.rank} within {self.timeout:g} s"
        world.changed.wait_for(lambda: world.failed or happened() or world.ended & {*missing()}, self.timeout)
        if not (world.failed or happened()):
            ended = dict.fromkeys(world.ended & {*missing()}, f"ended before it answered rank {self.rank}")
            world.failed = ended or dict.fromkeys(missing(), late)
            world.changed.notify_all()
        if world.failed:
            raise DistributedError("a rank failed", world.failed)

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank."""
        world, self._calls = self._world, self._calls + 1
        with world.changed:
            found = world.gathered[self._calls]
            found[self.rank] = obj
            world.changed.notify_all()
            self._wait(lambda: len(found) == self.size, lambda: [r for r in range(self.size) if r not in found])
            world.gathered.pop(self._calls - 1, None)  # all have left that call
        return [found[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        self.allgather(None)

    def abort(self) -> None:
        """Let all ranks that wait, or will, fail."""
        self._world.fail(self.rank, "called abort()")


def spawn(
    function: Callable[..., Any], /, *args: Any, ranks: int | None = None, devices: Sequence[int] | None = None
) -> list[Any]:
    """Call a function in several threads of this process, each of which is a rank.

    Parameters
    ----------
    function : callable
        ``function(comm, *args)``.
    *args : object
        What every rank is given.
    ranks : int, optional
        How many; by default one for each of `devices`, or each GPU, or two.
    devices : sequence of int, optional
        The GPU of each rank, which is current in its thread; by default the GPUs where `ranks` is not given.

    Returns
    -------
    list
        What the ranks return, in rank order.

    Raises
    ------
    Exception
        What the first rank that failed has raised; the others then fail as well.

    See Also
    --------
    connect : Joins processes that a launcher started.

    Examples
    --------
    >>> spawn(lambda comm: comm.allgather(comm.rank), ranks=2)
    [[0, 1], [0, 1]]
    """
    size, devices = _ranks(ranks, devices)
    world, results, errors = _World(size), [None] * size, []

    def run(rank: int) -> None:
        _here.comm = ThreadComm(world, rank)
        try:
            with world.failing(rank):
                if devices is not None:
                    load_cupy("devices").cuda.Device(devices[rank]).use()
                results[rank] = function(_here.comm, *args)
        except BaseException as error:  # the other ranks must end first
            errors.append(error)
        with world.changed:
            world.ended.add(rank)
            world.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,), name=f"cuattn-rank-{rank}") for rank in range(size)]
    with shared_cores(size), _short_turns():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():  # a signal that comes just before a wait is heard after it
                    thread.join(0.1)
        except BaseException:
            world.fail(0, "was interrupted")
            while {*threads} & {*threading.enumerate()}:  # an interrupted join takes its thread for ended
                time.sleep(1e-3)
            raise
    if errors:
        raise errors[0]
    return results


def _ranks(ranks: int | None, devices: Sequence[int] | None) -> tuple[int, Sequence[int] | None]:
    """Return how many ranks there are, and the device of each."""
    if devices is None and ranks is None:
        devices = range(_gpus()) or None
    size = as_integer(ranks) if ranks is not None else len(devices) if devices else 2
    if size is None or size < 1 or (devices is not None and len(devices) != size):
        raise ArgumentError(f"ranks is {shown(ranks)} and devices {shown(devices)}; expected one device for each rank")
    return size, devices


@contextlib.contextmanager
def shared_cores(ranks: int) -> Iterator[None]:
    """Hold BLAS to this rank's share of the machine's cores, unless the environment says how many threads it has."""
    if ranks == 1 or {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"} & os.environ.keys():
        yield
        return
    with threadpool_limits(max(1, usable_cores() // ranks), user_api="blas"):
        yield


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Let threads take turns soon; the last of several callers gives the interval back that was before the first."""
    with _turns_lock:
        if not _turns["callers"]:
            _turns["before"] = sys.getswitchinterval()
        _turns["callers"] += 1
        sys.setswitchinterval(min(_turns["before"], _TURN))
    try:
        yield
    finally:
        with _turns_lock:
            _turns["callers"] -= 1
            if not _turns["callers"]:
                sys.setswitchinterval(_turns["before"])


def hold_cores(ranks: int) -> None:
    """Hold BLAS to a process's share of the machine's cores, for good."""
    contextlib.ExitStack().enter_context(shared_cores(ranks))


def _gpus() -> int:
    """Return how many GPUs there are."""
    try:
        return load_cupy("devices").cuda.runtime.getDeviceCount()
    except Exception:  # a broken installation raises more than ImportError
        return 0
