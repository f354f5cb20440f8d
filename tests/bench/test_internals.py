"""Other tiles for the portable forward, and back."""

import numpy as np
import pytest

from bench.internals import BACKWARD_TILES, TILES, backward_plan, plan, portable_tile
from cuattn.cuda.tiles import Card
from cuattn.problem import validate

H200 = Card("sm_90", 132, 232448, 62914560)


def planned(head_dim, direction="forward"):
    q = np.zeros((8, 1024, head_dim), np.float16)
    problem, *_ = validate(direction, q, q, q, kernel="sm80")
    return (plan.forward_plan if direction == "forward" else backward_plan.backward_plan)(problem, H200)


@pytest.mark.parametrize("head_dim", TILES)
def test_the_tile_is_used_inside_and_forgotten_outside(head_dim):
    chosen = planned(head_dim)
    for rows, tile in TILES[head_dim].items():
        with portable_tile(tile):
            made = planned(head_dim)
            assert (made.block_m, made.block_n, made.workers) == (rows, tile.block_n, tile.warps)
            assert made.smem_bytes <= H200.shared_bytes
    assert planned(head_dim) == chosen


def test_the_tile_of_a_backward_is_used_inside_and_forgotten_outside():
    chosen = planned(64, "backward")
    for keys, tile in BACKWARD_TILES.items():
        with portable_tile(tile):
            made = planned(64, "backward")
            assert (made.block_m, made.block_n, made.workers) == (tile.block_m, keys, tile.warps)
            assert made.smem_bytes <= H200.shared_bytes
    assert planned(64, "backward") == chosen


@pytest.mark.gpu
def test_the_loops_give_the_textbooks_result():
    import cupy

    from bench import loop_order

    problem = loop_order.Problem(6, 256, 64, 128)
    operands = loop_order.arrays(cupy, problem)
    for runner in loop_order.RUNNERS:
        loop_order.check(problem, runner, operands, loop_order.launcher(problem, runner, *operands)())
