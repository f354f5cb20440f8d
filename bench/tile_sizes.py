"""Run the portable kernels with other tile sizes than the plan would choose, to see what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cuattn import dispatch
from cuattn.cuda import families
from cuattn.cuda.sm80 import backward_plan
from cuattn.cuda.sm80 import forward_plan as plan
from cuattn.cuda.sm80.backward_plan import BackwardTile
from cuattn.cuda.sm80.tiles import Tile

__all__ = ["BACKWARD_TILES", "TILES", "portable_tile"]

# Head dimension -> query rows -> a tile that fits in registers and shared memory of an H200.
TILES = {
    64: {
        16: Tile(16, 64, 1, 2, 1),
        32: Tile(32, 64, 2, 2, 1),
        64: Tile(64, 64, 4, 2, 1),
        128: Tile(128, 64, 4, 2, 2),
        256: Tile(256, 64, 8, 2, 1),
    },
    128: {
        16: Tile(16, 64, 1, 2, 1),
        32: Tile(32, 64, 2, 2, 1),
        64: Tile(64, 64, 4, 2, 1),
        128: Tile(128, 64, 8, 2, 1),
        256: Tile(256, 32, 8, 2, 1),
    },
}

# Keys -> a tile of the backward's key kernel, for 64 dimensions of 16 bits.
BACKWARD_TILES = {
    32: BackwardTile(64, 32, 8, 4, 2),
    64: BackwardTile(64, 64, 8, 4, 2),
    128: BackwardTile(64, 128, 8, 2, 2),
}


@contextlib.contextmanager
def portable_tile(tile: Tile | BackwardTile) -> Iterator[None]:
    """Let the portable forward or backward use `tile`; plans and launch records made before are forgotten."""
    chosen, table = plan.forward_tile, backward_plan._TILES
    if isinstance(tile, Tile):
        plan.forward_tile = lambda *_: tile
    else:
        backward_plan._TILES = ((0, 2, 64, (tile,) * 4), *table)
    _forget()
    try:
        yield
    finally:
        plan.forward_tile, backward_plan._TILES = chosen, table
        _forget()


def _forget() -> None:
    plan.forward_plan.cache_clear()
    backward_plan.backward_plan.cache_clear()
    families._records.clear()
    dispatch._slot.cache_clear()
