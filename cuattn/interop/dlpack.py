"""Arrays of any other library that speaks DLPack."""

import ctypes
import sys

import ml_dtypes
import numpy as np

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop.native import OnCuPy
from cuattn.interop.origin import device_array_module, type_name

__all__ = ["DLPack"]

# Device types and dtype codes of dlpack.h
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4


class DLPack(OnCuPy):
    """Objects with ``__dlpack__`` and ``__dlpack_device__``."""

    @staticmethod
    def owns(value):
        """Return whether `value` is an instance of a class that speaks DLPack."""
        return hasattr(type(value), "__dlpack__") and hasattr(type(value), "__dlpack_device__")

    @staticmethod
    def name_of(value):
        """Return the name of the library's top-level module."""
        return type(value).__module__.partition(".")[0]

    @staticmethod
    def take(name, value):
        """Return a NumPy or CuPy array over the memory of `value`, and its place."""
        try:
            device_type, _ = value.__dlpack_device__()
            if device_type in (_CPU, _CUDA_HOST):
                return _host_view(value), ("cpu", 0, _namespace(value))
            if device_type in (_CUDA, _CUDA_MANAGED):
                array = device_array_module(name, value).from_dlpack(value)
                return array, ("cuda", array.data.device_id, _namespace(value))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, UnsupportedError):
                raise
            raise DtypeError(f"{name} is {type_name(value)} that cannot be read through DLPack: {error}") from error
        raise UnsupportedError(
            f"{name} is on a device of DLPack type {int(device_type)}; expected host (1, 3) or CUDA (2, 13) memory"
        )

    @staticmethod
    def give(array, handle):
        """Return `array` through the ``from_dlpack`` of `handle`, or as it is where there is none."""
        if handle is None:
            return array
        try:
            return handle.from_dlpack(array)
        except BufferError:  # NumPy does not export bfloat16
            return array


def _namespace(value):
    """Return the module of `value` that has ``from_dlpack``, or None."""
    if hasattr(value, "__array_namespace__"):
        module = value.__array_namespace__()
    else:
        module = sys.modules.get(DLPack.name_of(value))
    return module if hasattr(module, "from_dlpack") else None


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, the first member of what a "dltensor" capsule points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Exported:
    """Memory behind a DLPack capsule, offered to NumPy as 16-bit integers.

    An array made from it keeps it, and so the capsule, alive; the producer's own destructor of the unused capsule
    releases the memory.
    """

    def __init__(self, capsule, tensor):
        self.capsule = capsule
        shape = tuple(tensor.shape[: tensor.ndim])
        strides = tuple(2 * step for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
        address = (tensor.data or 0) + tensor.byte_offset
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": np.dtype(np.uint16).str,
            "strides": strides,
            "data": (address, True),
        }


def _host_view(value):
    """Return a NumPy array over host memory, reading bfloat16 from the capsule because NumPy does not."""
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError):
        capsule = value.__dlpack__()
        pointer = _capsule_pointer(capsule, b"dltensor")
        tensor = _DLTensor.from_address(pointer)
        if (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
            raise
        return np.asarray(_Exported(capsule, tensor)).view(ml_dtypes.bfloat16)


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
