"""Arrays on a GPU: with stand-ins for what a machine without one lacks, and for real."""

import contextlib
import functools
import gc
import sys
import types
import weakref

import numpy as np
import pytest

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop import to_backend, torch_tensors
from cuattn.interop.origin import CuPy, constructor
from tests.interop.helpers import BFLOAT16, FLOATS, Producer, library, one

# CUDA, with stand-ins for what a machine without a GPU lacks


class CudaTensor:
    """Looks like a CUDA tensor and holds a CPU one."""

    is_cpu, is_cuda, requires_grad, is_nested, __torch_dispatch__ = False, True, False, False, None

    def __init__(self, tensor, index=1):
        self.tensor, self.index = tensor, index

    def __getattr__(self, name):
        return getattr(self.tensor, name)

    def get_device(self):
        return self.index


@pytest.fixture
def cuda_torch(monkeypatch):
    """The real torch, in which CudaTensor counts as a tensor."""
    torch = library("torch")
    fake = types.ModuleType("torch")
    fake.__dict__.update(vars(torch))
    fake.Tensor = CudaTensor
    fake.version = types.SimpleNamespace(cuda="13.0")
    fake.cuda = types.SimpleNamespace(current_stream=lambda index: types.SimpleNamespace(cuda_stream=700 + index))
    fake._C = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", fake)
    return torch


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cuda_tensor_becomes_a_cupy_array_over_its_memory(cuda_torch, dtype):
    cupy = library("cupy")
    x = cuda_torch.zeros(4, 6, dtype=getattr(cuda_torch, dtype))[1:, ::2]
    fake = CudaTensor(x)
    array, origin = one(fake, "bias")
    assert isinstance(array, cupy.ndarray)
    assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    assert (array.shape, array.data.ptr, array.data.device_id) == (tuple(x.shape), x.data_ptr(), 1)
    assert array.strides == tuple(array.itemsize * step for step in x.stride())
    assert (origin.kind, origin.backend, origin.device) == ("torch", "cuda", 1)
    alive = weakref.ref(fake)
    del fake, origin
    gc.collect()
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


def test_tensors_on_different_gpus_are_refused(cuda_torch):
    library("cupy")
    x = cuda_torch.zeros(3)
    with pytest.raises(DtypeError, match=r"k is .* on CUDA device 1, but q is .* on CUDA device 0"):
        to_backend({"q": CudaTensor(x, 0), "k": CudaTensor(x, 1)})


@pytest.mark.parametrize(("cuda", "extras"), [("13.0", ["cuda13"]), ("12.8", ["cuda12"]), (None, ["cuda13", "cuda12"])])
def test_a_cuda_tensor_without_cupy_says_what_to_install(cuda_torch, monkeypatch, cuda, extras):
    sys.modules["torch"].version.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match="importing CuPy failed") as caught:
        one(CudaTensor(cuda_torch.zeros(3)))
    commands = [f'pip install "cuattn[{extra}]"' for extra in extras]
    assert [command for command in commands if command in str(caught.value)] == commands
    assert str(caught.value).count("pip install") == len(extras)


class Current:
    """A device or a stream that notes, in order, when it is made current."""

    def __init__(self, events, label):
        self.events, self.label = events, label

    def __enter__(self):
        self.events.append(("enter", self.label))

    def __exit__(self, *exception):
        self.events.append(("exit", self.label))


@pytest.fixture
def events(monkeypatch):
    """What is made current of a stand-in for CuPy."""
    events = []
    current = functools.partial(Current, events)
    cuda = types.ModuleType("cupy.cuda")
    cuda.Device, cuda.get_current_stream = current, lambda: current("current stream")
    cuda.Stream = types.SimpleNamespace(from_external=lambda stream: current(stream.__cuda_stream__()))
    cuda.UnownedMemory = cuda.MemoryPointer = lambda *values: values

    class ndarray:
        dtype, data = np.dtype(np.float32), types.SimpleNamespace(device_id=3)

        def __init__(self, *values):
            pass

        def __dlpack__(self, **options):
            raise NotImplementedError

    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.ndarray, cupy.from_dlpack = cuda, ndarray, lambda value: ndarray()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    torch_tensors.foreign_stream.cache_clear()
    yield events
    torch_tensors.foreign_stream.cache_clear()


