"""cuattn.jax: the primitives compute what cuattn's functions do, and JAX's transformations compose."""

import functools
import os
import sys

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn import masks

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or there is no memory left for others on a GPU
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import buffer_callback  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from cuattn.jax import attention  # noqa: E402
from tests.tolerances import assert_close  # noqa: E402

N, D = 7, 4
both = pytest.mark.parametrize("stage", [lambda f: f, jax.jit], ids=["eager", "jit"])


@pytest.fixture(autouse=True)
def double_precision_on_the_cpu():
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        yield


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def qkv(*leading, dtype=np.float64):
    return [jnp.asarray(normal(*leading, N, D, seed=seed, dtype=dtype)) for seed in range(3)]


def table_score(s, b, h, i, j, table, factor):
    return s * factor + np.tanh(s) * table[h, i - j + N - 1]


HALVES = masks.causal_document([3, 4])
BIAS, TABLE = normal(4, 1, N, seed=8), normal(4, 2 * N - 1, seed=9)
CASES = {  # keywords, and the heads of k and v
    "plain": ({}, 4),
    "causal": ({"is_causal": True}, 4),
    "window": ({"window": (2, 1), "scale": 0.3, "softcap": 1.5}, 4),
    "columns": ({"mask": HALVES}, 4),
    "boolean": ({"mask": HALVES.dense()[None]}, 4),
    "bias": ({"bias": BIAS}, 4),
    "groups": ({"is_causal": True, "enable_gqa": True, "bias": BIAS}, 2),
    "score": ({"score": table_score, "score_args": (TABLE, 0.7)}, 4),
}
cases = pytest.mark.parametrize("name", CASES)


def case(name):
    """Return a function of the operands that are differentiated, these, and the keywords of cuattn's functions."""
    keywords, kv_heads = CASES[name]
    q, k, v = normal(2, 4, N, D), normal(2, kv_heads, N, D, seed=1), normal(2, kv_heads, N, D, seed=2)
    learned = {name: keywords[name] for name in ("bias", "score_args") if name in keywords}
    further = [learned["bias"]] if "bias" in learned else list(learned.get("score_args", ())[:1])

    def function(q, k, v, *further):
        changed = dict(keywords)
        if "bias" in changed:
            changed["bias"] = further[0]
        if "score_args" in changed:
            changed["score_args"] = (further[0], *changed["score_args"][1:])
        return attention(q, k, v, **changed)

    return function, tuple(map(jnp.asarray, (q, k, v, *further))), keywords


def flat(gradients):
    """Return gradients of cuattn as `case` orders them."""
    return [x for x in (*gradients, *gradients.dscore) if x is not None]


@both
@cases
def test_values_and_gradients_are_those_of_the_core(name, stage):
    function, operands, keywords = case(name)
    do = jnp.asarray(normal(2, 4, N, D, seed=5))
    arrays = list(map(np.asarray, operands[:3]))
    fwd = cuattn.forward(*arrays, **keywords)
    o, pull = jax.vjp(stage(function), *operands)
    assert isinstance(o, jax.Array)
    np.testing.assert_array_equal(o, fwd.o)
    gradients = cuattn.backward(np.asarray(do), *arrays, fwd, **keywords)
    for found, known in zip(stage(pull)(do), flat(gradients), strict=True):
        np.testing.assert_array_equal(found, known)


@both
@cases
def test_derivatives_agree_with_differences(name, stage):
    function, operands, _ = case(name)
    check_grads(stage(function), operands, order=1, modes=["fwd", "rev"])


@cases
def test_second_derivatives_agree_with_differences(name):
    """Reverse over reverse, forward over reverse, reverse over forward."""
    function, operands, _ = case(name)

    def loss(*operands):
        return jnp.sin(function(*operands)).sum()

    def along(*operands):
        return jax.jvp(function, operands, tuple(map(jnp.cos, operands)))[1]

    everything = tuple(range(len(operands)))
    check_grads(jax.jit(jax.grad(loss, everything)), operands, order=1, modes=["fwd", "rev"])
    check_grads(jax.jit(along), operands, order=1, modes=["rev"])


