"""The portable kernels: any GPU from compute capability 8.0 on."""

from cuattn.cuda.sm80.backward import Backward
from cuattn.cuda.sm80.backward_jvp import BackwardJvp
from cuattn.cuda.sm80.forward import Forward
from cuattn.cuda.sm80.jvp import Jvp

__all__ = ["Backward", "BackwardJvp", "Forward", "Jvp"]
