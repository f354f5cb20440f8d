"""backward_preprocess against NumPy: delta with and without lse's gradient, statistics, flags of rows."""

from __future__ import annotations

import numpy as np
import pytest

from cuattn.cuda import compile as compiler
from cuattn.cuda import source
from cuattn.cuda.params import PARAMS
from cuattn.cuda.sm80.backward import PREPROCESS_DEFAULTS

pytestmark = pytest.mark.gpu

HEADS, ROWS, COLUMNS, GROUP = 3, 200, 64, 128  # GROUP: kStatRows
EMPTY, FAR = 1, 2


def launch(elem, arrays, results):
    """Run the kernel on one batch of heads; `arrays` and `results` by the name of their field."""
    import cupy

    acc = {"__half": "float"}.get(elem, elem)
    constants = {
        **PREPROCESS_DEFAULTS, "elem": elem, "acc": acc, "o_elem": elem, "block_m": 64, "warps": 8, "head_dim": COLUMNS,
        "head_dim_v": COLUMNS, "load_bytes": 16, "atomic_dq": False, "dlse": "dlse" in arrays,
        "bias_grad": acc, "block_n": 64, "mask": 0, "band_left": False, "band_right": False,
    }  # fmt: skip
    p = np.zeros((), PARAMS)
    held = {name: cupy.asarray(x) for name, x in {**arrays, **results}.items()}
    for name, x in held.items():
        if name in results:
            p[name] = x.data.ptr
            continue
        p[f"{name}.data"] = x.data.ptr
        p[f"{name}.head"], p[f"{name}.row"] = (stride // x.itemsize for stride in x.strides[:2])
    p["batch_size"], p["batch"], p["heads"], p["n_queries"], p["head_dim_v"] = 1, 1, HEADS, ROWS, COLUMNS
    p["dropout_scale"], p["splits"] = 2.0, 1
    cubin = compiler.compile_cubin(
        source.build("util/bwd_preprocess.cu", constants), f"sm_{cupy.cuda.Device().compute_capability}"
    )
    kernel = compiler.load(cubin, "backward_preprocess")
    kernel((HEADS * 2,), (256,), (np.frombuffer(p.tobytes(), f"V{PARAMS.itemsize}")[0],), 0)
    return {name: held[name].get() for name in results}


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(("elem", "dtype"), [("__half", np.float16), ("float", np.float32), ("double", np.float64)])
def test_numbers_of_rows(elem, dtype, with_dlse):
    rng = np.random.default_rng(0)
    stat = np.float64 if dtype == np.float64 else np.float32
    do, o = (rng.standard_normal((HEADS, ROWS, COLUMNS)).astype(dtype) for _ in range(2))
    l, m, dlse = (1 + rng.random((HEADS, ROWS)).astype(stat) for _ in range(3))
    l[0, 5], m[0, 5], do[0, 5] = 0, -np.inf, np.nan
    m[1, 150], m[2, 3], m[2, 4] = 1e5, -3e38, 3e38
    arrays = {"dout": do, "o": o, "l": l, "m": m} | ({"dlse": dlse} if with_dlse else {})
    vectors = 1 if dtype == np.float16 else 2
    nothing = np.full((vectors, HEADS, 2 * GROUP), np.nan, stat)
    results = {"delta": nothing[0], "stat": nothing, "counters": np.full((HEADS, 2), -1, np.int32)}
    found = launch(elem, arrays, results)
    delta = (np.where(l[..., None] == 0, 0, do.astype(stat) * o.astype(stat)).sum(-1) - (dlse if with_dlse else 0)) / 2
    delta[l == 0] = 0
    np.testing.assert_allclose(found["delta"][:, :ROWS], delta, atol=200 * np.finfo(stat).eps)
    assert not found["delta"][:, ROWS:].any()
    flags = np.zeros((HEADS, 2), np.int32)
    flags[0, 0] = EMPTY
    if vectors == 1:
        flags[1, 1], flags[2, 0] = FAR, FAR
        empty = found["stat"][0] == -np.inf
        assert empty[0, 5] and empty[:, ROWS:].all() and empty.sum() == 1 + HEADS * (2 * GROUP - ROWS)
        usual = np.abs(m) < 100
        wanted = -(m * np.log2(np.e) + np.log2(np.where(usual, l, 1)))
        np.testing.assert_allclose(found["stat"][0, :, :ROWS][usual], wanted[usual], rtol=1e-6)
    else:
        np.testing.assert_array_equal(found["stat"][0, :, :ROWS], np.where(l == 0, np.inf, m))
    np.testing.assert_array_equal(found["counters"], flags)
