"""Strides, packed arguments and random keys, without a GPU."""

import ctypes
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from cuattn.cuda import arguments, early, launch
from cuattn.cuda.launch import Kernel
from cuattn.cuda.params import PARAMS
from cuattn.errors import DtypeError, UnsupportedError
from cuattn.problem import Band, Place
from cuattn.rng import RNGState, round_keys
from tests.cuda.sm90.test_forward_plan import problem

SEED = 0x0123456789ABCDEF


def device_like(array):
    """Give a NumPy array the attribute that tells a CuPy array's address."""
    return SimpleNamespace(
        shape=array.shape, strides=array.strides, ndim=array.ndim, dtype=array.dtype,
        data=SimpleNamespace(ptr=array.ctypes.data),
    )  # fmt: skip


def test_collapse_merges_even_axes():
    x = np.empty((2, 3, 5, 4, 7, 8), np.float16)
    axes = arguments.collapse((2, 3, 5), [arguments.steps_of(x)])
    assert axes.size == (1, 1, 1, 30)
    assert axes.pick(arguments.steps_of(x)) == (0, 0, 0, 4 * 7 * 8)


def test_collapse_keeps_a_broadcast_axis_apart():
    x, y = np.empty((2, 3, 4, 7, 8)), np.empty((1, 3, 4, 7, 8))
    axes = arguments.collapse((2, 3), map(arguments.steps_of, (x, y)))
    assert axes.size == (1, 1, 2, 3)
    assert axes.pick(arguments.steps_of(y)) == (0, 0, 0, 4 * 7 * 8)


def test_collapse_finds_every_element():
    base = np.arange(2 * 3 * 4 * 5).reshape(3, 2, 5, 4)
    view = base.transpose(1, 0, 3, 2)
    axes = arguments.collapse(view.shape, [arguments.steps_of(view)])
    strides = axes.pick(arguments.steps_of(view))
    for flat, index in enumerate(np.ndindex(view.shape)):
        offset, rest = 0, flat
        for size, stride in zip(axes.size[::-1], strides[::-1], strict=True):
            offset += rest % size * stride
            rest //= size
        assert base.ravel()[offset] == view[index]


def test_too_many_axes_are_refused():
    with pytest.raises(UnsupportedError, match="at most 4"):
        arguments.collapse((2,) * 6, np.eye(6, dtype=int))


def test_load_bytes_follow_address_and_strides():
    buffer = np.zeros(4096, np.uint8)
    start = -buffer.ctypes.data % 16
    x = buffer[start : start + 2048].view(np.float16).reshape(2, 8, 64)
    assert arguments.load_bytes(device_like(x)) == 16
    assert arguments.load_bytes(device_like(x[..., 4:])) == 8
    assert arguments.load_bytes(device_like(x[..., 1:])) == 2
    assert arguments.load_bytes(device_like(x[:1, :1, 8:])) == 16


def kernel(values, maps=(), more_slots=MappingProxyType({}), **more):
    """Return a launch that is never made."""
    names, maps = {name: number for number, name in enumerate(("a", "b"))}, [(name, None) for name in maps]
    slots = {"q.data": "a", "o.data": "b", **more_slots}
    return Kernel(0, names, "sm80/fwd.cu", "kernel", {}, (1,), 32, PARAMS, values, slots, maps=maps, **more)


