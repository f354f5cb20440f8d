"""Which tiles are visited, and which of their elements are hidden, against dense masks; block sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.cpu.blocks import Blocks, choose, stack_shape
from cuattn.cpu.heads import all_heads
from cuattn.cpu.tiles import Tiles
from cuattn.problem import validate
from tests.cpu.sizes import forced
from tests.strategies import DTYPES, cases


def problem_of(case):
    (q, k, v), options = case.arguments()
    problem, operands, _ = validate("forward", q, k, v, **options)
    return problem, operands


@given(case=cases(dtypes=DTYPES[2:3], max_length=120), rows=st.sampled_from((16, 48)), keys=st.sampled_from((16, 64)))
def test_visited_tiles_hold_all_that_is_visible_and_nothing_visible_is_hidden(case, rows, keys):
    problem, operands = problem_of(case)
    if 0 in problem.score_shape:
        return
    size = Blocks(rows, keys, 1, 1, 3, 100, -(-problem.n_queries // rows), -(-problem.n_keys // keys))
    tiles = Tiles(problem, operands, size)
    visible = np.ones(problem.score_shape, bool) if case.visible is None else case.visible
    visible = np.broadcast_to(visible, problem.score_shape)
    bias = None if case.bias is None else np.broadcast_to(case.bias, problem.score_shape)
    for head in all_heads(problem):
        rebuilt = np.zeros((size.row_tiles * rows, size.key_tiles * keys), bool)
        for row_tile in range(size.row_tiles):
            chunks = tiles.chunks(head, row_tile)
            assert [chunk.index for chunk in chunks] == sorted({chunk.index for chunk in chunks})
            for chunk in chunks:
                assert chunk.count == sum(count for _, _, count in chunk.runs)
                for first, _, count in chunk.runs:
                    assert first // 3 == (first + count - 1) // 3 == chunk.index
                    rebuilt[row_tile * rows : (row_tile + 1) * rows, first * keys : (first + count) * keys] = True
                for tile, _ in chunk.partial:
                    hidden = tiles.hidden(head, row_tile, tile)
                    there = rebuilt[row_tile * rows :, tile * keys :][:rows, :keys]
                    there = there[: problem.n_queries - row_tile * rows, : problem.n_keys - tile * keys]
                    there[np.broadcast_to(hidden, there.T.shape).T] = False
        expected = visible[head.query]
        np.testing.assert_array_equal(rebuilt[: problem.n_queries, : problem.n_keys], expected)
        if bias is not None:
            expected = expected & (bias[head.query] > -np.inf)
        np.testing.assert_array_equal(tiles.dead_keys(head), ~expected.any(axis=0))


@pytest.mark.parametrize("head_dim", [1, 16, 64, 128, 256, 512])
@pytest.mark.parametrize("n", [1, 100, 4096, 16384])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_block_sizes_are_multiples_of_16_that_cover_the_problem(head_dim, n, dtype):
    x = np.lib.stride_tricks.as_strided(np.zeros(head_dim, dtype), (1, n, head_dim), (0, 0, np.dtype(dtype).itemsize))
    problem, operands, _ = validate("forward", x, x, x)
    size = choose(problem, operands)
    assert size.rows % 16 == size.keys % 16 == 0
    assert (size.row_tiles - 1) * size.rows < n <= size.row_tiles * size.rows
    assert (size.key_tiles - 1) * size.keys < n <= size.key_tiles * size.keys
    assert size.panel % size.chunk == 0
    assert cuattn.plan(x, x, x).workspace_bytes <= cuattn.plan(x, x, x).workers * 64e6
    rows = 0
    for row_tile in range(0, size.row_tiles, size.stack):
        _, stack, height = stack_shape(problem, size, 1, row_tile)
        assert height % 16 == 0
        assert stack * height >= min(n - row_tile * size.rows, stack * size.rows)
        rows += stack * height
    assert n <= rows


def test_a_block_mask_of_multiples_of_64_has_no_partial_tiles():
    rng = np.random.default_rng(0)
    mask = cuattn.BlockMask(rng.random((4, 8)) < 0.5, 128, 64)
    x = np.zeros((1, 512, 64), np.float32)
    problem, operands, _ = validate("forward", x, x, x, mask=mask)
    tiles = Tiles(problem, operands, choose(problem, operands))
    head = all_heads(problem)[0]
    assert not any(chunk.partial for t in range(4) for chunk in tiles.chunks(head, t))


@given(case=cases(dtypes=DTYPES[2:3], max_length=200), chunk=st.integers(1, 4), panel=st.integers(1, 3))
def test_merged_chunks_hold_the_same_tiles_in_the_same_order(case, chunk, panel):
    problem, operands = problem_of(case)
    if 0 in problem.score_shape:
        return
    size = Blocks(16, 16, 1, 1, chunk, chunk * panel, -(-problem.n_queries // 16), -(-problem.n_keys // 16))
    tiles = Tiles(problem, operands, size)

    def listed(chunks):
        seen, partial = [], {}
        for chunk in chunks:
            slots = [(first + n, slot + n) for first, slot, count in chunk.runs for n in range(count)]
            assert [slot for _, slot in slots] == list(range(chunk.count))
            seen += [tile for tile, _ in slots]
            for pair, veil in zip(chunk.partial, chunk.veils, strict=True):
                assert pair in slots
                partial[pair[0]] = veil
        return seen, partial

    for head in all_heads(problem):
        for row_tile in range(size.row_tiles):
            chunks, indices, merged = tiles.view(head, row_tile)
            assert indices == tuple(each.index for each in chunks)
            assert listed(merged) == listed(chunks)
            assert all(each.count <= chunk for each in merged)
            assert [each.padding for each in merged[-1:]] == [each.padding for each in chunks[-1:]]
            for first, _, count in (run for each in merged for run in each.runs):
                assert first % size.panel + count <= size.panel


def test_tiles_along_a_diagonal_share_what_hides_them():
    mask = cuattn.masks.sliding_window(2048, 300)
    x = np.zeros((1, 2048, 64), np.float32)
    problem, operands, _ = validate("forward", x, x, x, mask=mask)
    size = choose(problem, operands)
    tiles, head = Tiles(problem, operands, size), all_heads(problem)[0]
    veils = {veil for t in range(size.row_tiles) for chunk in tiles.chunks(head, t) for veil in chunk.veils}
    assert None not in veils
    assert len(veils) <= 8


def test_forced_sizes_reach_the_backend():
    x = np.zeros((1, 100, 8), np.float32)
    with forced(16, 16, 1, 1, 1):
        cuattn.forward(x, x, x)
