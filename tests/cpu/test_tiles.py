"""Which tiles are visited, and which of their elements are hidden, against dense masks (cuattn.cpu.tiles)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.cpu.arithmetic import hide
from cuattn.cpu.blocks import choose
from cuattn.cpu.call import visible_parts
from cuattn.cpu.tiles import MASK_BYTES, Visibility
from cuattn.cpu.walk import Tiles
from cuattn.io_model.sizes import cdiv
from tests.cpu.problems import problem_of
from tests.strategies import DTYPES, cases


def visibility(problem, _, masks, again=True, **sizes):
    """Return the visibility of a problem in tiles of given sizes, and its blocks."""
    parts = visible_parts(problem, masks, problem.place)
    blocks = choose(problem, parts)
    if sizes:
        tiles = {"row_tiles": cdiv(problem.n_queries, sizes["rows"]), "key_tiles": cdiv(problem.n_keys, sizes["keys"])}
        blocks = blocks._replace(**sizes, **tiles)
    return Visibility(problem, parts, blocks, again=again), blocks


def of_case(case):
    (q, k, v), options = case.arguments()
    return problem_of(q, k, v, **options)


@given(
    case=cases(dtypes=DTYPES[2:3], max_length=120),
    rows=st.sampled_from((16, 48)),
    keys=st.sampled_from((16, 64)),
    step=st.integers(1, 4),
)
def test_visited_tiles_hold_all_that_is_visible_and_nothing_visible_is_hidden(case, rows, keys, step):
    problem, operands, masks = of_case(case)
    scores = (*problem.stat_shape, problem.n_keys)
    if 0 in scores:
        return
    found, blocks = visibility(problem, operands, masks, rows=rows, keys=keys, step=step, heads=1)
    visible = np.broadcast_to(True if case.visible is None else case.visible, scores)
    for head in np.ndindex(*problem.batch, problem.heads):
        seen = np.zeros((blocks.row_tiles, rows, blocks.key_tiles * keys), np.float32)
        for row_tile, of_rows in enumerate(seen):
            for part in found.parts(head, row_tile):
                _mark(of_rows, part, blocks)
        seen = seen.reshape(-1, seen.shape[-1])
        np.testing.assert_array_equal(seen[: problem.n_queries, : problem.n_keys], visible[head])
        assert not seen[: problem.n_queries, problem.n_keys :].any()


def _mark(seen, part, blocks):
    """Set what a part shows to 1."""
    tiles = [
        (first + n, slot) for first, slots, _ in part.runs for n, slot in enumerate(range(slots.start, slots.stop))
    ]
    assert [slot for _, slot in tiles] == list(range(part.count))
    assert {tile // blocks.step for tile, _ in tiles} == {part.index}
    shown = np.ones((part.count, blocks.keys, blocks.rows), np.float32)
    for slots, bits in part.masks:
        keys, seen_bits = bits()
        hide(shown[slots, keys], seen_bits)
    for tile, slot in tiles:
        seen[:, tile * blocks.keys : (tile + 1) * blocks.keys] += shown[slot].T


def test_a_block_mask_of_multiples_of_64_has_no_partial_tiles():
    rng = np.random.default_rng(0)
    mask = cuattn.BlockMask(rng.random((4, 8)) < 0.5, 128, 64)
    x = np.zeros((1, 512, 64), np.float32)
    found, blocks = visibility(*problem_of(x, x, x, mask=mask))
    assert not any(part.masks for row_tile in range(blocks.row_tiles) for part in found.parts((0,), row_tile))


def test_tiles_along_a_diagonal_share_what_hides_them():
    mask = cuattn.masks.sliding_window(2048, 300)
    x = np.zeros((1, 2048, 64), np.float32)
    found, blocks = visibility(*problem_of(x, x, x, mask=mask))
    parts = [part for row_tile in range(blocks.row_tiles) for part in found.parts((0,), row_tile)]
    masks = {mask for part in parts for _, mask in part.masks}
    assert 0 < len(masks) <= 8


def test_no_more_is_remembered_than_there_is_room_for():
    rng = np.random.default_rng(0)
    x = np.zeros((1, 4096, 64), np.float32)
    found, blocks = visibility(*problem_of(x, x, x, mask=rng.random((4096, 4096)) < 0.5))
    made = [found.parts((0,), t) for t in range(blocks.row_tiles)]
    size = blocks.rows * blocks.keys * 4
    remembered = sum(shown()[1].nbytes for shown in found._tile_masks.values())
    assert MASK_BYTES - 16 * size < remembered <= MASK_BYTES
    assert found.parts((0,), 0) is made[0]
    (_, first), (_, last) = made[0][0].masks[0], made[-1][-1].masks[-1]
    assert first() is first() and last() is not last()


def test_elements_are_remembered_for_other_heads_alone():
    x, rng = np.zeros((2, 1, 256, 64), np.float32), np.random.default_rng(0)
    for batch in (2, 1):
        problem, operands, masks = problem_of(x, x, x, mask=rng.random((batch, 1, 256, 256)) < 0.5)
        task = Tiles(problem, operands, masks, None, {}, True)
        (_, shown), *_ = task.visibility.parts((0, 0), 0)[0].masks
        assert (shown() is shown()) == (batch == 1)