@both
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_dtypes(dtype, stage):
    q, k, v = qkv(2, 3, dtype=dtype)
    fwd = cuattn.forward(q, k, v)
    bias = normal(N, N)
    o, pull = jax.vjp(stage(attention), q, k, v)
    np.testing.assert_array_equal(o, fwd.o)
    for found, known in zip(stage(pull)(q), cuattn.backward(q, q, k, v, fwd)[:3], strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, known)
    wide = jax.grad(lambda bias: attention(q, k, v, bias=bias).astype(jnp.float32).sum())(bias.astype(np.float32))
    assert wide.dtype == np.float32


@both
@cases
@pytest.mark.parametrize("axis", [0, 2])
def test_vmap_is_a_loop(name, axis, stage):
    """Also of gradients, which each call has of its own by what the calls share."""
    function, operands, _ = case(name)
    operands = [jnp.stack([x, x[::-1]], min(axis, x.ndim)) if index % 2 == 0 else x for index, x in enumerate(operands)]
    axes = [min(axis, x.ndim - 1) if index % 2 == 0 else None for index, x in enumerate(operands)]
    everything = tuple(range(len(operands)))
    tangents = tuple([jnp.cos(x) for x in operands])

    def loss(*operands):
        return jnp.sin(function(*operands)).sum()

    for transformed in (
        function,
        jax.grad(loss, everything),
        lambda *operands: jax.jvp(function, operands[: len(axes)], operands[len(axes) :])[1],
    ):
        twice = axes * (1 + (transformed.__name__ == "<lambda>"))
        given = (*operands, *tangents)[: len(twice)]
        mapped = stage(jax.vmap(transformed, twice))(*given)
        for index in range(2):
            one = [x if dim is None else jnp.take(x, index, dim) for x, dim in zip(given, twice, strict=True)]
            for found, known in zip(jax.tree.leaves(mapped), jax.tree.leaves(transformed(*one)), strict=True):
                np.testing.assert_allclose(found[index], known, atol=1e-12)


def test_jacobians_and_hessians():
    q, k, v = qkv()

    def loss(q, k):
        return jnp.sin(attention(q, k, v)).sum()

    forward, reverse = jax.jacfwd(attention)(q, k, v), jax.jacrev(attention)(q, k, v)
    np.testing.assert_allclose(forward, reverse, atol=1e-12)
    once, twice = jax.hessian(loss, (0, 1))(q, k), jax.jacrev(jax.jacrev(loss, (0, 1)), (0, 1))(q, k)
    for one, other in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


def test_ranks_and_broadcast_axes():
    (q, k, v), (one, *_) = qkv(2, 3), qkv()
    for operands in ((one, one, one), (q, one, v), (one, k, v[:1]), (q[0], k, v)):
        o = jax.jit(attention)(*operands)
        np.testing.assert_array_equal(o, cuattn.attention(*operands))
        gradients = jax.grad(lambda *x: attention(*x).sum(), (0, 1, 2))(*operands)
        assert [x.shape for x in gradients] == [x.shape for x in operands]


def test_empty_arrays():
    q, k, v = qkv(2, 3)
    assert jax.jit(attention)(q[:0], k[:0], v[:0]).shape == (0, 3, N, D)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda q: attention(q, k[..., :0, :], v[..., :0, :]).sum()))(q), 0)


def test_masks_of_traced_vectors():
    """Under jit the vectors of a column mask are arrays like others, one compilation for all documents."""
    q, k, v = qkv(2, 3)

    @jax.jit
    def gradient(q, *columns):
        return jax.grad(lambda q: attention(q, k, v, mask=columns).sum())(q)

    for lengths in ([3, 4], [1, 1, 5]):
        mask = masks.causal_document(lengths)
        columns = [mask.lts, mask.lte, mask.uts, mask.ute]
        known = jax.grad(lambda q, mask=mask: attention(q, k, v, mask=mask).sum())(q)
        np.testing.assert_array_equal(gradient(q, *columns), known)
        several = [jnp.stack([x, x]) for x in columns]
        np.testing.assert_array_equal(jax.vmap(gradient, (None, 0, 0, 0, 0))(q, *several)[1], known)
    assert gradient._cache_size() == 1


