"""Time calls fairly: caches flushed, the device kept busy, rivals interleaved, every sample kept.

A clock knows one device. `measure` runs rivals in turn, so that a drifting temperature or clock meets all of them
alike, and begins each round with the next of them.  Before each call the clock overwrites a buffer larger than the L2
cache: inputs come from device memory, as in a model, and the device is still busy while the host enqueues the call, so
that the events around it enclose device work alone.  If one of the rivals takes many milliseconds it does so after
each call for as long again: back to back, float64 backwards of 32 ms were up to 18 % slower for a quarter of a second,
whichever of several they were, and slower behind PyTorch's than behind ours.
"""

import contextlib
import gc
import time

import numpy as np

FLUSH_BYTES = 256 << 20  # four times the L2 cache of an H200 and more
HOST_MARGIN = 1.5  # the device is kept busy for this many times the host cost of a call
TIRING = 0.02  # seconds; a call as long as this may leave a lower clock to the next one
RECOVERY = 0.05  # seconds of flushes, at most, that follow each call before the next, if one of the rivals' is so long
LONG = 0.2  # seconds; a longer call that was checked before needs no warm-up that does not count


class CudaClock:
    """Time device work on PyTorch's current stream with CUDA events."""

    def __init__(self):
        import torch

        self._torch = torch
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
        self._buffer = torch.empty(max(FLUSH_BYTES, 4 * cache), dtype=torch.uint8, device="cuda")
        self._flush_seconds = 0.0
        passes = 8
        for _ in range(2):  # the first time loads the kernel
            pending = self.start(lambda: self.occupy(0.0, passes), passes=0)
            self._flush_seconds = self.read(pending) / passes

    def occupy(self, seconds, passes=1):
        """Enqueue flushes that keep the device busy for `seconds`, and at least `passes` of them."""
        if self._flush_seconds:
            passes = max(passes, int(np.ceil(seconds / self._flush_seconds)))
        for _ in range(passes):
            self._buffer.zero_()

    def start(self, call, host_seconds=0.0, passes=1):
        """Flush, then enqueue `call` between two events.

        `host_seconds` is what enqueuing it takes; None for a call on a stream of its own, which waits for itself.
        """
        events = [self._torch.cuda.Event(enable_timing=True) for _ in range(2)]
        if passes:
            self.occupy(HOST_MARGIN * (host_seconds or 0.0), passes)
        if host_seconds is None:
            self.synchronize()
        events[0].record()
        call()
        events[1].record()
        return events

    def read(self, pending):
        """Wait for a started call; return its duration in seconds."""
        pending[1].synchronize()
        return pending[0].elapsed_time(pending[1]) / 1e3

    def synchronize(self):
        """Wait for the device."""
        self._torch.cuda.synchronize()


