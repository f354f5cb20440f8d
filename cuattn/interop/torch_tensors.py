"""PyTorch tensors, on the CPU and on CUDA devices.

This path reads pointer, shape and strides off the tensor instead of going through DLPack, which costs several
times as much per tensor.  Results and scratch memory of calls on a GPU come from PyTorch's own allocator, on its own
current stream: nothing is handed back, and a call can be captured by ``torch.cuda.graph``.
"""

import functools
import math
import operator
import sys
from itertools import accumulate, starmap

import ml_dtypes
import numpy as np

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop.origin import ArrayOrigin, device_array_module, hold, pieces, type_name

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CONTIGUOUS_LAST = frozenset({"q", "k", "v", "do", "fwd.o"})  # of these, backends read no other strides
_NAMES = ("float16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")


class Torch(ArrayOrigin):
    """Tensors of PyTorch."""

    library, array = "torch", "Tensor"

    @classmethod
    def take(cls, name, value):
        """Return a NumPy or CuPy array over the memory of `value`, and its origin."""
        torch = sys.modules["torch"]
        _refuse_differentiated(torch, name, value)
        dtype = _dtypes(torch).get(value.dtype)
        if dtype is None or value.layout is not torch.strided or value.is_nested or value.is_neg():
            raise _unreadable(torch, name, value)
        if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            # Its operations may not act on memory of its own: fake, distributed, ... tensors.
            raise UnsupportedError(f"{name} is {type_name(value)}, a subclass that is no plain block of memory")
        try:
            if value.is_cpu:
                return _host_view(torch, value, dtype), cls.at()
            if value.is_cuda:
                return _device_view(torch, name, value, dtype), cls.at(value.get_device())
        except RuntimeError as error:
            raise UnsupportedError(
                f"{name} has no memory that can be read ({error}); inside a transform of torch.func call "
                "cuattn.torch.attention, and take torch.func's jacrev or vmap for is_grads_batched or vectorize=True"
            ) from error
        raise UnsupportedError(f"{name} is on device {str(value.device)!r}; expected a tensor on 'cpu' or 'cuda'")

    @staticmethod
    def signature(names, values):
        """Return layouts and addresses of tensors, see :func:`cuattn.interop.signature`."""
        torch, forward_ad, plain = _parts()
        try:
            if forward_ad._current_level >= 0:  # tensors may carry tangents; or another version may say so elsewhere
                return None
            key = values[0].shape, names, torch.is_grad_enabled()
            if values[0] is not values[1]:  # one that is given twice is like no other
                for check, layouts in _met.get(key, ()):
                    if check(*values):
                        addresses = [value.data_ptr() for value in values]
                        if math.gcd(_ALIGNED, *addresses) == _ALIGNED:
                            return layouts, addresses
            return _seen(torch, plain, key, values)
        except (AttributeError, RuntimeError):  # an array of another kind; no memory, or no strides
            return None

    def from_backend(self, array):
        """Return a tensor over the memory of a NumPy array; a tensor as it is."""
        torch = sys.modules["torch"]
        if not isinstance(array, np.ndarray):
            return array
        if array.dtype == _BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def stream(self):
        """Return PyTorch's current stream of the device as a CuPy stream."""
        return foreign_stream(self.device, self._handle(self.device))

    @functools.cached_property
    def _handle(self):
        """What tells the handle of PyTorch's current stream of a device."""
        raw = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)  # private, and ten times as fast
        return raw or (lambda device: sys.modules["torch"].cuda.current_stream(device).cuda_stream)

    def allocator(self, wanted):
        """Return what allocates tensors, see :meth:`cuattn.interop.ArrayOrigin.allocator`."""
        return _FromTorch(wanted)


