"""Interval arithmetic against the dense matrix, with bounds that nobody has checked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cuattn.masks import intervals

SIDES = st.none() | st.integers(0, 20) | st.just(2**62)


@st.composite
def unchecked(draw, count=None):
    """Draw (intervals, n_queries, n_keys): bounds of any sign and order."""
    n_queries, n_keys = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    count = draw(st.integers(1, 4)) if count is None else count
    bounds = hnp.arrays(
        np.int32, (n_keys,), elements=st.integers(-5, n_queries + 5) | st.sampled_from((-(2**31), 2**31 - 1))
    )
    return [(draw(bounds), draw(bounds)) for _ in range(count)], n_queries, n_keys


def hides(pairs, n_queries):
    i = np.arange(n_queries)[:, None]
    return np.any([(start <= i) & (i < end) for start, end in pairs], axis=0)


def by_tile(matrix, block_m, block_n):
    """Return a nested list of the matrix's tiles."""
    rows, columns = matrix.shape
    return [
        [matrix[i : i + block_m, j : j + block_n] for j in range(0, columns, block_n)] for i in range(0, rows, block_m)
    ]


@given(unchecked(), st.integers(1, 9), st.integers(1, 9))
def test_tile_states_are_sound(drawn, block_m, block_n):
    pairs, n_queries, n_keys = drawn
    table = intervals.tile_table(pairs, n_queries, block_m, block_n)
    row_tiles, key_tiles = -(-n_queries // block_m), -(-n_keys // block_n)
    assert table.shape == (key_tiles, len(pairs), 4)
    assert table.dtype == np.int32
    states = intervals.tile_states(table, 0, row_tiles)
    assert states.shape == (row_tiles, key_tiles)
    assert states.dtype == np.int8
    for row, tiles in enumerate(by_tile(hides(pairs, n_queries), block_m, block_n)):
        for key, tile in enumerate(tiles):
            assert states[row, key] != intervals.SKIP or tile.all()
            assert states[row, key] != intervals.FULL or not tile.any()


@given(unchecked(), st.integers(1, 9), st.integers(1, 9))
def test_tile_states_are_as_tight_as_equation_4(drawn, block_m, block_n):
    pairs, n_queries, n_keys = drawn
    pairs = [tuple(np.clip(bound, 0, n_queries) for bound in pair) for pair in pairs]
    pairs = [
        (np.minimum(start, end), np.maximum(start, end)) for start, end in pairs
    ]  # the equation needs start <= end
    row_tiles = -(-n_queries // block_m)
    states = intervals.tile_states(intervals.tile_table(pairs, n_queries, block_m, block_n), 0, row_tiles)
    for row in range(row_tiles):
        first, last = row * block_m, min((row + 1) * block_m, n_queries)
        for key in range(-(-n_keys // block_n)):
            tile = slice(key * block_n, (key + 1) * block_n)
            masked = [first >= start[tile].max() and last <= end[tile].min() for start, end in pairs]
            touched = [first < end[tile].max() and last > start[tile].min() for start, end in pairs]
            if any(masked):
                assert states[row, key] == intervals.SKIP
            elif not any(touched):
                assert states[row, key] == intervals.FULL


@given(unchecked(), st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_range_of_row_tiles(drawn, block_m, block_n, data):
    pairs, n_queries, _ = drawn
    row_tiles = -(-n_queries // block_m)
    first = data.draw(st.integers(0, row_tiles))
    last = data.draw(st.integers(first, row_tiles))
    table = intervals.tile_table(pairs, n_queries, block_m, block_n)
    whole = intervals.tile_states(table, 0, row_tiles)
    np.testing.assert_array_equal(intervals.tile_states(table, first, last), whole[first:last])


@given(unchecked(count=2), st.integers(1, 9), st.integers(1, 9))
def test_skipped_tiles(drawn, block_m, block_n):
    pairs, n_queries, _ = drawn
    table = intervals.tile_table(pairs, n_queries, block_m, block_n)
    states = intervals.tile_states(table, 0, -(-n_queries // block_m))
    np.testing.assert_array_equal(intervals.skipped_tiles(table), (states == intervals.SKIP).sum(axis=0))


@given(unchecked())
def test_covered(drawn):
    pairs, n_queries, _ = drawn
    np.testing.assert_array_equal(intervals.covered(pairs, n_queries), hides(pairs, n_queries).all(axis=0))


@given(st.integers(0, 20), st.integers(0, 20), SIDES, SIDES, st.integers(-20, 20))
def test_band_intervals(n_queries, n_keys, left, right, offset):
    pairs = intervals.band_intervals(n_queries, n_keys, left, right, offset)
    assert len(pairs) == (left is not None) + (right is not None)
    i, j = np.arange(n_queries)[:, None], np.arange(n_keys)[None, :]
    visible = np.ones((n_queries, n_keys), dtype=bool)
    if left is not None:
        visible &= i + offset - left <= j
    if right is not None:
        visible &= j <= i + offset + right
    if pairs:
        np.testing.assert_array_equal(hides(pairs, n_queries), ~visible)


def test_a_block_larger_than_the_keys_costs_no_memory():
    (pair,) = intervals.band_intervals(8, 8, None, 0)
    assert intervals.tile_bounds(*pair, n_queries=8, block_m=2**31 - 1, block_n=2**31 - 1).tolist() == [[1, 0, 0, 1]]
