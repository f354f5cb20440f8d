"""Conversions: dense matrices, FlashMask's index tensors, rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.errors import DtypeError, MaskError
from cuattn.masks import ColumnMask
from tests import oracle
from tests.masks.strategies import any_constructor, column_masks


def runs(hidden, axis):
    """Count the runs of True along an axis."""
    hidden = np.moveaxis(hidden, axis, -1).astype(int)
    return (np.diff(hidden, axis=-1, prepend=0) == 1).sum(axis=-1)


@given(column_masks())
def test_from_dense_round_trip(mask):
    again = ColumnMask.from_dense(mask.dense())
    assert (again.n_queries, again.n_keys, again.leading) == (mask.n_queries, mask.n_keys, mask.leading)
    assert_array_equal(again.dense(), mask.dense())


@given(st.integers(0, 24).flatmap(any_constructor), st.integers(1, 6), st.integers(1, 6))
def test_from_dense_skips_as_much(mask, block_m, block_n):
    """The choice of lower and upper for a run keeps the tiles of the paper's masks as they were, or better."""
    states = ColumnMask.from_dense(mask.dense()).tile_states(block_m, block_n)
    assert ((states == 0) >= (mask.tile_states(block_m, block_n) == 0)).all()


@given(hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=9)))
def test_from_dense_of_anything(dense):
    dense.flags.writeable = False
    hidden_runs = runs(~dense, axis=-2)
    if hidden_runs.size and hidden_runs.max() > 2:
        *matrix, column = np.argwhere(hidden_runs > 2)[0]
        where = f"mask\\[{', '.join(map(str, matrix))}\\]" if matrix else "mask"
        with pytest.raises(MaskError, match=f"{where}: column {column} hides"):
            ColumnMask.from_dense(dense)
    else:
        assert_array_equal(ColumnMask.from_dense(dense).dense(), dense)


@given(column_masks())
def test_rows(mask):
    dense = np.swapaxes(mask.dense(), -1, -2)
    row_runs = runs(~dense, axis=-2)
    if row_runs.size and row_runs.max() > 2:
        row = np.argwhere(row_runs > 2)[0][-1]
        with pytest.raises(MaskError, match=f"row {row} hides"):
            mask.rows()
    else:
        rows = mask.rows()
        assert (rows.n_queries, rows.n_keys, rows.leading) == (mask.n_keys, mask.n_queries, mask.leading)
        assert_array_equal(rows.dense(), dense)


@given(st.integers(0, 24), st.integers(0, 24), st.data())
def test_rows_of_rows(n_queries, n_keys, data):
    """Masks with two runs in every row and column come back from two transpositions."""
    window, offset = data.draw(st.integers(0, 9)), data.draw(st.integers(-9, 9))
    i, j = np.arange(n_queries)[:, None], np.arange(n_keys)
    mask = ColumnMask.from_dense(np.abs(i + offset - j) <= window)
    assert_array_equal(mask.rows().rows().dense(), mask.dense())


def test_rows_of_a_large_mask():
    mask = masks.global_sliding_window(2**18, 1000, 100)
    rows = mask.rows()
    assert (rows.n_queries, rows.n_keys) == (2**18, 2**18)
    assert_array_equal(rows._table(1, 64), mask._table(1, 64))  # it is symmetric


@st.composite
def index_tensors(draw):
    n_queries, n_keys = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    is_causal = draw(st.booleans())
    columns = draw(st.sampled_from((1, 2) if is_causal else (2, 4)))
    shape = (*draw(st.sampled_from([(), (2,), (1, 3), (2, 2)])), n_keys, columns)
    idx = draw(hnp.arrays(draw(st.sampled_from((np.int32, np.int64))), shape, elements=st.integers(0, n_queries)))
    return idx, is_causal, n_queries


@given(index_tensors())
def test_startend_row_indices_mean_what_flashmask_says(drawn):
    idx, is_causal, n_queries = drawn
    n_keys, columns = idx.shape[-2:]
    c, whole = np.moveaxis(idx, -1, 0), np.full(idx.shape[:-1], n_queries)
    if is_causal:
        visible = oracle.visible_band(n_queries, n_keys, None, 0, n_keys - n_queries)
        visible = visible & oracle.visible_outside([c[0], whole] if columns == 1 else c, n_queries)
    else:
        visible = oracle.visible_outside([c[0], whole, 0 * whole, c[1]] if columns == 2 else c, n_queries)
    mask = ColumnMask.from_startend_row_indices(idx, is_causal, n_queries)
    assert_array_equal(mask.dense(), visible)
    if idx.ndim <= 4:
        out = mask.to_startend_row_indices()
        assert out.dtype == np.int32
        assert out.shape == (*(1,) * (4 - idx.ndim), *idx.shape[:-1], 4)
        again = ColumnMask.from_startend_row_indices(out, False, n_queries)
        assert_array_equal(again.dense().reshape(mask.dense().shape), mask.dense())


def test_causal_keeps_the_vectors_it_was_given():
    mask = ColumnMask.from_startend_row_indices([[3, 4], [2, 4], [1, 2], [4, 0]], True, 4)
    assert mask.lts.tolist() == [3, 2, 1, 4]
    assert mask.lte.tolist() == [4, 4, 2, 0]
    assert (mask.uts.tolist(), mask.ute.tolist()) == ([0] * 4, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ColumnMask.from_dense(np.ones((2, 2))), DtypeError, "mask has dtype float64"),
        (lambda: ColumnMask.from_dense([[1, 0]]), DtypeError, "mask has dtype int64"),
        (lambda: ColumnMask.from_dense([True]), MaskError, r"mask has shape \(1,\)"),
        (
            lambda: ColumnMask.from_startend_row_indices([[1, 2, 3]], True, 4),
            MaskError,
            r"idx has shape \(1, 3\).*1 or 2",
        ),
        (lambda: ColumnMask.from_startend_row_indices([[1]], False, 4), MaskError, r"\(1, 1\).*2 or 4.*not causal"),
        (lambda: ColumnMask.from_startend_row_indices([[1] * 4], True, 4), MaskError, "1 or 2.*causal"),
        (lambda: ColumnMask.from_startend_row_indices([1], True, 4), MaskError, r"idx has shape \(1,\)"),
        (lambda: ColumnMask.from_startend_row_indices([[5]], True, 4), MaskError, r"idx\[0, 0\] = 5.*\[0, 4\]"),
        (lambda: ColumnMask.from_startend_row_indices([[-1]], True, 4), MaskError, r"idx\[0, 0\] = -1"),
        (lambda: ColumnMask.from_startend_row_indices([[1.0]], True, 4), DtypeError, "idx has dtype float64"),
        (lambda: ColumnMask.from_startend_row_indices([[1]], 1, 4), DtypeError, "is_causal = 1"),
        (lambda: ColumnMask.from_startend_row_indices([[1]], True, -4), MaskError, "n_queries = -4"),
        (lambda: ColumnMask.stack([[[masks.full(2)]]]).to_startend_row_indices(), MaskError, r"\(1, 1, 1\).*at most"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
