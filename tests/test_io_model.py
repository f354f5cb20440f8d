"""The papers' IO models against what the algorithms really read and write."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cuattn import io_model, reference
from cuattn.errors import ArgumentError, ShapeError
from cuattn.io_model.sizes import cdiv
from tests.reference.cases import draw_blocks, make_case, scattered

# Every M here makes 4 d divide M and both block sizes divide N, so that nothing is rounded up.
WHOLE = [(64, 8, 128), (64, 8, 256), (64, 8, 512), (128, 8, 128), (96, 4, 96), (1024, 64, 16384), (4096, 128, 65536)]


@st.composite
def sizes(draw, max_n=10**6, max_d=512):
    """Draw N, d and an M with d <= M <= N d, evenly over its magnitudes."""
    n, d = draw(st.integers(1, max_n)), draw(st.integers(1, max_d))
    return n, d, max(d, min(n * d, int(d * n ** draw(st.floats(0, 1)))))


def all_tiles(n, d, m, lower, upper):
    blocks = io_model.block_sizes(n, d, m)
    return io_model.Tiles(*(np.full((blocks.t_r, blocks.t_c), x) for x in (True, lower, upper)))


# What the algorithms count is compared with these models where they run: tests/reference.


def test_a_mask_computed_on_the_chip_costs_nothing():
    case = make_case(20, 4, 20)
    counts = [reference.flash_forward(*case.qkv, 20, mask=mask).counts for mask in (None, scattered)]
    assert counts[0] == counts[1]


# The lecture's terms, exactly, where nothing is rounded up.


@pytest.mark.parametrize(("n", "d", "m"), WHOLE)
def test_exact_counts_are_the_closed_forms(n, d, m):
    """And so are the accesses of the algorithms, which are these counts, as tests/reference shows.

    They say what doubling N or M does, and that the swapped loops save a third of 12 N^2 d^2 / M, the leading term.
    """
    assert io_model.flash_forward(n, d, m).total == io_model.lecture_forward(n, d, m) + 2 * n  # to initialise l and m
    swapped = io_model.lecture_swapped_forward(n, d, m)
    assert io_model.swapped_forward(n, d, m).total == swapped - n * d  # O starts on the chip
    backward = 20 * n**2 * d**2 / m + 8 * n**2 * d / m + 7 * n * d
    assert io_model.flash_backward(n, d, m).total == backward
    for share in (0, 0.25, 0.5, 1):
        blocks = np.zeros(io_model.block_sizes(n, d, m)[2:], bool)
        blocks.flat[: round(share * blocks.size)] = True
        s = blocks.mean()
        exact = io_model.flash_forward(n, d, m, blocks=blocks).total - blocks.size - 2 * n
        assert exact == pytest.approx(io_model.lecture_forward(n, d, m, s), rel=1e-12)


# Theta: the ratio to the papers' expression stays between constants for all N, d and M in the theorems' range.
# B_c < M / 4d + 1 <= 5 M / 4d, so T_c >= 4 N d / 5 M; and T_c <= 4 N d / M + 1 <= 5 N d / M.


@given(size=sizes())
def test_theorem_2(size):
    check_theta(size, io_model.flash_forward, (3, 4), (3, 2), io_model.standard_forward, 2, 4 + 2 * 5)


@given(size=sizes())
def test_theorem_5(size):
    check_theta(size, io_model.flash_backward, (5, 2), (7, 0), io_model.standard_backward, 4, 8 + 4 * 5)


def check_theta(size, flash, passes, once, standard, least, most):
    """Hold what is moved, in T_c passes and `once`, matrices and vectors, between constants times the theorem's."""
    n, d, m = size
    ratio = flash(n, d, m).total / io_model.theorem_2_flash(n, d, m)
    assert 0.8 * passes[0] <= ratio <= 5 * (passes[0] + passes[1] / d) + once[0] + once[1] / d
    assume(m >= d * d)
    assert least <= standard(n, d, m).total / io_model.theorem_2_standard(n, d) <= most


