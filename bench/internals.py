"""Everything of cuattn that is no public API and that measurements need: tiles, plans made anew, kernels of studies."""

import contextlib
import functools
from pathlib import Path
from unittest import mock

from cuattn import dispatch
from cuattn.cuda import compile as compiler
from cuattn.cuda import source
from cuattn.cuda.sm80 import backward, forward
from cuattn.cuda.sm80.tiles import BackwardTile, BackwardTiles, Tile

STUDIES = Path(__file__).resolve().parent / "studies"
nvrtc_version = compiler.nvrtc_version

# Query rows -> a tile for 64 dimensions that fits in registers and shared memory of an H200.
TILES = {
    16: Tile(16, 64, 1, 2, 1),
    32: Tile(32, 64, 2, 2, 1),
    64: Tile(64, 64, 4, 2, 1),
    128: Tile(128, 64, 4, 2, 2),
    256: Tile(256, 64, 8, 2, 1),
}

# Keys -> a tile of the backward's key kernel, for 64 dimensions of 16 bits.
BACKWARD_TILES = {
    32: BackwardTile(64, 32, 8, 4, 2),
    64: BackwardTile(64, 64, 8, 4, 2),
    128: BackwardTile(64, 128, 8, 2, 2),
}


@contextlib.contextmanager
def portable_tile(tile):
    """Let the portable forward or backward use `tile`; launch sequences made before are forgotten."""
    if isinstance(tile, Tile):
        changed = mock.patch.object(forward, "look_up", lambda *_: tile)
    else:
        tiles = BackwardTiles(tile, tile, tile, tile)
        changed = mock.patch.object(backward, "look_up", lambda *_: tiles)
    dispatch.forget()
    try:
        with changed:
            yield
    finally:
        dispatch.forget()


@functools.lru_cache(maxsize=64)
def study_text(name, constants):
    """Return the complete source of ``bench/studies/NAME``, specialised by `constants` as the library's kernels are."""
    return source.prologue(dict(constants)) + source.flatten_text((STUDIES / name).read_text(), name)


@functools.lru_cache(maxsize=64)
def study_kernel(name, kernel, constants, shared_bytes):
    """Return a kernel of ``bench/studies/NAME``, compiled for the current GPU."""
    import cupy

    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    cubin = compiler.compile_cubin(study_text(name, constants), arch, name=name)
    return compiler.load(cubin, kernel, shared_bytes)
