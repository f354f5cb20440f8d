"""What the kernels need to be told of a mask: its kind as a term of ``cfg::mask``, and where its numbers lie.

The tables that kernels read are made of all masks of a call together, by the kernels that the masks' kinds name;
`cuattn.cuda.tables` launches them and knows no kind.
"""

from typing import Any, NamedTuple


class CudaHalf(NamedTuple):
    """How kernels take a kind of mask."""

    code: int  # what one such mask adds to cfg::mask, see kernels/attn/mask_format.cuh
    most: int  # masks of this kind that a launch takes
    source: str  # the field of MaskParams that describes the mask, or an array of `most` of them
    operand: str | None  # the field of Params that does, where kernels read the mask itself
    file: str  # of the kernels that make the tables
    kernels: tuple[str, ...]  # their names, in the order in which they run


class Source(NamedTuple):
    """Where a mask's numbers lie on a GPU, in elements from its address."""

    leading: tuple[int, ...]
    strides: tuple[int, ...]  # of the leading axes
    row: int  # from row to row, or from one vector to the next
    col: int  # from key to key
    block_m: int = 1  # rows and keys that share an element
    block_n: int = 1


def source_of(array: Any, block_m: int = 1, block_n: int = 1) -> Source:
    """Describe an array (..., rows or vectors, keys); one on the host is contiguous, as its copy on a GPU will be."""
    steps = zip(array.shape, array.strides, strict=True)
    *strides, row, col = (0 if n == 1 else stride // array.dtype.itemsize for n, stride in steps)
    return Source(array.shape[:-2], tuple(strides), row, col, block_m, block_n)
