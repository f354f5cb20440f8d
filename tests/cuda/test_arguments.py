"""Strides, packed arguments and random keys, without a GPU."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from cuattn.cuda import arguments
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
    axes = arguments.collapse((2, 3, 5), ((x.shape[:3], x.strides[:3]),))
    assert axes.size == (1, 1, 1, 30)
    assert axes.strides(x.shape[:3], x.strides[:3], 2) == (0, 0, 0, 4 * 7 * 8)


def test_collapse_keeps_a_broadcast_axis_apart():
    x, y = np.empty((2, 3, 4, 7, 8)), np.empty((1, 3, 4, 7, 8))
    axes = arguments.collapse((2, 3), tuple((a.shape[:2], a.strides[:2]) for a in (x, y)))
    assert axes.size == (1, 1, 2, 3)
    assert axes.strides(y.shape[:2], y.strides[:2], 8) == (0, 0, 0, 4 * 7 * 8)


def test_collapse_finds_every_element():
    base = np.arange(2 * 3 * 4 * 5).reshape(3, 2, 5, 4)
    view = base.transpose(1, 0, 3, 2)
    axes = arguments.collapse(view.shape, ((view.shape, view.strides),))
    strides = axes.strides(view.shape, view.strides, base.itemsize)
    for flat, index in enumerate(np.ndindex(view.shape)):
        offset, rest = 0, flat
        for size, stride in zip(axes.size[::-1], strides[::-1], strict=True):
            offset += rest % size * stride
            rest //= size
        assert base.ravel()[offset] == view[index]


def test_too_many_axes_are_refused():
    shape = (2,) * 6
    layouts = tuple((tuple(n if a == b else 1 for b, n in enumerate(shape)), (8,) * 6) for a in range(6))
    with pytest.raises(UnsupportedError, match="at most 4"):
        arguments.collapse(shape, layouts)


def test_load_bytes_follow_address_and_strides():
    buffer = np.zeros(4096, np.uint8)
    start = -buffer.ctypes.data % 16
    x = buffer[start : start + 2048].view(np.float16).reshape(2, 8, 64)
    assert arguments.load_bytes(device_like(x)) == 16
    assert arguments.load_bytes(device_like(x[..., 4:])) == 8
    assert arguments.load_bytes(device_like(x[..., 1:])) == 2
    assert arguments.load_bytes(device_like(x[:1, :1, 8:])) == 16


def test_struct_holds_values_and_slots():
    struct = arguments.Struct(PARAMS, {"n_keys": 7, "q.row": -3, "scale": 0.5}, ("q.data", "o.data"))
    words = struct.piece().words
    for slot, address in zip(struct.slots, (11, 12), strict=True):
        words[slot] = address
    record = np.frombuffer(words[:-1].tobytes(), PARAMS)[0]
    assert (record["n_keys"], record["q"]["row"], record["scale"]) == (7, -3, 0.5)
    assert (record["q"]["data"], record["o"]["data"], record["k"]["data"]) == (11, 12, 0)
    assert np.frombuffer(struct.piece().words[:-1].tobytes(), PARAMS)[0]["q"]["data"] == 0


def test_piece_holds_the_template_and_points_to_it():
    struct = arguments.Struct(PARAMS, {"n_keys": 7}, ("q.data", "o.data"))
    words, addresses = struct.piece(2)
    words[struct.slots[1]] = 12
    assert len(words) == PARAMS.itemsize // 8 + 3
    assert addresses == words[-3] + PARAMS.itemsize
    record = np.frombuffer(ctypes.string_at(words[-3], PARAMS.itemsize), PARAMS)[0]
    assert (record["n_keys"], record["o"]["data"], record["q"]["data"]) == (7, 12, 0)


def changed(words, changes):
    """Apply changes to an argument's words, and return it as a record."""
    for place, kept, word in changes:
        words[place] = words[place] & kept | word
    return np.frombuffer(words[:-1].tobytes(), PARAMS)[0]


def test_random_state_replaces_the_one_before(monkeypatch):
    monkeypatch.setattr(arguments, "check_reachable", lambda *_: None)
    words = arguments.Struct(PARAMS, {"dropout.batch": 9}, ()).piece().words
    for state in (RNGState(77, SimpleNamespace(__cuda_array_interface__={"data": (64, True)})), RNGState(SEED, 5)):
        record = changed(words, arguments.state_changes(state, 0))["dropout"]
        assert record["batch"] == 9
    assert record["offset"] == 5 and record["offset_data"] == 0
    assert record["keys"].tolist() == [list(pair) for pair in round_keys(RNGState(SEED).key)]


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
    words = arguments.Struct(PARAMS, values, ()).piece().words
    before = np.frombuffer(words[:-1].tobytes(), PARAMS)[0].copy()
    assert (before["band_left"], before["band_right"]) == (-3, 12)
    place = Place(3, 5, 40, row=64, key=32, shift=-100)
    after = changed(words, arguments.place_changes(p, place, 1 << 20, 1 << 21)).copy()
    assert (after["band_left"], after["band_right"]) == (97, -88)
    assert [int(after["dropout"][name]) for name in ("batch", "head", "heads", "row", "key")] == [3, 5, 40, 64, 32]
    assert (after["dropout"]["row_blocks"], after["dropout"]["key_blocks"]) == (1 << 20, 1 << 21)
    fresh = arguments.Struct(PARAMS, values, ()).piece().words
    kept = {}
    for word, bits, _ in arguments.place_changes(p, place):
        kept[word] = kept.get(word, -1) & bits
    assert all(words[i] & kept.get(i, -1) == fresh[i] & kept.get(i, -1) for i in range(PARAMS.itemsize // 8))


@pytest.mark.parametrize("shift", [-(2**31), 2**31])
def test_a_band_far_away_does_not_overflow(shift):
    fields = arguments.band_fields(problem(band=Band(2**31, 0, 0)), shift)
    assert all(abs(side) <= 2**30 for side in fields.values())
