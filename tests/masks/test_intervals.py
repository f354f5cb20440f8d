"""Interval arithmetic against the dense matrix, with bounds that nobody has checked."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from cuattn.masks import causal, intervals
from tests import oracle
from tests.masks.predicates import assert_sound, equation_4


@st.composite
def unchecked(draw):
    """Draw (bounds, n_queries, n_keys): starts and ends of intervals in turn, of any sign and order."""
    n_queries, n_keys = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    count = draw(st.integers(1, 4))
    elements = st.integers(-5, n_queries + 5) | st.sampled_from((-(2**31), 2**31 - 1))
    return draw(hnp.arrays(np.int32, (2 * count, n_keys), elements=elements)), n_queries, n_keys


@given(unchecked(), st.integers(1, 9), st.integers(1, 9))
def test_tile_states_are_sound(drawn, block_m, block_n):
    bounds, n_queries, n_keys = drawn
    table = intervals.tile_table(bounds, n_queries, block_m, block_n)
    row_tiles, key_tiles = -(-n_queries // block_m), -(-n_keys // block_n)
    assert table.shape == (4, len(bounds) // 2, key_tiles)
    assert table.dtype == np.int32
    assert_sound(
        intervals.tile_states(table, 0, row_tiles), oracle.visible_outside(bounds, n_queries), block_m, block_n
    )


@given(unchecked(), st.integers(1, 9), st.integers(1, 9))
def test_tile_states_are_as_tight_as_equation_4(drawn, block_m, block_n):
    bounds, n_queries, n_keys = drawn
    # The equation needs start <= end.
    bounds = np.sort(np.clip(bounds, 0, n_queries).reshape(len(bounds) // 2, 2, n_keys), axis=1).reshape(bounds.shape)
    hidden, touched = equation_4(bounds, n_queries, block_m, block_n)
    states = intervals.tile_states(intervals.tile_table(bounds, n_queries, block_m, block_n), 0, hidden.shape[1])
    assert (states[hidden.any(axis=0)] == intervals.SKIP).all()
    assert (states[~touched.any(axis=0)] == intervals.FULL).all()


@given(unchecked())
def test_keys_that_intervals_hide_together(drawn):
    """A key that no row sees is skipped, however many intervals that takes."""
    bounds, n_queries, _ = drawn
    states = intervals.tile_states(intervals.tile_table(bounds, n_queries, max(n_queries, 1), 1), 0, 1)
    if n_queries:
        assert_array_equal(states[0] != intervals.SKIP, oracle.visible_outside(bounds, n_queries).any(axis=0))


def test_a_block_larger_than_the_keys_costs_no_memory():
    table = intervals.tile_table(causal(8)._array, n_queries=8, block_m=2**31 - 1, block_n=2**31 - 1)
    assert table[:, 1].ravel().tolist() == [1, 0, 0, 1]
