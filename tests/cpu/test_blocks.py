"""Sizes of blocks, and what follows from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.cpu.blocks import small_columns, summed_keys


@given(width=st.integers(1, 600), units=st.integers(1, 300))
def test_a_product_sums_over_equal_parts_of_the_keys_and_not_too_many(width, units):
    summed = summed_keys(width, 16 * units)
    assert 16 * units % summed == 0
    assert summed % 16 == 0
    assert summed <= 384
    assert summed == 16 or summed <= 12 * width


@pytest.mark.parametrize(("width", "keys", "expected"), [(64, 384, 384), (64, 896, 224), (64, 128, 128), (5, 384, 48)])
def test_it_sums_over_as_many_as_it_may(width, keys, expected):
    assert summed_keys(width, keys) == expected


@given(width=st.integers(1, 600), others=st.integers(1, 2_000_000))
def test_small_columns_cover_the_width_once(width, others):
    covered = np.concatenate([np.arange(part.start, part.stop) for part in small_columns(width, others)])
    np.testing.assert_array_equal(covered, np.arange(width))
