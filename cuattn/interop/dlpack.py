"""Arrays of JAX, and of any other library that speaks DLPack."""

import ctypes
import struct
import sys

import ml_dtypes
import numpy as np

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop.origin import ArrayOrigin, device_array_module, type_name

# Device types and dtype codes of dlpack.h
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4
_TENSOR = "PiiiBBHPPQ"  # DLTensor of dlpack.h, the first member of what a "dltensor" capsule points to


class Jax(ArrayOrigin):
    """Concrete arrays of JAX."""

    library, array = "jax", "Array"  # tracers are such, too

    @classmethod
    def take(cls, name, value):
        """Return a NumPy or CuPy array over the memory of `value`, and its origin."""
        jax = sys.modules["jax"]
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedError(
                f"{name} is a JAX tracer ({type(value).__name__}), and only cuattn.jax.attention takes part in "
                "JAX's transformations; call that, or call outside jax.jit, jax.grad and jax.vmap "
                "(jax.lax.stop_gradient does not help inside them)"
            )
        if value.is_deleted():
            raise DtypeError(f"{name} is a JAX array whose buffer was deleted or donated; expected a live array")
        device, *others = value.devices()
        if others:
            raise UnsupportedError(f"{name} is spread over {1 + len(others)} devices; expected an array on one device")
        if device.platform == "cpu":
            try:
                return np.asarray(value), cls.at(handle=device)
            except TypeError as error:
                raise DtypeError(f"{name} has dtype {value.dtype}, which NumPy cannot read: {error}") from error
        if device.platform in ("gpu", "cuda"):
            cupy = device_array_module(name, value)
            return cupy.from_dlpack(value), cls.at(value.__dlpack_device__()[1], device)
        raise UnsupportedError(f"{name} is on JAX platform {device.platform!r}; expected 'cpu' or 'gpu'")

    def from_backend(self, array):
        """Return a JAX array over the memory of `array`, on the device that is the handle."""
        jax = sys.modules["jax"]
        if not isinstance(array, np.ndarray):
            return None if array is None else jax.dlpack.from_dlpack(array)
        if array.dtype != np.float64:
            return jax.device_put(array, self.handle)
        enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
        with enable_x64(True):  # a float64 argument was made under it; outside, JAX would round the result
            return jax.device_put(array, self.handle)


class DLPack(ArrayOrigin):
    """Objects with ``__dlpack__`` and ``__dlpack_device__``."""

    @classmethod
    def owns(cls, value):
        """Return whether `value` is an instance of a class that speaks DLPack."""
        return hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__")

    @classmethod
    def take(cls, name, value):
        """Return a NumPy or CuPy array over the memory of `value`, and its origin."""
        library = type(value).__module__.partition(".")[0]
        try:
            module = value.__array_namespace__() if hasattr(value, "__array_namespace__") else sys.modules.get(library)
            handle = getattr(module, "from_dlpack", None)
            device_type, _ = value.__dlpack_device__()
            if device_type in (_CPU, _CUDA_HOST):
                return _host_view(value), cls.at(None, handle, library)
            if device_type in (_CUDA, _CUDA_MANAGED):
                array = device_array_module(name, value).from_dlpack(value)
                return array, cls.at(array.data.device_id, handle, library)
        except UnsupportedError:
            raise
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise DtypeError(f"{name} is {type_name(value)} that cannot be read through DLPack: {error}") from error
        raise UnsupportedError(
            f"{name} is on a device of DLPack type {int(device_type)}; expected host (1, 3) or CUDA (2, 13) memory"
        )

    def from_backend(self, array):
        """Return `array` through the handle, a ``from_dlpack``, or as it is where there is none."""
        if self.handle is None or array is None:
            return array
        try:
            return self.handle(array)
        except BufferError:  # NumPy does not export bfloat16
            return array


class Memory:
    """Memory at an address, offered to NumPy; an array made from it keeps it, and so its `owner`, alive."""

    def __init__(self, address, shape, strides, typestr, owner=None):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": typestr,
            "strides": strides,
            "data": (address, True),
        }


def _host_view(value):
    """Return a NumPy array over host memory, reading bfloat16 from the capsule because NumPy does not.

    The producer's own destructor of the unused capsule releases the memory.
    """
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError):
        capsule = value.__dlpack__()
        tensor = ctypes.string_at(_capsule_pointer(capsule, b"dltensor"), struct.calcsize(_TENSOR))
        data, _, _, ndim, code, bits, lanes, shape, strides, offset = struct.unpack(_TENSOR, tensor)
        if (code, bits, lanes) != (_BFLOAT, 16, 1):
            raise
        numbers = ctypes.c_int64 * ndim
        steps = tuple(2 * step for step in numbers.from_address(strides)) if strides else None
        memory = Memory(data + offset, tuple(numbers.from_address(shape)), steps, np.dtype(np.uint16).str, capsule)
        return np.asarray(memory).view(ml_dtypes.bfloat16)


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
