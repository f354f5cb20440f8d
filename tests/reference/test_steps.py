"""What every algorithm refuses: an on-chip memory outside the theorems' range, and arrays of other shapes."""

import re

import numpy as np
import pytest

from cuattn import reference
from cuattn.errors import ArgumentError, ShapeError
from tests.reference.cases import make_case

CASE = make_case(10, 4, 10)
FWD = reference.flash_forward(*CASE.qkv, CASE.M)
MASK = np.zeros((4, 10), int)
ALGORITHMS = {
    "standard_forward": reference.standard_forward,
    "standard_backward": lambda q, k, v, M: reference.standard_backward(CASE.do, q, k, v, np.ones((10, 10)), M),
    "flash_forward": reference.flash_forward,
    "flash_backward": lambda q, k, v, M: reference.flash_backward(CASE.do, q, k, v, FWD, M),
    "flashmask_forward": lambda q, k, v, M: reference.flashmask_forward(q, k, v, MASK, M),
    "swapped_forward": reference.swapped_forward,
    "rabe_staats_forward": reference.rabe_staats_forward,
}
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


@algorithms
@pytest.mark.parametrize("M", [0, 3, 41, 1e9, 10.0, None, "all"])
def test_m_outside_the_range(algorithm, M):
    expected = "expected d <= M <= N d, here 4 <= M <= 40" if isinstance(M, int) else "expected a whole number"
    with pytest.raises(ArgumentError, match=f"M = {M!r}: {expected}"):
        algorithm(*CASE.qkv, M)


@algorithms
@pytest.mark.parametrize(("which", "shape"), [("K", (9, 4)), ("V", (10, 3)), ("Q", (10,)), ("Q", (0, 4))])
def test_shapes(algorithm, which, shape):
    arrays = [np.ones(shape if name == which else (10, 4)) for name in "QKV"]
    # A backward has dO before them; those that agree with each other then disagree with it.
    with pytest.raises(ShapeError, match=re.escape(f"{which} has shape {shape}")):
        algorithm(*arrays, 8)
