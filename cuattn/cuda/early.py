"""Launches that may begin before the one in front of them has ended: programmatic dependent launch.

The kernel in front allows it (``griddepcontrol.launch_dependents``), so that blocks begin where multiprocessors have
no more work of it; the launched one ends when that has ended (``griddepcontrol.wait``).
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache

from cuattn.cuda.device import device_of

_DRIVER = 12030  # the first whose graphs take such launches
_CAPABLE = 90  # the first GPUs that do; kernels for others do not wait
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("shape", ctypes.c_uint * 7),  # grid, block, shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


_EARLY = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))


@lru_cache(maxsize=64)
def launcher(device: int) -> Callable[..., Callable[[int, int], int]] | None:
    """Return what prepares early launches on a GPU, if it does them.

    It takes a function, grid, block and shared memory, as ``cuLaunchKernel`` does.  What it returns launches that on a
    stream with arguments, for one thread at a time, and returns 0.
    """
    import cupy

    capability = int(device_of(device).arch.removeprefix("sm_"))
    if capability < _CAPABLE or cupy.cuda.runtime.driverGetVersion() < _DRIVER:
        return None
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4

    def prepared(pointer: int, *shape: int) -> Callable[[int, int], int]:
        config = _Config((ctypes.c_uint * 7)(*shape), None, ctypes.addressof(_EARLY), 1)
        address = ctypes.addressof(config)

        def launch(stream: int, arguments: int) -> int:
            config.stream = stream
            return function(address, pointer, arguments, None)

        return launch

    return prepared
