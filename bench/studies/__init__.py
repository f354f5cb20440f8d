"""Kernels that answer a question of the papers and are no part of the library.

They are compiled as the library's own are, with the headers of ``kernels/`` and a prologue of constants.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from cuattn.cuda import compile as compiler
from cuattn.cuda import source

__all__ = ["function", "text"]

FOLDER = Path(__file__).resolve().parent


@functools.lru_cache(maxsize=64)
def text(name: str, constants: tuple[tuple[str, object], ...]) -> str:
    """Return the complete source of ``bench/studies/NAME``, specialised by `constants`."""
    return source.prologue(constants) + source.flatten_text((FOLDER / name).read_text(), name)


@functools.lru_cache(maxsize=64)
def function(name: str, kernel: str, constants: tuple[tuple[str, object], ...], shared_bytes: int) -> Any:
    """Return a kernel of ``bench/studies/NAME``, compiled for the current GPU."""
    import cupy

    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    return compiler.load(compiler.compile_cubin(text(name, constants), arch, name=name), kernel, shared_bytes)
