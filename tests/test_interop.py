"""Arrays of every kind enter, views of the same memory come out, and results go home as the same kind."""

import gc
import importlib
import subprocess
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cuattn
from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop import enter, torch_tensors

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def one(value, name="q"):
    """Enter a single array."""
    arrays, home = enter({name: value})
    return arrays[name], home


def library(name):
    """Import a framework that may be absent."""
    return pytest.importorskip(name)


# NumPy


@settings(max_examples=50, deadline=None)
@given(hnp.array_shapes(min_dims=0, min_side=0), st.sampled_from([*FLOATS, "bool", "int64", "complex64", "object"]))
def test_a_numpy_array_is_itself(shape, dtype):
    x = np.zeros(shape, dtype)
    array, home = one(x)
    assert array is x
    assert home.leave(array) is x
    assert (home.kind, home.backend, home.device) == ("numpy", "cpu", 0)
    with home.scope():
        pass


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("make", [np.asmatrix, lambda x: np.lib.stride_tricks.as_strided(x, (4, 3), (0, 8))])
def test_numpy_subclasses_and_views_share_memory(make):
    x = make(np.arange(6.0).reshape(2, 3))
    array, _ = one(x)
    assert type(array) is np.ndarray
    assert np.shares_memory(array, x)


def test_memmap_and_read_only_arrays_are_fine(tmp_path):
    x = np.memmap(tmp_path / "x.bin", np.float32, "w+", shape=(2, 3))
    x.flags.writeable = False
    array, _ = one(x)
    assert type(array) is np.ndarray
    assert np.shares_memory(array, x)
    assert not array.flags.writeable


def test_a_masked_array_is_refused_because_its_mask_would_be_lost():
    with pytest.raises(DtypeError, match=r"k is a numpy\.ma\.MaskedArray, whose mask would be lost"):
        one(np.ma.masked_array(np.zeros(3), [0, 1, 0]), "k")


def test_foreign_byte_order_is_refused():
    swapped = np.zeros(3, np.dtype(np.float32).newbyteorder())
    with pytest.raises(DtypeError, match=r"v has dtype .* byte order of another machine"):
        one(swapped, "v")


@pytest.mark.parametrize("value", [None, [[1.0]], 1.0, np.float32(1), "q", object(), np.ndarray, {}, (1, 2)])
def test_non_arrays_are_refused_by_name(value):
    with pytest.raises(DtypeError, match=r"^q is .*; expected an array of NumPy, CuPy, PyTorch or JAX"):
        one(value)


def test_only_optional_arguments_may_be_none():
    x = np.zeros((2, 3))
    arrays, _ = enter({"q": x, "bias": None, "mask": None})
    assert arrays == {"q": x, "bias": None, "mask": None} or arrays["q"] is x
    assert list(arrays) == ["q", "bias", "mask"]
    arrays, _ = enter({"q": x, "o": None}, optional={"o"})
    assert arrays["o"] is None
    with pytest.raises(DtypeError, match=r"^o is None"):
        enter({"q": x, "o": None})
    with pytest.raises(DtypeError, match="at least one array"):
        enter({"mask": None})


def test_none_stays_none_on_the_way_home():
    _, home = one(np.zeros(3))
    assert home.leave(None) is None


# PyTorch on the CPU


@pytest.mark.parametrize("dtype", [*FLOATS, "bool", "int32", "uint8"])
def test_torch_shares_memory_both_ways(dtype):
    torch = library("torch")
    base = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    for x in (base, base.transpose(0, 1), base[:, 1:], base[:1].expand(5, 3, 4), base[0, 0, 0], base[:0]):
        array, home = one(x)
        assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
        assert array.shape == tuple(x.shape)
        assert np.array_equal(array.astype(np.float64), x.to(torch.float64).numpy())
        assert array.size == 0 or array.ctypes.data == x.data_ptr()
        result = np.ascontiguousarray(array)
        back = home.leave(result)
        assert type(back) is torch.Tensor
        assert (back.dtype, back.device) == (x.dtype, x.device)
        assert result.size == 0 or back.data_ptr() == result.ctypes.data
        assert torch.equal(back.reshape(x.shape), x)
    assert (home.kind, home.backend) == ("torch", "cpu")


