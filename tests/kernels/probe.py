"""Run a few lines of CUDA around one header on one warp, on CuPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn.cuda import compile as compiler
from cuattn.cuda import source


def run(includes, arguments, body, *arrays, constants=None, threads=32, preamble="", shared_bytes=0, arch=None):
    """Compile ``extern "C" __global__ void probe(<arguments>) { body }`` and run it on copies of `arrays`.

    Returns the arrays as the kernel left them, as NumPy arrays.  In the body, ``l`` is the lane, ``memory`` the
    dynamic shared memory and ``at`` its address; `arch` is the GPU's own unless it is given.
    """
    import cupy

    lines = [f'#include "{name}"' for name in ("ptx/shared.cuh", *includes)]
    lines += [
        preamble,
        f'extern "C" __global__ void probe({arguments}) {{',
        "extern __shared__ __align__(1024) unsigned char memory[];",
        "const int l = threadIdx.x % 32;",
        "const u32 at = ptx::shared_address(memory); (void)l; (void)at;",
        body,
        "}",
    ]
    text = source.prologue(constants or {}) + source.flatten_text("\n".join(lines), "probe.cu")
    device = [cupy.asarray(x) for x in arrays]
    kernel = compiler.load(compiler.compile_cubin(text, arch or f"sm_{capability()}"), "probe", shared_bytes)
    kernel((1,), (threads,), tuple(device), shared_bytes)
    return [x.get() for x in device]


def capability() -> int:
    """Return the GPU's compute capability, 90 for example."""
    import cupy

    return int(cupy.cuda.Device().compute_capability)


def need_hopper(newer=True):
    """Skip the test on an older GPU than Hopper, or (`newer` false) on a newer one too."""
    if not (capability() >= 90 if newer else capability() == 90):
        pytest.skip("needs compute capability 9.0")


def lanes() -> tuple[np.ndarray, np.ndarray]:
    """Return g = lane / 4 and q = lane % 4 of the 32 lanes."""
    return np.arange(32) // 4, np.arange(32) % 4


def gather(d: np.ndarray) -> np.ndarray:
    """Gather a result of m16n8 tiles from the lanes' values, (32, m_tiles, n_tiles, 4) or without leading tiles."""
    d = d.reshape(32, *(1,) * (4 - d.ndim), *d.shape[1:])
    m, n = d.shape[1:3]
    # (g, q, m, n, half, odd) to rows 16 m + 8 half + g and columns 8 n + 2 q + odd
    return d.reshape(8, 4, m, n, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(16 * m, 8 * n)
