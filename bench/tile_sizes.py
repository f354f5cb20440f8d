"""Run the portable forward with other tile sizes than the plan would choose, to see what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module

from cuattn import dispatch
from cuattn.cuda import choice
from cuattn.cuda.tiles import Tile

__all__ = ["TILES", "portable_tile"]

plan = import_module("cuattn.cuda.plan")  # `cuattn.cuda.plan` is a function

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


@contextlib.contextmanager
def portable_tile(tile: Tile) -> Iterator[None]:
    """Let the portable forward (``kernel="sm80"``) use `tile`; plans and launch records made before are forgotten."""
    chosen = plan.forward_tile
    plan.forward_tile = lambda *_: tile
    _forget()
    try:
        yield
    finally:
        plan.forward_tile = chosen
        _forget()


def _forget() -> None:
    plan.forward_plan.cache_clear()
    choice._records.clear()
    dispatch._slot.cache_clear()