def test_torch_tensor_that_requires_grad_is_refused_while_grad_mode_is_on():
    torch = library("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    for value in (x, x * 2, torch.nn.Parameter(x.detach())):
        with pytest.raises(UnsupportedError, match=r"q requires grad .*q\.detach\(\).*torch\.autograd\.Function"):
            one(value)
        with torch.no_grad():
            array, home = one(value)
            assert array.ctypes.data == value.data_ptr()
            assert not home.leave(array).requires_grad
        with torch.inference_mode():
            one(value)
    plain = torch.zeros(2, 3)
    with pytest.raises(UnsupportedError, match="bias requires grad"):
        enter({"q": plain, "k": plain, "v": plain, "bias": x})


def test_torch_forward_mode_and_function_transforms_are_refused():
    torch = library("torch")
    x = torch.ones(2, 3)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match="k carries a forward-mode tangent"):
            one(torch.autograd.forward_ad.make_dual(x, x), "k")
        one(x)

    def f(value):
        with pytest.raises(UnsupportedError, match=r"torch\.(func|autograd\.Function)"):
            one(value)
        return value.sum()

    torch.func.grad(f)(x)
    torch.func.vmap(f)(x)
    torch.func.jvp(f, (x,), (x,))


def test_unusual_torch_tensors_get_a_clear_error():
    torch = library("torch")
    x = torch.ones(3, 3)
    refused = {
        "torch.sparse_coo": x.to_sparse(),
        r"neg bit.*resolve_neg": torch.ones(3, dtype=torch.complex64).conj().imag,
        r"conj bit.*resolve_conj": torch.ones(3, dtype=torch.complex64).conj(),
        "device 'meta'": torch.ones(3, device="meta"),
    }
    with pytest.warns(Warning):
        refused["quantised"] = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    with pytest.warns(Warning):
        refused["nested"] = torch.nested.nested_tensor([x, x])
    with torch._subclasses.FakeTensorMode():
        refused["no plain block of memory"] = torch.ones(3)
    for message, value in refused.items():
        with pytest.raises(UnsupportedError, match=f"v .*{message}"):
            one(value, "v")
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(DtypeError, match=rf"v has dtype {dtype}"):
            one(torch.zeros(3, dtype=dtype), "v")


# JAX on the CPU


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_are_views_and_come_back_on_their_device(dtype):
    jax = library("jax")
    x = jax.numpy.arange(24, dtype=dtype).reshape(2, 3, 4)
    array, home = one(x)
    assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    assert array.ctypes.data == x.unsafe_buffer_pointer()
    assert np.array_equal(array, np.asarray(x))
    back = home.leave(array.copy())
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.shape, back.devices()) == (x.dtype, x.shape, x.devices())
    assert bool((back == x).all())
    assert home.kind == "jax"


def test_a_float64_result_stays_float64_in_jax():
    jax = library("jax")
    _, home = one(jax.numpy.zeros(3))
    assert home.leave(np.full(3, 1 / 3)).dtype == np.float64


def test_jax_tracers_are_refused():
    jax = library("jax")
    x = jax.numpy.ones((2, 3))

    def f(value):
        with pytest.raises(UnsupportedError, match=r"do is a JAX tracer .*jax\.custom_vjp"):
            one(value, "do")
        return value.sum()

    jax.jit(f)(x)
    jax.grad(f)(x)
    jax.vmap(f)(x)


def test_unreadable_jax_arrays_get_a_clear_error():
    jax = library("jax")
    deleted = jax.numpy.ones(3)
    deleted.delete()
    with pytest.raises(DtypeError, match="deleted or donated"):
        one(deleted)
    with pytest.raises(DtypeError, match="key<"):
        one(jax.random.key(0))


