"""A GPU as plans and launches see it: what it can hold, who owns an address, and counters that a stream keeps."""

import ctypes
import functools
import threading
from typing import Any, NamedTuple

from cuattn.errors import CuattnError, DtypeError, UnsupportedError

COUNTERS = 4096  # 32-bit counters that the launches of one stream share, each 0 between launches

# cudaDeviceAttr: compute capability, major and minor; multiprocessors; shared memory of a block that asks; L2 cache.
_ATTRIBUTES = (75, 76, 16, 97, 38)
_DEVICE_MEMORY = 2  # cudaMemoryTypeDevice
_PER_THREAD = 2  # address of the default stream that every thread has to itself
_STREAMS_KEPT = 256

_counters: dict[tuple[int, int, int], Any] = {}  # by device, number of the stream, thread


class Device(NamedTuple):
    """What plans and launches need to know of a GPU.

    Attributes
    ----------
    arch : str
        "sm_90".
    multiprocessors : int
    shared_bytes : int
        Shared memory that one block may have.
    l2_bytes : int
        Size of the L2 cache.
    number : int
        CUDA's index of it.
    """

    arch: str
    multiprocessors: int
    shared_bytes: int
    l2_bytes: int
    number: int = 0

    def without(self, multiprocessors: int) -> "Device":
        """Return what is left of it when others have so many multiprocessors; it keeps one."""
        left = max(self.multiprocessors - multiprocessors, 1)
        return self._replace(multiprocessors=left) if multiprocessors else self


@functools.lru_cache(maxsize=64)
def device_of(number: int) -> Device:
    """Return what is known of GPU `number`; UnsupportedError if it is too old."""
    from cupy.cuda import runtime

    major, minor, *rest = (runtime.deviceGetAttribute(code, number) for code in _ATTRIBUTES)
    if major < 8:
        raise UnsupportedError(f"GPU {number} has compute capability {major}.{minor}; expected 8.0 or newer")
    return Device(f"sm_{major}{minor}", *rest, number)


def check_reachable(address: int, device: int) -> None:
    """Raise DtypeError unless a kernel on a GPU may read the random state's offset at an address."""
    import cupy

    memory = cupy.cuda.runtime.pointerGetAttributes(address)
    if memory.type == _DEVICE_MEMORY and memory.device != device:
        raise DtypeError(f"rng.offset is on GPU {memory.device} but q is on GPU {device}; expected the same GPU")


def zero(address: int, size: int, stream: Any) -> None:
    """Fill device memory with zeros."""
    import cupy

    if size:
        cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)


def counters_of(stream: Any, device: int) -> int:
    """Return the address of a stream's counters, COUNTERS of them, which every launch leaves at 0.

    Launches may share counters only if one waits for the other.  A stream that was given the handle of a destroyed one
    does not wait for that one's launches: only the driver's own number of a stream tells the two apart.
    """
    thread = threading.get_ident() if stream.ptr == _PER_THREAD else 0
    kept = vars(stream).setdefault("_cuattn_counters", {})  # CuPy's default stream stands for those of all devices
    memory = kept.get((device, thread))
    if memory is None:
        memory = kept[device, thread] = _new_counters(stream, device, thread)
    return memory.ptr


def _new_counters(stream: Any, device: int, thread: int) -> Any:
    import cupy

    key = device, _stream_number(stream.ptr), thread
    memory = _counters.pop(key, None)
    if memory is None:
        # Memory of its own, not the pool's: to free it waits for every launch that may still count in it.
        memory = cupy.cuda.Memory(4 * COUNTERS)
        zero(memory.ptr, 4 * COUNTERS, stream)
    _counters[key] = memory
    while len(_counters) > _STREAMS_KEPT:
        _counters.pop(next(iter(_counters)), None)
    return memory


def _stream_number(handle: int) -> int:
    """Return the number that the driver gave a stream, which no other stream of this process ever has."""
    number = ctypes.c_ulonglong()
    function = ctypes.CDLL("libcuda.so.1").cuStreamGetId
    function.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulonglong)]
    status = function(handle, ctypes.byref(number))
    if status:
        raise CuattnError(f"the driver does not know stream {handle:#x} (CUresult {status}); expected a live stream")
    return number.value
