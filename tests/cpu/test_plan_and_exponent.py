"""The plan of a call, and the exponential's unit."""

import numpy as np
import pytest

import cuattn
from cuattn.cpu.exponent import UNIT, exponential, from_units, lowest, to_units


def test_the_plan_names_tiles_threads_and_memory():
    x = np.zeros((2, 300, 64), np.float32)
    plan = cuattn.plan(x, x, x)
    assert (plan.kernel, plan.direction) == ("cpu", "forward")
    assert plan.block_m % 16 == plan.block_n % 16 == 0
    assert plan.workers >= 1
    assert 0 < plan.workspace_bytes < 64e6 * plan.workers
    assert "host memory" in str(plan)
    assert cuattn.plan(x, x, x, direction="backward").workspace_bytes > plan.workspace_bytes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_units_are_those_of_the_exponential(dtype):
    x = np.linspace(-20, 20, 101).astype(dtype)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(exponential((x * UNIT).astype(dtype)), np.exp(x), rtol=40 * eps)
    np.testing.assert_allclose(from_units(to_units(x).astype(dtype)), x, rtol=2 * eps)
    assert from_units(x).dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_lowest_score_has_a_normal_exponential_next_to_nothing(dtype):
    value = float(exponential(np.array(lowest(np.dtype(dtype)), dtype)))
    tiny = float(np.finfo(dtype).tiny)
    assert tiny <= value < 1e3 * tiny