@both
@pytest.mark.parametrize("place", ["mask", "from_function", "score"])
def test_functions_see_the_batch_of_their_call(place, stage):
    def visible(b, h, i, j):
        return (b == 0) | (i >= j)

    keywords = {
        "mask": {"mask": visible},
        "from_function": {"mask": masks.from_function(visible, N, batch=2, heads=3)},
        "score": {"score": lambda s, b, h, i, j: np.where(visible(b, h, i, j), s, -np.inf)},
    }[place]
    q, k, v = qkv(4, 2, 3)
    known = cuattn.attention(q[1], k[1], v[1], **keywords)
    np.testing.assert_array_equal(stage(jax.vmap(functools.partial(attention, **keywords)))(q, k, v)[1], known)


def test_arguments_of_a_score_function_are_mapped():
    """Twice, of some axes or all, with gradients of their own."""

    def score(s, b, h, i, j, slope, shift):
        return s * slope[h] + shift[b % 2, i - j]

    q, slopes, shifts = jnp.asarray(normal(5, 3, 2, 4, N, D)), jnp.asarray(normal(5, 4)), jnp.asarray(normal(3, 2, N))

    def loss(q, slope, shift):
        return jnp.sin(attention(q, q, q, score=score, score_args=(slope, shift))).sum()

    everything = jax.grad(loss, (0, 1, 2))
    found = jax.jit(jax.vmap(jax.vmap(everything, (0, None, 0)), (0, 0, None)))(q, slopes, shifts)
    for outer, inner in np.ndindex(5, 3):
        known = everything(q[outer, inner], slopes[outer], shifts[inner])
        for one, other in zip(found, known, strict=True):
            np.testing.assert_allclose(one[outer, inner], other, atol=1e-12)


def test_integers_of_a_score_function():
    q, k, v = qkv(2, 3)
    document = jnp.asarray([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])

    def score(s, b, h, i, j, document, slope):
        return np.where(document[b, i] == document[b, j], s * slope[h], -np.inf)

    def loss(q, slope, document):
        return attention(q, k, v, score=score, score_args=(document, slope)).sum()

    slope = jnp.asarray([0.5, 1.0, 2.0])
    check_grads(functools.partial(jax.jit(loss), document=document), (q, slope), order=1, modes=["fwd", "rev"])


def test_scan_checkpoint_and_cond():
    q, k, v = qkv(2, 3)

    def layer(x, _):
        return x + jax.checkpoint(attention)(x, k, v), None

    def network(x):
        x = jax.lax.scan(layer, x, length=2)[0]
        return jax.lax.cond(x.sum() > 0, lambda x: attention(x, x, x), lambda x: x, x).sum()

    def plain(x):
        for _ in range(2):
            x = x + attention(x, k, v)
        return (attention(x, x, x) if x.sum() > 0 else x).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(network))(q), jax.grad(plain)(q), atol=1e-12)


def test_calls_on_a_gpu_are_programs(monkeypatch):
    """Compiled once for what is not in the arrays."""
    monkeypatch.setattr(cuattn.jax.primitives, "on_host", lambda array: False)
    compiled = []
    monkeypatch.setattr(buffer_callback, "buffer_callback", counted(compiled))
    q, k, v = qkv(2, 3)
    for scale in (0.5, 0.5, 0.25):
        found = jax.grad(lambda q, scale=scale: attention(q, k, v, mask=masks.causal(N), scale=scale).sum())(q)
        fwd = cuattn.forward(q, k, v, is_causal=True, scale=scale)
        known = cuattn.backward(jnp.ones_like(q), q, k, v, fwd, is_causal=True, scale=scale).dq
        np.testing.assert_array_equal(found, known)
    assert len(compiled) == 4  # forward and backward, for two scales
    np.testing.assert_array_equal(attention(q, k, v), cuattn.attention(q, k, v))


def counted(calls):
    """Return JAX's function, which notes its calls."""
    plain = buffer_callback.buffer_callback
    return lambda *args, **keywords: calls.append(args) or plain(*args, **keywords)