def test_jax_arrays_on_several_devices():
    library("jax")
    script = """
import jax, pytest
import cuattn
from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop import enter
first, second = jax.devices()
x = jax.numpy.ones((2, 2))
y = jax.device_put(x, second)
arrays, home = enter({"q": y})
assert home.leave(arrays["q"].copy()).devices() == {second}
with pytest.raises(DtypeError, match="k is .* but q is"):
    enter({"q": x, "k": y})
mesh = jax.sharding.Mesh([first, second], "n")
with pytest.raises(UnsupportedError, match="v is spread over 2 devices"):
    enter({"v": jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("n")))})
"""
    env = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, cwd=cwd())


# Other producers of DLPack


class Producer:
    """A minimal foreign array."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_an_unknown_producer_is_read_in_place_and_gets_numpy_back():
    x = np.arange(6.0).reshape(2, 3)[:, ::2]
    array, home = one(Producer(x))
    assert np.shares_memory(array, x)
    assert np.array_equal(array, x)
    assert home.leave(array) is array
    assert home.kind == __name__.partition(".")[0]


def test_a_producer_with_a_namespace_gets_its_own_kind_back():
    class Named(Producer):
        def __array_namespace__(self, api_version=None):
            return types.SimpleNamespace(from_dlpack=Named)

    x = np.arange(6.0)
    array, home = one(Named(x))
    back = home.leave(array)
    assert type(back) is Named
    assert back.array is array
    with pytest.raises(DtypeError, match=r"k is .*Producer on the CPU, but q is .*Named on the CPU"):
        enter({"q": Named(x), "k": Producer(x)})


def test_bfloat16_of_an_unknown_producer_is_read_from_the_capsule():
    torch = library("torch")
    x = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[1:, ::2]
    array, home = one(Producer(x))
    assert array.dtype == BFLOAT16
    assert array.ctypes.data == x.data_ptr()
    assert array.strides == tuple(2 * step for step in x.stride())
    expected, pointer = x.float().numpy().copy(), x.data_ptr()
    del x  # the view keeps the memory alive
    assert np.array_equal(array.astype(np.float32), expected)
    assert array.ctypes.data == pointer
    assert home.leave(array) is array


def test_unreadable_producers_get_a_clear_error():
    torch = library("torch")
    with pytest.raises(UnsupportedError, match="q is on a device of DLPack type 8"):
        one(Producer(np.zeros(3), device=(8, 0)))
    with pytest.raises(DtypeError, match="cannot be read through DLPack"):
        one(Producer(torch.zeros(3, dtype=torch.float8_e5m2)))

    class Broken(Producer):
        def __dlpack_device__(self):
            raise BufferError("not here")

    with pytest.raises(DtypeError, match="not here"):
        one(Broken(np.zeros(3)))


# Mixtures


def test_mixed_kinds_name_both_arguments():
    torch, jax = library("torch"), library("jax")
    kinds = {"numpy.ndarray": np.zeros(3), "torch.Tensor": torch.zeros(3), "jaxlib": jax.numpy.zeros(3)}
    for first, x in kinds.items():
        for second, y in kinds.items():
            if first != second:
                with pytest.raises(DtypeError, match=f"k is a {second}.* on the CPU, but q is a {first}.* on the CPU"):
                    enter({"q": x, "bias": None, "k": y})


# The wrappers that the errors about automatic differentiation recommend


def operands():
    """Return q, k, v, do and the explicit gradients, as NumPy arrays."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 24, 8), np.float32)
    fwd = cuattn.forward(q, k, v, is_causal=True)
    return (q, k, v, do), cuattn.backward(do, q, k, v, fwd, is_causal=True, deterministic=True)


