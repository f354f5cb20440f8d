"""Other tiles for the portable kernels, and back."""

import numpy as np
import pytest

from bench.internals import BACKWARD_TILES, TILES, backward_plan, forward_plan, portable_tile
from cuattn.cuda.device import Device
from cuattn.problem import Problem

H200 = Device("sm_90", 132, 232448, 60 << 20)
PLANS = {"forward": forward_plan.forward_plan, "backward": backward_plan.backward_plan}


def planned(direction):
    problem = Problem(direction, (8,), 1, 1, 1024, 1024, 64, 64, np.dtype(np.float16), 0.125)
    return PLANS[direction](problem, H200)


@pytest.mark.parametrize("direction", PLANS)
def test_the_tile_is_used_inside_and_forgotten_outside(direction):
    chosen = planned(direction)
    for kept, tile in (TILES if direction == "forward" else BACKWARD_TILES).items():
        with portable_tile(tile):
            made = planned(direction)
            assert (made.block_m, made.block_n, made.workers) == (tile.block_m, tile.block_n, tile.warps)
            assert kept == (made.block_m if direction == "forward" else made.block_n)
            assert made.smem_bytes <= H200.shared_bytes
    assert planned(direction) == chosen


@pytest.mark.gpu
def test_the_loops_give_the_textbooks_result():
    import cupy

    from bench import loop_order

    problem = loop_order.Problem(6, 256, 64, 128)
    operands = loop_order.arrays(cupy, problem)
    for runner in loop_order.RUNNERS:
        loop_order.check(problem, runner, operands, loop_order.launcher(problem, runner, *operands)())
