"""BlockMask: building, meaning, tiles of any size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn.errors import DtypeError, MaskError
from cuattn.masks import BlockMask
from tests.masks.predicates import states_of
from tests.masks.strategies import block_masks


def meaning(mask, n_queries, n_keys):
    blocks = np.repeat(np.repeat(mask.blocks, mask.block_m, axis=-2), mask.block_n, axis=-1)
    return blocks[..., :n_queries, :n_keys]


@given(block_masks())
def test_dense(drawn):
    mask, n_queries, n_keys = drawn
    dense = mask.dense(n_queries, n_keys)
    assert dense.shape == (*mask.leading, n_queries, n_keys)
    assert_array_equal(dense, meaning(mask, n_queries, n_keys))
    whole = mask.blocks.shape[-2] * mask.block_m, mask.blocks.shape[-1] * mask.block_n
    assert_array_equal(mask.dense(), meaning(mask, *whole))
    assert mask.fits(n_queries, n_keys)
    assert not mask.fits(n_queries + mask.block_m, n_keys)


@given(block_masks(), st.integers(1, 9), st.integers(1, 9))
def test_tile_states_are_exact(drawn, block_m, block_n):
    mask, n_queries, n_keys = drawn
    states = mask.tile_states(block_m, block_n, n_queries, n_keys)
    assert states.dtype == np.int8
    assert_array_equal(states, states_of(mask.dense(n_queries, n_keys), block_m, block_n))
    rho = mask.block_sparsity(block_m, block_n, n_queries, n_keys)
    assert rho == (float((states == 0).mean()) if states.size else 0.0)


def test_blocks_are_copied_and_frozen():
    blocks = np.ones((2, 2), dtype=bool)
    mask = BlockMask(blocks, 4, 4)
    blocks[:] = False
    assert mask.blocks.all()
    with pytest.raises(ValueError, match="read-only"):
        mask.blocks[0, 0] = False


def test_identity():
    mask = BlockMask(np.ones((2, 2), dtype=bool), 4, 4)
    assert mask == BlockMask([[True, True], [True, True]], np.int64(4), 4)
    assert mask != BlockMask(np.ones((2, 2), dtype=bool), 4, 8)
    assert mask != BlockMask(np.zeros((2, 2), dtype=bool), 4, 4)
    assert repr(mask) == "<BlockMask 2 x 2 blocks of 4 x 4 on the host>"
    assert repr(BlockMask(np.ones((3, 1, 2), dtype=bool), 4, 8)) == (
        "<BlockMask (3,) x 1 x 2 blocks of 4 x 8 on the host>"
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockMask(np.ones((2, 2)), 4, 4), DtypeError, "blocks has dtype float64"),
        (lambda: BlockMask([True], 4, 4), MaskError, r"blocks has shape \(1,\)"),
        (lambda: BlockMask([[True], [True, False]], 4, 4), DtypeError, "blocks = list"),
        (lambda: BlockMask([[True]], 0, 4), MaskError, "block_m = 0"),
        (lambda: BlockMask([[True]], 4, -1), MaskError, "block_n = -1"),
        (lambda: BlockMask([[True]], 4, 4.0), DtypeError, "block_n = 4.0"),
        (lambda: BlockMask([[True]], 4, 4).dense(5, 4), MaskError, "n_queries = 5.*1 blocks of 4"),
        (lambda: BlockMask([[True]], 4, 4).dense(4, 0), MaskError, "n_keys = 0"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
