"""The lecture's forward with swapped loops."""

import pytest
from hypothesis import given

from cuattn import reference
from cuattn.errors import ArgumentError, ShapeError
from tests.reference.cases import cases, check_forward, make_case


@given(case=cases())
def test_forward_matches_the_oracle(case):
    check_forward(case, reference.swapped_forward(*case.qkv, case.M), scale=1.0)


@given(case=cases(max_n=40))
def test_it_moves_less_than_algorithm_1(case):
    """Also in the worst case, one block: there Algorithm 1 still initialises O, l, m and reads them back."""
    swapped = reference.swapped_forward(*case.qkv, case.M)
    assert swapped.counts.total < reference.flash_forward_basic(*case.qkv, case.M).counts.total


def test_errors():
    case = make_case(10, 4, 4)
    with pytest.raises(ArgumentError, match="M = 3: expected d <= M <= N d, here 4 <= M <= 40"):
        reference.swapped_forward(*case.qkv, 3)
    with pytest.raises(ShapeError, match="K has shape"):
        reference.swapped_forward(case.q, case.k[1:], case.v, 8)
