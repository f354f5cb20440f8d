"""A dtype is one row: a new one needs no other change."""

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.problem import DTYPES, FLOAT32, Dtype
from tests import oracle
from tests.tolerances import assert_close

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture
def float8():
    """Make 8-bit numbers known for one test."""
    DTYPES[FLOAT8] = Dtype(FLOAT8, FLOAT32)
    yield FLOAT8
    del DTYPES[FLOAT8]


@pytest.mark.parametrize("size", [20, 300], ids=["direct", "tiled"])
def test_a_dtype_that_is_only_a_row(float8, size):
    rng = np.random.default_rng(0)
    do, q, k, v = (rng.standard_normal((2, size, 8)).astype(float8) for _ in range(4))
    with pytest.raises(cuattn.DtypeError, match="float16 or bfloat16 or float32 or float64 or float8_e4m3fn"):
        cuattn.attention(*(x.astype(np.int8) for x in (q, k, v)))
    fwd = cuattn.forward(q, k, v, is_causal=True)
    assert (fwd.o.dtype, fwd.l.dtype, fwd.m.dtype) == (float8, FLOAT32, FLOAT32)
    visible = np.tri(size, dtype=bool)
    exact = oracle.forward(q, k, v, visible=visible)
    usual = oracle.forward(q, k, v, visible=visible, dtype=FLOAT8)
    for actual, e, t in zip(fwd[:3], exact, usual, strict=True):
        assert_close(actual, e, t, dtype=FLOAT8)
    grads = cuattn.backward(do, q, k, v, fwd, is_causal=True)
    assert [grad.dtype for grad in grads[:3]] == [float8] * 3
    exact = oracle.backward(do, q, k, v, visible=visible)
    usual = oracle.backward(do, q, k, v, visible=visible, dtype=FLOAT8)
    for actual, e, t in zip(grads[:3], exact, usual, strict=False):
        assert_close(actual, e, t, dtype=FLOAT8)


@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_rows_say_what_their_sums_are(dtype):
    row = DTYPES[dtype]
    assert row.dtype == dtype
    assert row.stat.itemsize == max(dtype.itemsize, 4)
