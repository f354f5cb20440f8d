"""The CPU backend: tiled attention in NumPy.

Scores are never stored beyond a chunk of tiles; products go through NumPy's BLAS library, one thread each, on as
many threads as it would have used; masked tiles are skipped.
"""

from cuattn.cpu.backward import backward
from cuattn.cpu.forward import forward
from cuattn.cpu.merge import merge
from cuattn.cpu.plan import plan

__all__ = ["backward", "forward", "merge", "plan"]

FAMILIES = ("cpu",)
