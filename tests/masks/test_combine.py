"""Masks that hold together: one column mask where that says it, else all of them."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.errors import DtypeError, MaskError
from cuattn.masks import AllOf, BlockMask, BooleanMask, ColumnMask
from tests.masks.predicates import assert_sound
from tests.masks.strategies import any_constructor, block_masks, boolean_masks, column_masks

SHAPE = 14, 11
LEADING = ((), (1,), (3,), (2, 1), (2, 3))  # any two broadcast


def drawn_masks():
    leading = st.sampled_from(LEADING)
    return leading.flatmap(
        lambda shape: st.one_of(
            column_masks(*SHAPE, shape),
            block_masks(*SHAPE, shape).map(lambda drawn: drawn[0]),
            boolean_masks(*SHAPE, shape),
        )
    )


@given(drawn_masks(), drawn_masks())
def test_both_hold(a, b):
    mask = a & b
    expected = a.dense(*SHAPE) & b.dense(*SHAPE)
    assert_array_equal(mask.dense(*SHAPE), expected)
    assert isinstance(mask, ColumnMask | BlockMask | BooleanMask | AllOf)
    assert_array_equal((b & a).dense(*SHAPE), expected)
    assert sum(part.kind == "boolean" for part in mask.parts) <= 1


@given(drawn_masks(), drawn_masks(), drawn_masks(), st.integers(1, 9), st.integers(1, 9))
def test_three_hold(a, b, c, block_m, block_n):
    mask = AllOf([a, AllOf([b, c])]).bind(*SHAPE)
    assert len(mask.parts) == 3 and {part.kind for part in mask.parts} == {part.kind for part in (a, b, c)}
    expected = a.dense(*SHAPE) & b.dense(*SHAPE) & c.dense(*SHAPE)
    assert_sound(mask.tile_states(block_m, block_n), expected, block_m, block_n)
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask and hash(again) == hash(mask) and repr(again) == repr(mask)
    assert again != a and mask.layout == again.layout


@given(column_masks(*SHAPE, leading=()), column_masks(*SHAPE, leading=()))
def test_two_intervals_suffice_or_not(a, b):
    """A ColumnMask comes out just where the matrix is one."""
    mask = a & b
    try:
        alone = ColumnMask.from_dense(a.dense() & b.dense())
    except MaskError:
        assert mask == AllOf([a, b])
    else:
        assert isinstance(mask, ColumnMask) and mask == alone


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(any_constructor(n), st.just(n))))
def test_full_changes_nothing(drawn):
    mask, n = drawn
    assert isinstance(mask & masks.full(n), ColumnMask)
    assert_array_equal((mask & masks.full(n)).dense(), mask.dense())
    assert_array_equal((mask & mask).dense(), mask.dense())


def test_arrays():
    mask = masks.causal(4)
    padding = np.array([True, True, False, True])
    for both in (mask & padding[None], padding[None] & mask):
        assert isinstance(both, ColumnMask)
        assert_array_equal(both.dense(), mask.dense() & padding)
    chequered = np.indices((4, 4)).sum(axis=0) % 2 == 0
    chequered = np.block([[chequered, chequered], [chequered, chequered]])
    for both in (masks.causal(8) & chequered, chequered & masks.causal(8)):
        assert isinstance(both, AllOf)
        assert_array_equal(both.dense(), np.tri(8, dtype=bool) & chequered)
    chequered[:] = False
    assert both.dense().any()  # masks hold copies


def test_arrays_of_torch():
    torch = pytest.importorskip("torch")
    array = torch.ones(4, 4, dtype=torch.bool)
    for both in (masks.causal(4) & array, array & masks.causal(4)):
        assert_array_equal(both.dense(), np.tri(4, dtype=bool))


def test_lengths_that_masks_leave_open():
    blocks = BlockMask(np.eye(2, dtype=bool), 64, 64)
    mask = blocks & masks.sliding_window(100, 200)
    assert (mask.n_queries, mask.n_keys) == (100, 100) and mask.dense().shape == (100, 100)
    other = BlockMask(np.ones((2, 2), bool), 60, 60)
    assert (blocks & other).n_queries == 120
    assert (blocks & other).fits(100, 110) and not (blocks & other).fits(128, 100)
    part = (blocks & other).bind(100, 100).restrict(slice(0, 64))
    assert (part.n_queries, part.n_keys) == (64, 100)


def test_lengths_stay_open():
    """What a single row of booleans stands for is known only when the other mask's length is."""
    blocks = BlockMask(np.eye(2, dtype=bool), 32, 32)
    row, column = np.arange(57) % 3 > 0, (np.arange(57) % 5 > 0)[:, None]
    for mask in (blocks & row[None], row[None] & blocks, blocks & column, column & blocks):
        assert mask.fits(57, 57)
        expected = blocks.dense(57, 57) & (row if mask.fits(60, 57) else column)
        assert_array_equal(mask.dense(57, 57), expected)
        assert_array_equal((mask & masks.causal(57)).dense(), expected & np.tri(57, dtype=bool))
    assert_array_equal((row[None] & (column & blocks)).dense(57, 57), blocks.dense(57, 57) & row & column)
    both = BooleanMask(row[None]) & column
    assert_array_equal(both.dense(), row & column)


def test_parts_of_parts():
    mask = masks.causal(200) & BlockMask(np.eye(2, dtype=bool), 128, 128)
    part = mask.restrict([(0, 16), (128, 200)], slice(64, 200))
    rows = np.r_[0:16, 128:200]
    assert_array_equal(part.dense(), mask.dense()[rows, 64:])


def test_no_other_operators():
    mask = masks.causal(4)
    for operation in (lambda: mask | mask, lambda: ~mask, lambda: mask & 3, lambda: mask ^ mask):
        with pytest.raises(TypeError):
            operation()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda mask: mask & masks.causal(5), MaskError, "4 queries x 4 keys.*5 queries x 5 keys.*one shape"),
        (lambda mask: mask & np.ones((4, 5), bool), MaskError, r"\(4, 5\).*one shape"),
        (lambda mask: mask & np.ones((4, 4)), DtypeError, "dtype float64: expected bool"),
        (lambda mask: np.ones(4, bool) & mask, MaskError, "at least 2 axes"),
        (lambda mask: AllOf([]), MaskError, "parts is empty"),
        (lambda mask: AllOf(mask), DtypeError, "parts = <ColumnMask"),
        (
            lambda mask: ColumnMask.stack([mask] * 3) & ColumnMask.stack([mask] * 2),
            MaskError,
            r"\(3,\).*\(2,\).*broadcast",
        ),
    ],
)
def test_bad_calls(call, error, message):
    with pytest.raises(error, match=message):
        call(masks.causal(4))