@given(size=sizes(max_n=4096), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_proposition_4(size, share, seed):
    n, d, m = size
    m = max(m, min(n * d, 4 * d * 16))
    blocks = draw_blocks(n, d, m, share, seed)
    b = io_model.block_sizes(n, d, m)
    rows = np.minimum(b.b_r, n - np.arange(0, n, b.b_r))
    s = blocks.sum(1) @ rows / (n * b.t_c)  # the share of nonzero blocks, each by the rows it has
    # The proposition leaves out reading the block mask itself, T_r T_c elements.
    accesses = io_model.flash_forward(n, d, m, blocks=blocks).total - blocks.size
    assert 0.8 * 3 <= accesses / io_model.proposition_4(n, d, m, s) <= 5 * (3 + 4 / d)


@given(size=sizes(max_n=10**5))
def test_standard_attention_without_m_reads_every_operand_once_per_kernel(size):
    n, d, _ = size
    assert io_model.standard_forward(n, d).total == 4 * n * n + 4 * n * d
    assert io_model.standard_backward(n, d).total == 7 * n * n + 8 * n * d


def test_flash_attention_moves_less_than_the_others_at_the_paper_s_sizes():
    """N = 1024, d = 64 and the 192 KB of an A100's SRAM in 32-bit elements."""
    n, d, m = 1024, 64, 192 * 1024 // 4
    flash = io_model.flash_forward(n, d, m).total
    assert flash < io_model.rabe_staats_forward(n, d, m).total
    assert 3 * flash < io_model.standard_forward(n, d, m).total


# FlashMask.


def test_mask_vectors_against_a_dense_mask():
    for n, b_r in ((1024, 64), (8192, 128)):
        assert n * n / io_model.flashmask_vectors(n, b_r) == b_r / 4
    assert io_model.flashmask_vectors(10, 4) == 4 * 3 * 10


@given(size=sizes(max_n=2000, max_d=64))
def test_flashmask_s_vectors_cost_at_most_what_the_paper_says(size):
    n, d, m = size
    m = max(m, min(n * d, 4 * d * 4))
    b_r = io_model.block_sizes(n, d, m).b_r
    counts = [io_model.flashmask_forward(n, d, m, all_tiles(n, d, m, x, x)) for x in (False, True)]
    assert counts[1].reads - counts[0].reads == io_model.flashmask_vectors(n, b_r)
    assert counts[1].writes == counts[0].writes


def test_flashmask_s_backward_reads_its_vectors_once():
    n, d, m = 256, 8, 512
    blocks = io_model.block_sizes(n, d, m)
    none = all_tiles(n, d, m, False, False)._replace(visited=np.zeros((blocks.t_r, blocks.t_c)))
    skipped = io_model.flashmask_backward(n, d, m, none)
    once = 4 * n * d  # dO and O for D, K and V
    vectors = io_model.flashmask_vectors(n, n)
    preprocessing = vectors + 8 * blocks.t_c
    assert vectors == 4 * n
    assert skipped.reads == once + preprocessing + vectors


# Errors.


@pytest.mark.parametrize(
    ("n", "d", "m", "message"),
    [
        (0, 4, 4, "n = 0: expected a positive whole number"),
        (4, 0, 4, "d = 0: expected a positive whole number"),
        (4, 4, 3, "M = 3: expected d <= M <= N d, here 4 <= M <= 16"),
        (4, 4, 17, "M = 17: expected d <= M <= N d, here 4 <= M <= 16"),
        (4, 4, 4.0, "M = 4.0: expected a whole number of elements"),
        (4.5, 4, 4, "n = 4.5: expected a positive whole number"),
    ],
)
def test_sizes_outside_the_theorems(n, d, m, message):
    for model in (io_model.block_sizes, io_model.flash_forward, io_model.swapped_forward):
        with pytest.raises(ArgumentError, match=message):
            model(n, d, m)


def test_tiles_of_the_wrong_shape():
    with pytest.raises(ShapeError, match=r"blocks has shape \(3, 3\): expected \(T_r, T_c\) = \(8, 8\)"):
        io_model.flash_forward(64, 8, 256, blocks=np.ones((3, 3)))
    tiles = all_tiles(64, 8, 256, True, True)._replace(upper=np.ones(3))
    with pytest.raises(ShapeError, match=r"tiles\.upper has shape"):
        io_model.flashmask_forward(64, 8, 256, tiles)


@given(a=st.integers(-(2**70), 2**70), b=st.integers(1, 2**40))
def test_cdiv_is_the_ceiling(a, b):
    assert (cdiv(a, b) - 1) * b < a <= cdiv(a, b) * b
    assert cdiv(np.array([a % 99, b % 99]), 7).tolist() == [cdiv(a % 99, 7), cdiv(b % 99, 7)]


@given(size=sizes())
def test_block_sizes_cover_n(size):
    n, d, m = size
    for square in (False, True):
        b = io_model.block_sizes(n, d, m, square)
        assert b.b_c == -(-m // (4 * d))
        assert b.b_r == (b.b_c if square else min(b.b_c, d))
        assert (b.t_r - 1) * b.b_r < n <= b.t_r * b.b_r
        assert (b.t_c - 1) * b.b_c < n <= b.t_c * b.b_c
