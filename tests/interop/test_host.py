"""Host arrays of every kind enter as views, and results go back as the same kind."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop import to_backend
from tests.interop.helpers import BFLOAT16, FLOATS, Producer, library, one, run

# NumPy


@settings(max_examples=50, deadline=None)
@given(hnp.array_shapes(min_dims=0, min_side=0), st.sampled_from([*FLOATS, "bool", "int64", "complex64", "object"]))
def test_a_numpy_array_is_itself(shape, dtype):
    x = np.zeros(shape, dtype)
    array, origin = one(x)
    assert array is x
    assert origin.from_backend(array) is x
    assert (origin.kind, origin.backend, origin.device) == ("numpy", "cpu", 0)
    with origin.scope():
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


def test_arrays_keep_their_order():
    x = np.zeros((2, 3))
    assert list(to_backend({"q": x, "bias": x, "k": x})[0]) == ["q", "bias", "k"]


def test_none_stays_none_on_the_way_home():
    _, origin = one(np.zeros(3))
    assert origin.from_backend(None) is None


# Other producers of DLPack


def test_an_unknown_producer_is_read_in_place_and_gets_numpy_back():
    x = np.arange(6.0).reshape(2, 3)[:, ::2]
    array, origin = one(Producer(x))
    assert np.shares_memory(array, x)
    assert np.array_equal(array, x)
    assert origin.from_backend(array) is array
    assert origin.kind == __name__.partition(".")[0]


def test_a_producer_with_a_namespace_gets_its_own_kind_back():
    class Named(Producer):
        def __array_namespace__(self, api_version=None):
            return types.SimpleNamespace(from_dlpack=Named)

    x = np.arange(6.0)
    array, origin = one(Named(x))
    back = origin.from_backend(array)
    assert type(back) is Named
    assert back.array is array
    with pytest.raises(DtypeError, match=r"k is .*Producer on the CPU, but q is .*Named on the CPU"):
        to_backend({"q": Named(x), "k": Producer(x)})


def test_bfloat16_of_an_unknown_producer_is_read_from_the_capsule():
    torch = library("torch")
    x = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)[1:, ::2]
    array, origin = one(Producer(x))
    assert array.dtype == BFLOAT16
    assert array.ctypes.data == x.data_ptr()
    assert array.strides == tuple(2 * step for step in x.stride())
    expected, pointer = x.float().numpy().copy(), x.data_ptr()
    del x  # the view keeps the memory alive
    assert np.array_equal(array.astype(np.float32), expected)
    assert array.ctypes.data == pointer
    assert origin.from_backend(array) is array


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
                    to_backend({"q": x, "k": y})


# House rules


def test_no_framework_is_imported_in_order_to_look():
    script = """
import sys
import numpy as np
from cuattn.interop import to_backend
to_backend({"q": np.zeros((2, 3))})
try:
    to_backend({"q": [1.0]})
except TypeError:
    pass
loaded = {"torch", "jax", "cupy", "scipy", "rich"} & set(sys.modules)
assert not loaded, loaded
"""
    run(script)
