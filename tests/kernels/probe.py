"""Run a few lines of CUDA around one header on one warp, on CuPy arrays."""

from __future__ import annotations

import numpy as np

from cuattn.cuda import compile as compiler
from cuattn.cuda import source


def run(includes, arguments, body, *arrays, constants=None, threads=32, preamble="", shared_bytes=0):
    """Compile ``extern "C" __global__ void probe(<arguments>) { body }`` and run it on copies of `arrays`.

    Returns the arrays as the kernel left them, as NumPy arrays.  In the body, ``l`` is the lane and ``memory`` the
    dynamic shared memory.
    """
    import cupy

    lines = [f'#include "{name}"' for name in includes]
    lines += [
        preamble,
        f'extern "C" __global__ void probe({arguments}) {{',
        "extern __shared__ __align__(128) unsigned char memory[];",
        "const int l = threadIdx.x % 32; (void)l; (void)memory;",
        body,
        "}",
    ]
    text = source.prologue(constants or {}) + source.flatten_text("\n".join(lines), "probe.cu")
    device = [cupy.asarray(x) for x in arrays]
    arch = f"sm_{cupy.cuda.Device().compute_capability}"
    kernel = compiler.load(compiler.compile_cubin(text, arch), "probe", shared_bytes)
    kernel((1,), (threads,), tuple(device), shared_bytes)
    return [x.get() for x in device]


def lanes() -> tuple[np.ndarray, np.ndarray]:
    """Return g = lane / 4 and q = lane % 4 of the 32 lanes."""
    return np.arange(32) // 4, np.arange(32) % 4
