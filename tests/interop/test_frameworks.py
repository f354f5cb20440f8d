"""PyTorch tensors and JAX arrays on the CPU, and what they refuse."""

import numpy as np
import pytest

import cuattn
from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop import signature, to_backend, torch_tensors
from tests.interop.helpers import BFLOAT16, FLOATS, library, one, run

# PyTorch on the CPU


@pytest.mark.parametrize("dtype", [*FLOATS, "bool", "int32", "uint8"])
def test_torch_shares_memory_both_ways(dtype):
    torch = library("torch")
    base = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, dtype))
    for x in (base, base.transpose(0, 1), base[:, 1:], base[:1].expand(5, 3, 4), base[0, 0, 0], base[:0]):
        array, origin = one(x)
        assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
        assert array.shape == tuple(x.shape)
        assert np.array_equal(array.astype(np.float64), x.to(torch.float64).numpy())
        assert array.size == 0 or array.ctypes.data == x.data_ptr()
        result = np.ascontiguousarray(array)
        back = origin.from_backend(result)
        assert type(back) is torch.Tensor
        assert (back.dtype, back.device) == (x.dtype, x.device)
        assert result.size == 0 or back.data_ptr() == result.ctypes.data
        assert torch.equal(back.reshape(x.shape), x)
    assert (origin.kind, origin.backend) == ("torch", "cpu")


def test_torch_tensor_that_requires_grad_is_refused_while_grad_mode_is_on():
    torch = library("torch")
    x = torch.zeros(2, 3, requires_grad=True)
    for value in (x, x * 2, torch.nn.Parameter(x.detach())):
        with pytest.raises(UnsupportedError, match=r"q requires grad .*cuattn\.torch\.attention.*q\.detach\(\)"):
            one(value)
        with torch.no_grad():
            array, origin = one(value)
            assert array.ctypes.data == value.data_ptr()
            assert not origin.from_backend(array).requires_grad
        with torch.inference_mode():
            one(value)
    plain = torch.zeros(2, 3)
    with pytest.raises(UnsupportedError, match="bias requires grad"):
        to_backend({"q": plain, "k": plain, "v": plain, "bias": x})


def test_torch_forward_mode_and_function_transforms_are_refused():
    torch = library("torch")
    x = torch.ones(2, 3)
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match="k carries a forward-mode tangent"):
            one(torch.autograd.forward_ad.make_dual(x, x), "k")
        one(x)

    def f(value):
        with pytest.raises(UnsupportedError, match=r"cuattn\.torch\.attention"):
            one(value)
        return value.sum()

    torch.func.grad(f)(x)
    torch.func.vmap(f)(x)
    torch.func.jvp(f, (x,), (x,))


def test_torch_compile_runs_the_call_as_it_is():
    """The compiler breaks its graph around a call; it never looks inside, where it would meet no tensors."""
    torch = library("torch")
    x = torch.randn(2, 40, 8)
    bias, mask = torch.randn(40, 40), torch.randn(40, 40) > 0
    fwd, documents = cuattn.forward(x, x, x), cuattn.masks.document([30, 10])
    functions = [
        lambda x: cuattn.attention(x, x, x),
        lambda x: cuattn.attention(2 * x, x, x, is_causal=True) + 1,
        lambda x: cuattn.attention(x, x, x, bias=bias, mask=mask, softcap=5.0),
        lambda x: cuattn.attention(x, x, x, mask=documents, window=(3, 3)),
        lambda x: cuattn.forward(x, x, x, dropout_p=0.3, rng=5).lse,
        lambda x: cuattn.backward(x, x, x, x, fwd).dv,
        lambda x: cuattn.merge(fwd, fwd).o,
        lambda x: cuattn.attention(x.bfloat16(), x.bfloat16(), x.bfloat16()),
    ]
    for function in functions:
        torch._dynamo.reset()
        assert torch.equal(torch.compile(function, backend="eager")(x), function(x))
    torch._dynamo.reset()
    assert torch.equal(torch.compile(cuattn.attention, backend="eager")(x, x, x), functions[0](x))


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


