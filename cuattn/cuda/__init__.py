"""The CUDA backend: launch sequences for CuPy arrays on the current device."""

from cuattn.cuda.add import add_sequence
from cuattn.cuda.families import FAMILIES, launch_sequence, plan
from cuattn.cuda.merge import merge_sequence

__all__ = ["FAMILIES", "add_sequence", "launch_sequence", "merge_sequence", "plan"]
