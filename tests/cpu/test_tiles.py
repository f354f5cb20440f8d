"""Which tiles are visited, and which of their elements are hidden, against dense masks; block sizes."""

from itertools import product, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.cpu.blocks import ABREAST, Blocks, choose, stack_shape
from cuattn.cpu.heads import all_heads
from cuattn.cpu.tiles import PARTS, Tiles
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
            chunks = tiles.view(head, row_tile).chunks
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
    assert not any(chunk.partial for t in range(4) for chunk in tiles.view(head, t).chunks)


@given(
    case=cases(dtypes=DTYPES[2:3], max_length=200),
    chunk=st.integers(1, 4),
    panel=st.integers(1, 3),
    stack=st.integers(1, 5),
    most=st.integers(1, ABREAST),
)
def test_groups_hold_what_their_row_tiles_see_in_parts_of_about_one_size(case, chunk, panel, stack, most):
    problem, operands = problem_of(case)
    if 0 in problem.score_shape:
        return
    size = Blocks(16, 16, stack, 1, chunk, chunk * panel, -(-problem.n_queries // 16), -(-problem.n_keys // 16))
    tiles = Tiles(problem, operands, size)

    def listed(parts):
        pairs = [(first + n, slot + n) for _, runs in parts for first, slot, count in runs for n in range(count)]
        return [tile for tile, _ in pairs], [slot for _, slot in pairs]

    for head, row_tile in product(all_heads(problem), range(0, size.row_tiles, stack)):
        stop = min(row_tile + stack, size.row_tiles)
        groups = tiles.groups(head, row_tile, stop, most)
        views = [tiles.view(head, t) for t in range(row_tile, stop)]
        assert [view for group in groups for view in group.views] == views
        for group in groups:
            assert 1 <= len(group.views) <= most
            assert views[group.start] is group.views[0]
            seen, slots = listed([(part.count, part.runs) for part in group.parts])
            assert slots == [slot for part in group.parts for slot in range(part.count)]
            counts = [part.count for part in group.parts]
            assert max(counts, default=0) <= size.slots // len(group.views)
            assert max(counts, default=0) - min(counts, default=0) <= 1
            for part in group.parts:
                assert all(first % size.panel + count <= size.panel for first, _, count in part.runs)
            for row, view in enumerate(group.views):
                assert listed([(0, chunk.runs) for chunk in view.chunks])[0] == seen
                assert view.indices == tuple(chunk.index for chunk in view.chunks)
                veiled = [each for part in group.parts for each in part.veils if each[0] == row]
                assert {tile: veil for _, tile, _, veil in veiled} == view.partial
                assert all((tile, slot) in zip(seen, slots, strict=True) for _, tile, slot, _ in veiled)
                assert [part.padding for part in group.parts[-1:]] == [chunk.padding for chunk in view.chunks[-1:]]


def test_tiles_along_a_diagonal_share_what_hides_them():
    mask = cuattn.masks.sliding_window(2048, 300)
    x = np.zeros((1, 2048, 64), np.float32)
    problem, operands, _ = validate("forward", x, x, x, mask=mask)
    size = choose(problem, operands)
    tiles, head = Tiles(problem, operands, size), all_heads(problem)[0]
    veils = {veil for t in range(size.row_tiles) for chunk in tiles.view(head, t).chunks for veil in chunk.veils}
    assert None not in veils
    assert len(veils) <= 8


def test_remembered_groups_have_no_more_parts_than_there_is_room_for():
    row_tiles, key_tiles = 33, PARTS // 8  # at two key tiles a part, a row tile takes a 16th of the room
    q, k = (np.zeros((1, 16 * n, 8), np.float32) for n in (row_tiles, key_tiles))
    mask = cuattn.BlockMask(np.ones((row_tiles, key_tiles), bool), 16, 16)
    problem, operands, _ = validate("forward", q, k, k, mask=mask)
    tiles = Tiles(problem, operands, Blocks(16, 16, 1, 1, 1, 1, row_tiles, key_tiles))
    head = all_heads(problem)[0]
    made = [tiles.groups(head, t, t + 1, 1) for t in range(row_tiles)]
    kept = list(takewhile(lambda t: tiles.groups(head, t, t + 1, 1) is made[t], reversed(range(row_tiles))))
    assert 0 < sum(len(group.parts) for t in kept for group in made[t]) <= PARTS


def test_forced_sizes_reach_the_backend():
    x = np.zeros((1, 100, 8), np.float32)
    with forced(16, 16, 1, 1, 1):
        cuattn.forward(x, x, x)
