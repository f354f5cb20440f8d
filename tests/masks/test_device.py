"""Masks on a GPU: with CuPy where there is one, else with a stand-in that keeps "device" arrays apart from NumPy's."""

import contextlib
import importlib
import pickle
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.errors import DtypeError, MaskError, UnsupportedError
from cuattn.masks import BlockMask, ColumnMask
from tests.masks.strategies import column_masks


class Device(contextlib.nullcontext):
    def __init__(self, index=0):
        super().__init__()
        self.id = 0 if index is None else index

    def __repr__(self):
        return f"<CUDA Device {self.id}>"


class DeviceArray:
    """An array that only the stand-in's functions can use: np.asarray on it fails, as on a CuPy array."""

    def __init__(self, array, device=0):
        self._host, self.device = np.array(array), Device(device)

    def __dlpack_device__(self):
        return (2, self.device.id)

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def get(self):
        return self._host.copy()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return on_device(getattr(self._host, name))

    def __getitem__(self, key):
        return on_device(self._host[to_host(key)])

    def __setitem__(self, key, value):
        self._host[to_host(key)] = to_host(value)

    def __len__(self):
        return len(self._host)

    def __int__(self):
        return int(self._host)


def to_host(value):
    if isinstance(value, tuple | list):
        return type(value)(map(to_host, value))
    assert not isinstance(value, np.ndarray) or value.ndim == 0, "host data reached a device function"
    return value._host if isinstance(value, DeviceArray) else value


def on_device(value):
    if isinstance(value, tuple):
        return tuple(map(on_device, value))
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.dtype):
        return DeviceArray(value)
    if callable(value) and not isinstance(value, type):
        return lambda *args, **kwargs: on_device(
            value(*map(to_host, args), **{name: to_host(arg) for name, arg in kwargs.items()})
        )
    return value


def _binary(name):
    def operate(self, *args):
        return on_device(getattr(self._host, name)(*(to_host(arg) for arg in args)))

    return operate


for _name in ("add", "sub", "mul", "rmul", "floordiv", "neg", "and", "or", "invert", "gt", "ge", "eq", "ne"):
    setattr(DeviceArray, f"__{_name}__", _binary(f"__{_name}__"))


class Event:
    done = False

    def __init__(self, disable_timing):
        self.stream = None

    def record(self, stream):
        self.stream = stream


class Stream:
    def __init__(self, ptr):
        self.ptr, self.waited, self.synchronised = ptr, [], 0

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        self.synchronised += 1

    def is_capturing(self):
        return False


class FakeCuPy(types.ModuleType):
    """NumPy's functions on DeviceArrays, and the part of cupy.cuda that masks use."""

    def __init__(self):
        super().__init__("cupy")
        self.ndarray = DeviceArray
        self.stream = Stream(1)
        self.cuda = types.SimpleNamespace(Device=Device, Event=Event, get_current_stream=lambda: self.stream)

    def asarray(self, array):
        return DeviceArray(np.array(array))

    def __getattr__(self, name):
        return on_device(getattr(np, name))


def of_device_vectors(dtype=np.int32):
    return ColumnMask(*(DeviceArray(np.zeros(4, dtype)) for _ in range(4)), n_queries=4)


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def library(request):
    """CuPy, or what stands in for it."""
    return request.getfixturevalue("cupy") if request.param == "stand-in" else importlib.import_module("cupy")


def test_importing_masks_imports_numpy_alone():
    code = "import sys, cuattn.masks; print([m for m in ('cupy', 'torch', 'jax', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_host_mask_is_copied_once(cupy):
    mask = masks.causal_document([5, 3])
    twin = mask.to_device()
    assert twin.on_device and twin.device == 0
    assert repr(twin) == "<ColumnMask 8 queries x 8 keys on GPU 0>"
    assert mask.to_device() is twin
    assert mask.to_device(0) is twin
    assert twin.to_device() is twin
    assert cupy.stream.synchronised == 1
    assert mask.to_device(1) is not twin
    assert twin.to_host() == mask
    with pytest.raises(DtypeError, match="device = 1: expected 0"):
        twin.to_device(1)
    with pytest.raises(AttributeError, match="immutable"):
        twin.n_queries = 3


def test_an_uploaded_mask_never_waits(cupy):
    twin = masks.causal(4).to_device()
    cupy.stream = Stream(2)
    twin.dense()
    assert cupy.stream.waited == []


def test_a_mask_of_device_vectors_is_waited_for_on_other_streams(cupy):
    mask = of_device_vectors()
    mask.dense()
    assert cupy.stream.waited == []
    cupy.stream = Stream(2)
    mask.dense()
    assert [event.stream.ptr for event in cupy.stream.waited] == [1]


