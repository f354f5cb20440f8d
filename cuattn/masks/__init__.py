"""Attention masks: what each query row may see, without ever storing the matrix.

`ColumnMask` holds two hidden row intervals per key (FlashMask), `BlockMask` a pattern of whole blocks, `FunctionMask`
a function of row and key; `from_function` makes a mask of such a function, the other functions build the masks of the
FlashMask paper in O(N).  Importing this package imports NumPy alone; CuPy is imported when an array on a GPU arrives.

Examples
--------
>>> from cuattn import masks
>>> mask = masks.causal_document([300, 500, 224])
>>> mask
<ColumnMask 1024 queries x 1024 keys on the host>
>>> mask.block_sparsity(128, 128)
0.65625
"""

from typing import TYPE_CHECKING, Any

from cuattn.masks.cells import BlockMask, BooleanMask
from cuattn.masks.column import ColumnMask
from cuattn.masks.combine import AllOf
from cuattn.masks.constructors import (
    causal,
    eviction,
    full,
    global_sliding_window,
    prefix_lm_causal,
    qk_sparse,
    random_eviction,
    sliding_window,
)
from cuattn.masks.packed import (
    causal_blockwise,
    causal_document,
    document,
    hash_sparse,
    prefix_lm_document,
    share_question,
)

if TYPE_CHECKING:
    from cuattn.masks.function import FunctionMask, from_function

CONSTRUCTORS = {
    make.__name__: make
    for make in (
        causal,
        causal_blockwise,
        causal_document,
        document,
        eviction,
        full,
        global_sliding_window,
        hash_sparse,
        prefix_lm_causal,
        prefix_lm_document,
        qk_sparse,
        random_eviction,
        share_question,
        sliding_window,
    )
}
"""What builds column masks of numbers and lists of them, by name."""

__all__ = [
    "AllOf",
    "BlockMask",
    "BooleanMask",
    "ColumnMask",
    "FunctionMask",
    "causal",
    "causal_blockwise",
    "causal_document",
    "document",
    "eviction",
    "from_function",
    "full",
    "global_sliding_window",
    "hash_sparse",
    "prefix_lm_causal",
    "prefix_lm_document",
    "qk_sparse",
    "random_eviction",
    "share_question",
    "sliding_window",
]


def __getattr__(name: str) -> Any:
    """Import what masks of functions need when the first of them is made."""
    if name not in ("FunctionMask", "from_function"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cuattn.masks import function

    return getattr(function, name)