def test_arrays_of_numpy_are_taken():
    q, k, v = map(np.asarray, qkv(2))
    assert isinstance(attention(q, k, v), jax.Array)
    np.testing.assert_array_equal(jax.jit(attention)(q, k, v), cuattn.attention(q, k, v))
    _, pull = jax.vjp(attention, q, k, v)
    assert all(isinstance(x, jax.Array) for x in pull(q))


@both
@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"k": np.zeros((3, N, D + 1))}, cuattn.ShapeError, r"q has shape \(2, 3, 7, 4\) and k \(3, 7, 5\)"),
        ({"v": np.zeros((3, N, D), np.float32)}, cuattn.DtypeError, "v has dtype float32 and q float64"),
        ({"bias": np.zeros((N, 2))}, cuattn.ShapeError, r"bias has shape \(7, 2\)"),
        ({"mask": np.zeros((N, 2), bool)}, cuattn.ShapeError, r"mask has shape \(7, 2\)"),
        ({"mask": masks.causal(5)}, cuattn.ShapeError, "mask is <ColumnMask 5 queries"),
        ({"mask": (np.zeros(N, int),) * 3}, cuattn.DtypeError, "mask is tuple of 3; expected the four vectors"),
        ({"is_causal": "left"}, cuattn.ArgumentError, "is_causal is 'left'"),
        ({"score_args": (1.0,)}, cuattn.ArgumentError, "score_args has 1 items but score is None"),
        ({"bias": "x"}, cuattn.DtypeError, "bias is str; expected an array of JAX or NumPy"),
        ({"scale": "x"}, cuattn.DtypeError, "scale is 'x'; expected a real number"),
    ],
)
def test_errors_name_the_argument(keywords, error, message, stage):
    arrays = dict(zip("qkv", qkv(2, 3), strict=True))
    arrays |= {name: jnp.asarray(keywords[name]) for name in keywords if name in arrays}
    keywords = {name: value for name, value in keywords.items() if name not in arrays}
    with pytest.raises(error, match=message):
        stage(lambda q, k, v: attention(q, k, v, **keywords))(**arrays)


def test_a_traced_scale_is_refused():
    q, k, v = qkv(2)
    with pytest.raises(cuattn.DtypeError, match=r"scale is .*expected a real number"):
        jax.jit(lambda scale: attention(q, k, v, scale=scale))(0.5)


def test_what_cannot_be_differentiated_says_so():
    q, k, v = qkv(2)

    def square(x):
        return attention(x, k, v).sum()

    with pytest.raises(cuattn.UnsupportedError, match=r"jax\.jvp of jax\.jvp"):
        jax.jacfwd(jax.jacfwd(square))(q)
    with pytest.raises(cuattn.UnsupportedError, match="third derivative"):
        jax.grad(lambda x: jax.grad(lambda x: jax.grad(square)(x).sum())(x).sum())(q)


def test_an_older_jax_says_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.buffer_callback", None)
    with pytest.raises(cuattn.UnsupportedError, match=r"needs jax\.experimental\.buffer_callback, which JAX .* lacks"):
        jax.jit(lambda *x: attention(*x))(*qkv(2))


def test_other_platforms_are_refused():
    with pytest.raises(cuattn.UnsupportedError, match=r"staged for platform.*'tpu'"):
        jax.jit(attention).trace(*qkv(2)).lower(lowering_platforms=("tpu",))


