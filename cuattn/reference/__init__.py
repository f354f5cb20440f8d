"""The papers' algorithms, line by line in NumPy, each counting its own HBM accesses.

Every function takes (N, d) arrays and the size M of the on-chip memory, divides the work as its paper does, and
reaches arrays only through :class:`~cuattn.reference.hbm.HBM`, which counts the elements read and written.
:mod:`cuattn.io_model` predicts those counts.  They explain and check; for speed there is :func:`cuattn.attention`.

| algorithm | function |
|---|---|
| FlashAttention Alg. 0, standard forward | :func:`standard_forward` |
| FlashAttention Alg. 1, forward without scale, mask and dropout | :func:`flash_forward_basic` |
| FlashAttention Alg. 2, forward | :func:`flash_forward` |
| FlashAttention Alg. 3, standard backward | :func:`standard_backward` |
| FlashAttention Alg. 4, backward | :func:`flash_backward` |
| FlashAttention Alg. 5, block-sparse forward | :func:`block_sparse_forward` |
| its backward: Alg. 4 over nonzero blocks | :func:`block_sparse_backward` |
| the lecture's forward with swapped loops | :func:`swapped_forward` |
| Rabe and Staats, chunked forward | :func:`rabe_staats_forward` |
| FlashMask Alg. 1 and 2, forward and backward | :func:`flashmask_forward`, :func:`flashmask_backward` |
"""

from cuattn.reference.block_sparse import block_sparse_backward, block_sparse_forward
from cuattn.reference.flash import flash_backward, flash_forward, flash_forward_basic
from cuattn.reference.flashmask import flashmask_backward, flashmask_forward
from cuattn.reference.hbm import HBM, Counts
from cuattn.reference.rabe_staats import rabe_staats_forward
from cuattn.reference.results import Backward, FlashMaskForward, Forward, RabeStaatsForward, StandardForward
from cuattn.reference.standard import standard_backward, standard_forward
from cuattn.reference.swapped import swapped_forward

__all__ = [
    "HBM",
    "Backward",
    "Counts",
    "FlashMaskForward",
    "Forward",
    "RabeStaatsForward",
    "StandardForward",
    "block_sparse_backward",
    "block_sparse_forward",
    "flash_backward",
    "flash_forward",
    "flash_forward_basic",
    "flashmask_backward",
    "flashmask_forward",
    "rabe_staats_forward",
    "standard_backward",
    "standard_forward",
    "swapped_forward",
]
