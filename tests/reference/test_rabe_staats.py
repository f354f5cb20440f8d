"""Rabe and Staats' chunked forward."""

import pytest
from hypothesis import given

from cuattn import io_model, reference
from cuattn.errors import ArgumentError
from tests.reference.cases import cases, check_forward, make_case


@given(case=cases())
def test_forward_matches_the_oracle(case):
    check_forward(case, reference.rabe_staats_forward(*case.qkv, case.M), scale=1.0)


def test_it_keeps_a_copy_of_the_output_per_chunk_of_keys():
    case = make_case(32, 4, 32)
    sizes = io_model.block_sizes(32, 4, 32)
    counts = reference.rabe_staats_forward(*case.qkv, 32).counts
    assert counts.extra == sizes.t_c * sizes.b_r * (4 + 2)


def test_errors():
    with pytest.raises(ArgumentError, match="M = 99"):
        reference.rabe_staats_forward(*make_case(10, 4, 4).qkv, 99)
