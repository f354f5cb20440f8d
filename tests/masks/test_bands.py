"""A mask is a band just when its dense form is one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.masks import ColumnMask
from cuattn.masks.constructors import band
from tests import oracle
from tests.masks.strategies import any_constructor, column_masks

REACHES = st.tuples(*[st.one_of(st.none(), st.integers(-8, 20))] * 2)
SIDES = st.none() | st.integers(0, 20) | st.just(2**62)


@given(st.integers(0, 20), st.integers(0, 20), SIDES, SIDES, st.integers(-20, 20))
def test_bands_are_their_formula(n_queries, n_keys, left, right, offset):
    mask = band(n_queries, n_keys, left, right, offset)
    assert_array_equal(mask.dense(), oracle.visible_band(n_queries, n_keys, left, right, offset))


@given(st.integers(2, 24), st.integers(1, 24), REACHES)
def test_bands_are_found(n_queries, n_keys, reach):
    """All but a single row's, whose visible keys do not say how they go on."""
    visible = oracle.visible_band(n_queries, n_keys, *reach, 0)
    mask = ColumnMask.from_dense(visible)
    if not visible.any():
        assert mask.reach is None
        return
    assert_array_equal(oracle.visible_band(n_queries, n_keys, *mask.reach, 0), visible)
    assert ColumnMask.stack([[mask, mask]] * 3).reach == mask.reach


@given(st.one_of(column_masks(), st.integers(0, 24).flatmap(any_constructor)))
def test_what_is_found_is_the_mask(mask):
    if mask.reach is not None:
        band = oracle.visible_band(mask.n_queries, mask.n_keys, *mask.reach, 0)
        assert_array_equal(np.broadcast_to(band, mask.dense().shape), mask.dense())


@given(st.integers(4, 24), st.integers(0, 2), st.data())
def test_one_element_less_is_no_band(n, right, data):
    visible = oracle.visible_band(n, n, None, right, 0)
    changed = visible.copy()
    elements = [
        (i, j) for i, j in zip(*np.nonzero(visible), strict=True) if (i, j) != (n - 1, 0)
    ]  # without it, a window
    changed[data.draw(st.sampled_from(elements))] = False
    whole, less = ColumnMask.from_dense(visible), ColumnMask.from_dense(changed)
    assert whole.reach == (None, right) and less.reach is None
    assert ColumnMask.stack([whole, less]).reach is None
    assert ColumnMask.stack([less, whole]).reach is None


def test_overlapping_and_empty_intervals():
    """Two intervals may share what they hide, lie in each other's triangle, or start behind their end."""
    j = np.arange(8)
    assert ColumnMask(0 * j, j, 0 * j, np.maximum(j - 1, 0), n_queries=8).reach == (None, 0)
    assert ColumnMask(j // 2, j, 0 * j, j // 2, n_queries=8).reach == (None, 0)
    assert ColumnMask(j + 1, 8 - 0 * j, 8 - 0 * j, j, n_queries=8).reach == (0, None)
    assert ColumnMask(0 * j, 0 * j, 8 - 0 * j, 0 * j, n_queries=8).reach == (None, None)
    assert ColumnMask(0 * j + 3, 0 * j + 5, 0 * j, 0 * j, n_queries=8).reach is None


def test_which_constructors_make_bands():
    assert masks.full(5, 7).reach == masks.document([9]).reach == (None, None)
    assert masks.causal(5, 7).reach == (None, 2)
    assert masks.causal(5, 7, "top_left").reach == masks.causal_document([9]).reach == (None, 0)
    assert masks.sliding_window(9, 3).reach == (2, 0)
    assert masks.causal_document([4, 5]).reach is masks.sliding_window(9, 0).reach is masks.full(0, 3).reach is None
    assert masks.full(3, 0).reach is None
