"""Exponentials and capped scores against NumPy."""

import numpy as np
import pytest

from tests.kernels.probe import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("elem", "units"), [("float", 6), ("double", 3)])
def test_exp_times(elem, units):
    dtype = np.dtype(np.float32 if elem == "float" else np.float64)
    rng = np.random.default_rng(5)
    lowest = 60 if elem == "float" else 670
    x = -lowest * rng.random(64).astype(dtype) ** 3
    x[:4] = 0, -np.inf, np.nan, -1e5
    y = (1 / rng.uniform(1, 2.0**30, 64)).astype(dtype)
    body = "z[threadIdx.x] = exp_times(x[threadIdx.x], y[threadIdx.x]);"
    arguments = f"const {elem}* x, const {elem}* y, {elem}* z"
    z = run(["attn/math.cuh"], arguments, body, x, y, np.empty(64, dtype), threads=64)[2]
    wanted = np.exp(x.astype(np.longdouble)) * y
    np.testing.assert_allclose(z, wanted.astype(dtype), rtol=units * np.finfo(dtype).eps)
    assert z[1] == 0 and np.isnan(z[2]) and z[3] == 0


def test_cap_score_by_type():
    x = np.linspace(-30, 30, 32, dtype=np.float32)
    for elem, accuracy in (("__half", 2e-6), ("__nv_bfloat16", 2e-6), ("float", 1e-6)):
        constants = {"elem": elem, "acc": "float", "bias_elem": "float", "softcap": True, "bias": False}
        constants |= dict.fromkeys(("score", "additive", "runs"), False) | {"dropout": 0}
        body = "Params p{}; p.scale = -0.5; p.softcap = 4; p.cap_scale = -0.125; y[l] = cap_score(p, x[l]);"
        y = run(["attn/score.cuh"], "const float* x, float* y", body, x, np.empty_like(x), constants=constants)[1]
        np.testing.assert_allclose(y, 4 * np.tanh(-0.5 * x.astype(float) / 4), atol=accuracy)
