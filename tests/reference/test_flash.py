"""Algorithms 1, 2, 4 and 5: FlashAttention, dense and block-sparse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import io_model, reference
from cuattn.errors import ArgumentError, DtypeError, ShapeError
from cuattn.masks import BlockMask
from tests.reference.cases import (
    DROPOUTS,
    MASKS,
    cases,
    check_backward,
    check_forward,
    dense,
    draw_blocks,
    make_case,
    scattered,
)

SCALES = st.sampled_from([None, 1.0, 0.3, -0.5, 0.0])  # 1 alone, without mask and dropout, is Algorithm 1
SHARES = st.sampled_from([None, 0, 0.3, 0.8, 1])


def sparsity(case, share, seed=0):
    """Draw a block mask, and its elements; None for a share of None."""
    if share is None:
        return None, None
    blocks, n = draw_blocks(*case.q.shape, case.M, share, seed), len(case.q)
    return blocks, BlockMask(blocks, *io_model.block_sizes(*case.q.shape, case.M)[:2]).dense(n, n)


@given(
    case=cases(),
    mask=MASKS,
    share=SHARES,
    dropout=DROPOUTS,
    scale=SCALES,
    in_hbm=st.booleans(),
    seed=st.integers(0, 99),
)
def test_forward_and_backward_match_the_oracle_and_the_model(case, mask, share, dropout, scale, in_hbm, seed):
    visible, (blocks, shown) = dense(mask, len(case.q)), sparsity(case, share, seed)
    options = {"scale": scale, "mask": visible if in_hbm else mask, "dropout_p": dropout.p, "b": dropout.b}
    options["blocks"] = blocks
    fwd = reference.flash_forward(*case.qkv, case.M, rng=dropout.state, **options)
    grads = reference.flash_backward(case.do, *case.qkv, fwd, case.M, **options)
    assert fwd.rng_state == dropout.state
    in_hbm = in_hbm and mask is not None
    if blocks is None or not in_hbm:  # of both the model does not know which elements are asked for
        sizes = (*case.q.shape, case.M, dropout.p > 0, in_hbm, blocks)
        assert fwd.counts[:2] == io_model.flash_forward(*sizes)
        assert grads.counts[:2] == io_model.flash_backward(*sizes)
    if blocks is not None:
        visible = shown if visible is None else visible & shown
    check_forward(case, fwd, visible=visible, scale=scale, dropout=dropout)
    check_backward(case, grads, visible=visible, scale=scale, dropout=dropout)


def test_empty_rows():
    case = make_case(11, 2, 6)
    fwd = reference.flash_forward(*case.qkv, case.M, mask=scattered)
    empty = ~dense(scattered, 11).any(1)
    assert empty.any()
    assert (fwd.o[empty] == 0).all()
    assert (fwd.l[empty] == 0).all()
    assert (fwd.m[empty] == -np.inf).all()
    grads = reference.flash_backward(case.do, *case.qkv, fwd, case.M, mask=scattered)
    assert (grads.dq[empty] == 0).all()


def test_extra_memory_is_linear():
    case = make_case(24, 4, 20)
    fwd = reference.flash_forward(*case.qkv, case.M)
    assert fwd.counts.extra == 2 * 24  # l and m (Theorem 1)
    assert reference.flash_backward(case.do, *case.qkv, fwd, case.M).counts.extra == 0
    dropped = reference.flash_forward(*case.qkv, case.M, dropout_p=0.5, rng=1)
    assert dropped.counts.extra == 2 * 24 + 2  # and the random state


@given(case=cases(max_n=40, max_d=8))
def test_tiles_fit_on_the_chip(case):
    """The block sizes of Algorithm 1 need Theta(M) elements on the chip, as the proof of Theorem 2 claims.

    With B_c < M / 4d + 1 and B_r <= min(B_c, d): K, V (and Q, O) take less than M / 2 + 2 d each pair, S less than
    M / 4 + d, l and m at most 2 d.  The backward holds four blocks of each kind and two tiles like S.
    """
    d = case.q.shape[1]
    fwd = reference.flash_forward(*case.qkv, case.M)
    assert fwd.counts.sram < 1.25 * case.M + 7 * d
    grads = reference.flash_backward(case.do, *case.qkv, fwd, case.M)
    assert grads.counts.sram < 2.5 * case.M + 12 * d


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": np.ones((10, 9), bool)}, ShapeError, r"mask has shape \(10, 9\)"),
        ({"blocks": np.ones((1, 1))}, ShapeError, "blocks has shape"),
        ({"dropout_p": 1, "rng": 0}, ArgumentError, "dropout_p = 1"),
        ({"dropout_p": 0.5}, ArgumentError, "rng is None"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        reference.flash_forward(*make_case(10, 4, 4).qkv, 8, **options)


@pytest.mark.parametrize("state", [None, np.random.default_rng(1)])
def test_a_backward_does_not_draw_anew(state):
    case = make_case(10, 4, 8)
    fwd = reference.flash_forward(*case.qkv, 8, dropout_p=0.5, rng=0)._replace(rng_state=state)
    with pytest.raises(DtypeError, match=r"fwd\.rng_state has type"):
        reference.flash_backward(case.do, *case.qkv, fwd, 8, dropout_p=0.5)
