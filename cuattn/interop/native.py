"""What a kind of array is, and the two kinds that the backends work on: NumPy arrays and CuPy arrays."""

import math
import sys
import weakref
from itertools import accumulate

import numpy as np

from cuattn.errors import DtypeError

HOST = ("cpu", 0, None)  # backend, CUDA device, and what `give` needs to know beside the array

_kept = []  # memory of captured calls whose results cannot hold it
_UNIT = 256  # bytes; what shares a piece of memory begins at multiples of it


class Kind:
    """A kind of array.  By default work on a GPU goes on CuPy's current stream, into memory of CuPy's pool.

    A subclass has ``take(name, value)``, which returns a NumPy or CuPy array over the memory of an argument, and its
    place as in `HOST`.  For arrays on a GPU it may have ``signature(values)``, see :func:`cuattn.interop.signature`.

    Attributes
    ----------
    library, array : str
        Names of the module and of its class of arrays.
    """

    library = array = ""

    @classmethod
    def owns(cls, value):
        """Return whether `value` is an array of this kind; what is not imported has none."""
        module = sys.modules.get(cls.library)
        return module is not None and isinstance(value, getattr(module, cls.array, ()))

    @classmethod
    def name_of(cls, value):
        """Return the name of this kind."""
        return cls.library

    @staticmethod
    def give(array, handle):
        """Return a result of a backend as an array of this kind; `handle` is the last item of the place."""
        return array

    @staticmethod
    def stream(device):
        """Return the caller's current stream of a device, which must be current, as a CuPy stream."""
        return sys.modules["cupy"].cuda.get_current_stream()

    @staticmethod
    def allocator(wanted, device):
        """Return what allocates results, see :meth:`cuattn.interop.ArrayOrigin.allocator`."""
        return _FromPool(wanted, device)


class NumPy(Kind):
    """Host arrays."""

    library, array = "numpy", "ndarray"

    @staticmethod
    def take(name, value):
        """Return a plain ndarray over the memory of `value`, and its place."""
        if type(value) is not np.ndarray:
            if isinstance(value, np.ma.MaskedArray):
                raise DtypeError(
                    f"{name} is a numpy.ma.MaskedArray, whose mask would be lost; pass {name}.filled(...) "
                    "and say what may be attended to with mask="
                )
            value = value.view(np.ndarray)
        if not value.dtype.isnative:
            raise DtypeError(
                f"{name} has dtype {value.dtype.str!r}, in the byte order of another machine; "
                f'pass {name}.astype({name}.dtype.newbyteorder("="))'
            )
        return value, HOST


class CuPy(Kind):
    """Device arrays of CuPy."""

    library, array = "cupy", "ndarray"

    @staticmethod
    def take(name, value):
        """Return the array itself, and its place."""
        return value, ("cuda", value.data.device_id, None)

    @staticmethod
    def signature(values):
        """Return layouts and addresses of arrays, see :func:`cuattn.interop.signature`."""
        ndarray = sys.modules["cupy"].ndarray
        layouts, addresses = [], []
        for value in values:
            if value is None:
                layouts.append(None)
                addresses.append(0)
                continue
            if type(value) is not ndarray:
                return None
            data = value.data
            address = data.ptr
            layouts += value.dtype, value.shape, value.strides, data.device_id, address & 15
            addresses.append(address)
        return tuple(layouts), addresses


class _FromPool:
    """Allocates CuPy arrays on CuPy's current stream."""

    def __init__(self, wanted, device):
        self._wanted, self._device = wanted, device
        self._cupy = sys.modules["cupy"]

    def __call__(self, scratch_bytes, together, held):
        """Return results, their addresses and that of scratch memory, and what keeps the latter alive."""
        if together:
            return self._one_piece(scratch_bytes, held)
        ndarray = self._cupy.ndarray
        results = [ndarray(shape, dtype) for shape, dtype in self._wanted]
        addresses = [result.data.ptr for result in results]
        scratch = self._cupy.cuda.alloc(scratch_bytes) if scratch_bytes else None
        addresses.append(scratch.ptr if scratch_bytes else 0)
        return results, addresses, scratch

    def _one_piece(self, scratch_bytes, held):
        cuda = self._cupy.cuda
        starts, size = pieces(self._wanted, scratch_bytes)
        memory = cuda.alloc(size)
        owner = cuda.UnownedMemory(memory.ptr, size, (memory, *held), self._device)
        places = [cuda.MemoryPointer(owner, start) for start in starts]
        results = [
            self._cupy.ndarray(shape, dtype, place) for (shape, dtype), place in zip(self._wanted, places, strict=False)
        ]
        return results, [place.ptr for place in places], owner


def hold(owner, memory):
    """Keep memory that a captured graph uses as long as one of its results, or for good where that cannot be told."""
    try:
        weakref.finalize(owner, _release, memory).atexit = False
    except TypeError:  # no weak references to it
        _kept.append(memory)


def _release(memory):
    """Let go of memory: the reference that brought it here was the last."""


def pieces(wanted, scratch_bytes):
    """Return where in one piece of memory each result and, last, scratch memory begin, and the size of it all."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
    *starts, size = accumulate((-(-size // _UNIT) * _UNIT for size in (*sizes, scratch_bytes)), initial=0)
    return starts, size
