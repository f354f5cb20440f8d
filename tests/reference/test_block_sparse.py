"""Algorithm 5, block-sparse FlashAttention, and its backward."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import io_model, reference, rng
from cuattn.errors import ArgumentError, ShapeError
from tests.reference.cases import (
    DROPOUTS,
    MASKS,
    cases,
    check_backward,
    check_derivatives,
    check_forward,
    dense,
    make_case,
)


def draw_blocks(case, share, seed=0):
    sizes = io_model.block_sizes(*case.q.shape, case.M)
    blocks = np.random.default_rng(seed).random((sizes.t_r, sizes.t_c)) < share
    rows, keys = np.arange(len(case.q)) // sizes.b_r, np.arange(len(case.q)) // sizes.b_c
    return blocks, blocks[rows[:, None], keys]


@given(case=cases(), share=st.sampled_from([0, 0.3, 0.8, 1]), mask=MASKS, dropout=DROPOUTS, seed=st.integers(0, 99))
def test_forward_and_backward_match_the_oracle(case, share, mask, dropout, seed):
    blocks, visible = draw_blocks(case, share, seed)
    if mask is not None:
        visible = visible & dense(mask, len(case.q))
    options = {"mask": mask, "dropout_p": dropout.p, "b": dropout.b}
    fwd = reference.block_sparse_forward(*case.qkv, blocks, case.M, rng=dropout.state, **options)
    check_forward(case, fwd, visible=visible, dropout=dropout)
    grads = reference.block_sparse_backward(case.do, *case.qkv, fwd, blocks, case.M, **options)
    check_backward(case, grads, visible=visible, dropout=dropout)


def test_all_blocks_is_algorithm_2():
    case = make_case(17, 5, 33)
    blocks, _ = draw_blocks(case, 1)
    options = {"dropout_p": 0.3, "rng": 3}
    sparse = reference.block_sparse_forward(*case.qkv, blocks, case.M, **options)
    full = reference.flash_forward(*case.qkv, case.M, **options)
    assert all(np.array_equal(x, y) for x, y in zip(sparse[:3], full[:3], strict=True))
    assert sparse.counts.total == full.counts.total + blocks.size


def test_backward_is_the_derivative_of_the_forward():
    case = make_case(16, 3, 24, seed=2)
    blocks, _ = draw_blocks(case, 0.5)
    state = rng.RNGState(1)
    fwd = reference.block_sparse_forward(*case.qkv, blocks, case.M, dropout_p=0.2, rng=state)
    grads = reference.block_sparse_backward(case.do, *case.qkv, fwd, blocks, case.M, dropout_p=0.2)[:3]

    def forward(*qkv):
        return reference.block_sparse_forward(*qkv, blocks, case.M, dropout_p=0.2, rng=state).o

    check_derivatives(case, forward, grads)


def test_errors():
    case = make_case(16, 3, 24)
    blocks, _ = draw_blocks(case, 1)
    with pytest.raises(ShapeError, match="blocks has shape"):
        reference.block_sparse_forward(*case.qkv, blocks[1:], case.M)
    with pytest.raises(ArgumentError, match="M = 2"):
        reference.block_sparse_forward(*case.qkv, blocks, 2)
