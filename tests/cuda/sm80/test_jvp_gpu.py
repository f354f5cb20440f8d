"""The portable kernel along tangents on a GPU against the textbook: float32 by products of halves, and float64."""

import numpy as np
import pytest

import cuattn
from tests.cuda.cases import Case, columns_of, dense_of, oracle_options, sized, to_device
from tests.derivatives import JVP, Known, results_of, tangents_of

pytestmark = pytest.mark.gpu

F64 = {"dtype": np.dtype(np.float64), "batch": (1,)}
F32 = {"dtype": np.dtype(np.float32), "batch": (1,)}
CASES = [
    sized("d64", 150, 333, **F32),
    sized("d128 causal", 200, 200, 128, options={"is_causal": True}, **F32),
    sized("d100 in groups", 77, 260, 100, heads=4, kv_heads=2, **F32),
    sized("long", 40, 3000, heads=1, kv_heads=1, **F32),
    sized("longer than halves serve", 16, 16500, 16, heads=1, kv_heads=1, **F32),
    sized("d16 dropout", 150, 140, 16, options={"dropout_p": 0.3, "rng": 5}, **F32),
    sized("columns", 300, 200, mask=columns_of, **F32),
    sized("boolean d128", 100, 200, 128, mask=dense_of, **F32),
    Case("d 40 dv 72", head_dim=40, head_dim_v=72, options={"softcap": 3.0}, **F32),
    sized("float64 d128 causal", 150, 150, 128, options={"is_causal": True}, **F64),
    sized("float64 d72 dropout", 70, 140, 72, options={"dropout_p": 0.3, "rng": 5}, heads=4, kv_heads=2, **F64),
    sized("float64 columns", 150, 200, mask=columns_of, **F64),
]


@pytest.mark.parametrize(("names", "size"), [("qkv", 1.0), ("q", 2.0**40), ("kv", 2.0**-40), ("v", 1.0)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_jvp(case, names, size):
    """Tangents of any size: halves have few bits, and a fixed least one; in float64 two warps may share rows."""
    arrays, options = case.arrays()
    tangents = {
        name: x if x is None else (x * size).astype(case.dtype) for name, x in tangents_of(arrays, names).items()
    }
    given = {name: to_device(x) for name, x in {**options, **tangents}.items()}
    found = cuattn.jvp(*map(to_device, arrays.values()), kernel="sm80", **given)
    known = Known({**arrays, "do": None, **tangents}, oracle_options(case, options), samples=2)
    known.check(JVP, results_of(found))


def test_accuracy_does_not_depend_on_the_kernel():
    """Errors of halves and of float64, which float32 takes where rows are long, are of one size."""
    rng = np.random.default_rng(0)
    q, k, v, tq, tk, tv = (to_device(rng.standard_normal((1, 2, 500, 64)).astype(np.float32)) for _ in range(6))
    exact = cuattn.jvp(
        *(x.astype(np.float64) for x in (q, k, v)),
        **{n: x.astype(np.float64) for n, x in (("tq", tq), ("tk", tk), ("tv", tv))},
    )
    found = cuattn.jvp(q, k, v, tq=tq, tk=tk, tv=tv)
    for name in ("o", "to", "tlse"):
        a, b = getattr(found, name).get(), getattr(exact, name).get()
        assert np.abs(a - b).max() <= 2**-20 * np.abs(b).max(), name
