"""The CUDA backend: records of launches for CuPy arrays on the current device."""

from cuattn.cuda.families import plan, record
from cuattn.cuda.merge import merge_record

__all__ = ["merge_record", "plan", "record"]
