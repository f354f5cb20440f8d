"""Score functions at the door: what is refused, and how results come back."""

import copy
import pickle

import numpy as np
import pytest

import cuattn
from cuattn.errors import ArgumentError, DtypeError, UnsupportedError
from tests.test_dispatch import gpu_array

Q = np.ones((2, 4, 8, 16), np.float32)
SLOPES = np.ones(4, np.float32)


def alibi(s, b, h, i, j, slope):
    return s + slope[h] * (j - i)


@pytest.mark.parametrize(
    ("score", "args", "error", "message"),
    [
        (5, (), DtypeError, r"score is 5; expected a function score\(s, b, h, i, j, \*score_args\)"),
        (None, (1,), ArgumentError, "score_args has 1 items but score is None"),
        (None, SLOPES, DtypeError, "score_args is a numpy.ndarray; expected a tuple"),
        (alibi, SLOPES, DtypeError, "score_args is a numpy.ndarray; expected a tuple"),
        (alibi, ([1, 2],), ArgumentError, r"score_args\[0\] = \[1, 2\]: expected an array, or a number"),
        (alibi, (2**64,), ArgumentError, r"score_args\[0\] = 18446744073709551616: expected an array, or a number"),
        (alibi, (SLOPES.astype(complex),), ArgumentError, r"score_args\[0\] has dtype complex128"),
        (alibi, (np.ma.ones(4),), DtypeError, r"score_args\[0\] is a numpy\.ma\.MaskedArray"),
        (alibi, (), ArgumentError, r"test_scoring\.py:\d+: TypeError: .* 'slope', while the function was traced"),
        (
            lambda s, b, h, i, j: s if i < j else 0,
            (),
            ArgumentError,
            r"test_scoring\.py:\d+: a branch needs .*np\.where",
        ),
        (lambda s, b, h, i, j: i < j, (), ArgumentError, "returns a boolean: expected the score"),
        (lambda s, b, h, i, j: None, (), ArgumentError, r"returns None \(a return is missing\?\)"),
        (lambda s, b, h, i, j: s + SLOPES[s], (), ArgumentError, r"test_scoring\.py:\d+: "),
        (lambda s, b, h, i, j: s + i // 0, (), ArgumentError, r"test_scoring\.py:\d+: "),
        (lambda s, b, h, i, j: s + (i + 2) * 2**62, (), ArgumentError, "computes an integer beyond int64"),
    ],
)
def test_bad_functions_and_arguments_are_refused(score, args, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message):
            cuattn.attention(Q, Q, Q, score=score, score_args=args)


def test_tensors_that_require_grad_are_refused():
    torch = pytest.importorskip("torch")
    slope, q = torch.ones(4, requires_grad=True), torch.ones(2, 4, 8, 16)
    for score, args, error in (
        (alibi, (slope,), UnsupportedError),
        (lambda s, b, h, i, j, unread: s, (slope,), UnsupportedError),
        (lambda s, b, h, i, j: s * slope[h], (), ArgumentError),
    ):
        with pytest.raises(error, match="grad"):
            cuattn.attention(q, q, q, score=score, score_args=args)


def test_arrays_lie_where_q_does():
    device = gpu_array((4,), np.float32)
    with pytest.raises(DtypeError, match=r"score_args\[0\] is a cupy.* on CUDA device 0, but q is"):
        cuattn.attention(Q, Q, Q, score=alibi, score_args=(device,))
    with pytest.raises(DtypeError, match=r"score_args\[0\] is a numpy.* on the CPU, but q is"):
        cuattn.attention(*3 * [gpu_array(Q.shape)], score=alibi, score_args=(SLOPES,))


def test_gradients_are_four_and_have_those_of_the_score_function():
    made = cuattn.Gradients(1, 2, 3, 4, (5, None))
    assert tuple(made) == (1, 2, 3, 4) and cuattn.Gradients(1, 2, 3) == (1, 2, 3, None)
    for same in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made._replace(dq=1)):
        assert same == made and same.dscore == (5, None)
    assert made._replace(dscore=()).dscore == cuattn.Gradients._make([1, 2, 3, 4]).dscore == ()
