"""Hopper's forward compiles with score functions without spills, and its warpgroups' products overlap."""

import pytest

from cuattn.cuda.families import launch_sequence
from tests.cuda import scores
from tests.cuda.cases import BF16, Case, bias_of, columns_of
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, scored
from tests.cuda.sm80.test_forward_compile import spills

CAUSAL = {"is_causal": "top_left"}
D64 = Case("d64 causal", n_queries=4096, n_keys=4096, options=CAUSAL)
D128 = D64._replace(name="d128", head_dim=128, options=None)
BESIDE = [
    D128._replace(name="d128 column dropout", mask=columns_of, options={"dropout_p": 0.25, "rng": 9}),
    D128._replace(name="d128 bias causal", bias=bias_of(0, 1, 1, 1, dtype=BF16), options=CAUSAL),
    D64._replace(name="d192", head_dim=192),
]
CASES = [
    *((name, D128) for name in scores.SCORES),
    *((name, D64) for name in ("alibi", "relative_table", "pair_bias", "gated", "hidden")),  # one of each kind
    *zip(("alibi", "relative_table", "gated"), BESIDE, strict=True),
    ("gated", BESIDE[0]),
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=lambda value: getattr(value, "name", value))
def test_scores_spill_nothing(name, case, driver):
    call = scored(prepared(case, kernel="sm90"), scores.SCORES[name](case))
    for kernel in launch_sequence(*call[:3])._kernels:
        _, path, _, constants, _, _, traced = kernel._found
        if path.startswith("sm90"):
            assert not spills(f"{name} {case.name}", path, constants, "sm_90a", traced)
