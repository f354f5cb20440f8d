"""Sizes of the tables that kernels read: never a matrix that the caller did not give."""

import numpy as np
import pytest

from cuattn.masks import BlockMask, BooleanMask, causal_document, from_function
from cuattn.masks.cuda_half import Extent

N = 1 << 14


def extent(*masks, tile=(128, 128, 64), instances=1):
    return Extent(instances, N, N, *tile, True, tuple((mask.kind, mask.source()) for mask in masks))


def size(mask, **more):
    """Return the bytes of a mask's tables, without the states of tiles."""
    tables = mask.cuda.tables(extent(mask, **more))
    return sum(tables.values()) - tables.get("states", 0) - tables.get("rough", 0)


@pytest.mark.parametrize(
    "mask",
    [
        BooleanMask(np.ones((1, N), bool)),
        BooleanMask(np.ones((N, 1), bool)),
        from_function(lambda b, h, i, j: (i - j) % 3 == 0, N),
        causal_document([N // 2, N // 2]),
        BlockMask(np.ones((N // 64, N // 64), bool), 64, 64),
    ],
    ids=lambda mask: repr(mask)[:40],
)
def test_memory_goes_with_the_length(mask):
    assert size(mask) <= 24 * N
    assert extent(mask).strides["states_instance"] == N // 64 // 4 * N // 128 // 4


def test_bits_are_an_eighth_of_a_matrix():
    mask = BooleanMask(np.broadcast_to(np.ones((1, 1), bool), (N, N)))
    assert N * N // 8 <= size(mask) <= N * N // 8 + N
    strides = extent(mask, tile=(128, 112, 128)).strides
    assert strides["bits_tile"] == 112 and strides["bits_row"] == -(-N // 112) * 112


def test_who_writes_last():
    """What sorts row tiles, and what looks for keys that some row sees of several masks, read what the others write."""
    mask = from_function(lambda b, h, i, j: (i - j) % 3 == 0, N)
    kernels = mask.cuda.kernels(extent(mask))
    assert [kernel.name for kernel in kernels if kernel.last] == ["mask_order"]
    assert [kernel.generated for kernel in kernels] == ["tiles", "tiles", "visible", ""]
    beside = mask.cuda.kernels(extent(mask, BooleanMask(np.ones((1, N), bool))))
    assert {kernel.name for kernel in beside if kernel.last} == {"mask_order", "mask_alive"}