def test_tensors_like_those_that_were_met_are_known_by_one_comparison(monkeypatch):
    """It says what asking for everything says, also of tensors that look alike and are not."""
    torch = library("torch")
    monkeypatch.setattr(torch_tensors, "_met", {})
    x, k = (torch.randn(4, 8, 8) for _ in range(2))
    layouts, addresses = signature({"q": x, "k": k})
    ((check, _),) = torch_tensors._met[x.shape, ("q", "k"), True]
    assert check(x, k) and not check(x, x)
    other = torch.randn(4, 8, 8)
    assert signature({"q": other, "k": k}) == (layouts, [other.data_ptr(), k.data_ptr()]) != (layouts, addresses)
    assert signature({"q": other, "bias": k})[0] != layouts
    longer, wanted = torch.randn(4, 8, 16), torch.randn(4, 8, 8, requires_grad=True)
    unlike = [x.double(), x[:3], x.mT, longer[..., :8], longer[..., ::2], x.to("meta"), torch._neg_view(x), wanted]
    unlike.append(torch.zeros(257)[1:].view(4, 8, 8))
    alone = []
    for value in [*unlike, *unlike]:
        alone.append(signature({"q": value, "k": k}))
        assert alone[-1] is None or alone[-1][0] != layouts
    assert alone[: len(unlike)] == alone[len(unlike) :] and [found is None for found in alone].count(True) == 4
    with torch.no_grad():
        for _ in range(2):
            assert signature({"q": wanted, "k": k})[0] == layouts
    assert signature({"q": wanted, "k": k}) is None
    with torch.autograd.forward_ad.dual_level():
        assert signature({"q": x, "k": k}) is None
    monkeypatch.setattr(torch_tensors, "_met", {})
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", None)  # as another version may be without it
    assert signature({"q": x, "k": k}) == (layouts, addresses) and not torch_tensors._met


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose_(0, 2),
        lambda x: x.resize_(4, 8, 4),
        lambda x: x.set_(x[1:].clone()),
        lambda x: x.set_(x.untyped_storage(), 1, (3, 8, 8)),
        lambda x: setattr(x, "data", x.double()),
        lambda x: x.requires_grad_(),
        lambda x: x.squeeze_(),
        lambda x: x.mul_(2),
    ],
)
def test_a_tensor_that_changes_in_place_is_looked_at_anew(change, monkeypatch):
    torch = library("torch")
    x, others = torch.randn(4, 8, 8), {"k": torch.randn(4, 8, 8), "v": torch.randn(4, 8, 8)}
    first = signature({"q": x, **others})
    assert signature({"q": x, **others}) == first
    change(x)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found = signature({"q": x, **others})
            monkeypatch.setattr(torch_tensors, "_met", {})
            assert found == signature({"q": x, **others})
            assert grad or found is not None


# JAX on the CPU


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_jax_arrays_are_views_and_come_back_on_their_device(dtype):
    jax = library("jax")
    x = jax.numpy.arange(24, dtype=dtype).reshape(2, 3, 4)
    array, origin = one(x)
    assert array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype))
    assert array.ctypes.data == x.unsafe_buffer_pointer()
    assert np.array_equal(array, np.asarray(x))
    back = origin.from_backend(array.copy())
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.shape, back.devices()) == (x.dtype, x.shape, x.devices())
    assert bool((back == x).all())
    assert origin.kind == "jax"


def test_a_float64_result_stays_float64_in_jax():
    jax = library("jax")
    _, origin = one(jax.numpy.zeros(3))
    assert origin.from_backend(np.full(3, 1 / 3)).dtype == np.float64


def test_jax_tracers_are_refused():
    jax = library("jax")
    x = jax.numpy.ones((2, 3))

    def f(value):
        with pytest.raises(UnsupportedError, match=r"do is a JAX tracer .*cuattn\.jax\.attention"):
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
from cuattn.interop import signature, to_backend, torch_tensors
first, second = jax.devices()
x = jax.numpy.ones((2, 2))
y = jax.device_put(x, second)
arrays, origin = to_backend({"q": y})
assert origin.from_backend(arrays["q"].copy()).devices() == {second}
with pytest.raises(DtypeError, match="k is .* but q is"):
    to_backend({"q": x, "k": y})
mesh = jax.sharding.Mesh([first, second], "n")
with pytest.raises(UnsupportedError, match="v is spread over 2 devices"):
    to_backend({"v": jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("n")))})
"""
    run(script, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu", PATH="")


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
