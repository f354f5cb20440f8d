"""The list for compute-sanitizer holds every feature, and every option is one that the library takes."""

import numpy as np
import pytest

import cuattn
from bench import sanitize


def test_every_dtype_group_and_width_is_there():
    found = sanitize.problems()
    assert {(x.kernel, np.dtype(x.dtype)) for x in found} == {
        (kernel, np.dtype(dtype)) for kernel, dtypes in sanitize.DTYPES.items() for dtype in dtypes
    }
    for kernel, dtypes in sanitize.DTYPES.items():
        for dtype in dtypes:
            shapes = [x.shape for x in found if (x.kernel, x.dtype) == (kernel, dtype)]
            assert any(heads > kv_heads and d != dv for heads, kv_heads, _, _, d, dv in shapes)
    used = {option for x in found for option in x.options}
    assert used >= {"mask", "bias", "softcap", "dropout_p", "window", "is_causal", "deterministic", "out_dtype"}


@pytest.mark.parametrize(("shape", "options"), sanitize.FEATURES, ids=str)
def test_problems_are_legal(shape, options):
    heads, kv_heads, n_queries, n_keys, d, dv = shape
    q, k, v = (np.zeros(x, np.float16) for x in ((heads, n_queries, d), (kv_heads, n_keys, d), (kv_heads, n_keys, dv)))
    options = {key: x for key, x in options.items() if key not in ("mask", "bias", "deterministic", "out_dtype")}
    assert cuattn.plan(q, k, v, **options, enable_gqa=heads != kv_heads)


@pytest.mark.gpu
def test_each_family_computes_its_first_problem():
    for kernel in sanitize.DTYPES:
        assert "forward" in sanitize.problems([kernel])[0].run()
