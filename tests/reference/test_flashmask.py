"""FlashMask's Algorithms 1 and 2."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import io_model, masks, reference
from cuattn.errors import ShapeError
from tests import oracle
from tests.masks.predicates import equation_4
from tests.reference.cases import cases, check_backward, check_forward, make_case


def draw_vectors(n, seed):
    """Draw two intervals per key: any, none, whole columns, or runs of documents."""
    generator = np.random.default_rng(seed)
    kind = seed % 4
    if kind == 0:  # anything, empty intervals and dead keys included
        return generator.integers(0, n + 1, (4, n))
    none = np.zeros(n, int)
    if kind == 1:
        return none, none, none, none
    documents = np.sort(generator.integers(0, 4, n))
    start, end = np.searchsorted(documents, documents), np.searchsorted(documents, documents, "right")
    upper = start if kind == 2 else np.arange(n)  # causal inside the documents
    return end, np.full(n, n), none, upper


@given(case=cases(max_n=32), seed=st.integers(0, 10**6), as_object=st.booleans())
def test_results_tiles_and_accesses(case, seed, as_object):
    """A skipped tile shows nothing, and a visited tile without element tests hides nothing."""
    n, d = case.q.shape
    vectors, sizes = draw_vectors(n, seed), io_model.block_sizes(n, d, case.M)
    mask = masks.ColumnMask(*vectors, n_queries=n) if as_object else vectors
    visible, (hidden, touched) = oracle.visible_outside(vectors, n), equation_4(np.array(vectors), n, *sizes[:2])
    visited = ~hidden.any(axis=0)
    tiles = io_model.Tiles(visited, *(touched & visited))
    fwd = reference.flashmask_forward(*case.qkv, mask, case.M)
    check_forward(case, fwd, visible=visible)
    assert all(np.array_equal(x, y) for x, y in zip(fwd.tiles, tiles, strict=True))
    assert fwd.counts[:2] == io_model.flashmask_forward(n, d, case.M, tiles)
    assert fwd.counts.extra == n + 8 * sizes.t_c  # L and the bounds (section 4.3: linear)
    rows, keys = np.arange(n) // sizes.b_r, np.arange(n) // sizes.b_c
    visited, tested = (x[rows[:, None], keys] for x in (tiles.visited, tiles.lower | tiles.upper))
    assert not visible[~visited].any()
    assert visible[visited & ~tested].all()
    grads = reference.flashmask_backward(case.do, *case.qkv, fwd, mask, case.M)
    check_backward(case, grads, visible=visible)
    assert grads.counts[:2] == io_model.flashmask_backward(n, d, case.M, tiles)


def test_causal_documents_skip_and_leave_tiles_unmasked():
    """128 tokens in two documents of 64, tiles of 8 x 8: half of each document's square, and its diagonal partial."""
    case = make_case(128, 8, 256)
    n = 128
    vectors = np.repeat([64, 128], 64), np.full(n, n), np.zeros(n, int), np.arange(n)
    tiles = reference.flashmask_forward(*case.qkv, vectors, case.M).tiles
    assert tiles.visited.sum() == 2 * 36
    assert tiles.upper.sum() == 16
    assert tiles.lower.sum() == 0


def test_vectors_of_another_length():
    case, vectors = make_case(10, 4, 8), draw_vectors(10, 0)
    with pytest.raises(ShapeError, match=r"LTE has shape \(9,\)"):
        reference.flashmask_forward(*case.qkv, (vectors[0], vectors[1][:9], *vectors[2:]), 8)