def nested(*labels):
    """Return the events of things that are made current one in another."""
    return [("enter", label) for label in labels] + [("exit", label) for label in labels[::-1]]


def test_scope_makes_the_tensors_device_and_torch_stream_current(cuda_torch, events):
    _, origin = one(CudaTensor(cuda_torch.zeros(3)))
    with origin.scope(), pytest.raises(ZeroDivisionError), origin.scope():
        _ = 1 / 0
    assert events == nested(1, (0, 701), 1, (0, 701))


def test_whether_the_arrays_device_is_current(events):
    cupy = sys.modules["cupy"]
    _, origin = one(cupy.ndarray())
    cupy.cuda.runtime = types.SimpleNamespace(getDevice=lambda: current)
    for current in (3, 0):
        assert origin.is_current == (current == 3)
    assert not events


def test_scope_of_cupy_arrays_keeps_the_current_stream(events):
    array = sys.modules["cupy"].ndarray()
    taken, origin = one(array)
    assert taken is array
    assert (origin.kind, origin.backend, origin.device) == ("cupy", "cuda", 3)
    assert origin.from_backend(array) is array
    with origin.scope():
        pass
    assert events == nested(3, "current stream")


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_arrays_are_made_as_by_their_class(shape):
    cupy = library("cupy")
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, 4096, None, 0), 0)
    make = constructor(cupy.ndarray)
    assert make is not cupy.ndarray
    cupy.cuda.set_allocator(lambda size: memory)
    try:
        found, wanted = (of(shape, BFLOAT16) for of in (make, cupy.ndarray))
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    for name in ("shape", "dtype", "strides", "size", "nbytes", "base", "_c_contiguous", "_f_contiguous"):
        assert getattr(found, name) == getattr(wanted, name)
    assert type(found) is cupy.ndarray and found.data.ptr == memory.ptr
    assert constructor(type("ndarray", (), {})).__name__ == "ndarray"  # without an inner constructor


@pytest.mark.parametrize("rows", [5, 1 << 18])
def test_small_results_share_a_piece_of_memory(rows):
    cupy = library("cupy")
    taken = []

    def allocate(size):
        taken.append(size)
        memory = cupy.cuda.UnownedMemory(4096 << 10 * len(taken), size, None, 0)
        return cupy.cuda.MemoryPointer(memory, 0)

    cupy.cuda.set_allocator(allocate)
    try:
        wanted = [((rows, 8), BFLOAT16), ((rows,), np.dtype(np.float32))]
        results, addresses, scratch = CuPy.at(0).allocator(wanted)(100, False, ())
    finally:
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)
    assert [(x.shape, x.dtype) for x in results] == wanted and scratch.mem.size == 100
    assert [x.data.ptr for x in results] + [scratch.ptr] == addresses
    first, second = (x.data.mem for x in results)
    assert (first is second) == (rows == 5) and len(taken) == (2 if rows == 5 else 3)
    assert addresses[1] - addresses[0] >= 16 * rows and addresses[1] % 256 == 0


@pytest.mark.usefixtures("events")
def test_other_cuda_producers_go_through_cupy():
    array, origin = one(Producer(None, device=(2, 3)))
    assert isinstance(array, sys.modules["cupy"].ndarray)
    assert (origin.backend, origin.device) == ("cuda", 3)
    assert origin.from_backend(array) is array


# On a real GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["q", "bias"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_torch_tensors_are_read_in_place(dtype, name):
    torch, cupy = library("torch"), library("cupy")
    whole = torch.arange(24, device="cuda").reshape(4, 6).to(getattr(torch, dtype))
    x = whole[1:, 1::2] if name == "bias" else whole[1:, 1:3]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        array, origin = one(x, name)
        assert array.data.ptr == x.data_ptr()
        with origin.scope():
            assert cupy.cuda.get_current_stream().ptr == origin.stream().ptr == stream.cuda_stream
            wide = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array
            assert wide.get().tolist() == x.tolist()


