"""Everything of cuattn that is no public API and that measurements need: tiles, plans made anew, kernels of studies."""

import contextlib
import functools
from importlib import import_module
from pathlib import Path

from cuattn import dispatch
from cuattn.cuda import backward_plan, choice, source
from cuattn.cuda import compile as compiler
from cuattn.cuda.backward_plan import BackwardTile
from cuattn.cuda.tiles import Tile

__all__ = ["BACKWARD_TILES", "TILES", "portable_tile", "study_kernel", "study_text"]

plan = import_module("cuattn.cuda.plan")  # `cuattn.cuda.plan` is a function
STUDIES = Path(__file__).resolve().parent / "studies"

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
def portable_tile(tile):
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


def _forget():
    plan.forward_plan.cache_clear()
    backward_plan.backward_plan.cache_clear()
    choice._records.clear()
    dispatch._slot.cache_clear()


@functools.lru_cache(maxsize=64)
def study_text(name, constants):
    """Return the complete source of ``bench/studies/NAME``, specialised by `constants` as the library's kernels are."""
    return source.prologue(constants) + source.flatten_text((STUDIES / name).read_text(), name)


@functools.lru_cache(maxsize=64)
def study_kernel(name, kernel, constants, shared_bytes):
    """Return a kernel of ``bench/studies/NAME``, compiled for the current GPU."""
    import cupy

    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    cubin = compiler.compile_cubin(study_text(name, constants), arch, name=name)
    return compiler.load(cubin, kernel, shared_bytes)
