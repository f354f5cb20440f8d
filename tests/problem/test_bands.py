"""What a mask and the problem's own band leave visible together, as one band."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import masks
from cuattn.problem import Band, mask_as_band, validate
from cuattn.problem.bands import join_reach
from tests import oracle

SIDES = st.one_of(st.none(), st.integers(-3, 12))
OPEN = st.one_of(st.none(), st.integers(0, 12))


@given(st.integers(1, 12), st.integers(1, 12), st.tuples(SIDES, SIDES), OPEN, OPEN, st.booleans(), st.booleans())
def test_joined(n_queries, n_keys, reach, left, right, has_band, bottom):
    def seen(left, right, offset):
        return oracle.visible_band(n_queries, n_keys, left, right, offset)

    band = Band(left, right, n_keys - n_queries if bottom else 0) if has_band else None
    joined, whole = join_reach(band, reach, n_queries, n_keys)
    if not whole:
        assert joined is band
        return
    both = seen(*reach, 0) & (seen(left, right, band.offset) if has_band else True)
    np.testing.assert_array_equal(
        seen(None, None, 0) if joined is None else seen(joined.left, joined.right, joined.offset), both
    )
    if joined is not None:
        assert joined.offset in (0, n_keys - n_queries)
        assert all(side is None or side >= 0 for side in (joined.left, joined.right))


def taken(mask, **options):
    q, k = np.zeros((2, 6, 8), np.float32), np.zeros((2, 9, 8), np.float32)
    return mask_as_band(*validate("forward", q, k, k, mask=mask, **options)[:2])


@pytest.mark.parametrize(
    ("mask", "options", "band"),
    [
        (masks.full(6, 9), {}, None),
        (masks.full(6, 9), {"is_causal": "top_left"}, Band(None, 0, 0)),
        (masks.causal(6, 9), {}, Band(None, 0, 3)),
        (masks.causal(6, 9, "top_left"), {}, Band(None, 0, 0)),
        (masks.causal(6, 9), {"window": (4, 2, "bottom_right")}, Band(4, 0, 3)),
    ],
)
def test_a_mask_that_is_a_band(mask, options, band):
    problem, operands = taken(mask, **options)
    assert (problem.mask, problem.band, operands.mask) == (None, band, None)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (masks.causal(6, 9, "top_left"), {"is_causal": "bottom_right"}),  # a reach that misses the diagonal
        (masks.ColumnMask.from_dense(np.eye(6, 9, dtype=bool) | (np.arange(9) % 2 == 0)), {}),
        (np.ones((6, 9), bool), {}),
    ],
)
def test_any_other_mask_stays(mask, options):
    problem, operands = taken(mask, **options)
    assert problem.mask is not None and operands.mask is not None
    assert (problem.band is not None) == bool(options)
