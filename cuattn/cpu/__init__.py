"""The CPU backend: attention in NumPy, small problems by whole heads, large ones by tiles.

Scores are never stored beyond a few tiles or a few small heads; products go through NumPy's BLAS library, one thread
each, on as many threads as it would have used; masked tiles are skipped.
"""

from cuattn.cpu.call import plan, run
from cuattn.cpu.merge import merge

__all__ = ["FAMILIES", "merge", "plan", "run"]

FAMILIES = ("cpu",)
