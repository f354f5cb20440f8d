"""The lecture's forward with swapped loops, and Rabe and Staats' chunks."""

import pytest
from hypothesis import given

from cuattn import io_model, reference
from tests.reference.cases import cases, check_forward, make_case


@pytest.mark.parametrize("forward", [reference.swapped_forward, reference.rabe_staats_forward])
@given(case=cases())
def test_forwards_match_the_oracle_and_the_model(forward, case):
    fwd = forward(*case.qkv, case.M)
    check_forward(case, fwd, scale=1.0)
    assert fwd.counts[:2] == getattr(io_model, forward.__name__)(*case.q.shape, case.M)


@given(case=cases(max_n=40))
def test_swapped_loops_move_less_than_algorithm_1(case):
    """Also in the worst case, one block: there Algorithm 1 still initialises O, l, m and reads them back."""
    swapped = reference.swapped_forward(*case.qkv, case.M)
    assert swapped.counts.total < reference.flash_forward(*case.qkv, case.M, scale=1).counts.total


def test_rabe_and_staats_keep_a_copy_of_the_output_per_chunk_of_keys():
    case = make_case(32, 4, 32)
    sizes = io_model.block_sizes(32, 4, 32)
    counts = reference.rabe_staats_forward(*case.qkv, 32).counts
    assert counts.extra == sizes.t_c * sizes.b_r * (4 + 2)
