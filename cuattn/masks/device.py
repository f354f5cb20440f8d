"""Mask arrays on a GPU, through CuPy, which is imported when the first of them appears."""

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from cuattn.errors import UnsupportedError, expect_no_tracing

_CUDA_DEVICE_TYPES = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged


def is_device_array(value: Any) -> bool:
    """Tell whether `value` is an array in GPU memory, whichever library made it."""
    expect_no_tracing()
    locate = getattr(value, "__dlpack_device__", None)
    if locate is not None:
        return int(locate()[0]) in _CUDA_DEVICE_TYPES
    return getattr(value, "__cuda_array_interface__", None) is not None


def load_cupy(name: str) -> ModuleType:
    """Import CuPy; `name` is the argument that needs it, for the message."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedError(
            f"{name} is for a GPU, which needs CuPy: expected cuattn[cuda12] or cuattn[cuda13] to be installed"
        ) from error


def adopt(name: str, value: Any) -> Any:
    """View a GPU array of any library as a CuPy array, ordered after its producer's work."""
    cupy = load_cupy(name)
    if isinstance(value, cupy.ndarray):
        return value
    if not hasattr(value, "__dlpack__"):
        return cupy.asarray(value)
    # DLPack before __cuda_array_interface__: the interface's version 2 says nothing about streams.
    with cupy.cuda.Device(value.__dlpack_device__()[1]):
        return cupy.from_dlpack(value)


def namespace(array: Any) -> ModuleType:
    """Return the module, NumPy or CuPy, that computes on `array`; NumPy where there is None."""
    return np if array is None or isinstance(array, np.ndarray) else importlib.import_module("cupy")


def there(array: Any) -> AbstractContextManager[Any]:
    """Return a context in which an array's GPU, if it lies on one, is the current one."""
    return nullcontext() if namespace(array) is np else array.device


def copy(array: Any) -> Any:
    """Copy an array to a new C-contiguous one in the same place."""
    with there(array):
        return array.copy(order="C")


def upload(array: np.ndarray, device: int | None) -> Any:
    """Copy a host array to a GPU (None = CuPy's current one) and wait until every stream can see it."""
    cupy = load_cupy("device")
    with cupy.cuda.Device(device):
        stream = cupy.cuda.get_current_stream()
        if stream.ptr > 1 and stream.is_capturing():
            raise UnsupportedError(
                "mask is on the host, and a graph being captured cannot copy it to a GPU; call its to_device() before"
            )
        copied = cupy.asarray(np.ascontiguousarray(array))
        stream.synchronize()
    return copied


def pack(vectors: Sequence[Any], limit: int) -> Any:
    """Copy vectors and scalars that broadcast into one new int32 array, (len(vectors), ...).

    Values on a GPU, which nobody has checked, are clamped to [0, limit].
    """
    array = next(filter(is_device_array, vectors), None)
    xp = namespace(array)
    with there(array):
        packed = xp.empty((len(vectors), *np.broadcast_shapes(*map(np.shape, vectors))), dtype=xp.int32)
        for k, vector in enumerate(vectors):
            packed[k] = (
                vector if array is None or isinstance(vector, int) else xp.clip(vector.astype(xp.int64), 0, limit)
            )
    return packed


def current_stream() -> Any:
    """Return CuPy's current stream of its current device."""
    return importlib.import_module("cupy").cuda.get_current_stream()


class Ready:
    """The moment when device memory is written: an event on the stream that writes it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream.ptr
        self._event = importlib.import_module("cupy").cuda.Event(disable_timing=True)
        self._event.record(stream)

    def wait(self, stream: Any) -> None:
        """Make a stream wait for that moment, unless it is the same stream or the moment has passed."""
        if self._event is None or stream.ptr == self._stream:
            return
        if stream.ptr > 1 and stream.is_capturing():
            with _anything_allowed():  # the stream cannot wait for what is no part of its graph, so the host does
                self._event.synchronize()
        elif not self._event.done:
            stream.wait_event(self._event)
            return
        self._event = None


@contextmanager
def _anything_allowed() -> Iterator[None]:
    """Let this thread ask about events while a stream is captured, in whichever mode that was begun."""
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