@pytest.mark.gpu
def test_gpu_torch_copies_a_strided_last_axis():
    torch = library("torch")
    x = torch.arange(24.0, device="cuda").reshape(4, 6)[:, ::2]
    array, _ = one(x)
    assert array.data.ptr != x.data_ptr() and array.get().tolist() == x.tolist()


def allocated(library_name, together):
    """Return results, addresses and their keeper as a origin of one kind allocates them."""
    framework = library(library_name)
    q = framework.zeros((2, 3), **({"device": "cuda"} if library_name == "torch" else {}))
    _, origin = one(q)
    wanted = [((2, 3, 5), BFLOAT16), ((), np.dtype(np.float64)), ((7, 0), np.dtype(np.float32))]
    with origin.scope():
        return origin.allocator(wanted)(100, together, ()), wanted


@pytest.mark.gpu
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_gpu_results_are_the_callers_kind_of_array(name, together):
    (results, addresses, keeper), wanted = allocated(name, together)
    assert len(addresses) == 4 and addresses[-1] and keeper is not None
    for result, address, (shape, dtype) in zip(results, addresses, wanted, strict=False):
        assert type(result).__module__.partition(".")[0] == name
        assert tuple(result.shape) == shape and str(result.dtype).removeprefix("torch.") == dtype.name
        contiguous = result.is_contiguous() if name == "torch" else result.flags.c_contiguous
        assert contiguous and (0 in shape or (result.data_ptr() if name == "torch" else result.data.ptr) == address)


@pytest.mark.parametrize("shape", [(), (7, 0), (2, 1, 5)])
@pytest.mark.parametrize("private", [True, False])
def test_tensors_are_made_as_by_empty(shape, private):
    torch = library("torch")
    without = types.SimpleNamespace(_C=None, empty_strided=torch.empty_strided)
    made = torch_tensors.constructor(torch if private else without, "cpu")
    assert isinstance(made, types.BuiltinFunctionType) == private
    for context in (contextlib.nullcontext(), torch.inference_mode()):
        with context:
            wanted, found = (
                torch.empty(shape, dtype=torch.bfloat16),
                made(shape, torch_tensors.strides_of(shape), torch.bfloat16),
            )
        for name in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
            assert getattr(found, name) == getattr(wanted, name)
        assert (found.stride(), found.is_inference()) == (wanted.stride(), wanted.is_inference())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_gpu_any_result_keeps_a_shared_piece_of_memory(name):
    (results, addresses, keeper), _ = allocated(name, together=True)
    begin, end = min(addresses), max(addresses) + 100
    kept = results[1]
    del results, keeper
    gc.collect()
    for _ in range(50):
        (_, others, _), _ = allocated(name, together=True)
        assert not any(begin <= address < end for address in others)
    del kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_cupy_is_itself(dtype):
    cupy = library("cupy")
    x = cupy.zeros((3, 4), BFLOAT16 if dtype == "bfloat16" else dtype)
    array, origin = one(x)
    assert array is x
    with origin.scope():
        assert origin.from_backend(array) is x


@pytest.mark.gpu
def test_gpu_jax_round_trip():
    jax, cupy = library("jax"), library("cupy")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    x = jax.numpy.arange(24, dtype="bfloat16").reshape(4, 6)
    array, origin = one(x)
    assert array.data.ptr == x.unsafe_buffer_pointer()
    with origin.scope():
        back = origin.from_backend(cupy.copy(array))
    assert back.devices() == x.devices()
    assert bool((back == x).all())


@pytest.mark.gpu
def test_gpu_foreign_producer_is_ordered_by_the_handshake():
    cupy = library("cupy")

    class Wrapped(Producer):
        streams = ()

        def __dlpack__(self, *, stream=None, **options):
            self.streams = (*self.streams, stream)
            return self.array.__dlpack__(stream=stream, **options)

    x = Wrapped(cupy.arange(6.0), device=(2, 0))
    with cupy.cuda.Stream() as stream:
        array, _ = one(x)
        assert x.streams == (stream.ptr,)
        assert array.data.ptr == x.array.data.ptr
