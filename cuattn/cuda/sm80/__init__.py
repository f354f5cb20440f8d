"""The portable kernels: any GPU from compute capability 8.0 on."""

from cuattn.cuda.sm80.backward import Backward
from cuattn.cuda.sm80.forward import Forward

__all__ = ["Backward", "Forward"]
