"""Every bad argument gets the right error, and its message names the argument, the value and the expectation."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.errors import ArgumentError, CuattnError, DtypeError, ShapeError, UnsupportedError
from tests import oracle
from tests.tolerances import assert_close


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


Q = ones(2, 4, 8)
BAD = [
    # keyword arguments (q, k, v replaced by name), error, what the message says
    ({"q": ones(8)}, ShapeError, r"q .*\(8,\).*at least two axes"),
    ({"q": [[1.0]]}, DtypeError, "q .*list.*array"),
    ({"q": None}, DtypeError, "q .*None"),
    ({"q": Q.astype(np.int32)}, DtypeError, "q .*int32.*float16"),
    ({"q": Q.astype(np.complex64)}, DtypeError, "q .*complex64"),
    ({"q": Q.astype(">f4")}, DtypeError, "q .*>f4"),
    ({"q": np.ma.masked_array(Q, Q > 2)}, DtypeError, "q .*[Mm]asked"),
    ({"k": Q.astype(np.float64)}, DtypeError, "k .*float64.*q .*float32"),
    ({"v": Q.astype(ml_dtypes.bfloat16)}, DtypeError, "v .*bfloat16.*q .*float32"),
    ({"k": ones(2, 4, 7)}, ShapeError, "k .*head_dim"),
    ({"q": ones(2, 4, 0), "k": ones(2, 4, 0)}, ShapeError, "q .*head_dim.*at least 1"),
    ({"v": ones(2, 5, 8)}, ShapeError, "k .*v .*number of keys"),
    ({"q": ones(6, 4, 8)}, ShapeError, "6 heads and k.*2.*enable_gqa"),
    ({"q": ones(3, 4, 8)}, ShapeError, "3 heads and k.*2"),
    ({"q": ones(3, 4, 8), "enable_gqa": True}, ShapeError, "3 heads and k.*multiple of 2"),
    ({"v": ones(3, 4, 8)}, ShapeError, "k .*v .*heads"),
    ({"q": ones(2, 1, 4, 8), "k": ones(3, 1, 4, 8), "v": ones(3, 1, 4, 8)}, ShapeError, "q .*broadcast"),
    ({"scale": np.nan}, ArgumentError, "scale .*nan.*finite"),
    ({"scale": "big"}, DtypeError, "scale .*'big'.*number"),
    ({"scale": True}, DtypeError, "scale .*True.*number"),
    ({"softcap": 0.0}, ArgumentError, "softcap .*0.*> 0"),
    ({"softcap": -3}, ArgumentError, "softcap .*-3.*> 0"),
    ({"dropout_p": 1.0}, ArgumentError, "dropout_p .*1.*< 1"),
    ({"dropout_p": -0.1}, ArgumentError, "dropout_p .*-0.1"),
    ({"dropout_p": "x"}, DtypeError, "dropout_p .*'x'"),
    ({"dropout_p": 0.5, "rng": -1}, ArgumentError, "rng .*-1"),
    ({"dropout_p": 0.5, "rng": 2**64}, ArgumentError, "rng .*18446744073709551616"),
    ({"dropout_p": 0.5, "rng": cuattn.RNGState(1, 2**32)}, ArgumentError, r"rng\.offset .*4294967296"),
    ({"rng": 1.5}, DtypeError, "rng .*float"),
    ({"is_causal": "diagonal"}, ArgumentError, "is_causal .*'diagonal'.*'top_left'"),
    ({"is_causal": 1}, ArgumentError, "is_causal .*1"),
    ({"is_causal": True, "q": ones(2, 3, 8)}, ArgumentError, "is_causal .*3 queries and 4 keys"),
    ({"window": 4}, ArgumentError, "window .*4.*left, right"),
    ({"window": (1, -1)}, ArgumentError, "window's right .*-1"),
    ({"window": (1.5, 1)}, ArgumentError, "window's left .*1.5"),
    ({"window": (1, 1, "middle")}, ArgumentError, "window.*'middle'"),
    ({"window": (1, 1), "q": ones(2, 3, 8)}, ArgumentError, "window .*3 queries and 4 keys.*third"),
    ({"window": (1, 1, "top_left"), "is_causal": "bottom_right"}, ArgumentError, "window .*same alignment"),
    ({"enable_gqa": "yes"}, DtypeError, "enable_gqa .*'yes'"),
    ({"precision": "fp8"}, ArgumentError, "precision .*'fp8'.*'tf32'"),
    ({"kernel": "sm70"}, ArgumentError, "kernel .*'sm70'.*'sm80'"),
    ({"kernel": "sm90"}, UnsupportedError, "kernel .*'sm90'.*GPU"),
    ({"mask": ones(4, 4)}, DtypeError, "mask .*float32.*boolean"),
    ({"mask": "causal"}, DtypeError, "mask "),
    ({"mask": ones(3, 4, dtype=bool)}, ShapeError, r"mask .*\(3, 4\).*\(2, 4, 4\)"),
    ({"mask": ones(1, 2, 4, 4, dtype=bool)}, ShapeError, "mask .*broadcast"),
    ({"mask": cuattn.masks.causal(5)}, ShapeError, "mask .*5 queries x 5 keys.*4 queries and 4 keys"),
    ({"mask": cuattn.ColumnMask(*np.zeros((4, 3, 4), np.int32), n_queries=4)}, ShapeError, r"mask .*\(3,\)"),
    ({"bias": ones(5, 4)}, ShapeError, r"bias .*\(5, 4\).*\(2, 4, 4\)"),
    ({"bias": ones(4, 4, dtype=np.float64)}, DtypeError, "bias .*float64.*float32"),
    ({"bias": 0.5}, DtypeError, "bias .*float"),
]


@pytest.mark.parametrize("call", [cuattn.forward, cuattn.plan])
@pytest.mark.parametrize("change,error,message", BAD, ids=range(len(BAD)))
def test_bad_arguments(call, change, error, message):
    options = dict(change)
    arrays = [options.pop(name, Q) for name in "qkv"]
    with pytest.raises(error, match=message):
        call(*arrays, **options)


FWD = cuattn.Forward(Q, ones(2, 4), ones(2, 4), None)
BAD_BACKWARD = [
    ({"do": ones(2, 4, 7)}, ShapeError, r"do .*\(2, 4, 7\).*\(2, 4, 8\)"),
    ({"do": Q.astype(np.float64)}, DtypeError, "do .*float64"),
    ({"do": None}, DtypeError, "do .*None"),
    ({"fwd": FWD[0]}, DtypeError, "fwd .*Forward"),
    ({"fwd": FWD[:3]}, DtypeError, "fwd .*Forward"),
    ({"fwd": FWD._replace(o=ones(2, 3, 8))}, ShapeError, "fwd.o .*"),
    ({"fwd": FWD._replace(l=ones(2, 3))}, ShapeError, "fwd.l .*"),
    ({"fwd": FWD._replace(m=ones(2, 4, dtype=np.float64))}, DtypeError, "fwd.m .*float64.*float32"),
    ({"fwd": FWD._replace(m=None)}, DtypeError, "fwd.m .*None"),
    ({"dropout_p": 0.5}, ArgumentError, "dropout_p .*rng_state"),
    ({"fwd": FWD._replace(rng_state=cuattn.RNGState(1, 0))}, ArgumentError, "rng_state .*dropout_p"),
    ({"deterministic": 1}, DtypeError, "deterministic .*1"),
]


@pytest.mark.parametrize("change,error,message", BAD_BACKWARD, ids=range(len(BAD_BACKWARD)))
def test_bad_backward_arguments(change, error, message):
    options = dict(change)
    do, fwd = options.pop("do", Q), options.pop("fwd", FWD)
    with pytest.raises(error, match=message):
        cuattn.backward(do, Q, Q, Q, fwd, **options)


BAD_PARTS = [
    ((), ArgumentError, "parts"),
    ((Q,), DtypeError, r"parts\[0\].*Forward"),
    ((FWD, FWD._replace(o=ones(2, 5, 8))), ShapeError, r"parts\[1\].o"),
    ((FWD, FWD._replace(l=ones(2, 5))), ShapeError, r"parts\[1\].l"),
    ((FWD, FWD._replace(o=Q.astype(np.float16))), DtypeError, r"parts\[1\].o .*float16"),
    ((FWD._replace(o=Q.astype(np.int8)),), DtypeError, r"parts\[0\].o .*int8"),
]


@pytest.mark.parametrize("parts,error,message", BAD_PARTS, ids=range(len(BAD_PARTS)))
def test_bad_parts(parts, error, message):
    with pytest.raises(error, match=message):
        cuattn.merge(*parts)


def test_bad_direction():
    with pytest.raises(ArgumentError, match=r"direction .*'sideways'.*'backward'"):
        cuattn.plan(Q, Q, Q, direction="sideways")


SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)
ARRAYS = st.one_of(
    st.builds(
        lambda shape, dtype: np.ones(shape, dtype),
        st.one_of(SHAPES, st.sampled_from([(4, 8), (2, 4, 8), (1, 2, 4, 8), (4, 4), (4, 2, 4, 8)])),
        st.sampled_from([np.float32, np.float64, np.float16, np.int64, bool, ml_dtypes.bfloat16]),
    ),
    *[st.just(Q)] * 3,
    st.none(),
    st.text(max_size=2),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3))
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "mask": st.one_of(ARRAYS, st.builds(cuattn.masks.causal, st.integers(0, 5)), SCALARS),
        "bias": st.one_of(ARRAYS, SCALARS),
        "is_causal": st.one_of(SCALARS, st.sampled_from(["top_left", "bottom_right"])),
        "window": st.one_of(SCALARS, st.tuples(SCALARS, SCALARS), st.tuples(SCALARS, SCALARS, SCALARS)),
        **dict.fromkeys(("scale", "softcap", "dropout_p", "rng", "enable_gqa", "precision", "kernel"), SCALARS),
        "out_dtype": st.one_of(SCALARS, st.sampled_from(["float32", "int8"])),
    },
)


@settings(max_examples=600)
@given(q=ARRAYS, k=ARRAYS, v=ARRAYS, options=OPTIONS)
def test_random_arguments_give_a_result_or_a_clear_error(q, k, v, options):
    """All entries are 1, so a result must be a mean of ones (0 in empty rows), scaled only by dropout."""
    try:
        fwd = cuattn.forward(q, k, v, **options)
    except CuattnError as error:
        assert len(str(error)) > 10
        return
    lead = fwd.o.shape[:-2]
    assert fwd.o.shape[-2:] == (q.shape[-2], v.shape[-1]) and fwd.l.shape == (*lead, q.shape[-2])
    if not options.get("dropout_p"):
        o = fwd.o.astype(np.float64)
        seen = fwd.l > 0
        exact = np.broadcast_to(seen[..., None].astype(np.float64), o.shape)
        assert_close(fwd.o, exact, exact.astype(fwd.o.dtype))


def test_backward_accepts_plain_tuples():
    fwd = cuattn.forward(Q, Q, Q, dropout_p=0.5, rng=3)
    a = cuattn.backward(Q, Q, Q, Q, fwd, dropout_p=0.5)
    b = cuattn.backward(Q, Q, Q, Q, (fwd.o, fwd.l, fwd.m, (3, 0)), dropout_p=0.5)
    np.testing.assert_array_equal(a.dq, b.dq)


def test_scalars_may_be_numpy_scalars_and_lists():
    exact = oracle.forward(Q, Q, Q, visible=oracle.visible_band(4, 4, 1, 1, 0), scale=0.5)
    fwd = cuattn.forward(Q, Q, Q, window=[np.int64(1), 1], scale=np.array(0.5), is_causal=np.False_)
    assert_close(fwd.o, exact[0], exact[0].astype(np.float32))


def test_a_backward_with_dropout_can_be_planned():
    assert cuattn.plan(Q, Q, Q, dropout_p=0.5, direction="backward").direction == "backward"
