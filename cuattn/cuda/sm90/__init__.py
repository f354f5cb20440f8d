"""The kernels for compute capability 9.0: bulk tensor copies and warpgroup products."""

from cuattn.cuda.sm90.backward import Backward
from cuattn.cuda.sm90.backward_jvp import BackwardJvp, DoubleBackward
from cuattn.cuda.sm90.forward import Forward
from cuattn.cuda.sm90.jvp import Jvp

__all__ = ["Backward", "BackwardJvp", "DoubleBackward", "Forward", "Jvp"]
