"""ColumnMask: building, meaning, tiles, identity."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.errors import DtypeError, MaskError
from cuattn.masks import ColumnMask
from tests import oracle
from tests.masks.predicates import states_of
from tests.masks.strategies import any_constructor, column_masks

NAMES = ("lts", "lte", "uts", "ute")


def meaning(mask):
    return oracle.visible_outside([getattr(mask, name) for name in NAMES], mask.n_queries)


@given(column_masks())
def test_dense(mask):
    dense = mask.dense()
    assert dense.dtype == np.bool_
    assert dense.shape == (*mask.leading, mask.n_queries, mask.n_keys)
    assert_array_equal(dense, meaning(mask))


@given(st.integers(1, 24).flatmap(any_constructor))
def test_tiles_of_one_element_are_exact(mask):
    assert_array_equal(mask.tile_states(1, 1) == 2, mask.dense())
    assert_array_equal(mask.tile_states(1, 1) == 0, ~mask.dense())


@pytest.mark.parametrize("name", ["causal_document", "document", "hash_sparse"])
def test_aligned_documents_have_no_tile_to_spare(name):
    """Where documents end on tiles, only the diagonal of a causal mask is partial, and nothing of the other."""
    mask = getattr(masks, name)([8, 4, 12])
    assert_array_equal(mask.tile_states(4, 4), states_of(mask.dense(), 4, 4))


def test_padding_does_not_spoil_a_tile():
    """Keys that no row may see count as hidden by both intervals, so tiles with a few of them are still skipped."""
    mask = ColumnMask(lts=[8, 8, 8, 0], lte=[8] * 4, uts=[0] * 4, ute=[4, 4, 4, 0], n_queries=8)
    assert mask.tile_states(4, 4).tolist() == [[0], [1]]


def test_vectors_are_copied_and_frozen():
    lts = np.array([1, 2], dtype=np.int32)
    mask = ColumnMask(lts, [2, 2], [0, 0], [0, 0], n_queries=2)
    lts[:] = 0
    assert mask.lts.tolist() == [1, 2]
    for name in NAMES:
        vector = getattr(mask, name)
        assert vector.dtype == np.int32
        assert vector.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            vector[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            vector.setflags(write=True)


@pytest.mark.parametrize("name", ["lts", "n_queries", "n_keys", "_array", "something"])
def test_attributes_cannot_be_set(name):
    mask = masks.causal(4)
    with pytest.raises(AttributeError):
        setattr(mask, name, 3)
    with pytest.raises(AttributeError):
        delattr(mask, name)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64])
def test_any_integer_dtype(dtype):
    vectors = np.array([[1, 2], [2, 2], [0, 0], [0, 1]], dtype=dtype)
    assert ColumnMask(*vectors, n_queries=2) == ColumnMask(*vectors.tolist(), n_queries=2)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_vectors_of_other_libraries(library):
    library = pytest.importorskip(library)
    vectors = [[1, 2], [2, 2], [0, 0], [0, 1]]
    mask = ColumnMask(*vectors, n_queries=2)
    assert mask == ColumnMask(*map(library.asarray, vectors), n_queries=2)
    assert mask.dense().tolist() == ColumnMask.from_dense(library.asarray(mask.dense())).dense().tolist()


def test_leading_axes_broadcast():
    mask = ColumnMask([[[1]], [[2]]], [[2], [3], [3]], [0], [0], n_queries=3)
    assert mask.leading == (2, 3)
    assert_array_equal(mask.dense(), meaning(mask))


def test_pickle_leaves_the_tables_out():
    mask = masks.causal(1000)
    before = len(pickle.dumps(mask))
    mask.tile_states(1, 1)
    assert len(pickle.dumps(mask)) == before


def test_masks_of_another_class_are_not_equal():
    class Kind(ColumnMask):
        pass

    vectors = np.zeros((4, 3), np.int32)
    mask, kind = ColumnMask(*vectors, n_queries=2), Kind(*vectors, n_queries=2)
    assert mask != kind and kind != mask and kind == Kind(*vectors, n_queries=2)


def test_identity():
    mask = masks.causal(4)
    assert copy.copy(mask) is mask
    assert copy.deepcopy([mask])[0] is mask
    assert mask == masks.causal(4)
    assert hash(mask) == hash(masks.causal(4))
    assert mask != masks.causal(4, 5)
    assert mask != masks.full(4)
    assert mask != ColumnMask(*(np.asarray(getattr(mask, name))[None] for name in NAMES), n_queries=4)
    assert mask != masks.BlockMask(np.ones((4, 4), dtype=bool), 1, 1)
    assert mask != 4
    assert mask.to_host() is mask


def test_repr_is_one_line():
    assert repr(masks.causal(4, 6)) == "<ColumnMask 4 queries x 6 keys on the host>"
    assert repr(ColumnMask.stack([[masks.full(2)]])) == "<ColumnMask (1, 1) x 2 queries x 2 keys on the host>"


def test_stack():
    parts = [[masks.causal(4), masks.full(4), masks.sliding_window(4, 2)], [masks.document([1, 3])] * 3]
    mask = ColumnMask.stack(parts)
    assert mask.leading == (2, 3)
    for row, dense in zip(parts, mask.dense(), strict=True):
        for part, one in zip(row, dense, strict=True):
            assert_array_equal(one, part.dense())


GOOD = {"lts": [0, 1], "lte": [1, 1], "uts": [0, 0], "ute": [0, 0], "n_queries": 2}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lts": [0, 3]}, MaskError, r"lts\[1\] = 3.*\[0, 2\]"),
        ({"ute": [[0, 0], [-1, 0]]}, MaskError, r"ute\[1, 0\] = -1"),
        ({"lte": np.array([2**40, 0])}, MaskError, r"lte\[0\] = 1099511627776"),
        ({"uts": [0.0, 1.0]}, DtypeError, "uts has dtype float64"),
        ({"uts": [True, False]}, DtypeError, "uts has dtype bool"),
        ({"uts": np.ma.masked_equal([0, 1], 1)}, DtypeError, "uts is a numpy masked array"),
        ({"lts": None}, DtypeError, "lts has dtype object"),
        ({"lts": ["a", "b"]}, DtypeError, "lts has dtype"),
        ({"lts": [[1], [2, 3]]}, DtypeError, "lts = list"),
        ({"lts": 1}, MaskError, r"lts \(\).*same n_keys"),
        ({"lts": [1]}, MaskError, r"lts \(1,\), lte \(2,\)"),
        ({"lts": np.zeros((2, 2), int), "ute": np.zeros((3, 2), int)}, MaskError, "broadcast"),
        ({"n_queries": -1}, MaskError, "n_queries = -1"),
        ({"n_queries": 2.5}, DtypeError, "n_queries = 2.5"),
        ({"n_queries": None}, DtypeError, "n_queries = None"),
        ({"n_queries": 2**31}, MaskError, "n_queries = 2147483648"),
    ],
)
def test_bad_vectors(change, error, message):
    with pytest.raises(error, match=message):
        ColumnMask(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda mask: mask.tile_states(0, 4), MaskError, r"block_m = 0.*\[1,"),
        (lambda mask: mask.tile_states(4, 2.0), DtypeError, "block_n = 2.0"),
        (lambda mask: mask.block_sparsity(4, -1), MaskError, "block_n = -1"),
        (lambda mask: ColumnMask.stack([]), MaskError, "masks is empty"),
        (lambda mask: ColumnMask.stack(mask), DtypeError, "masks = <ColumnMask"),
        (lambda mask: ColumnMask.stack([mask, 3]), DtypeError, "masks = 3"),
        (lambda mask: ColumnMask.stack([mask, masks.full(3)]), MaskError, "expected one shape"),
        (lambda mask: mask.to_device(-1), MaskError, "device = -1"),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(masks.causal(4))


def test_large_masks_take_little():
    """The table of a million keys is made in O(N): a matrix of tiles would have 2**26 entries here."""
    mask = masks.causal_document([2**15] * 2**5)
    assert 0.96 < mask.block_sparsity() < 0.99