class HostClock:
    """Time work that runs on the host, in the call itself.

    Parameters
    ----------
    pause : float, optional
        Seconds to sleep before a sample: for 7 to 9 ms after a call the threads of PyTorch's OpenMP spin, on cores that
        the next call needs.
    batch : float, optional
        Seconds that a sample takes, about, of calls that are shorter: it is the mean of several in a row, which begin
        warm.  Without it a sample is the first call after the pause.
    """

    def __init__(self, pause=0.0, batch=0.0):
        self._pause, self._batch = pause, batch

    def occupy(self, seconds, passes=1):
        """Do nothing: there is no device to keep busy."""

    def start(self, call, host_seconds=0.0, passes=1):
        """Run `call`, repeatedly if it is short; return its duration in seconds."""
        time.sleep(self._pause)
        found = self._mean(call, 1)
        if repeats := round(self._batch / found):
            self._mean(call, 1 + repeats // 4)
            found = self._mean(call, repeats)
        return found

    @staticmethod
    def _mean(call, repeats):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats

    def read(self, pending):
        """Return the duration that `start` took."""
        return pending

    def synchronize(self):
        """Do nothing: calls are over when they return."""


@contextlib.contextmanager
def _no_collection():
    """Keep Python's garbage collector out of the samples."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(calls, clock, *, seconds=2.0, least=7, most=50, alone=()):
    """Time calls in turn.

    Parameters
    ----------
    calls : dict of str to callable
        What to time; each enqueues work and returns.
    clock : CudaClock or HostClock
        Of the device that does the work.
    seconds : float, optional
        Device time to aim at, for all calls together.
    least, most : int, optional
        Bounds on the number of rounds, whatever `seconds` says.
    alone : container of str, optional
        Calls that use streams of their own and wait for them: each begins on an idle device, and its time includes
        what the host needs to enqueue it.

    Returns
    -------
    dict of str to list of float
        Every sample in seconds, in the order taken, equally many of all; warm-up calls are left out, but for those of
        calls that take a fifth of a second and more.

    Examples
    --------
    >>> samples = measure({"sum": lambda: sum(range(10))}, HostClock(), seconds=0.0)
    >>> len(samples["sum"])
    7
    """
    with _no_collection():
        host, took, once = {}, {}, 0.0
        names, samples = list(calls), {name: [] for name in calls}
        for name, call in calls.items():
            host[name], spent = _warm_up(call, clock)
            if spent < LONG:
                host[name], spent = _warm_up(call, clock)
            elif name not in alone:
                samples[name].append(spent)
            host[name] = None if name in alone else host[name]
            took[name] = spent
            once += spent
        rounds = int(np.clip(seconds / max(once, 1e-9), least, most))
        before = names[-1] if names else ""
        tiring = max(took.values(), default=0.0) >= TIRING
        for turn in range(rounds):
            first = turn % max(len(names), 1)
            due = [name for name in names[first:] + names[:first] if len(samples[name]) < rounds]
            pending = {}
            for name in due:
                clock.occupy(min(took[before], RECOVERY) if tiring else 0.0, passes=0)
                pending[name] = clock.start(calls[name], host_seconds=host[name])
                before = name
            for name, events in pending.items():
                samples[name].append(clock.read(events))
    return samples


def _warm_up(call, clock):
    """Return the seconds that enqueuing a call took, and its duration."""
    clock.occupy(1e-3)
    begin = time.perf_counter()
    pending = clock.start(call)
    enqueued = time.perf_counter() - begin
    return enqueued, clock.read(pending)


def host_cost(call, clock, *, samples=400, burst=50):
    """Time how long the host is held by one warm call, with the device kept busy meanwhile.

    Parameters
    ----------
    call : callable
        Enqueues work on the device and returns.
    clock : CudaClock or HostClock
        Of that device.
    samples : int, optional
        Calls to time, at least.
    burst : int, optional
        Calls between two waits for the device: few enough that the queue of launches never fills, which would hold
        the host.

    Returns
    -------
    list of float
        Seconds per call, every sample.
    """
    for _ in range(5):
        call()
    clock.synchronize()
    begin = time.perf_counter()
    call()
    estimate = time.perf_counter() - begin
    durations = []
    with _no_collection():
        while len(durations) < samples:
            clock.synchronize()
            clock.occupy(HOST_MARGIN * burst * estimate)
            for _ in range(burst):
                start = time.perf_counter_ns()
                call()
                durations.append(time.perf_counter_ns() - start)
    clock.synchronize()
    return [duration / 1e9 for duration in durations]


def timed(samples):
    """Return the values of a row that stand for samples in seconds: all of them, median and quartiles, in us.

    Examples
    --------
    >>> timed([3e-6, 1e-6, 2e-6])["median_us"]
    2.0
    """
    q1, median, q3 = (round(float(x) * 1e6, 3) for x in np.percentile(samples, [25, 50, 75]))
    return {"samples_us": [round(sample * 1e6, 2) for sample in samples], "median_us": median, "q1_us": q1, "q3_us": q3}