def test_an_autograd_function_around_forward_and_backward_works():
    torch = library("torch")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            fwd = cuattn.forward(q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, *fwd[:3])
            return fwd.o

        @staticmethod
        def backward(ctx, do):
            q, k, v, *fwd = ctx.saved_tensors
            return cuattn.backward(do, q, k, v, (*fwd, None), is_causal=True, deterministic=True)[:3]

    arrays, expected = operands()
    *inputs, do = (torch.from_numpy(x) for x in arrays)
    for x in inputs:
        x.requires_grad_()
    o = Attention.apply(*inputs)
    o.backward(do)
    for x, gradient in zip(inputs, expected[:3], strict=True):
        assert np.array_equal(x.grad.numpy(), gradient)


def test_a_custom_vjp_around_forward_and_backward_works():
    jax = library("jax")

    def like(*arrays):
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)

    def forward(q, k, v):
        def call(q, k, v):
            return cuattn.forward(q, k, v, is_causal=True)[:3]

        statistics = jax.ShapeDtypeStruct(q.shape[:-1], q.dtype)
        results = jax.pure_callback(call, (*like(q), statistics, statistics), q, k, v)
        return results[0], (q, k, v, *results)

    def backward(saved, do):
        def call(do, q, k, v, *fwd):
            return cuattn.backward(do, q, k, v, (*fwd, None), is_causal=True, deterministic=True)[:3]

        return jax.pure_callback(call, like(*saved[:3]), do, *saved)

    attention = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attention.defvjp(forward, backward)
    (q, k, v, do), expected = operands()
    _, pullback = jax.vjp(jax.jit(attention), q, k, v)
    for gradient, known in zip(pullback(jax.numpy.asarray(do)), expected[:3], strict=True):
        assert np.array_equal(np.asarray(gradient), known)


# CUDA, with stand-ins for what a machine without a GPU lacks


class CudaTensor:
    """Looks like a CUDA tensor and holds a CPU one."""

    is_cpu, is_cuda, requires_grad, is_nested = False, True, False, False

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
    fake.from_dlpack = lambda capsule: ("tensor", capsule)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return torch


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_cuda_tensor_becomes_a_cupy_array_over_its_memory(cuda_torch, dtype):
    cupy = library("cupy")
    x = cuda_torch.zeros(4, 6, dtype=getattr(cuda_torch, dtype))[1:, ::2]
    fake = CudaTensor(x)
    array, home = one(fake)
    assert isinstance(array, cupy.ndarray)
    assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    assert (array.shape, array.data.ptr, array.data.device_id) == (tuple(x.shape), x.data_ptr(), 1)
    assert array.strides == tuple(array.itemsize * step for step in x.stride())
    assert (home.kind, home.backend, home.device) == ("torch", "cuda", 1)
    alive = weakref.ref(fake)
    del fake, home
    gc.collect()
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


def test_results_go_to_torch_without_synchronisation(cuda_torch):
    library("cupy")
    _, home = one(CudaTensor(cuda_torch.zeros(3)))
    result = types.SimpleNamespace(__dlpack__=lambda *, stream: ("capsule", stream))
    assert home.leave(result) == ("tensor", ("capsule", -1))


def test_tensors_on_different_gpus_are_refused(cuda_torch):
    library("cupy")
    x = cuda_torch.zeros(3)
    with pytest.raises(DtypeError, match=r"k is .* on CUDA device 1, but q is .* on CUDA device 0"):
        enter({"q": CudaTensor(x, 0), "k": CudaTensor(x, 1)})


@pytest.mark.parametrize(("cuda", "extras"), [("13.0", ["cuda13"]), ("12.8", ["cuda12"]), (None, ["cuda13", "cuda12"])])
def test_a_cuda_tensor_without_cupy_says_what_to_install(cuda_torch, monkeypatch, cuda, extras):
    sys.modules["torch"].version.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match="importing CuPy failed") as caught:
        one(CudaTensor(cuda_torch.zeros(3)))
    commands = [f'pip install "cuattn[{extra}]"' for extra in extras]
    assert [command for command in commands if command in str(caught.value)] == commands
    assert str(caught.value).count("pip install") == len(extras)


