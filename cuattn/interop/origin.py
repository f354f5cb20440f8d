"""The way back to the caller: the kind and place of a call's arrays, and the two kinds that the backends work on."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.io_model.sizes import align_up

_kept = []  # memory of captured calls whose results cannot hold it
_HERE = contextlib.nullcontext()
_SHARED_BYTES = 1 << 20  # results of a call up to which they share a piece of memory


@dataclass(frozen=True)
class ArrayOrigin:
    """Where a call's arrays came from, and how results go back there.

    A subclass is a kind of array.  It has ``take(name, value)``, which returns a NumPy or CuPy array over the memory of
    an argument, and its origin; it may have ``signature(names, values)``, see :func:`cuattn.interop.signature`.  By
    default work on a GPU goes on CuPy's current stream, into memory of its pool.

    Attributes
    ----------
    library, array : str
        Names of the module and of its class of arrays.
    kind : str
        ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"``, or the top-level module of another DLPack producer.
    backend : {"cpu", "cuda"}
        Whether the arrays lie in host or in device memory.
    device : int
        The CUDA device; 0 for host memory.
    handle : object
        What the kind needs to know beside an array to give it back.
    """

    kind: str
    backend: str
    device: int
    handle: Any = field(default=None, repr=False)

    library = array = ""

    @classmethod
    def owns(cls, value):
        """Return whether `value` is an array of this kind; what is not imported has none."""
        return isinstance(value, getattr(sys.modules.get(cls.library), cls.array, ()))

    @staticmethod
    def signature(names, values):
        """Return layouts and addresses of arrays, see :func:`cuattn.interop.signature`; None: ``take`` has to look."""

    @classmethod
    def at(cls, device=None, handle=None, kind=None):
        """Return the origin of an array on a CUDA device, or of one in host memory."""
        return cls(kind or cls.library, "cpu" if device is None else "cuda", device or 0, handle)

    def from_backend(self, array):
        """Return `array` as the caller's kind of array, sharing its memory where that kind can.

        Parameters
        ----------
        array : numpy.ndarray or array from :meth:`allocator`
            A result of the backend, owned by this call: nobody may write to it afterwards.  None stays None.

        Returns
        -------
        array
            An array of the kind, on the device, that the arguments had.

        Notes
        -----
        Call it inside :meth:`scope`: the stream that is current there is the one that consumers of a CuPy array
        other than PyTorch are told to wait for.
        """
        return array

    def allocator(self, wanted):
        """Return a function that allocates results and scratch memory on a GPU.

        Parameters
        ----------
        wanted : sequence of (shape, dtype)
            The results.

        Returns
        -------
        callable
            ``allocate(scratch_bytes, together, held)``, to be called with the device current, returns the results,
            which are CuPy arrays or arrays of the caller's kind; a list of their addresses, with that of the scratch
            memory last; and what keeps the scratch memory alive.  With `together`, all is one piece of memory, which
            lives, and the objects `held` with it, as long as any of the results.
        """
        return _FromPool(wanted, self.device)

    def stream(self):
        """Return the caller's current stream of the device, which must be current, as a CuPy stream."""
        return sys.modules["cupy"].cuda.get_current_stream()

    @property
    def is_current(self):
        """Whether the arrays' GPU is CuPy's current device."""
        return self._current_device() == self.device

    @functools.cached_property
    def _current_device(self):
        return sys.modules["cupy"].cuda.runtime.getDevice

    def scope(self):
        """Return a context manager in which the arrays' device and the caller's stream are current for CuPy.

        For PyTorch tensors that stream is PyTorch's current one on their device, for everything else CuPy's
        current one there; for host memory nothing is done.
        """
        return _HERE if self.backend == "cpu" else self._current()

    @contextlib.contextmanager
    def _current(self):
        with sys.modules["cupy"].cuda.Device(self.device), self.stream():
            yield


class NumPy(ArrayOrigin):
    """Host arrays."""

    library, array = "numpy", "ndarray"

    @staticmethod
    def take(name, value):
        """Return a plain ndarray over the memory of `value`, and its origin."""
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
        return value, _HOST

    @staticmethod
    def signature(names, values):
        """Return layouts of plain arrays, see :func:`cuattn.interop.signature`."""
        layouts = [names]
        for value in values:
            if type(value) is not np.ndarray:
                return None
            layouts += value.dtype, value.shape
        return tuple(layouts), None


_HOST = NumPy.at()


