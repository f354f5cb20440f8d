"""The papers' algorithms, line by line in NumPy, each counting its own HBM accesses.

Every function takes (N, d) arrays and the size M of the on-chip memory, divides the work as its paper does, and
reaches arrays only through :class:`~cuattn.reference.HBM`, which counts the elements read and written.
:mod:`cuattn.io_model` predicts those counts.  They explain and check; for speed there is :func:`cuattn.attention`.

- FlashAttention Alg. 0 and 3, standard forward and backward: :func:`standard_forward`, :func:`standard_backward`
- FlashAttention Alg. 1, forward without scale, mask and dropout: :func:`flash_forward` with scale=1
- FlashAttention Alg. 2 and 4, forward and backward: :func:`flash_forward`, :func:`flash_backward`
- FlashAttention Alg. 5, block-sparse forward, and its backward: the same with `blocks`
- the lecture's forward with swapped loops: :func:`swapped_forward`
- Rabe and Staats, chunked forward: :func:`rabe_staats_forward`
- FlashAttention Alg. 2 and 4 along tangents: :func:`flash_jvp`, :func:`flash_backward_jvp`
- FlashMask Alg. 1 and 2, forward and backward: :func:`flashmask_forward`, :func:`flashmask_backward`
"""

from cuattn.reference.flash import flash_backward, flash_forward
from cuattn.reference.flashmask import FlashMaskForward, flashmask_backward, flashmask_forward
from cuattn.reference.standard import StandardForward, standard_backward, standard_forward
from cuattn.reference.steps import HBM, Backward, Counts, Forward
from cuattn.reference.tangents import BackwardJvp, Jvp, flash_backward_jvp, flash_jvp
from cuattn.reference.variants import RabeStaatsForward, rabe_staats_forward, swapped_forward

__all__ = [
    "HBM",
    "Backward",
    "BackwardJvp",
    "Counts",
    "FlashMaskForward",
    "Forward",
    "Jvp",
    "RabeStaatsForward",
    "StandardForward",
    "flash_backward",
    "flash_backward_jvp",
    "flash_forward",
    "flash_jvp",
    "flashmask_backward",
    "flashmask_forward",
    "rabe_staats_forward",
    "standard_backward",
    "standard_forward",
    "swapped_forward",
]
