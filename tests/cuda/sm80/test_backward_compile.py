"""The backward's kernels fit their cards and compile for three generations without spills or local memory."""

import numpy as np
import pytest

from cuattn.cuda import source
from cuattn.cuda.sm80.backward import PREPROCESS_DEFAULTS, STAT_ROWS, Cut
from tests.cuda.cases import CASES, F16, WIDE_HEADS, Case, case_of
from tests.cuda.nvrtc import compile_log
from tests.cuda.sm80.test_forward_compile import COMPILED, FEATURES, compiles, once, spills
from tests.cuda.sm80.test_forward_plan import DEVICES, STATIC_BYTES, problem_of

# What compiles with gradients that are summed, beside the kernels that prepare and round, which ask for no feature: the
# widest of each dtype.
SUMMED = {"float16 d128", "d256", "float32 d128", "float64 d128"}

# Cases of heads too wide for whole rows, whose kernels take several seconds each: what most and what sm_90 compiles.
_PLAIN = {"float32 d 512", "float64 wide d 512"}
_CROWDED = "wide d 320 dropout column causal"
WIDE = (
    _PLAIN | {"d 512"},
    _PLAIN | {f"float32 {_CROWDED}", f"float64 {_CROWDED}", "float32 wide d 288 bias softcap"},
)


def backward_jobs(arch):
    """Return the backward's variants on one architecture."""
    device = COMPILED[arch]
    for case in CASES + WIDE_HEADS:
        problem = problem_of(case, "backward")
        plain = not (case.options or case.mask or case.bias)
        if not compiles(case, arch):
            continue
        made = Cut(problem, device)
        constants = made.constants(16 if case.head_dim % 8 == 0 else 2)
        if made.chunk:
            if case.name in WIDE[arch == "sm_90"]:
                yield from _wide_jobs(case, constants, arch)
            continue
        keys = {**constants, "sum_dk": False, "sum_dv": False}
        yield case.name, "sm80/bwd.cu", tuple(keys.items()), arch
        rows = {**constants, **made.rows._asdict(), "atomic_dq": False, "sum_dq": False}
        if case.name in FEATURES or case.head_dim >= 256 or (plain and case.head_dim in (64, 128)):
            yield case.name, "sm80/bwd_rows.cu", tuple(rows.items()), arch
        if problem.bias is not None:
            shape = {"split": False, "sum_rows": "row" in case.name, "sum_keys": "column" in case.name}
            bias = {**constants, **made.bias._asdict(), "atomic_dq": False, **shape}
            yield case.name, "sm80/bwd_bias.cu", tuple(bias.items()), arch
        if case.name in SUMMED:
            yield case.name, "sm80/bwd_convert.cu", tuple(constants.items()), arch
            own = {**PREPROCESS_DEFAULTS, "o_elem": constants["elem"], "dlse": False}
            yield case.name, "util/bwd_preprocess.cu", tuple({**constants, **own}.items()), arch
            deposits = {"flush_every": 64 if case.dtype.itemsize > 2 else 0}
            yield case.name, "sm80/bwd.cu", tuple({**keys, **deposits, "sum_dk": True, "sum_dv": True}.items()), arch
            yield case.name, "sm80/bwd_rows.cu", tuple({**rows, "sum_dq": True}.items()), arch
    yield "sum", "util/bwd_sum.cu", (("grad", "__nv_bfloat16"), ("acc", "float")), arch


def _wide_jobs(case, constants, arch):
    """Return the variants of a head too wide for whole rows; those with a bias sum every gradient."""
    summed = case.bias is not None
    sums = {"sum_dk": summed, "sum_dv": summed, "sum_dq": summed}
    yield case.name, "sm80/bwd_wide.cu", tuple({**constants, **sums}.items()), arch
    if case.bias is not None:
        shape = {"split": False, "sum_rows": False, "sum_keys": False}
        yield case.name, "sm80/bwd_bias.cu", tuple({**constants, **shape}.items()), arch


@pytest.mark.parametrize(("name", "path", "constants", "arch"), once(backward_jobs))
def test_spills(name, path, constants, arch):
    assert not spills(name, path, constants, arch)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_fits_the_card(device):
    for case in CASES + WIDE_HEADS:
        problem = problem_of(case, "backward")
        made = Cut(problem, device)
        for kernel in ("keys", "rows", "bias") + (("convert",) if made.atomic else ()):
            assert made.shared_bytes(kernel) + STATIC_BYTES <= device.shared_bytes, (case.name, kernel)
            tile = getattr(made, "keys" if kernel == "convert" else kernel)
            assert STAT_ROWS % tile.block_m == 0
        assert made.constants()["atomic_dq"] == made.atomic


@pytest.mark.parametrize(
    "name", ["float16 d128", "dropout d64", "float32 d64", "float32 bias", "float64 d64", "float64 d128"]
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_shared_memory_is_what_the_key_kernel_lays_out(name, softcap):
    case = case_of(name)
    problem = problem_of(case._replace(options={**(case.options or {}), "softcap": softcap}), "backward")
    made = Cut(problem, DEVICES["H200"])
    wanted = made.shared_bytes("keys")
    check = f'#include "sm80/bwd_layout.cuh"\nstatic_assert(shared_bytes == {wanted});\n'
    compile_log(source.prologue(made.constants()) + source.flatten_text(check, "check.cu"), "sm_90")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", [F16, np.dtype(np.float32), np.dtype(np.float64)], ids=str)
def test_wide_heads_come_in_chunks(dtype, device):
    for head_dim, head_dim_v in ((512, 512), (320, 64), (64, 1000)):
        case = Case("wide", dtype, n_queries=9, n_keys=9, head_dim=head_dim, head_dim_v=head_dim_v)
        problem = problem_of(case, "backward")
        made = Cut(problem, device)
        assert made.head_dim >= head_dim and made.head_dim_v >= head_dim_v
        if made.chunk:
            assert not made.atomic
            assert made.head_dim % made.chunk == made.head_dim_v % made.chunk == made.part % made.chunk == 0
            assert "64 columns at a time" in str(made.notes())
        for kernel in ("keys", "rows", "bias"):
            assert made.shared_bytes(kernel) + STATIC_BYTES <= device.shared_bytes
