"""Calls of Python by XLA, with arrays where they lie: NumPy's on the CPU, CuPy's on XLA's own stream on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from cuattn.errors import UnsupportedError
from cuattn.interop.torch_tensors import foreign_stream

_CPU = 1  # dlpack.h


def call(run: Callable[..., list[Any]], results: list[Any], arrays: Sequence[Any]) -> list[Any]:
    """Stage a call of ``run(arrays, out)``, which fills the arrays `out` or returns others to be copied there.

    Parameters
    ----------
    run : callable
    results : list of jax.ShapeDtypeStruct
        Of what it returns.
    arrays : sequence of jax.Array
        Traced.

    Returns
    -------
    list of jax.Array
    """
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as error:
        raise UnsupportedError(
            f"cuattn.jax.attention under jax.jit needs jax.experimental.buffer_callback, which JAX {jax.__version__} "
            "lacks; expected a newer one, or a call outside of jax.jit"
        ) from error
    return buffer_callback(functools.partial(_answer, run), results)(*arrays)


def _answer(run: Callable[..., list[Any]], context: Any, results: Sequence[Any], *arrays: Any) -> None:
    """Run a call that XLA makes, on its buffers."""
    kind, device = results[0].__dlpack_device__()
    if kind == _CPU:
        _fill(run, list(map(np.asarray, arrays)), list(map(np.asarray, results)))
        return
    import cupy

    view = functools.partial(_device_view, cupy, device)
    with cupy.cuda.Device(device), foreign_stream(device, context.stream):
        _fill(run, list(map(view, arrays)), list(map(view, results)))


def _fill(run: Callable[..., list[Any]], arrays: list[Any], out: list[Any]) -> None:
    for wanted, found in zip(out, run(arrays, out), strict=True):
        if found is not wanted:
            wanted[...] = found


def _device_view(cupy: Any, device: int, buffer: Any) -> Any:
    """Return a CuPy array over a buffer of XLA."""
    dtype = np.dtype(buffer.dtype)
    address, _ = buffer.__cuda_array_interface__["data"]
    memory = cupy.cuda.UnownedMemory(address, int(np.prod(buffer.shape)) * dtype.itemsize, buffer, device)
    return cupy.ndarray(tuple(buffer.shape), dtype, cupy.cuda.MemoryPointer(memory, 0))
