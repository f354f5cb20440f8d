"""Other tiles for the portable kernels, and back."""

import numpy as np
import pytest

from bench.internals import BACKWARD_TILES, TILES, backward, forward, portable_tile
from cuattn.cuda.device import Device
from cuattn.problem import Problem

H200 = Device("sm_90", 132, 232448, 60 << 20)
CUTS = {"forward": forward.Cut, "backward": backward.Cut}


def tile_of(direction):
    problem = Problem(direction, (8,), 1, 1, 1024, 1024, 64, 64, np.dtype(np.float16), 0.125)
    cut = CUTS[direction](problem, H200)
    forward = direction == "forward"
    assert (cut.shared_bytes if forward else cut.shared_bytes("keys")) <= H200.shared_bytes
    return cut.tile if forward else cut.keys


@pytest.mark.parametrize("direction", CUTS)
def test_the_tile_is_used_inside_and_forgotten_outside(direction):
    chosen = tile_of(direction)
    for kept, tile in (TILES if direction == "forward" else BACKWARD_TILES).items():
        with portable_tile(tile):
            made = tile_of(direction)
            assert made == tile and kept == (made.block_m if direction == "forward" else made.block_n)
    assert tile_of(direction) == chosen


@pytest.mark.gpu
def test_the_loops_give_the_textbooks_result():
    import cupy

    from bench import loop_order

    problem = loop_order.Problem(6, 256, 64, 128)
    operands = loop_order.arrays(cupy, problem)
    for runner in loop_order.RUNNERS:
        loop_order.check(problem, runner, operands, loop_order.launcher(problem, runner, *operands)())