class _FromTorch:
    """Allocates tensors on PyTorch's current stream of the current device."""

    def __init__(self, wanted):
        torch = sys.modules["torch"]
        names = {theirs: ours for ours, theirs in _dtypes(torch).items()}
        self._wanted, self._new, self._byte = wanted, constructor(torch, "cuda"), torch.uint8
        self._address = torch.Tensor.data_ptr
        self._tensors = [(shape, strides_of(shape), names[dtype]) for shape, dtype in wanted]

    def __call__(self, scratch_bytes, together, held):
        """Return results, their addresses and that of scratch memory, and what keeps the latter alive."""
        if together:
            return self._one_piece(scratch_bytes, held)
        new = self._new
        results = list(starmap(new, self._tensors))
        addresses = list(map(self._address, results))
        scratch = new((scratch_bytes,), (1,), self._byte) if scratch_bytes else None
        addresses.append(scratch.data_ptr() if scratch_bytes else 0)
        return results, addresses, scratch

    def _one_piece(self, scratch_bytes, held):
        starts, size = pieces(self._wanted, scratch_bytes)
        memory = self._new((size,), (1,), self._byte)
        storage = memory.untyped_storage()
        results = []
        for (shape, strides, dtype), start in zip(self._tensors, starts, strict=False):
            results.append(memory.new_empty(0, dtype=dtype).set_(storage, start // dtype.itemsize, shape, strides))
            hold(results[-1], held)
        return results, [memory.data_ptr() + start for start in starts], memory


def _seen(torch, plain, key, values):
    """Return the layouts and addresses of tensors that are memory alone; None if one is more."""
    layouts, addresses = [key[1]], []
    for value in values:
        if type(value) not in plain or value.is_neg() or (value.requires_grad and torch.is_grad_enabled()):
            return None
        address = value.data_ptr()
        layouts += value.dtype, value.shape, value.is_contiguous() or value.stride(), value.device, address % _ALIGNED
        addresses.append(address)
    layouts = _token(*layouts)
    if math.gcd(_ALIGNED, *addresses) == _ALIGNED and len(set(map(id, values))) == len(values):
        _meet(torch, key, values, layouts)
    return layouts, addresses


@functools.lru_cache(maxsize=4096)
def _token(*layouts):
    """Return an object that stands for layouts: it takes no time to hash."""
    return object()


_ALIGNED = 16  # bytes
_MET = 4  # sets of tensors, of some names and with one shape of the first, that others are compared with
_met = {}  # by that shape, these names, and whether gradients are recorded: what compares, and the layouts
_MOST_MET = 1024


def _meet(torch, key, values, layouts):
    """Let aligned tensors that look like these be known by one comparison.

    PyTorch makes it before it runs a graph of its compiler: of types, dtypes, devices, sizes, strides, dispatch keys,
    and of whether they require grad, in a fraction of the time that asking for them takes.  It is private, and false
    where a tensor is given twice.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*values, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*values):
            _met[key] = ((guards.check, layouts), *_met.get(key, ())[: _MET - 1])
    except (AttributeError, TypeError, RuntimeError):  # of another version
        return
    if len(_met) > _MOST_MET:
        _met.clear()


def constructor(torch, place):
    """Return what makes a tensor of a shape, strides and a dtype on a kind of device, on the current one of them.

    PyTorch's own compiler makes those of its graphs so, in half the time of `torch.empty`; that way is private.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    ordinary = functools.partial(_empty_strided, torch, place)
    return getattr(guards, f"_empty_strided_{place}", ordinary)


def _empty_strided(torch, place, shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype, device=place)


def strides_of(shape):
    """Return the strides of a contiguous tensor.

    >>> strides_of((2, 3, 5)), strides_of((7, 0)), strides_of(())
    ((15, 5, 1), (1, 1), ())
    """
    steps = accumulate((max(size, 1) for size in shape[:0:-1]), operator.mul, initial=1)
    return tuple(steps)[: len(shape)][::-1]


@functools.cache
def _parts():
    """Return torch, its module of forward-mode differentiation, and the types of tensors that are memory alone."""
    torch = sys.modules["torch"]
    return torch, torch.autograd.forward_ad, (torch.Tensor, torch.nn.Parameter)


@functools.cache
def _dtypes(torch):
    """Return the NumPy dtype of each torch dtype that can be handed over."""
    table = {getattr(torch, name): np.dtype(name) for name in _NAMES}
    table[torch.bfloat16] = _BFLOAT16
    return table


def _refuse_differentiated(torch, name, value):
    """Raise for a tensor whose gradient or tangent would be lost."""
    forward_ad = torch.autograd.forward_ad
    if value.requires_grad and torch.is_grad_enabled():
        problem = f"{name} requires grad while grad mode is on"
        detach = f"pass {name}.detach(), call under torch.no_grad()"
    elif getattr(forward_ad, "_current_level", 0) >= 0 and forward_ad.unpack_dual(value).tangent is not None:
        problem = f"{name} carries a forward-mode tangent"
        detach = f"pass its primal (torch.autograd.forward_ad.unpack_dual({name}).primal)"
    else:
        return
    raise UnsupportedError(
        f"{problem}, and this function takes no part in PyTorch's autograd, so its gradient would be lost; "
        f"call cuattn.torch.attention, which does, or {detach}"
    )


def _unreadable(torch, name, value):
    """Return the error for a tensor whose elements do not lie in memory as its dtype and strides say."""
    if value.is_nested or value.layout is not torch.strided:
        layout = "nested" if value.is_nested else value.layout
        return UnsupportedError(f"{name} is a {layout} tensor; expected a dense one (torch.strided)")
    for unresolved, what, resolve in (
        (value.is_quantized, f"is quantised ({value.dtype})", "dequantize"),
        (value.is_conj(), "has its lazy conj bit set", "resolve_conj"),
        (value.is_neg(), "has its lazy neg bit set", "resolve_neg"),
    ):
        if unresolved:
            return UnsupportedError(f"{name} {what}; pass {name}.{resolve}()")
    return DtypeError(
        f"{name} has dtype {value.dtype}, which cuattn cannot read; expected torch.float16, torch.bfloat16, "
        "torch.float32 or torch.float64 (torch.bool for a mask)"
    )


def _host_view(torch, value, dtype):
    """Return a NumPy array over a CPU tensor."""
    if value.requires_grad:
        value = value.detach()
    if dtype is _BFLOAT16:
        return value.view(torch.int16).numpy().view(_BFLOAT16)
    return value.numpy()


def _device_view(torch, name, value, dtype):
    """Return a CuPy array that keeps a CUDA tensor alive, or a copy of it where the last axis must be contiguous."""
    if name in _CONTIGUOUS_LAST and value.ndim and value.shape[-1] > 1 and value.stride(-1) != 1:
        value = value.contiguous()  # PyTorch's copy: on its own stream, in its own memory
    cupy = sys.modules.get("cupy") or device_array_module(name, value, torch.version.cuda)
    memory = cupy.cuda.UnownedMemory(value.data_ptr(), value.nbytes, value, value.get_device())
    itemsize = dtype.itemsize
    strides = tuple([step * itemsize for step in value.stride()])
    return cupy.ndarray(tuple(value.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


class _ForeignStream:
    """A stream of another library, by its address (the CUDA stream protocol)."""

    def __init__(self, ptr):
        self.ptr = ptr

    def __cuda_stream__(self):
        return 0, self.ptr


@functools.cache
def foreign_stream(device, ptr):
    """Return a CuPy stream of a device over one of another library.

    It is kept for good (PyTorch draws its streams from a small pool): making one costs microseconds, and CuPy 14.0
    destroys the foreign stream together with the object that wraps it.
    """
    from cupy.cuda import Stream

    return Stream.from_external(_ForeignStream(ptr))
