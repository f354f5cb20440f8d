"""The peak of what is allocated during some work."""

import contextlib
import tracemalloc

__all__ = ["Peak", "peak"]


class Peak:
    """Bytes at the peak, beyond those in use at the start; valid after the work is done."""

    bytes = 0


@contextlib.contextmanager
def peak(device):
    """Observe the allocations of CuPy and PyTorch (``"cuda"``), or of NumPy (``"cpu"``, which slows Python down).

    Yields
    ------
    Peak
        On a GPU the sum of both allocators' peaks: exact where only one of them allocates meanwhile.

    Examples
    --------
    >>> import numpy as np
    >>> with peak("cpu") as found:
    ...     _ = np.ones(1 << 20, np.uint8)
    >>> found.bytes >> 20
    1
    """
    found = Peak()
    if device != "cuda":
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        try:
            yield found
            found.bytes = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        return
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    hook = _hook()
    with hook:
        yield found
    found.bytes = hook.most
    if torch is not None:
        found.bytes += torch.cuda.max_memory_allocated() - before


def _hook():
    """Return a CuPy memory hook that keeps the most bytes in use at a time."""
    import cupy

    class Hook(cupy.cuda.MemoryHook):
        name = "peak"
        now = 0
        most = 0

        def malloc_postprocess(self, **block):
            self.now += block["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **block):
            self.now -= block["mem_size"]

    return Hook()
