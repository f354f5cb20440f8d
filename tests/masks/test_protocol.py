"""The protocol of masks: all kinds of mask, and one that only this test knows, answer the questions of backends."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.errors import MaskError
from cuattn.masks.base import Mask
from cuattn.masks.cells import BooleanMask
from cuattn.masks.constructors import band
from cuattn.masks.intervals import join
from cuattn.masks.runs import length_of
from tests import oracle
from tests.masks.predicates import assert_sound
from tests.masks.strategies import band_masks, block_masks, boolean_masks, column_masks, function_masks


class Chequered(Mask):
    """What a new kind of mask needs: squares of a chessboard, of which each instance shows the others' hidden ones."""

    kind = "chequered"
    leading = (2,)
    _parameter_names = ("n_queries", "n_keys")

    def __init__(self, n_queries, n_keys):
        self._settle(None, n_queries, n_keys)

    def hidden(self, instance, rows, keys):
        i, j = np.arange(self.n_queries)[rows], np.arange(self.n_keys)[keys, None]
        return (i // 3 + j // 2) % 2 != instance[0]

    def states(self, instance, block_m, block_n, start, stop):
        return np.ones((stop - start, -(-self.n_keys // block_n)), np.int8)  # any tile may be called partial


def chequered():
    return st.builds(Chequered, st.integers(0, 20), st.integers(0, 20))


def bound_blocks():
    return block_masks().map(lambda drawn: drawn[0].bind(*drawn[1:]))


@st.composite
def combined(draw):
    """Draw an AllOf whose parts are of every kind, bound to their lengths."""
    n_queries, n_keys = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    leading = draw(st.sampled_from(((), (2, 1))))
    blocks, *_ = draw(block_masks(n_queries, n_keys, (3,)))
    columns = draw(column_masks(n_queries, n_keys, leading))
    return masks.AllOf([columns, blocks, draw(boolean_masks(n_queries, n_keys, ()))]).bind(n_queries, n_keys)


ANY = st.one_of(
    column_masks(), bound_blocks(), boolean_masks(), band_masks(), chequered(), combined(), function_masks()
)
TILE = st.integers(1, 9)


def runs(draw, length):
    """Draw a slice or ascending runs, and the indices that they take."""
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=6)))
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    whole = np.arange(length)
    if len(pairs) == 1 and draw(st.booleans()):
        return slice(*pairs[0]), whole[slice(*pairs[0])]
    return pairs, np.concatenate([whole[:0], *(whole[start:stop] for start, stop in pairs)])


@given(ANY, TILE, TILE)
def test_states(mask, block_m, block_n):
    states = mask.tile_states(block_m, block_n)
    row_tiles = states.shape[-2]
    assert_sound(states, mask.dense(), block_m, block_n)
    rho = mask.block_sparsity(block_m, block_n)
    assert isinstance(rho, float) and rho == (float((states == 0).mean()) if states.size else 0.0)
    for instance in np.ndindex(*mask.leading):
        for start in range(0, row_tiles, 2):
            some = mask.states(instance, block_m, block_n, start, min(start + 2, row_tiles))
            assert_array_equal(some, states[instance][start : start + 2])


@given(ANY, TILE, TILE)
def test_elements_of_tiles(mask, block_m, block_n):
    dense = mask.dense()
    for instance in np.ndindex(*mask.leading):
        tiles = list(np.ndindex(-(-mask.n_queries // block_m), -(-mask.n_keys // block_n)))
        if not tiles:
            continue
        keys = mask.patterns(instance, block_m, block_n, *(np.array(of) for of in zip(*tiles, strict=True)))
        known = {}
        for place, (m, n) in enumerate(tiles):
            rows = slice(m * block_m, min((m + 1) * block_m, mask.n_queries))
            columns = slice(n * block_n, min((n + 1) * block_n, mask.n_keys))
            tile = dense[instance][rows, columns].T
            assert_array_equal(np.broadcast_to(mask.hidden(instance, rows, columns), tile.shape), ~tile)
            if keys is not None and tile.shape == (block_n, block_m):
                assert_array_equal(known.setdefault(keys[place], tile), tile)


@given(ANY.filter(lambda mask: mask.kind != "chequered"), st.data())
def test_parts(mask, data):
    rows, i = runs(data.draw, mask.n_queries)
    keys, j = runs(data.draw, mask.n_keys)
    part = mask.restrict(rows, keys)
    assert (part.n_queries, part.n_keys, part.leading) == (i.size, j.size, mask.leading)
    assert_array_equal(part.dense(), mask.dense()[..., i[:, None], j])
    if mask.kind == "column":
        assert type(part) is masks.ColumnMask


@given(ANY.filter(lambda mask: mask.kind != "chequered"), st.data())
def test_heads(mask, data):
    dense, count = mask.dense(), mask.leading[-1] if mask.leading else 1
    start = data.draw(st.integers(0, count - 1)) if count else 0
    stop = data.draw(st.integers(start, count))
    some = mask.heads(start, stop)
    assert_array_equal(some.dense(), dense[..., start:stop, :, :] if count != 1 else dense)


@given(ANY)
def test_identity(mask):
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and hash(again) == hash(mask)
    assert again._array is None or not again._array.flags.writeable
    assert isinstance(hash(mask.layout), int)
    assert_array_equal(again.dense(), mask.dense())
    assert mask.device is None
    if mask.kind != "all":
        assert mask.parts == (mask,) and mask.layout[0] == mask.kind
    with pytest.raises(AttributeError, match="immutable"):
        mask.n_queries = 3


@given(ANY)
def test_lengths(mask):
    n_queries, n_keys = mask.n_queries, mask.n_keys
    assert mask.fits(n_queries, n_keys) and mask.bind(n_queries, n_keys) is mask.bind() is mask
    if mask.kind not in ("block", "boolean", "all"):
        assert not mask.fits(n_queries + 1, n_keys)
        with pytest.raises(MaskError, match=f"n_queries = {n_queries + 1}"):
            mask.bind(n_queries + 1)


def test_instances_broadcast():
    mask = masks.ColumnMask.stack([[masks.causal(4)] * 3])  # leading (1, 3)
    assert mask.instance((5, 2)) == (0, 2)
    assert mask.instance((1, 5, 2)) == (0, 2)
    assert masks.causal(4).instance((5, 2)) == ()
    assert Chequered(4, 4).instance((7, 1)) == (1,)


@given(
    column_masks(n_queries=12, n_keys=9), column_masks(n_queries=12, n_keys=9), band_masks(12, 9), block_masks(12, 9)
)
def test_join(first, second, band, drawn):
    try:
        np.broadcast_shapes(first.leading, second.leading)
    except ValueError:
        return
    block = drawn[0].bind(12, 9)
    joined, other = join((first, block, second, band))
    assert other is block
    visible = first.dense() & second.dense() & band.dense()
    assert_array_equal(joined.dense(), visible)
    assert_sound(joined.tile_states(3, 4), visible, 3, 4)
    assert join((first, block)) == (first, block)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(2, 4), (3, 6)], r"rows = .*\[3, 6\]"),
        ([(4, 2)], r"rows = \[\[4, 2\]\]"),
        ([(0, 9)], r"within \[0, 8\]"),
        ([(0, -1)], r"rows\[0, 1\] = -1"),
        (slice(None, None, 2), "step 1"),
    ],
)
def test_bad_runs(rows, message):
    with pytest.raises(MaskError, match=message):
        masks.causal(8).restrict(rows)


