"""The product of all forward features on a GPU; long, so only ``bench/gpu_check.py --full`` runs it."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from tests.cuda.cases import BF16, F16, Case, bias_of, blocks_of, columns_of, dense_of
from tests.cuda.gpu import made

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("CUATTN_FULL" not in os.environ, reason="runs with bench/gpu_check.py --full"),
]

DTYPES = (F16, BF16, np.dtype(np.float32), np.dtype(np.float64))
MASKS = {"none": None, "column": columns_of, "block": blocks_of(16, 48), "dense": dense_of}
BANDS = {"open": {}, "causal": {"is_causal": "bottom_right"}, "window": {"window": (90, 20, "top_left")}}
FEATURES = {
    "plain": {},
    "dropout": {"dropout_p": 0.2, "rng": 11},
    "softcap": {"softcap": 3.0},
    "bias": {},
    "all": {"dropout_p": 0.2, "rng": 11, "softcap": 3.0},
}


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), itertools.product(DTYPES, (64, 96, 128, 256)), ids=lambda x: getattr(x, "name", str(x))
)
def test_every_combination(dtype, head_dim, mask, band, features):
    bias = bias_of(1, 1, 1, 1, dtype=np.float64 if dtype == np.float64 else np.float32)
    case = Case(
        f"{dtype} {head_dim} {mask} {band} {features}", dtype=dtype, head_dim=head_dim, n_queries=150, n_keys=220,
        batch=(1,), options={**BANDS[band], **FEATURES[features]}, mask=MASKS[mask],
        bias=bias if features in ("bias", "all") else None,
    )  # fmt: skip
    problem = made(case)
    problem.check(problem.forward())
