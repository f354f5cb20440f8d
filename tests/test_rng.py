"""The dropout contract: published vectors, the definition element by element, statistics and limits."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import rng
from cuattn.errors import ArgumentError, DtypeError
from cuattn.rng import RNGState

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2
ZEROS = (0,) * 4, (0,) * 2

# Random123's kat_vectors file.
KNOWN_ANSWERS = [
    (7, ZEROS, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, ONES, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, ZEROS, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, ONES, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
CONTRACT = RNGState(0x0123456789ABCDEF, 5)
CONTRACT_DRAWS = {
    (0, 0): 0x2443,
    (0, 1): 0x18E9,
    (0, 8): 0x03B0,
    (8, 0): 0x93AD,
    (9, 9): 0x4603,
    (1, 2): 0x8755,
    (16, 0): 0x097D,
    (0, 16): 0x61E9,
    (1000, 131071): 0xDEDB,
}
WORD = st.integers(0, 2**32 - 1)
STATES = st.builds(RNGState, st.integers(0, 2**64 - 1), WORD)
LEVEL = st.integers(0, 65535)


def philox_by_definition(counter, key, rounds):
    """Philox4x32 in Python integers, as the docstring of cuattn.rng states it."""
    x, k = tuple(counter), tuple(key)
    for _ in range(rounds):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = (b >> 32 ^ x[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ x[3] ^ k[1], a & 0xFFFFFFFF)
        k = ((k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF)
    return x


def draw_by_definition(state, b, i, j):
    key = state.seed & 0xFFFFFFFF, state.seed >> 32
    x = philox_by_definition((j & ~9, i & ~8, b, state.offset), key, 7)
    word = x[2 * (j >> 3 & 1) + (i >> 3 & 1)]
    return word >> 16 if j & 1 else word & 0xFFFF


@pytest.mark.parametrize(("rounds", "block", "words"), KNOWN_ANSWERS)
def test_known_answers(rounds, block, words):
    assert tuple(rng.philox4x32(*block, rounds).tolist()) == words
    assert philox_by_definition(*block, rounds) == words


def test_philox_broadcasts_its_words():
    rows, keys = np.arange(3)[:, None], np.arange(5)
    words = rng.philox4x32((keys, rows, 7, 8), (9, rows), 10)
    assert (words.dtype, words.shape) == (np.uint32, (4, 3, 5))
    assert tuple(words[:, 2, 4].tolist()) == philox_by_definition((4, 2, 7, 8), (9, 2), 10)


def test_philox_without_rounds_returns_the_counter_modulo_2_32():
    assert rng.philox4x32((1, 2, 2**32 + 3, 4), (5, 6), 0).tolist() == [1, 2, 3, 4]


@given(counter=st.tuples(WORD, WORD, WORD, WORD), key=st.tuples(WORD, WORD), rounds=st.integers(0, 16))
def test_philox_equals_its_definition(counter, key, rounds):
    assert tuple(rng.philox4x32(counter, key, rounds).tolist()) == philox_by_definition(counter, key, rounds)


@given(key=st.tuples(WORD, WORD), rounds=st.integers(0, 16))
def test_round_keys(key, rounds):
    keys = rng.round_keys(key, rounds)
    assert len(keys) == rounds
    for r, pair in enumerate(keys):
        assert pair == ((key[0] + r * 0x9E3779B9) % 2**32, (key[1] + r * 0xBB67AE85) % 2**32)
        assert all(type(word) is int for word in pair)


def test_the_key_of_a_state_is_its_seed():
    assert CONTRACT.key == (0x89ABCDEF, 0x01234567)
    assert len(rng.round_keys(CONTRACT.key)) == rng.ROUNDS


@pytest.mark.parametrize(("place", "draw"), CONTRACT_DRAWS.items())
def test_contract_vectors(place, draw):
    i, j = place
    assert rng.draws(CONTRACT, 3, (i, i + 1), (j, j + 1)).tolist() == [[draw]]
    assert draw_by_definition(CONTRACT, 3, i, j) == draw


def test_contract_call():
    words = rng.philox4x32((48, 32, 3, CONTRACT.offset), CONTRACT.key, rng.ROUNDS)
    assert words.tolist() == [0x23679A1C, 0x3603770D, 0xA2F175EC, 0x17925D78]


def test_contract_first_rows_of_seed_42():
    expected = [
        [0xC19A, 0x92CB, 0x5E71, 0xB80C, 0x4506, 0xB734, 0x21AC, 0x174A],
        [0x0DF5, 0x7D1A, 0x4331, 0x4EE0, 0x4E0D, 0xDDF3, 0xCBA7, 0x32FD],
    ]
    assert rng.draws(RNGState(42), 0, (0, 2), (0, 8)).tolist() == expected


def test_contract_kept_elements_of_seed_42():
    kept = rng.keep(RNGState(42), 6554, 0, (0, 64), (0, 64))
    assert kept.sum() == 3696
    assert np.packbits(kept[0]).tobytes().hex() == "fefff6fff5fefff7"


@given(
    state=STATES,
    b=WORD,
    spans=st.tuples(*[st.tuples(st.integers(0, 2**32 - 40), st.integers(0, 40))] * 2),
    T=LEVEL,
)
def test_any_tile_equals_the_definition(state, b, spans, T):
    rows, keys = ((start, start + length) for start, length in spans)
    tile = rng.draws(state, b, rows, keys)
    expected = [[draw_by_definition(state, b, i, j) for j in range(*keys)] for i in range(*rows)]
    assert (tile.dtype, tile.shape) == (np.uint16, tuple(length for _, length in spans))
    assert np.array_equal(tile, np.array(expected, dtype=np.uint16).reshape(tile.shape))
    kept = rng.keep(state, T, b, rows, keys)
    assert kept.dtype == np.bool_
    assert np.array_equal(kept, tile >= T)


BLOCKS = st.lists(st.integers(0, 2**28 - 1), max_size=4)


@given(state=STATES, b=WORD, rows=BLOCKS, keys=BLOCKS, T=LEVEL)
def test_blocks_from_anywhere_equal_their_tiles(state, b, rows, keys, T):
    rows, keys = (16 * np.array(blocks, dtype=np.int64) for blocks in (rows, keys))
    kept = rng.keep_blocks(state, T, b, rows, keys)
    tiles = [[rng.keep(state, T, b, (i, i + 16), (j, j + 16)) for j in keys.tolist()] for i in rows.tolist()]
    assert (kept.dtype, kept.shape) == (np.bool_, (16 * len(rows), 16 * len(keys)))
    assert not kept.size or np.array_equal(kept, np.block(tiles))


@pytest.mark.parametrize("name", ["row_blocks", "key_blocks"])
@pytest.mark.parametrize("blocks", [[8], [-16], [2**32], [[0, 16]], 16])
def test_blocks_outside_the_limits(name, blocks):
    with pytest.raises(ArgumentError, match=f"{name}: expected one axis of multiples of 16"):
        rng.keep_blocks(RNGState(0), 1, 0, **{"row_blocks": [0], "key_blocks": [0], name: blocks})


def test_the_last_indices_are_reachable():
    top = 2**32 - 1
    state = RNGState(2**64 - 1, top)
    tile = rng.draws(state, top, (top - 2, top + 1), (top - 2, top + 1))
    assert tile[2, 2] == draw_by_definition(state, top, top, top)


def test_every_coordinate_changes_the_draws():
    def tile(seed=1, offset=2, b=3, row=0, key=0):
        return rng.draws(RNGState(seed, offset), b, (row, row + 64), (key, key + 64))

    base = tile()
    for other in (tile(seed=2), tile(seed=1 + (1 << 32)), tile(offset=3), tile(b=4), tile(row=64), tile(key=64)):
        # Two independent uniform tiles agree in 4096 / 65536 of a place on average.
        assert (base == other).sum() < 8


@pytest.mark.parametrize("T", [1, 655, 6554, 32768, 58982, 65535])
def test_keep_rate(T):
    kept = rng.keep(RNGState(2024, 1), T, 5, (0, 1024), (0, 1024))
    p = 1 - T / rng.LEVELS
    n = kept.size
    assert abs(kept.sum() - n * p) <= 5 * np.sqrt(n * p * (1 - p))
    # Every row and every column by itself has the same rate, and so has every residue modulo the block of 16.
    for axis in (0, 1):
        deviation = kept.mean(axis) - p
        assert np.abs(deviation).max() <= 6 * np.sqrt(p * (1 - p) / 1024) + 1 / 1024
    residues = kept.reshape(64, 16, 64, 16).mean((0, 2)) - p
    assert np.abs(residues).max() <= 6 * np.sqrt(p * (1 - p) / 4096) + 1 / 4096


def test_draws_are_uniform_and_neighbours_independent():
    tile = rng.draws(RNGState(99), 0, (0, 1024), (0, 1024))
    counts = np.bincount(tile.ravel() >> 8, minlength=256)
    chi_square = ((counts - 4096) ** 2 / 4096).sum()
    assert abs(chi_square - 255) < 6 * np.sqrt(2 * 255)
    centred = tile.astype(np.float64) - tile.mean()
    for step in (1, 8, 9, 16):
        for a, b in ((centred[step:], centred[:-step]), (centred[:, step:], centred[:, :-step])):
            assert abs((a * b).mean() / centred.var()) < 6 / 1024


@pytest.mark.parametrize(
    ("p", "level"),
    [(0.5 / 65536, 0), (1.5 / 65536, 2), (2.5 / 65536, 2), (65535.25 / 65536, 65535), (np.float32(0.25), 16384)],
)
def test_threshold_rounds_half_to_even(p, level):
    assert rng.threshold(p) == level
    assert isinstance(rng.threshold(p), int)


def test_threshold_zero_keeps_everything():
    assert rng.keep(RNGState(3), rng.threshold(0), 0, (0, 50), (0, 50)).all()


@pytest.mark.parametrize("p", [-0.1, -1e-30, 1.0, 1.5, np.nan, np.inf, 1 - 2**-17, 1 - 2**-20])
def test_threshold_out_of_range(p):
    with pytest.raises(ArgumentError, match="dropout_p"):
        rng.threshold(p)


@pytest.mark.parametrize("p", ["much", None, [0.1, 0.2], 1j])
def test_threshold_of_no_number(p):
    with pytest.raises(DtypeError, match="dropout_p"):
        rng.threshold(p)


PAIR = RNGState(np.int64(7), np.uint32(1))


@pytest.mark.parametrize(
    ("function", "given", "state"),
    [
        (rng.resolve, 12, (12, 0)),
        (rng.resolve, np.uint64(2**64 - 1), (2**64 - 1, 0)),
        (rng.resolve, RNGState(np.int64(3), np.array(4)), (3, 4)),
        (rng.resolve, PAIR, (7, 1)),
        (rng.recorded, 7, (7, 0)),
        *((rng.recorded, pair, (7, 1)) for pair in (RNGState(7, 1), (7, 1), [7, 1], PAIR)),
    ],
)
def test_states_in_every_form(function, given, state):
    found = function(given)
    assert type(found) is RNGState and found == state
    assert all(type(word) is int for word in found)


def test_resolve_draws_one_seed_from_a_generator():
    generator, twin = np.random.default_rng(5), np.random.default_rng(5)
    state = rng.resolve(generator)
    assert state == RNGState(int(twin.integers(2**64, dtype=np.uint64)), 0)
    assert rng.resolve(generator) != state


def test_resolve_none_is_fresh():
    states = {rng.resolve(None) for _ in range(4)}
    assert len(states) == 4
    assert all(0 <= state.seed < 2**64 and state.offset == 0 for state in states)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        *((rng.resolve, "rng", value) for value in (1.5, "7", True, (1, 2), RNGState(1.0, 0), RNGState(1, None))),
        (rng.resolve, "rng", np.random.RandomState),
        *((rng.recorded, "fwd.rng_state", value) for value in (np.random.default_rng(7), None, 1.5, True, "7")),
        *((rng.recorded, "fwd.rng_state", value) for value in ((1, 2, 3), (1, 2.0))),
    ],
)
def test_what_is_no_state(function, name, value):
    with pytest.raises(DtypeError, match=f"^{name}"):
        function(value)


@pytest.mark.parametrize(
    ("function", "value", "name"),
    [
        (rng.resolve, -1, "rng = -1"),
        (rng.resolve, 2**64, "rng = "),
        (rng.resolve, RNGState(2**64, 0), "rng.seed"),
        (rng.resolve, RNGState(0, 2**32), "rng.offset"),
        (rng.resolve, RNGState(0, -1), "rng.offset"),
        *((rng.recorded, value, r"^fwd\.rng_state") for value in (RNGState(2**64, 0), (0, -1), -1)),
    ],
)
def test_states_outside_the_limits(function, value, name):
    with pytest.raises(ArgumentError, match=name):
        function(value)


class DeviceArray:
    """An array on a GPU, whose value nobody may ask for: that would synchronise."""

    def __init__(self, shape, typestr):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (0, False), "version": 3}

    def __index__(self):
        raise AssertionError("reading the value would synchronise")


def test_resolve_leaves_a_device_offset_alone():
    offset = DeviceArray((), "<i8")
    assert rng.resolve(RNGState(1, offset)).offset is offset


@pytest.mark.parametrize(("shape", "typestr"), [((1,), "<i8"), ((), "<i2"), ((), "<f4")])
def test_resolve_device_offset_that_a_kernel_cannot_read(shape, typestr):
    with pytest.raises(DtypeError, match="offset is a device array"):
        rng.resolve(RNGState(1, DeviceArray(shape, typestr)))


@pytest.mark.parametrize(
    ("b", "rows", "keys", "name"),
    [
        (-1, (0, 1), (0, 1), "b = -1"),
        (2**32, (0, 1), (0, 1), "b = "),
        (0, (-1, 1), (0, 1), "rows"),
        (0, (0, 2**32 + 1), (0, 1), "rows"),
        (0, (0, 1), (5, 4), "keys"),
    ],
)
def test_tiles_outside_the_limits(b, rows, keys, name):
    with pytest.raises(ArgumentError, match=name):
        rng.draws(RNGState(0), b, rows, keys)
    with pytest.raises(ArgumentError, match=name):
        rng.keep(RNGState(0), 1, b, rows, keys)


@pytest.mark.parametrize("T", [-1, 65536])
def test_keep_needs_a_threshold(T):
    with pytest.raises(ArgumentError, match="T = "):
        rng.keep(RNGState(0), T, 0, (0, 1), (0, 1))


def test_state_is_a_plain_tuple_and_pickles():
    state = RNGState(1, 2)
    assert pickle.loads(pickle.dumps(state)) == state == (1, 2)
    assert RNGState(1).offset == 0