class Recorder:
    """A stand-in for cupy.cuda that records what is made current, in order."""

    def __init__(self):
        self.events = []
        events = self.events

        class Entered:
            def __init__(self, label):
                self.label = label

            def __enter__(self):
                events.append(("enter", self.label))

            def __exit__(self, *exception):
                events.append(("exit", self.label))

        class Stream(Entered):
            @classmethod
            def from_external(cls, stream):
                return cls(stream.__cuda_stream__())

        self.Device, self.Stream = Entered, Stream


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.Device, cupy.cuda.Stream = recorder.Device, recorder.Stream
    cupy.cuda.UnownedMemory = cupy.cuda.MemoryPointer = lambda *values: values
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    torch_tensors._cupy_stream.cache_clear()

    class ndarray:
        dtype, data = np.dtype(np.float32), types.SimpleNamespace(device_id=3)

        def __init__(self, *values):
            pass

        def __dlpack__(self, **options):
            raise NotImplementedError

    cupy.ndarray = ndarray
    cupy.from_dlpack = lambda value: ndarray()
    yield recorder
    torch_tensors._cupy_stream.cache_clear()


def test_scope_makes_the_tensors_device_and_torch_stream_current(cuda_torch, recorder):
    _, home = one(CudaTensor(cuda_torch.zeros(3)))
    with home.scope(), pytest.raises(ZeroDivisionError), home.scope():
        _ = 1 / 0
    inside = [("enter", 1), ("enter", (0, 701)), ("enter", 1), ("enter", (0, 701))]
    assert recorder.events == [*inside, *(("exit", label) for _, label in reversed(inside))]


def test_scope_of_cupy_arrays_keeps_the_current_stream(recorder):
    array = sys.modules["cupy"].ndarray()
    taken, home = one(array)
    assert taken is array
    assert (home.kind, home.backend, home.device) == ("cupy", "cuda", 3)
    assert home.leave(array) is array
    with home.scope():
        pass
    assert recorder.events == [("enter", 3), ("exit", 3)]


def test_other_cuda_producers_go_through_cupy(recorder):
    array, home = one(Producer(None, device=(2, 3)))
    assert isinstance(array, sys.modules["cupy"].ndarray)
    assert (home.backend, home.device) == ("cuda", 3)
    assert home.leave(array) is array


# House rules


def cwd():
    """Return the folder that holds the package under test."""
    return importlib.import_module("cuattn").__path__[0].removesuffix("cuattn")


def test_no_framework_is_imported_in_order_to_look():
    script = """
import sys
import numpy as np
from cuattn.interop import enter
enter({"q": np.zeros((2, 3)), "mask": None})
try:
    enter({"q": [1.0]})
except TypeError:
    pass
loaded = {"torch", "jax", "cupy", "scipy", "rich"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=cwd())


# On a real GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_torch_round_trip(dtype):
    torch, cupy = library("torch"), library("cupy")
    x = torch.arange(24, device="cuda").reshape(4, 6).to(getattr(torch, dtype))[1:, ::2]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        array, home = one(x)
        assert array.data.ptr == x.data_ptr()
        with home.scope():
            assert cupy.cuda.get_current_stream().ptr == stream.cuda_stream
            result = cupy.ascontiguousarray(array)
            back = home.leave(result)
    stream.synchronize()
    assert (back.dtype, back.device, back.data_ptr()) == (x.dtype, x.device, result.data.ptr)
    assert torch.equal(back, x)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu_cupy_is_itself(dtype):
    cupy = library("cupy")
    x = cupy.zeros((3, 4), BFLOAT16 if dtype == "bfloat16" else dtype)
    array, home = one(x)
    assert array is x
    with home.scope():
        assert home.leave(array) is x


@pytest.mark.gpu
def test_gpu_jax_round_trip():
    jax, cupy = library("jax"), library("cupy")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    x = jax.numpy.arange(24, dtype="bfloat16").reshape(4, 6)
    array, home = one(x)
    assert array.data.ptr == x.unsafe_buffer_pointer()
    with home.scope():
        back = home.leave(cupy.copy(array))
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