def test_all_parts_of_a_mask_are_waited_for(cupy):
    parts = []
    for number in (1, 3):
        cupy.stream = Stream(number)
        parts.append(of_device_vectors())
    mask = parts[0] & parts[1]
    cupy.stream = Stream(2)
    mask.dense()
    assert {event.stream.ptr for event in cupy.stream.waited} == {1, 3}


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_device_vectors_are_not_read_back(library, dtype):
    vectors = np.array([[-3, 2], [9, 4], [0, 0], [0, 1]], dtype=dtype)
    given = [library.asarray(vector) for vector in vectors]
    mask = ColumnMask(*given, n_queries=4)
    assert mask.on_device
    assert mask.lts.get().tolist() == [0, 2]
    given[0][0] = 3  # the mask holds copies
    assert mask.to_host() == ColumnMask(*np.clip(vectors, 0, 4), n_queries=4)


def test_wide_values_are_clamped_before_the_cast(library):
    huge = [library.asarray(np.array([2**32 + 1, -(2**32) - 1])) for _ in range(4)]
    assert ColumnMask(*huge, n_queries=4).lts.get().tolist() == [4, 0]


def test_vectors_in_two_places(cupy):
    host, device = np.zeros(4, np.int32), DeviceArray(np.zeros(4, np.int32))
    with pytest.raises(DtypeError, match=r"lts on cpu, .*uts on <CUDA Device 0>"):
        ColumnMask(host, host, device, host, n_queries=4)
    with pytest.raises(DtypeError, match=r"lts on <CUDA Device 0>, .*ute on <CUDA Device 1>"):
        ColumnMask(device, device, device, DeviceArray(host, device=1), n_queries=4)
    with pytest.raises(DtypeError, match="lts has dtype float32"):
        of_device_vectors(np.float32)
    with pytest.raises(DtypeError, match="lengths is on a GPU"):
        masks.document(device)


@given(column_masks(), st.integers(1, 9), st.integers(1, 9))
@example(masks.causal(0), 4, 4)
@example(masks.causal(0, 5), 4, 4)
@example(masks.causal(5, 0), 4, 4)
def test_methods_on_a_device(library, mask, block_m, block_n):
    vectors = [library.asarray(getattr(mask, name)) for name in ("lts", "lte", "uts", "ute")]
    for twin in (mask.to_device(), ColumnMask(*vectors, n_queries=mask.n_queries)):
        assert_array_equal(twin.dense().get(), mask.dense())
        assert_array_equal(twin.tile_states(block_m, block_n).get(), mask.tile_states(block_m, block_n))
        assert twin.block_sparsity(block_m, block_n) == mask.block_sparsity(block_m, block_n)
        assert twin.to_host() == mask
        again = ColumnMask.from_dense(twin.dense()).to_host()
        assert again == ColumnMask.from_dense(mask.dense())
    if len(mask.leading) <= 2:
        out = twin.to_startend_row_indices()
        assert_array_equal(out.get(), mask.to_startend_row_indices())
        again = ColumnMask.from_startend_row_indices(out, False, mask.n_queries)
        assert again.on_device and again.leading == out.shape[:-2]


def test_causal_indices_on_a_device(cupy):
    idx = np.array([[3], [4], [5]])
    mask = ColumnMask.from_startend_row_indices(DeviceArray(idx), True, 5)
    assert mask.to_host() == ColumnMask.from_startend_row_indices(idx, True, 5)
    assert masks.causal(4).to_device().rows() == masks.causal(4).rows()


def test_device_masks_stay_where_they_are(cupy):
    twin = masks.causal(4).to_device()
    with pytest.raises(MaskError, match="cannot be pickled"):
        pickle.dumps(twin)
    with pytest.raises(DtypeError, match="expected masks on the host"):
        ColumnMask.stack([twin])
    assert twin == twin
    assert twin != masks.causal(4)
    assert hash(twin) == hash(twin)


def test_blocks_on_a_device(library):
    host = BlockMask(np.random.default_rng(4).random((2, 5, 7)) < 0.5, 3, 4)
    for mask in (host.to_device(), BlockMask(library.asarray(host.blocks), 3, 4)):
        assert repr(mask) == "<BlockMask (2,) x 5 x 7 blocks of 3 x 4 on GPU 0>"
        assert_array_equal(mask.dense(14, 28).get(), host.dense(14, 28))
        assert_array_equal(mask.tile_states(4, 8, 14, 28).get(), host.tile_states(4, 8, 14, 28))
        assert mask.block_sparsity(3, 4) == host.block_sparsity(3, 4)
        assert mask.to_host() == host


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedError, match=r"needs CuPy.*cuda12"):
        masks.causal(4).to_device()
    with pytest.raises(UnsupportedError, match="lts is for a GPU"):
        of_device_vectors()


@pytest.mark.gpu
def test_vectors_of_other_libraries():
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    host = masks.causal_document([30, 34])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        vectors = [torch.from_numpy(np.array(v)).cuda() for v in (host.lts, host.lte, host.uts, host.ute)]
    mask = ColumnMask(*vectors, n_queries=64)
    with cupy.cuda.Stream(non_blocking=True):
        assert mask.to_host() == host