def test_blocks_are_cut_where_they_can_be():
    mask = masks.BlockMask(np.eye(4, dtype=bool), 64, 64)
    part = mask.restrict(slice(32, 200), [(0, 64), (96, 256)])
    assert (part.block_m, part.block_n) == (32, 32)
    indices = np.r_[0:64, 96:256]
    assert_array_equal(part.dense(), mask.dense()[32:200][:, indices])
    assert mask.restrict(slice(34, 200)).block == (2, 64)


def test_a_borrowed_array_is_not_copied():
    array = np.ones((4, 6), bool)
    mask = BooleanMask.borrow(array)
    array[1, 2] = False
    assert not mask.dense()[1, 2] and mask.borrowed and not BooleanMask(array).borrowed
    assert array.flags.writeable and not mask.array.flags.writeable
    assert np.shares_memory(mask.bind(4, 6).array, array) and mask.bind(4, 6).borrowed
    part = mask.restrict(slice(1, 3))
    assert not np.shares_memory(part.array, array)


def test_single_rows_and_keys_stand_for_all():
    mask = BooleanMask.borrow(np.array([[True, False, True]]))
    assert mask.fits(5, 3) and not mask.fits(5, 4)
    bound = mask.bind(5, 3)
    assert_array_equal(bound.dense(), np.broadcast_to([True, False, True], (5, 3)))
    assert bound.restrict(slice(1, 4), slice(0, 2)).dense().tolist() == [[True, False]] * 3
    assert mask.layout != BooleanMask(np.ones((3, 3), bool)).layout


@given(st.data(), st.none() | st.integers(-5, 9), st.none() | st.integers(-5, 9), st.integers(-9, 9))
def test_bands_of_shards(data, left, right, offset):
    """A band of the whole, in the indices of a part that is made of several pieces."""
    whole = band(20, 17, left, right, offset)
    rows, i = runs(data.draw, 20)
    keys, j = runs(data.draw, 17)
    part = whole.restrict(rows, keys)
    assert_array_equal(part.dense(), oracle.visible_band(20, 17, left, right, offset)[i[:, None], j])
    assert (part.n_queries, part.n_keys) == (i.size, j.size)
    assert length_of(((2, 4), (6, 9))) == 5


def test_tables_are_remembered_but_not_all():
    mask = masks.causal(64)
    for size in range(1, 40):
        mask.tile_states(size, size)
    assert mask._table.cache_info().currsize <= 8
    assert mask._table(16, 16) is mask._table(16, 16)
