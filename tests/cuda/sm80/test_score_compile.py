"""The portable kernels compile with score functions for three generations without spills or local memory."""

import pytest

from cuattn.cuda.families import launch_sequence
from tests.cuda import scores
from tests.cuda.cases import Case, case_of, columns_of
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, scored
from tests.cuda.sm80.test_forward_compile import COMPILED, failures

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


def jobs(arch):
    """Return what calls of both directions compile on an architecture, but for kernels that ask for no scores."""
    for name, case in CALLS + MORE_CALLS * (arch == "sm_90"):
        for direction in ("forward", "backward"):
            call = scored(prepared(case, direction, kernel="sm80"), scores.SCORES[name](case))
            for kernel in launch_sequence(*call[:3])._kernels:
                _, path, _, constants, _, _, traced = kernel._found
                if path not in ("util/bwd_preprocess.cu", "sm80/bwd_convert.cu") and traced:
                    yield f"{name} {case.name}", path, constants, arch, traced


@pytest.mark.parametrize("arch", COMPILED)
def test_scores_spills(arch, driver, monkeypatch):
    monkeypatch.setattr("cuattn.cuda.call.device_of", lambda number: COMPILED[arch])
    assert not failures(list(jobs(arch)))
