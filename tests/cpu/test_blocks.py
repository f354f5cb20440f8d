"""Sizes of blocks, and the heads that are computed together (cuattn.cpu.blocks)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.cpu.blocks import choose, even, head_groups
from tests.cpu.problems import problem_of
from tests.strategies import DTYPES, cases


def blocks_of(*arrays, **options):
    problem, _, masks = problem_of(*arrays, **options)
    return choose(problem, masks)


@given(length=st.integers(1, 10_000), limit=st.sampled_from((16, 48, 64, 128)))
def test_even_blocks_are_multiples_of_16_up_to_the_limit_and_as_few_as_can_be(length, limit):
    size = even(length, limit)
    assert size % 16 == 0 and 16 <= size <= limit
    assert -(-length // size) == -(-length // limit)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("head_dim", [1, 16, 64, 128, 256, 512])
@pytest.mark.parametrize("n", [1, 100, 4096, 16384])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_cover_the_problem_and_products_sum_over_few_keys(operation, head_dim, n, dtype):
    x = np.lib.stride_tricks.as_strided(np.zeros(head_dim, dtype), (1, n, head_dim), (0, 0, np.dtype(dtype).itemsize))
    problem, _, masks = problem_of(x, x, x, operation=operation)
    size = choose(problem, masks)
    assert size.rows % 16 == size.keys % 16 == 0
    assert (size.row_tiles - 1) * size.rows < n <= size.row_tiles * size.rows
    assert (size.key_tiles - 1) * size.keys < n <= size.key_tiles * size.keys
    assert size.keys <= max(16, 12 * head_dim)
    assert 1 <= size.step <= size.held <= size.key_tiles
    assert size.held == size.key_tiles or size.held % size.step == 0
    assert cuattn.plan(x, x, x).workspace_bytes <= cuattn.plan(x, x, x).workers * 64e6


def test_tiles_of_a_block_mask_of_multiples_of_64_lie_within_its_blocks():
    x = np.zeros((1, 512 * 2, 64), np.float32)
    size = blocks_of(x, x, x, mask=cuattn.BlockMask(np.ones((8, 16), bool), 128, 64))
    assert 128 % size.rows == 0 and 64 % size.keys == 0


def test_heads_are_joined_with_and_without_a_mask_but_not_under_masks_of_their_own():
    x = np.zeros((2, 8, 600, 64), np.float32)
    causal, own = cuattn.masks.causal(600), np.ones((8, 600, 600), bool)
    assert blocks_of(x[:, :, :100], x, x).heads == blocks_of(x, x, x, mask=causal).heads == 8
    assert blocks_of(x, x, x).stack == 8
    assert blocks_of(x, x, x, mask=own).heads == 1


@given(case=cases(dtypes=DTYPES[2:3], max_length=5), size=st.integers(1, 4))
def test_every_head_is_in_one_group_and_groups_of_one_list_read_what_no_other_does(case, size):
    (q, k, v), options = case.arguments()
    problem, operands, _ = problem_of(q, k, v, **options)
    lists = list(head_groups(problem, size))
    heads = [(*group.batch, head) for some in lists for group in some for head in range(group.start, group.stop)]
    assert heads == list(np.ndindex(*problem.batch, problem.heads))
    read = [{(*g.batch, h // problem.group) for g in some for h in range(g.start, g.stop)} for some in lists]
    assert sum(map(len, read)) == len(set().union(*read))
    for group in (group for some in lists for group in some):
        assert 1 <= group.count <= size
        for name, part in (("q", group.of_queries(operands["q"])), ("k", group.of_keys(operands["k"]))):
            wide = np.broadcast_to(operands[name], (*problem.batch, *operands[name].shape[-3:]))[group.batch]
            first = 0 if len(wide) == 1 else group.start if name == "q" else group.kv_start
            np.testing.assert_array_equal(part, wide[first : first + len(part)])
