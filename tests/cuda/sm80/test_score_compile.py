"""The portable kernels compile with score functions for three generations without spills or local memory."""

import pytest

from cuattn.cuda.families import launch_sequence
from cuattn.cuda.source import calls_functions
from tests.cuda import scores
from tests.cuda.cases import Case, case_of, columns_of
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, scored
from tests.cuda.sm80.test_forward_compile import COMPILED, failures

PLAIN = Case("plain", n_queries=150, n_keys=200)
DROPOUT = {"dropout_p": 0.25, "rng": 9, "is_causal": "top_left"}
# Every function once, and functions that add, that bend and that read per row with what takes most registers beside.
FUNCTIONS = [(name, PLAIN) for name in scores.SCORES]
CASES = [
    (name, case)
    for name in ("relative_table", "row_temperature", "gated")
    for case in (
        Case("d128 column dropout causal", head_dim=128, mask=columns_of, options=DROPOUT),
        Case("packed", heads=8, kv_heads=2, n_queries=3, n_keys=1500, head_dim=128),
        case_of("everything"),
        case_of("d256"),
        case_of("float32 d128"),
        case_of("float64 dropout column"),
    )
]
WIDE = [("alibi", case_of("float32 d 512")), ("head_temperature", case_of("d 512"))]


def jobs(arch):
    """Return what calls of both directions compile on an architecture."""
    for name, case in FUNCTIONS + (CASES + WIDE if arch == "sm_90" else CASES[1::3]):
        for direction in ("forward", "backward"):
            call = scored(prepared(case, direction, kernel="sm80"), scores.SCORES[name](case))
            for kernel in launch_sequence(*call[:3])._kernels:
                _, path, _, constants, _, _, traced = kernel._found
                if calls_functions(path) and "convert" not in path:
                    yield f"{name} {case.name}", path, constants, arch, traced


@pytest.mark.parametrize("arch", COMPILED)
def test_scores_spills(arch, driver, monkeypatch):
    monkeypatch.setattr("cuattn.cuda.call.device_of", lambda number: COMPILED[arch])
    assert not failures(list(jobs(arch)))
