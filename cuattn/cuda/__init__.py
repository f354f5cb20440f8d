"""The CUDA backend: launch sequences for CuPy arrays on the current device."""

from cuattn.cuda.families import FAMILIES, launch_sequence, plan
from cuattn.cuda.merge import merge_sequence

__all__ = ["FAMILIES", "launch_sequence", "merge_sequence", "plan"]
