"""The CUDA backend: CuPy arrays in, CuPy arrays out, on CuPy's current device and stream."""

from cuattn.cuda.forward import forward, plan
from cuattn.cuda.merge import merge

__all__ = ["forward", "merge", "plan"]
