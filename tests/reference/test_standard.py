"""Algorithms 0 and 3: standard attention."""

import numpy as np
import pytest
from hypothesis import given

from cuattn import io_model, reference
from cuattn.errors import ShapeError
from tests.reference.cases import cases, check_backward, check_forward, make_case


@given(case=cases())
def test_forward_and_backward_match_the_oracle_and_the_model(case):
    fwd = reference.standard_forward(*case.qkv, case.M)
    check_forward(case, fwd, scale=1.0)
    assert fwd.counts[:2] == io_model.standard_forward(*case.q.shape, case.M)
    grads = reference.standard_backward(case.do, *case.qkv, fwd.p, case.M)
    check_backward(case, grads, scale=1.0)
    assert grads.counts[:2] == io_model.standard_backward(*case.q.shape, case.M)


def test_memory_beyond_the_outputs_is_quadratic():
    case = make_case(20, 2, 40)
    fwd = reference.standard_forward(*case.qkv, case.M)
    assert fwd.counts.extra == 2 * 20**2  # S and P
    assert reference.standard_backward(case.do, *case.qkv, fwd.p, case.M).counts.extra == 2 * 20**2  # dP and dS


def test_dtype_is_that_of_the_arithmetic():
    case = make_case(5, 2, 10)
    assert reference.standard_forward(*case.qkv, 10).o.dtype == np.float64
    assert reference.standard_forward(*case.qkv, 10, dtype=np.float32).o.dtype == np.float32


def test_p_of_another_shape():
    case = make_case(10, 4, 8)
    with pytest.raises(ShapeError, match=r"P has shape \(10, 9\)"):
        reference.standard_backward(case.do, *case.qkv, np.ones((10, 9)), 8)
