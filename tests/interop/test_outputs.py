"""``out=``: results land in the caller's arrays, whatever their strides, and nowhere else."""

import numpy as np
import pytest

import cuattn
from cuattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError

X = np.random.default_rng(0).standard_normal((3, 2, 20, 8), np.float32)
FWD = cuattn.forward(X, X, X)


def strided(array, kind):
    """Return an empty array like another one, over memory laid out in another way."""
    if kind == "contiguous":
        return np.full_like(array, np.nan)
    if kind == "every other":
        return np.full((*array.shape, 2), np.nan, array.dtype)[..., 0]
    if kind == "reversed":
        return np.full_like(array, np.nan)[..., ::-1]
    return np.full(array.shape[::-1], np.nan, array.dtype).T


@pytest.mark.parametrize("kind", ["contiguous", "every other", "reversed", "transposed"])
@pytest.mark.parametrize("operation", ["attention", "forward", "backward", "bias gradient", "merge"])
def test_results_land_where_they_are_wanted(xp, operation, kind):
    x, fwd = xp.put(X), cuattn.Forward(*map(xp.put, FWD[:3]), None)
    zeros = xp.put(np.zeros((2, 1, 20), np.float32))
    calls = {
        "attention": lambda out: (cuattn.attention(x, x, x, is_causal=True, out=out and out[0]),),
        "forward": lambda out: cuattn.forward(x, x, x, is_causal=True, out=out)[:3],
        "backward": lambda out: cuattn.backward(x, x, x, x, fwd, deterministic=True, out=out)[:3],
        "bias gradient": lambda out: cuattn.backward(x, x, x, x, fwd, bias=zeros, deterministic=True, out=out),
        "merge": lambda out: cuattn.merge(fwd, fwd, out=out)[:3],
    }
    expected = calls[operation](None)
    out = [xp.put(strided(xp.get(array), kind)) for array in expected]
    for wanted in (tuple(out), [None if index == 1 else array for index, array in enumerate(out)]):
        found = calls[operation](wanted)
        for given, array, e in zip(wanted, found, expected, strict=True):
            assert given is None or given is array
            assert np.array_equal(xp.get(array), xp.get(e))


READ_ONLY = np.empty_like(X)
READ_ONLY.setflags(write=False)
SHARED = np.empty((3, 2, 20, 16), np.float32)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (X, ArgumentError, "out overlaps q"),
        (X[:, :, ::-1], ArgumentError, "out overlaps q"),
        (np.empty((2, 20, 8), np.float32), ShapeError, r"out has shape \(2, 20, 8\); expected \(3, 2, 20, 8\)"),
        (np.empty_like(X, dtype=np.float64), DtypeError, "out has dtype float64; expected float32"),
        (READ_ONLY, ArgumentError, "out is read-only"),
        (np.lib.stride_tricks.as_strided(np.empty(8, np.float32), X.shape, (0, 0, 0, 4)), ArgumentError, "stride of 0"),
        ([X.tolist()], DtypeError, "out is a list"),
    ],
)
def test_bad_outputs(out, error, message):
    with pytest.raises(error, match=message):
        cuattn.attention(X, X, X, out=out)


def test_outputs_of_several_results():
    a, b = np.empty_like(X), np.empty(X.shape[:-1], np.float32)
    with pytest.raises(ArgumentError, match=r"out is .*ndarray.*expected a tuple \(o, l, m\)"):
        cuattn.forward(X, X, X, out=a)
    with pytest.raises(ArgumentError, match=r"out\[2\] overlaps out\[1\]"):
        cuattn.forward(X, X, X, out=(a, b, b))
    with pytest.raises(ArgumentError, match=r"out\[3\] is given but the call has no dbias"):
        cuattn.backward(X, X, X, X, FWD, out=(a, None, None, b))


def test_neighbours_in_memory_do_not_overlap():
    k, out = SHARED[..., ::2], SHARED[..., 1::2]
    k[...] = X
    assert np.array_equal(cuattn.attention(X, k, k, out=out), cuattn.attention(X, X, X))


def test_nothing_to_write(xp):
    q, v, out = (xp.put(np.ones((2, 3, n), np.float32)) for n in (8, 0, 0))
    assert cuattn.attention(q, q, v, out=out) is out


def test_tensors_of_torch_and_arrays_of_jax():
    torch = pytest.importorskip("torch")
    x, out = torch.from_numpy(X), torch.empty(X.shape)
    assert cuattn.attention(x, x, x, out=out) is out
    assert np.array_equal(out.numpy(), cuattn.attention(X, X, X))
    with pytest.raises(DtypeError, match="out is"):
        cuattn.attention(x, x, x, out=np.empty_like(X))
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X)
    with pytest.raises(UnsupportedError, match="out is given for JAX arrays"):
        cuattn.attention(x, x, x, out=x + 1)
