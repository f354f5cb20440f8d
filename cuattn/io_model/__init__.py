"""How many elements attention moves between HBM and on-chip SRAM: the papers' formulas, and exact counts.

Three kinds of function, all pure, all counting elements (not bytes) of one head with N queries and N keys:

- the expressions inside the papers' Theta: :func:`theorem_2_standard` and :func:`theorem_2_flash` (Theorem 5 says of
  the backward what Theorem 2 says of the forward), :func:`proposition_4`, :func:`flashmask_vectors`;
- the lecture's closed forms with their constants: :func:`lecture_forward`, :func:`lecture_swapped_forward`;
- exact reads and writes, ceilings included, of each algorithm in :mod:`cuattn.reference`: :func:`standard_forward`,
  :func:`flash_forward` and the others, which return a :class:`Traffic`.  (Those of masks take the tiles that they leave
  visible.)

Names: n = N, the sequence length; d, the head dimension; m = M, the on-chip memory in elements.  Block sizes are
the papers' (Algorithms 1, 2, 4 and 5): B_c = ceil(M / 4d) keys and B_r = min(B_c, d) rows.

References
----------
T. Dao et al., "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022, appendices B to D.
G. Wang et al., "FlashMask: efficient and rich mask extension of FlashAttention", 2024, section 4.3 and appendix A.1.
S.-J. R. Kuo, "FlashAttention" (lecture), 2025.
"""

from cuattn.io_model.exact import (
    flash_backward,
    flash_backward_jvp,
    flash_forward,
    flash_jvp,
    flashmask_backward,
    flashmask_forward,
    rabe_staats_forward,
    standard_backward,
    standard_forward,
    swapped_forward,
)
from cuattn.io_model.formulas import (
    flashmask_vectors,
    lecture_forward,
    lecture_swapped_forward,
    proposition_4,
    theorem_2_flash,
    theorem_2_standard,
)
from cuattn.io_model.sizes import Blocks, Tiles, Traffic, block_sizes

__all__ = [
    "Blocks",
    "Tiles",
    "Traffic",
    "block_sizes",
    "flash_backward",
    "flash_backward_jvp",
    "flash_forward",
    "flash_jvp",
    "flashmask_backward",
    "flashmask_forward",
    "flashmask_vectors",
    "lecture_forward",
    "lecture_swapped_forward",
    "proposition_4",
    "rabe_staats_forward",
    "standard_backward",
    "standard_forward",
    "swapped_forward",
    "theorem_2_flash",
    "theorem_2_standard",
]