def gpu():
    """Return JAX's first GPU."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX has no GPU here")


LONG = 300
LONG_CASES = {
    "causal": ({"is_causal": True}, 4),
    "columns": ({"mask": masks.causal_document([100, 200])}, 4),
    "bias": ({"bias": normal(4, 1, LONG)}, 4),
    "groups": ({"is_causal": True, "enable_gqa": True}, 2),
    "score": ({"score": lambda s, b, h, i, j, slope: s - slope[h] * (i - j), "score_args": (normal(4) / 8,)}, 4),
}


def on(device, dtype, function, arrays):
    """Return the results of a function on a device, of arrays of floats of a dtype, as arrays of NumPy."""
    with jax.default_device(device):
        arrays = jax.tree.map(lambda x: jnp.asarray(x.astype(dtype)), arrays)
        return [np.asarray(x) for x in jax.tree.leaves(function(arrays))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("name", LONG_CASES)
def test_gpu_under_jit(name, dtype):
    """On XLA's buffers and stream: the values of the core's call, and gradients as right as the CPU's."""
    keywords, kv_heads = LONG_CASES[name]
    q, k, v, do = (normal(2, heads, LONG, 64, seed=seed) for seed, heads in enumerate((4, kv_heads, kv_heads, 4)))
    learned = {key: keywords[key] for key in ("bias", "score_args") if key in keywords}
    rest = {key: value for key, value in keywords.items() if key not in learned}

    def value(arrays, function=attention):
        return function(*arrays[:3], **rest, **arrays[4])

    @jax.jit
    def both(arrays):
        q, k, v, do, learned = arrays
        o, pull = jax.vjp(lambda q, k, v, learned: value((q, k, v, do, learned)), 2 * q, k, v, learned)
        return o, pull(do * 2)

    arrays = (q, k, v, do, learned)
    found = on(gpu(), dtype, both, arrays)
    core = on(gpu(), dtype, functools.partial(value, function=cuattn.attention), (2 * q, *arrays[1:]))
    np.testing.assert_array_equal(found[0], core[0])
    rounded = jax.tree.map(lambda x: x.astype(dtype), arrays)
    cpu, short = jax.devices("cpu")[0], np.float32 if dtype == np.float64 else dtype
    exact, low = on(cpu, np.float64, both, rounded), on(cpu, short, both, arrays)
    for one, known, textbook in zip(found, exact, low, strict=True):
        assert_close(one, known, textbook, magnitude=LONG)


@pytest.mark.gpu
def test_gpu_order_of_streams():
    """What comes before and after a call in a program of XLA is ordered with it; nothing is read or freed too early."""

    def step(x, _):
        return attention(x * 2, x[..., ::-1, :], x * 0.5) * 2, None

    with jax.default_device(gpu()):
        first = x = jnp.asarray(normal(1, 8, 2048, 64, dtype=np.float32))
        one = jax.jit(lambda x: step(x, None)[0])
        for _ in range(20):
            x = one(x).block_until_ready()
        for _ in range(3):
            np.testing.assert_array_equal(jax.jit(lambda x: jax.lax.scan(step, x, length=20)[0])(first), x)


def textbook(q, k, v):
    """Return attention, every step of it in the arrays' dtype."""
    return jax.nn.softmax(q @ k.mT * q.shape[-1] ** -0.5) @ v


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_gpu_second_derivatives(dtype):
    """Hessian-vector products in both orders of the modes are as right as the textbook's."""

    def products(function, operands):
        def loss(*x):
            return (function(*x).astype(jnp.float64) ** 2).sum()

        everything, along = (0, 1, 2), tuple([jnp.cos(x) for x in operands])

        def slope(*x):
            return jax.jvp(loss, x, along)[1]

        return jax.jvp(jax.grad(loss, everything), operands, along)[1], jax.grad(slope, everything)(*operands)

    cpu, operands = jax.devices("cpu")[0], tuple([normal(2, 65, 32, seed=seed) for seed in range(3)])
    found = on(gpu(), dtype, jax.jit(functools.partial(products, attention)), operands)
    low = on(cpu, dtype, functools.partial(products, textbook), operands)
    rounded = tuple([x.astype(dtype) for x in operands])
    exact = on(cpu, np.float64, functools.partial(products, textbook), rounded)
    for one, known, other in zip(found, exact, low, strict=True):
        assert_close(one, known, other, magnitude=65)


@pytest.mark.gpu
def test_gpu_arguments_that_nobody_holds():
    """The memory of arguments is not given to others before a call has read it."""
    with jax.default_device(gpu()):
        x = jnp.asarray(normal(4, 16, 2048, 64, dtype=ml_dtypes.bfloat16))
        known = attention(x, x, x, is_causal=True)
        for _ in range(5):
            operands = [x + 0 for _ in range(3)]
            found = [attention(*operands, is_causal=True) for _ in range(4)]
            del operands
            others = [jnp.full_like(x, n) for n in range(8)]
            for o in found:
                np.testing.assert_array_equal(o, known)
            del others
