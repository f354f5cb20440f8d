"""The portable kernels compile with score functions for three generations without spills or local memory."""

import pytest

from tests.cuda import scores
from tests.cuda.cases import Case, case_of, columns_of
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, scored
from tests.cuda.sm80.test_forward_compile import COMPILED, own_texts, spills

PLAIN = Case("plain", n_queries=150, n_keys=200)
DROPOUT = {"dropout_p": 0.25, "rng": 9, "is_causal": "top_left"}
# Functions that add, that bend, and with other sums of their arrays; and what takes most registers beside.
CALLS = [
    ("relative_table", PLAIN),
    ("row_temperature", case_of("float32 d128")),
    ("gated", Case("d128 column dropout causal", head_dim=128, mask=columns_of, options=DROPOUT)),
    ("relative_table", Case("packed", heads=8, kv_heads=2, n_queries=3, n_keys=1500, head_dim=128)),
]
MORE_CALLS = [
    ("grid", PLAIN),
    ("head_temperature", case_of("d 512")),
    ("gated", case_of("d256")),
    ("buckets", case_of("float64 dropout column")),
    ("alibi", case_of("float32 d 512")),
]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "case", "arch"),
    [(*call, arch) for arch in COMPILED for call in CALLS + MORE_CALLS * (arch == "sm_90")],
    ids=lambda value: getattr(value, "name", value),
)
def test_spills(name, case, arch, direction, driver, monkeypatch):
    call = scored(prepared(case, direction, kernel="sm80"), scores.SCORES[name](case))
    for path, constants, traced in own_texts(call, arch, monkeypatch):
        if path not in ("util/bwd_preprocess.cu", "sm80/bwd_convert.cu") and traced:  # which ask for no scores
            assert not spills(f"{name} {case.name}", path, constants, arch, traced)
