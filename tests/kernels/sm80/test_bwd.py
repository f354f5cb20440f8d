"""The backward kernels where sums move to memory: k and v of different widths, grouped heads, every dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.cuda.cases import Case
from tests.cuda.gpu import Problem, made, poisoned_memory

__all__ = ["poisoned_memory"]

pytestmark = pytest.mark.gpu

# Element type -> queries of one head whose group of four is summed in parts.
ROWS = {"bfloat16": 500, "float16": 500, "float32": 4200, "float64": 500}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("widths", [(256, 128), (128, 256), (64, 128), (96, 96), (40, 24)])
@pytest.mark.parametrize("dtype", ROWS)
def test_widths_and_groups(dtype, widths, group, deterministic):
    """A warp whose columns lie beyond the narrower of k and v leaves the rows behind its own alone."""
    options = {"window": (90, 60, "top_left")} if group > 1 else {}
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    case = Case("widths", kind, (2,), 4, 4 // group, ROWS[dtype], 170, *widths, options=options)
    problem = made(case)
    problem.check(problem.backward(deterministic=deterministic))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("widths", [(192, 128), (128, 64), (64, 128)])
def test_widths_and_groups_on_hopper(widths, group):
    case = Case("widths", np.dtype(ml_dtypes.bfloat16), (2,), 4, 4 // group, 500, 170, *widths)
    problem = made(case)
    try:
        actual = problem.backward("sm90")
    except NotImplementedError as error:
        pytest.skip(str(error))
    problem.check(actual)


@pytest.mark.parametrize("dtype", ROWS)
def test_saturated_softmax(dtype):
    """The scores are the forward's, bit for bit: where one key has all the weight, its weight is 1."""
    rng = np.random.default_rng(0)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    case = Case("saturated", kind, (1,), 1, 1, 512, 512, 64)
    q, v, do = (rng.standard_normal((1, 1, 512, 64)).astype(kind) for _ in range(3))
    problem = Problem(case, do, [q, q, v], {"scale": 1.0})
    problem.check(problem.backward())
