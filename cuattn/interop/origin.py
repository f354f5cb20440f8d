"""The way back to the caller: the kind and place of a call's arrays, and what all kinds share."""

import contextlib
import sys

from cuattn.errors import UnsupportedError


class ArrayOrigin:
    """Where a call's arrays came from, and how results go back there.

    Attributes
    ----------
    kind : str
        ``"numpy"``, ``"cupy"``, ``"torch"``, ``"jax"``, or the top-level module of another DLPack producer.
    backend : {"cpu", "cuda"}
        Whether the arrays lie in host or in device memory.
    device : int
        The CUDA device; 0 for host memory.
    """

    __slots__ = ("_adapter", "_handle", "backend", "device", "kind")

    def __init__(self, kind, backend, device, adapter, handle=None):
        self.kind = kind
        self.backend = backend
        self.device = device
        self._adapter = adapter
        self._handle = handle

    def __repr__(self):
        return f"ArrayOrigin(kind={self.kind!r}, backend={self.backend!r}, device={self.device!r})"

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
        return None if array is None else self._adapter.give(array, self._handle)

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
        return self._adapter.allocator(tuple(wanted), self.device)

    def stream(self):
        """Return the caller's current stream of the device, which must be current, as a CuPy stream."""
        return self._adapter.stream(self.device)

    def is_current(self):
        """Return whether the arrays' device is current for CuPy."""
        return sys.modules["cupy"].cuda.runtime.getDevice() == self.device

    def on_device(self):
        """Return a context manager in which the arrays' device is current for CuPy."""
        return sys.modules["cupy"].cuda.Device(self.device)

    @contextlib.contextmanager
    def scope(self):
        """Make the arrays' device and the caller's stream current for CuPy; do nothing for host memory.

        For PyTorch tensors that stream is PyTorch's current one on their device, for everything else CuPy's
        current one there.
        """
        if self.backend == "cpu":
            yield
            return
        with sys.modules["cupy"].cuda.Device(self.device), self.stream():
            yield


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