class CuPy(ArrayOrigin):
    """Device arrays of CuPy."""

    library, array = "cupy", "ndarray"

    @classmethod
    def take(cls, name, value):
        """Return the array itself, and its origin."""
        return value, _on(value.data.device_id)

    def scope(self):
        """Return what :meth:`ArrayOrigin.scope` does; where the device is current, so is its stream."""
        return _HERE if self.is_current else self._current()

    @staticmethod
    def signature(names, values):
        """Return layouts and addresses of arrays, see :func:`cuattn.interop.signature`."""
        layouts, addresses = [names], []
        try:
            for value in values:
                data = value.data
                address = data.ptr
                # Whether an array is contiguous takes a fifth of the time that its strides take.
                strides = value._c_contiguous or value.strides
                layouts += value.dtype, value.shape, strides, data.device_id, address & 15
                addresses.append(address)
        except AttributeError:  # an array of another kind
            return None
        return tuple(layouts), addresses


_on = functools.lru_cache(CuPy.at)  # to make one takes longer than all else that is asked of an array


class _FromPool:
    """Allocates CuPy arrays on CuPy's current stream.

    Results that are small together are parts of one piece of memory, which lives as long as any of them: half of what
    an array costs the host is to take its memory from the pool and to give it back.
    """

    def __init__(self, wanted, device):
        self._wanted, self._device = wanted, device
        self._cupy = sys.modules["cupy"]
        self._new = constructor(self._cupy.ndarray)
        starts, self._size = pieces(wanted, 0)
        self._parts = [(*of, start) for of, start in zip(wanted, starts, strict=False)]
        self._shared = len(wanted) > 1 and self._size <= _SHARED_BYTES

    def __call__(self, scratch_bytes, together, held):
        """Return results, their addresses and that of scratch memory, and what keeps the latter alive."""
        if together:
            return self._one_piece(scratch_bytes, held)
        new, alloc = self._new, self._cupy.cuda.alloc
        if self._shared:
            memory = alloc(self._size)
            results = [new(shape, dtype, memory + start) for shape, dtype, start in self._parts]
        else:
            results = [new(*of) for of in self._wanted]
        addresses = [result.data.ptr for result in results]
        scratch = alloc(scratch_bytes) if scratch_bytes else None
        addresses.append(scratch.ptr if scratch_bytes else 0)
        return results, addresses, scratch

    def _one_piece(self, scratch_bytes, held):
        cuda = self._cupy.cuda
        starts, size = pieces(self._wanted, scratch_bytes)
        memory = cuda.alloc(size)
        owner = cuda.UnownedMemory(memory.ptr, size, (memory, *held), self._device)
        places = [cuda.MemoryPointer(owner, start) for start in starts]
        results = [self._cupy.ndarray(*of, place) for of, place in zip(self._wanted, places, strict=False)]
        return results, [place.ptr for place in places], owner


def constructor(ndarray):
    """Return what makes a CuPy array of a shape and a dtype, as `ndarray` does, in two thirds of the time.

    What takes the rest is that arguments are handed on twice; the inner constructor is private.
    """
    new, fill = ndarray.__base__.__new__, getattr(ndarray, "_init", None)
    if fill is None:
        return ndarray

    def make(shape, dtype, memory=None):
        array = new(ndarray)
        fill(array, shape, dtype, memory)
        return array

    return make


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
    *starts, size = accumulate(map(align_up, (*sizes, scratch_bytes)), initial=0)
    return starts, size


def device_array_module(name, value, cuda_version=None):
    """Import CuPy because argument `name` lies in device memory.

    Parameters
    ----------
    name : str
        The argument's name.
    value : object
        The argument.
    cuda_version : str, optional
        The CUDA version that its framework was built for, to name the matching extra.

    Returns
    -------
    module
        ``cupy``.

    Raises
    ------
    UnsupportedError
        When CuPy cannot be imported.
    """
    try:
        import cupy
    except Exception as error:  # a broken installation raises more than ImportError
        extras = {"12": ["cuda12"], "13": ["cuda13"]}.get((cuda_version or "").split(".")[0], ["cuda13", "cuda12"])
        commands = " or ".join(f'`pip install "cuattn[{extra}]"`' for extra in extras)
        raise UnsupportedError(
            f"{name} is {type_name(value)} in CUDA memory, which needs CuPy, and importing CuPy failed "
            f"({type(error).__name__}: {error}); install it with {commands}"
        ) from error
    return cupy


def type_name(value):
    """Return how an error message calls the type of `value`, article included."""
    if value is None:
        return "None"
    cls = type(value)
    name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"