def record_of(piece):
    return np.frombuffer(ctypes.string_at(int(piece.words[PARAMS.itemsize // 8]), PARAMS.itemsize), PARAMS)[0]


def test_arguments_hold_values_and_addresses(monkeypatch):
    """A piece of memory holds the first argument and, behind it, where all are; it is kept for the same addresses."""
    started, pieces = [], []

    def start(self, piece, stream):
        started.append(record_of(piece))
        pieces.append(piece)

    monkeypatch.setattr(Kernel, "start", start)
    monkeypatch.setattr(launch, "_KEPT", 2)
    made = kernel({"n_keys": 7, "q.row": -3, "scale": 0.5})
    for addresses in ((11, 12), (13, 14), (11, 12), (15, 16), (13, 14)):
        made.launch(addresses, 0)
        record = started.pop()
        assert (record["n_keys"], record["q.row"], record["scale"]) == (7, -3, 0.5)
        assert (record["q.data"], record["o.data"], record["k.data"]) == (*addresses, 0)
    assert [pieces.index(piece) for piece in pieces] == [0, 1, 0, 1, 0]  # the oldest is taken for others
    assert {*made._idle} == {(13, 14), (15, 16)} and record_of(made.piece())["q.data"] == 0
    piece = kernel({}, maps=["a", "b"]).piece()
    assert len(piece.words) == PARAMS.itemsize // 8 + 3 and piece.arguments == piece.words[-3] + PARAMS.itemsize


def test_addresses_of_tables_are_those_of_the_launch(monkeypatch):
    """Whether a launch is given the tables of the one before, equal ones, others or none."""
    started = []
    monkeypatch.setattr(Kernel, "start", lambda self, piece, stream: started.append(record_of(piece)))
    tables = {"table.cols": 0, "table.bits": 1}
    made = kernel({}, more_slots={slot: slot for slot in tables}, tables=tables)
    first, second = [21, 22], [31, 32]
    piece = made.piece()
    made.fill(piece, (11, 12))
    for given in (first, first, second, [*second], first):
        made.change(piece, given, ())
        made.start(piece, 0)
        record = started.pop()
        assert [record[slot] for slot in tables] == given and (record["q.data"], record["o.data"]) == (11, 12)


@pytest.mark.parametrize("status", [0, 1])
def test_an_early_launch_that_is_refused_is_made_all_the_same(monkeypatch, status):
    calls = []
    monkeypatch.setattr(launch._thread, "launch", lambda *told: calls.append(("", told)))
    asked = []

    def launcher(device):
        asked.append(device)
        return lambda *told: lambda stream, arguments: calls.append(("early", (*told, stream, arguments, 0))) or status

    monkeypatch.setattr(launch, "launcher", launcher)
    monkeypatch.setattr(launch, "function", lambda *found: SimpleNamespace(ptr=5))
    made = kernel({}, early=True)
    for _ in range(2):
        made.launch((11, 12), 7)
    names, told = zip(*calls, strict=True)
    assert names == 2 * ("early", "")[: 1 + status] and len({*told}) == 1 and asked == [0]
    assert told[0][:9] == (5, 1, 1, 1, 32, 1, 1, 0, 7)
    assert (ctypes.sizeof(early._Config), ctypes.sizeof(early._Attribute)) == (56, 72)  # as cuda.h has them


def test_kernels_that_do_not_wait_are_not_launched_early(monkeypatch):
    """Those for GPUs before Hopper: util/merge.cu would read parts that are not there yet."""
    import cupy

    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: early._DRIVER)
    monkeypatch.setattr(early.ctypes, "CDLL", lambda name: SimpleNamespace(cuLaunchKernelEx=SimpleNamespace()))
    for arch, does in (("sm_80", False), ("sm_89", False), ("sm_90", True), ("sm_120", True)):
        monkeypatch.setattr(early, "device_of", lambda number, arch=arch: SimpleNamespace(arch=arch))
        assert (early.launcher.__wrapped__(0) is not None) == does


def changed(piece, changes):
    """Apply changes to an argument, and return it as a record."""
    for half, value in changes:
        piece.halves[half] = value
    return record_of(piece)


def test_random_state_replaces_the_one_before(monkeypatch):
    monkeypatch.setattr(arguments, "check_reachable", lambda *_: None)
    piece = kernel({"dropout.batch": 9}).piece()
    for state in (RNGState(77, SimpleNamespace(__cuda_array_interface__={"data": (64, True)})), RNGState(SEED, 5)):
        record = changed(piece, arguments.state_changes(state, 0))
        assert record["dropout.batch"] == 9
    assert record["dropout.offset"] == 5 and record["dropout.offset_data"] == 0
    keys = np.ascontiguousarray(record["dropout.keys"]).view(np.uint32).reshape(-1, 2)
    assert keys.tolist() == [list(pair) for pair in round_keys(RNGState(SEED).key)]


def test_an_offset_is_read_on_its_own_gpu(monkeypatch):
    """The kernel would follow the address whatever it points to."""
    cupy = pytest.importorskip("cupy")
    found = SimpleNamespace(type=2, device=1)
    monkeypatch.setattr(cupy.cuda.runtime, "pointerGetAttributes", lambda address: found)
    state = RNGState(1, SimpleNamespace(__cuda_array_interface__={"data": (64, True)}))
    with pytest.raises(DtypeError, match=r"rng\.offset is on GPU 1 but q is on GPU 0"):
        arguments.state_changes(state, 0)
    assert arguments.state_changes(state, 1)


def test_a_place_is_written_and_nothing_else():
    p = problem(band=Band(7, 2, 10), dropout=1)
    values = arguments.problem_fields(p, arguments.collapse((2,), ()))
    piece = kernel(values).piece()
    before = record_of(piece).copy()
    assert (before["band_left"], before["band_right"]) == (-3, 12)
    place = Place(3, 5, 40, row=64, key=32, shift=-100)
    after = changed(piece, arguments.place_changes(p, place, 1 << 20, 1 << 21))
    wanted = {"band_left": 97, "band_right": -88, "dropout.row_blocks": 1 << 20, "dropout.key_blocks": 1 << 21}
    wanted |= {f"dropout.{name}": getattr(place, name) for name in ("batch", "head", "heads", "row", "key")}
    for name in PARAMS.names:
        np.testing.assert_array_equal(after[name], wanted.get(name, before[name]), name)


@pytest.mark.parametrize("shift", [-(2**31), 2**31])
def test_a_band_far_away_does_not_overflow(shift):
    fields = arguments.band_fields(problem(band=Band(2**31, 0, 0)), shift)
    assert all(abs(side) <= 2**30 for side in fields.values())
