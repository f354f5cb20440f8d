"""The portable kernels along tangents compile for three generations; what the widest of them spill is bounded."""

import numpy as np
import pytest

from cuattn.errors import UnsupportedError
from tests.cuda.cases import BF16, F16, Case, bias_of, case_of, columns_of
from tests.cuda.nvrtc import kernel_resources
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, scored
from tests.cuda.scores import SCORES
from tests.cuda.sm80.test_forward_compile import COMPILED, own_texts

PLAIN = Case("plain", n_queries=150, n_keys=200)
DROPOUT = {"dropout_p": 0.25, "rng": 9, "is_causal": "top_left"}
CASES = [
    PLAIN,
    Case("float32", dtype=np.dtype(np.float32)),
    Case("d128 column dropout causal", head_dim=128, mask=columns_of, options=DROPOUT),
]
MORE_CASES = [
    Case("bias row", bias=bias_of(0, 1, 0, 1, dtype=BF16), head_dim=80),
    case_of("softcap float16"),
    Case("float64 causal", dtype=np.dtype(np.float64), options={"is_causal": "top_left"}),
    Case("bias", bias=bias_of(1, 1, 1, 1), dtype=F16),
    case_of("everything"),
    Case("d256", head_dim=256),
    Case("float32 d128", head_dim=128, dtype=np.dtype(np.float32)),
    Case("grouped", heads=6, kv_heads=2, head_dim=128),
]
OPERATIONS = ("jvp", "backward_jvp", "double_backward")
MOST = 64  # bytes that a thread may spill: sums take every register
EXCEPTIONS = {"everything": 192, "float32 d128": 128}


def spilled(call, arch, monkeypatch, most=MOST):
    """Yield the kernels of a call that spill more than they may."""
    for path, constants, traced in own_texts(call, arch, monkeypatch):
        if "jvp" in path:
            for entry, used in kernel_resources(path, constants, arch, traced).items():
                if used.stack > most:
                    yield entry, used


@pytest.mark.parametrize(
    ("arch", "operation", "case"),
    [
        (arch, operation, case)
        for arch in COMPILED
        for operation in OPERATIONS
        for case in CASES + MORE_CASES * (arch == "sm_90" and operation != "double_backward")
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_spills(arch, operation, case, driver, monkeypatch):
    call = prepared(case, operation, kernel="sm80")
    try:
        assert not list(spilled(call, arch, monkeypatch, EXCEPTIONS.get(case.name, MOST)))
    except UnsupportedError as error:  # too wide for the shared memory of small GPUs
        assert "no kernel along tangents" in str(error) and arch != "sm_90"


@pytest.mark.parametrize("operation", ["jvp", "backward_jvp"])
@pytest.mark.parametrize("name", ["relative_table", "gated"])
def test_score_functions_compile(name, operation, driver, monkeypatch):
    call = scored(prepared(PLAIN, operation, kernel="sm80"), SCORES[name](PLAIN))
    assert not list(spilled(call, "sm_90", monkeypatch))
